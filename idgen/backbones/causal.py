"""Decoder-only backbones (Llama, Qwen, SmolLM, ...): hidden states, and decoding over beams that share a prompt.

Everything goes through the model's own ``forward``, so that every architecture whose cache and 4-dimensional attention
masks are those of transformers works without a line of its own.

Shape legend: B users, S prompt tokens, K beams, N beam tokens read so far, D width, T tokens of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from idgen.trie import IGNORED_LABEL


class CausalState(NamedTuple):
    """What decoding keeps: the prompt once per user, and every token any beam has read."""

    cache: DynamicCache
    """Keys and values of S prompt tokens and N beam tokens."""
    prompt_BS: Tensor
    """Bool: no padding."""
    visible_BKN: Tensor
    """Bool: which of the beam tokens are ancestors of each beam of the step before."""
    first_BD: Tensor
    """Hidden state of the last prompt token: it predicts the first token of an ID."""


def target_states(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """(B, T, D): the hidden states whose logits predict ``labels``, ready for the output table.

    ``input_ids`` (B, T) and ``labels`` (B, T) stand in Hugging Face's order: the label of a position is its own token,
    -100 where it is no target, and is predicted by the position before. The first position predicts nothing, so its
    label must be -100.
    """
    hidden_BTD = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    return torch.nn.functional.pad(hidden_BTD[:, :-1], (0, 0, 1, 0))


def labelled(prompt_BS: Tensor, mask_BS: Tensor, target_BT: Tensor, padding: int) -> dict[str, Tensor]:
    """Prompts and their targets as one row each, targets labelled: what :func:`target_states` reads.

    ``target_BT`` is padded with -100. Rows are padded on the right.
    """
    is_target_BT = target_BT != IGNORED_LABEL
    given_BW = torch.cat([prompt_BS, target_BT.clamp(min=0)], 1)
    kept_BW = torch.cat([mask_BS != 0, is_target_BT], 1)
    label_BW = torch.cat([torch.full_like(prompt_BS, IGNORED_LABEL), target_BT], 1)
    order_BW = torch.sort((~kept_BW).long(), dim=1, stable=True).indices[:, : int(kept_BW.sum(1).max())]
    kept_BW = kept_BW.gather(1, order_BW)
    return {
        "input_ids": given_BW.gather(1, order_BW).masked_fill(~kept_BW, padding),
        "attention_mask": kept_BW.long(),
        "labels": label_BW.gather(1, order_BW).masked_fill(~kept_BW, IGNORED_LABEL),
    }


def start(model: Any, input_ids_BS: Tensor, attention_mask_BS: Tensor) -> CausalState:
    """Read the prompts, padded on the right, once; ``model`` is already unwrapped."""
    cache = DynamicCache(config=model.config)
    hidden_BSD = model.model(
        input_ids=input_ids_BS, attention_mask=attention_mask_BS, past_key_values=cache, use_cache=True
    ).last_hidden_state
    prompt_BS = attention_mask_BS != 0
    last_B = prompt_BS.sum(1) - 1
    user_B = torch.arange(len(last_B), device=last_B.device)
    nothing_BKN = torch.zeros(len(last_B), 1, 0, dtype=torch.bool, device=last_B.device)
    return CausalState(cache, prompt_BS, nothing_BKN, hidden_BSD[user_B, last_B])


def step(
    model: Any, state: CausalState, token_BK: Tensor, parent_BK: Tensor, number: int
) -> tuple[Tensor, CausalState]:
    """Let every beam read one token: (hidden states (B, K, D) ready for the output table, the new state).

    Step 0 reads nothing: the end of the prompt has been read. ``parent_BK`` says which beam of the step before each
    beam continues. The K beams stand side by side as K more tokens of one sequence; a mask lets each see the prompt,
    its own ancestors and itself. Nothing is copied or reordered.
    """
    if number == 0:
        return state.first_BD[:, None].expand(-1, token_BK.shape[1], -1), state
    num_users, num_beams = token_BK.shape
    num_read = state.visible_BKN.shape[2]
    visible_BKN = state.visible_BKN.gather(1, parent_BK[..., None].expand(-1, -1, num_read))
    itself_BKK = torch.eye(num_beams, dtype=torch.bool, device=token_BK.device).expand(num_users, -1, -1)
    visible_BKN = torch.cat([visible_BKN, itself_BKK], 2)
    seen_BKW = torch.cat([state.prompt_BS[:, None].expand(-1, num_beams, -1), visible_BKN], 2)
    dtype = model.get_input_embeddings().weight.dtype
    mask_B1KW = torch.zeros(seen_BKW.shape, dtype=dtype, device=token_BK.device)
    mask_B1KW = mask_B1KW.masked_fill(~seen_BKW, torch.finfo(dtype).min)[:, None]
    place_BK = (state.prompt_BS.sum(1, keepdim=True) + number - 1).expand(-1, num_beams)
    hidden_BKD = model.model(
        input_ids=token_BK,
        attention_mask=mask_B1KW,
        position_ids=place_BK,
        past_key_values=state.cache,
        use_cache=True,
    ).last_hidden_state
    return hidden_BKD, state._replace(visible_BKN=visible_BKN)


def token_logits(model: Any, hidden_RD: Tensor) -> Tensor:
    """Logits in fp32."""
    return model.lm_head(hidden_RD).float()
