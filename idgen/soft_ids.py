"""Soft item IDs: the recommender reads the ID generator's probabilities, so that its loss trains the generator.

Shapes: M distinct items of a batch, S input tokens, L tokens of an ID, V vocabulary, D width of the recommender,
B samples, N tokens of the item texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from idgen.backbones.families import family_of, unwrap
from idgen.backbones.family import TokenBatch, evaluating
from idgen.config import SampleConfig
from idgen.events import EventTable, draw_samples, is_target
from idgen.id_generator import MAX_TEXT_TOKENS
from idgen.losses import sequence_loss
from idgen.prompts import load_templates
from idgen.samples import prompts_of, target_labels
from idgen.segments import PromptParts, Prompts, Segments, join, lay_out, make_segments
from idgen.tasks import Task, merge_tasks, parents_of
from idgen.tokenizer import SPACE
from idgen.trie import Parents

MAX_NEW_TOKENS = 9
"""Of a generated ID, without the end token, as in IDGenRec."""


class SoftSource(NamedTuple):
    """What the batches of generator training are made of."""

    parts: PromptParts
    events: EventTable
    texts: Segments
    """Tokens of the item texts with the end token, items of all tasks one after the other."""
    first_text_K: np.ndarray
    """Number of the first item text of each task."""
    banned_V: Tensor
    """Bool: no part of an ID (punctuation, special tokens)."""
    end_token: int
    samples: SampleConfig
    nodes: Parents | None = None
    """Where labels stand in the tries of the current IDs; None: the loss needs no trie."""


def soft_source(
    tasks: Sequence[Task],
    item_texts: Sequence[Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
) -> SoftSource:
    """Prepare generator training on ``tasks``; ``item_texts[k]``: the item texts of task k in item order.

    Half the recommender's history length, as in IDGenRec (SIGIR 2024), and no augmentation. ``num_tokens``: size of
    the models' vocabulary. Errors: ``ValueError`` when texts and tasks do not belong together.
    """
    for task, texts in zip(tasks, item_texts, strict=True):
        if len(texts) != len(task.trie):
            raise ValueError(
                f"got {len(texts)} item texts for the {len(task.trie)} items of {task.name!r}; expected as many"
            )
    parts, events = merge_tasks(tasks)
    samples = replace(
        tasks[0].config,
        max_history=max(1, tasks[0].config.max_history // 2),
        item_dropout=0.0,
        pairs=False,
    )
    flat = [text for texts in item_texts for text in texts]
    tokens = tokenizer(flat, truncation=True, max_length=MAX_TEXT_TOKENS)["input_ids"]
    sizes = [len(texts) for texts in item_texts]
    return SoftSource(
        parts=parts,
        events=events,
        texts=make_segments(tokens),
        first_text_K=np.cumsum([0, *sizes])[:-1],
        banned_V=banned_tokens(tokenizer, num_tokens),
        end_token=cast(int, tokenizer.eos_token_id),
        samples=samples,
        nodes=parents_of(tasks),
    )


def banned_tokens(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> Tensor:
    """(V,) bool: special tokens, rows without a token, and pieces of punctuation alone, by the text of the piece.

    The lone space piece stays: it begins words that are spelled in smaller pieces. Differs from the released code of
    IDGenRec, which bans the first token of each encoded punctuation character, for most of them the lone space.
    """
    banned = [True] * num_tokens
    special = set(tokenizer.all_special_ids)
    for token, piece in enumerate(tokenizer.convert_ids_to_tokens(list(range(min(num_tokens, len(tokenizer)))))):
        text = piece.replace(SPACE, "")
        banned[token] = token in special or (bool(text) and re.search(r"\w", text) is None)
    return torch.tensor(banned)


def soft_batches(source: SoftSource, batch_size: int, generator: torch.Generator) -> Iterator[TokenBatch]:
    """One epoch of samples for `soft_id_loss`, on the same positions as the recommender's training."""
    rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
    order = rng.permutation(np.flatnonzero(is_target(source.events)))
    num_templates = len(load_templates(source.samples.templates))
    for start in range(0, len(order), batch_size):
        target_B = order[start : start + batch_size]
        draw = draw_samples(source.events, target_B, num_templates, source.samples, rng)
        prompts = prompts_of(source.parts, source.events, draw)
        item_M, text_M = _distinct_items(source, prompts)
        token_MS, length_M = join(source.texts, text_M[:, None], source.parts.padding)
        arrays = {
            **prompts._asdict(),
            "item": item_M,
            "text_ids": token_MS,
            "text_mask": (np.arange(token_MS.shape[1]) < length_M[:, None]).astype(np.int64),
            "labels": target_labels(source.parts, source.events, draw.target_N),
        }
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        yield batch if source.nodes is None else batch | source.nodes.batch(batch["labels"], batch["task_B"])


def soft_id_loss(generator: Any, recommender: Any, source: SoftSource, batch: TokenBatch) -> Tensor:
    """The recommender's own loss on prompts whose item IDs are soft; gradients reach the generator alone.

    The generator writes an ID for every item of the histories; the recommender reads the expected token embeddings
    at the places of these IDs in its usual prompt and is asked for the target's current (hard) ID. Freeze the
    recommender's parameters to spare their gradients. Source: IDGenRec (SIGIR 2024), joint training. Differs from its
    released code: probabilities instead of log-probabilities, positions from the end token on are left out, prompts
    have the recommender's own layout and padding is masked by length.
    """
    banned_V = source.banned_V.to(batch["text_ids"].device)
    token_ML, length_M = greedy_ids(
        generator, batch["text_ids"], batch["text_mask"], banned_V, source.end_token, MAX_NEW_TOKENS
    )
    logit_MLV = id_logits(generator, batch["text_ids"], batch["text_mask"], token_ML)
    table_VD = unwrap(recommender).get_input_embeddings().weight
    prob_MLV = token_probabilities(logit_MLV, banned_V)
    soft_MLD = prob_MLV.to(table_VD.dtype) @ table_VD  # expected embeddings sum_v p(v) E[v]
    prompts = Prompts(*(batch[name].cpu().numpy() for name in Prompts._fields))
    place_BS, length_B = spliced(
        source.parts, prompts, batch["item"].cpu().numpy(), length_M.cpu().numpy(), soft_MLD.shape[1], len(table_VD)
    )
    place_BS = place_BS.to(soft_MLD.device)
    column_S = torch.arange(place_BS.shape[1], device=soft_MLD.device)
    targets = {name: batch[name] for name in ("labels", "node", "first_child", "child_token") if name in batch}
    inputs = {
        "inputs_embeds": embed(place_BS, table_VD, soft_MLD),
        "attention_mask": (column_S < length_B.to(soft_MLD.device)[:, None]).long(),
    }
    return sequence_loss(recommender, inputs | targets)


def greedy_ids(
    model: Any, text_MS: Tensor, mask_MS: Tensor, banned_V: Tensor, end_token: int, max_new_tokens: int
) -> tuple[Tensor, Tensor]:
    """Most likely allowed tokens one by one: (token_ML, length_M); the end token and what follows is ``end_token``.

    ``length_M`` counts the tokens before the end token, at least one. No gradients, no dropout.
    """
    model = unwrap(model)
    with evaluating(model):
        family = family_of(model)
        state = family.start(model, text_MS, mask_MS)
        token_M1 = torch.full_like(text_MS[:, :1], model.config.decoder_start_token_id)
        parent_M1 = torch.zeros_like(token_M1)
        ended_M1 = torch.zeros_like(token_M1, dtype=torch.bool)
        tokens = []
        for step in range(max_new_tokens):
            hidden_M1D, state = family.step(model, state, token_M1, parent_M1, step)
            logit_MV = family.token_logits(model, hidden_M1D[:, 0])
            end_M = logit_MV[:, end_token].clone()
            logit_MV = logit_MV.masked_fill(banned_V, -torch.inf)
            if step > 0:
                logit_MV[:, end_token] = end_M
            token_M1 = torch.where(ended_M1, end_token, logit_MV.argmax(1, keepdim=True))
            ended_M1 = token_M1 == end_token
            tokens.append(token_M1)
            if bool(ended_M1.all()):
                break
    token_ML = torch.cat(tokens, 1)
    length_M = (token_ML != end_token).sum(1)
    return token_ML[:, : int(length_M.max())], length_M


def id_logits(model: Any, text_MS: Tensor, mask_MS: Tensor, token_ML: Tensor) -> Tensor:
    """Logits (M, L, V) of the generator for each token, given the tokens before it, with gradients.

    These are the logits of the greedy loop: the fed-back arg-max has no gradient, so nothing is lost.
    """
    base = unwrap(model)
    hidden_MSD = base.encoder(input_ids=text_MS, attention_mask=mask_MS).last_hidden_state
    hidden_MLD = base.decoder(
        input_ids=base._shift_right(token_ML),
        encoder_hidden_states=hidden_MSD,
        encoder_attention_mask=mask_MS,
        use_cache=False,
    ).last_hidden_state
    return family_of(base).token_logits(base, hidden_MLD)


def token_probabilities(logit_MLV: Tensor, banned_V: Tensor) -> Tensor:
    """Softmax over the tokens that may stand in an ID; each row sums to 1."""
    return torch.softmax(logit_MLV.masked_fill(banned_V, -torch.inf), -1)


def spliced(
    parts: PromptParts, prompts: Prompts, item_M: np.ndarray, length_M: np.ndarray, width: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Prompts with generated IDs in the place of the current ones: (place_BS, length_B).

    A place below ``num_tokens`` is a token, place ``num_tokens + m * width + l`` is token l of the new ID of item
    segment ``item_M[m]``. Layout, separators and truncation are those of the recommender's prompts.
    """
    old = parts.segments
    start_G, length_G = old.start_G.copy(), old.length_G.copy()
    start_G[item_M] = len(old.token_F) + np.arange(len(item_M)) * width
    length_G[item_M] = length_M
    place_F = np.concatenate([old.token_F, num_tokens + np.arange(len(item_M) * width)])
    renewed = parts._replace(segments=Segments(place_F, start_G, length_G))
    place_BS, length_B = join(renewed.segments, lay_out(renewed, prompts), parts.padding)
    return torch.from_numpy(place_BS), torch.from_numpy(length_B)


def embed(place_BS: Tensor, table_VD: Tensor, soft_MLD: Tensor) -> Tensor:
    """Embeddings (B, S, D) of the places of `spliced`."""
    num_tokens = len(table_VD)
    hard_BSD = table_VD[place_BS.clamp(max=num_tokens - 1)]
    soft_BSD = soft_MLD.flatten(0, 1)[(place_BS - num_tokens).clamp(min=0)]
    return torch.where((place_BS >= num_tokens)[..., None], soft_BSD, hard_BSD)


def _distinct_items(source: SoftSource, prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
    """Item segments of all histories, each once, and the numbers of their texts."""
    task_BH = np.broadcast_to(prompts.task_B[:, None], prompts.history_BH.shape)
    used_BH = prompts.history_BH > 0
    item_M, first = np.unique(prompts.history_BH[used_BH], return_index=True)
    task_M = task_BH[used_BH][first]
    return item_M, source.first_text_K[task_M] + item_M - source.parts.first_item_K[task_M]
