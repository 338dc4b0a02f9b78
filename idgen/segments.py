"""Pieces of text that were tokenised once, and prompts put together from them without touching the tokenizer again.

Shapes: G segments, F tokens of all segments, B prompts, W segments a prompt has at most, S input tokens, H history
length, K tasks, P prompt templates, L parts of a template before (after) the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from idgen.config import SampleConfig
from idgen.prompts import SEPARATOR, load_templates, split_template
from idgen.tokenizer import encode

NOTHING = 0
"""Segment without tokens: fills the rows of prompts that have fewer segments."""


class Segments(NamedTuple):
    """Token sequences one after the other; sequence g is ``token_F[start_G[g] : start_G[g] + length_G[g]]``."""

    token_F: np.ndarray
    start_G: np.ndarray
    length_G: np.ndarray


class PromptParts(NamedTuple):
    """All that prompts of K tasks are made of. Template p of task k is row ``k * P + p`` of the tables of parts."""

    segments: Segments
    before_PL: np.ndarray
    """Segments before the history."""
    after_PL: np.ndarray
    """Segments after the history; the last one closes the prompt."""
    separator_K: np.ndarray
    first_item_K: np.ndarray
    """Segment of item 0 of each task."""
    end_K: np.ndarray
    """Segment that closes an item ID: the end token, or nothing."""
    max_source_tokens: int
    padding: int
    """The padding token."""


class Prompts(NamedTuple):
    """What B prompts are to contain, before truncation."""

    task_B: np.ndarray
    template_B: np.ndarray
    """Rows of the tables of parts."""
    history_BH: np.ndarray
    """Segments of the history's items, NEWEST first, ``NOTHING`` behind the oldest one."""


def make_segments(sequences: Sequence[Sequence[int]]) -> Segments:
    """Number the sequences 0, 1, ...; sequence 0 should be the empty one."""
    length_G = np.fromiter(map(len, sequences), np.int64, len(sequences))
    tokens = [np.asarray(sequence, dtype=np.int64) for sequence in sequences if len(sequence)]
    token_F = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
    return Segments(token_F, np.cumsum(length_G) - length_G, length_G)


def make_parts(
    domain: str,
    item_tokens: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    config: SampleConfig,
    end_token: int | None,
) -> PromptParts:
    """Tokenise the words of all prompts of one domain and number the segments.

    ``end_token`` closes every item ID that is a target, None where IDs need none. The tokenizer's end token closes the
    prompt. Of rows ``end_token`` closes the words before the history and every item of it, instead of `SEPARATOR`:
    prompt and target are one row of closed IDs.
    Errors: ``ValueError`` when the longest template with the longest item does not fit, or the tokenizer lacks a
    padding token.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no padding token; load it with idgen.tokenizer.load_tokenizer")
    split = [split_template(template, domain) for template in load_templates(config.templates)]
    words = sorted({text for pair in split for text in pair if text})
    number = {"": NOTHING} | {text: 4 + place for place, text in enumerate(words)}
    end = [] if end_token is None else [end_token]
    is_row = config.is_row
    prompt_end = end_token if is_row else cast(int, tokenizer.eos_token_id)
    if not is_row and tokenizer.decode([token for word in encode(tokenizer, ["a", "b"]) for token in word]) == "ab":
        raise ValueError(
            f"got templates {config.templates} with a tokenizer that puts no space between words tokenised one by one, "
            "expected list or history, where what closes an item ID parts it from the next. Set samples.templates"
        )
    mark = [end] if is_row else encode(tokenizer, [SEPARATOR])
    fixed = [[], *(mark or [[]]), end, [] if prompt_end is None else [prompt_end], *encode(tokenizer, words)]
    parts = PromptParts(
        segments=make_segments([*fixed, *item_tokens]),
        before_PL=np.array([[number[before], 2 if is_row and before else NOTHING] for before, _ in split]),
        after_PL=np.array([[number[after], 3] for _, after in split]),
        separator_K=np.array([1]),
        first_item_K=np.array([len(fixed)]),
        end_K=np.array([2]),
        max_source_tokens=config.max_source_tokens,
        padding=int(tokenizer.pad_token_id),
    )
    _check_room(parts, domain, num_items=2 if is_row else 1)
    return parts


def merge_parts(parts: Sequence[PromptParts]) -> PromptParts:
    """One table for several tasks: task numbers count on, segments of later tasks are renumbered.

    Errors: ``ValueError`` when the tasks differ in input length or number of templates.
    """
    if len(parts) == 1:
        return parts[0]
    settings = {(part.max_source_tokens, len(part.before_PL)) for part in parts}
    if len(settings) != 1:
        raise ValueError(
            f"got tasks with different (max_source_tokens, number of templates): {sorted(settings)}; "
            "expected equal ones. Build all tasks with the same SampleConfig"
        )
    shifts = np.cumsum([0, *(len(part.segments.length_G) for part in parts)])[:-1]
    tokens = np.cumsum([0, *(len(part.segments.token_F) for part in parts)])[:-1]
    segments = Segments(
        np.concatenate([part.segments.token_F for part in parts]),
        np.concatenate([part.segments.start_G + shift for part, shift in zip(parts, tokens, strict=True)]),
        np.concatenate([part.segments.length_G for part in parts]),
    )
    return PromptParts(
        segments=segments,
        before_PL=np.concatenate([_shifted(part.before_PL, shift) for part, shift in zip(parts, shifts, strict=True)]),
        after_PL=np.concatenate([_shifted(part.after_PL, shift) for part, shift in zip(parts, shifts, strict=True)]),
        separator_K=np.concatenate(
            [_shifted(part.separator_K, shift) for part, shift in zip(parts, shifts, strict=True)]
        ),
        first_item_K=np.concatenate([part.first_item_K + shift for part, shift in zip(parts, shifts, strict=True)]),
        end_K=np.concatenate([part.end_K + shift for part, shift in zip(parts, shifts, strict=True)]),
        max_source_tokens=parts[0].max_source_tokens,
        padding=parts[0].padding,
    )


def lay_out(parts: PromptParts, prompts: Prompts) -> np.ndarray:
    """Segments of each prompt in reading order, (B, W).

    The oldest items are left out first when a prompt would be longer than ``max_source_tokens``; the words of the
    prompt and the newest item always stay.
    """
    length_G = parts.segments.length_G
    before_BL, after_BL = parts.before_PL[prompts.template_B], parts.after_PL[prompts.template_B]
    separator_B = parts.separator_K[prompts.task_B]
    room_B = parts.max_source_tokens - length_G[before_BL].sum(1) - length_G[after_BL].sum(1)
    history_BH = _newest_that_fit(prompts.history_BH, length_G, separator_B, room_B)
    history_BH = history_BH[:, ::-1]
    num_prompts, longest = history_BH.shape
    joined_BW = np.zeros((num_prompts, max(2 * longest - 1, 0)), np.int64)
    joined_BW[:, ::2] = history_BH
    both_BH = (history_BH[:, :-1] != NOTHING) & (history_BH[:, 1:] != NOTHING)
    joined_BW[:, 1::2] = np.where(both_BH, separator_B[:, None], NOTHING)
    return np.concatenate([before_BL, joined_BW, after_BL], 1)


def num_tokens(segments: Segments, segment_BW: np.ndarray) -> np.ndarray:
    """Tokens of each row of segments, (B,)."""
    return segments.length_G[segment_BW].sum(1)


def join(segments: Segments, segment_BW: np.ndarray, padding: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each row of segments one after the other, padded on the right: (token_BS, length_B)."""
    length_BW = segments.length_G[segment_BW]
    length_B = length_BW.sum(1)
    flat_length = length_BW.ravel()
    offset = np.cumsum(flat_length) - flat_length
    place_F = np.arange(int(flat_length.sum())) + np.repeat(segments.start_G[segment_BW].ravel() - offset, flat_length)
    token_BS = np.full((len(segment_BW), int(length_B.max(initial=0))), padding, np.int64)
    token_BS[np.arange(token_BS.shape[1]) < length_B[:, None]] = segments.token_F[place_F]
    return token_BS, length_B


def _check_room(parts: PromptParts, domain: str, num_items: int) -> None:
    """``num_items``: a row of which every item but the first is a target holds two at least."""
    length_G = parts.segments.length_G
    longest_item = int(length_G[int(parts.first_item_K[0]) :].max(initial=0))
    words_P = length_G[np.concatenate([parts.before_PL, parts.after_PL], 1)].sum(1)
    mark = int(length_G[parts.separator_K].max())
    needed = int(words_P.max()) + num_items * (longest_item + mark) - mark
    if needed > parts.max_source_tokens:
        raise ValueError(
            f"max_source_tokens is {parts.max_source_tokens}, but a prompt of domain {domain!r} with "
            f"{'a single item' if num_items == 1 else 'two items'} needs up to {needed} (longest item ID "
            f"{longest_item}). Set max_source_tokens to {needed} or more"
        )


def _newest_that_fit(
    history_BH: np.ndarray, length_G: np.ndarray, separator_B: np.ndarray, room_B: np.ndarray
) -> np.ndarray:
    step_BH = length_G[history_BH] + length_G[separator_B][:, None]
    used_BH = np.cumsum(step_BH, 1) - length_G[separator_B][:, None]
    kept_BH = used_BH <= room_B[:, None]
    return np.where(kept_BH, history_BH, NOTHING)


def _shifted(number: np.ndarray, shift: int) -> np.ndarray:
    """Renumber, but for ``NOTHING``, which is segment 0 of every table."""
    return np.where(number > 0, number + shift, number)
