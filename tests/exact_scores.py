"""The oracle of decoding: exact scores of every item, teacher-forced through a model's own forward pass."""

from __future__ import annotations

import torch

from idgen.backbones.families import family_of, unwrap
from idgen.backbones.family import evaluating


def allowed_tokens(trie, prefix) -> list[int]:
    """Tokens that may follow ``prefix`` in the trie; the end token, or 0, when there is none."""
    node = int(trie.walk(torch.tensor([list(prefix)], dtype=torch.long)))
    tokens = [] if node < 0 else trie.children(torch.tensor([node])).token_C.tolist()
    return tokens or [trie.eos_token_id or 0]


def teacher_forced(model, input_ids_BS, mask_BS, user, token_CT):
    """Logits (C, T, V) of these tokens behind the user's prompt, without any code of ``start`` and ``step``."""
    prompt_S = input_ids_BS[user][mask_BS[user] != 0]
    prompt_CS = prompt_S.expand(len(token_CT), -1)
    if family_of(model).continues_prompt:
        row_CW = torch.cat([prompt_CS, token_CT], 1)
        return model(input_ids=row_CW, use_cache=False).logits[:, len(prompt_S) - 1 : -1].float()
    return model(input_ids=prompt_CS, decoder_input_ids=model._shift_right(token_CT)).logits.float()


def score_catalogue(model, input_ids_BS, mask_BS, trie):
    """log p(ID) of every item for every user, each token among those that may follow in the trie, (B, I)."""
    model = unwrap(model)
    score_BI = torch.zeros(len(input_ids_BS), len(trie))
    with evaluating(model):
        for user in range(len(input_ids_BS)):
            logit_ITV = teacher_forced(model, input_ids_BS, mask_BS, user, trie.label_IT.clamp(min=0))
            node_I = torch.zeros(len(trie), dtype=torch.long)
            for number, label_I in enumerate(trie.label_IT.unbind(1)):
                here_I = label_I >= 0
                child = trie.children(node_I[here_I])
                allowed_IV = torch.full_like(logit_ITV[here_I, number], -torch.inf)
                allowed_IV[child.row_C, child.token_C] = logit_ITV[here_I, number][child.row_C, child.token_C]
                score_BI[user, here_I] += torch.log_softmax(allowed_IV, 1).gather(1, label_I[here_I, None])[:, 0]
                node_I = torch.where(here_I, trie.advance(node_I, label_I.clamp(min=0)), node_I)
    return score_BI
