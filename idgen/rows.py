"""Samples for decoder-only models: rows of item IDs of which many positions are targets, and catalogue walks in them.

Shapes: N samples drawn at a time, B samples of a batch, S input tokens, W segments a row has at most, K tasks, R rows
of several samples, P their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idgen.backbones.family import TokenBatch
from idgen.segments import NOTHING, PromptParts, Prompts
from idgen.trie import IGNORED_LABEL
from idgen.walks import Neighbours, draw_walks

A_WALK = -1
"""Stands for a catalogue walk among the events that are targets."""
LONGEST_WALK = 5


class Samples(NamedTuple):
    """N samples drawn for training."""

    prompts: Prompts
    target_N: np.ndarray
    """Segment of the target's item ID."""
    walk_N: np.ndarray
    """Bool: catalogue walks, waiting to be drawn or there."""


def with_walks(
    samples: Samples, neighbours: Sequence[Neighbours | None], parts: PromptParts, rng: np.random.Generator
) -> Samples:
    """Put catalogue walks into the places that wait for them, each from a task drawn uniformly from the K tasks.

    A walk has template 0 and no user. Raises ``ValueError`` where a task has no neighbours.
    """
    prompts, target_N = samples.prompts, samples.target_N.copy()
    task_N, history_NH = prompts.task_B.copy(), prompts.history_BH.copy()
    place_N = np.flatnonzero(samples.walk_N)
    task_N[place_N] = rng.integers(len(neighbours), size=len(place_N))
    history_NH[place_N] = NOTHING
    for number, near in enumerate(neighbours):
        if near is None:
            raise ValueError(
                f"got walk_share without text neighbours for task {number}; expected some. Build the task with "
                "neighbours, or set walk_share to 0"
            )
        mine_N = place_N[task_N[place_N] == number]
        longest = min(LONGEST_WALK, history_NH.shape[1])
        for place, walk in zip(mine_N, draw_walks(near, len(mine_N), rng, longest=longest), strict=True):
            segments = parts.first_item_K[number] + np.array(walk)
            target_N[place] = segments[-1]
            history_NH[place, : len(walk) - 1] = segments[-2::-1]  # newest first
    wordings = len(parts.before_PL) // len(parts.first_item_K)
    prompts = Prompts(
        task_B=task_N,
        wording_B=np.where(samples.walk_N, task_N * wordings + 1, prompts.wording_B),
        user_B=np.where(samples.walk_N, NOTHING, prompts.user_B),
        history_BH=history_NH,
    )
    return Samples(prompts, target_N, samples.walk_N)


def with_targets(samples: Samples) -> Prompts:
    """Prompts that end with their target."""
    prompts = samples.prompts
    return prompts._replace(history_BH=np.concatenate([samples.target_N[:, None], prompts.history_BH], 1))


def num_given(
    parts: PromptParts, segment_BW: np.ndarray, target_B: np.ndarray, walk_B: np.ndarray, task_B: np.ndarray
) -> np.ndarray:
    """(B,) tokens of a row before its first target: the words before the history and the first item; of a walk, whose
    order means nothing, all but the last item."""
    length_G, words = parts.segments.length_G, parts.before_PL.shape[1]
    history_BW = segment_BW[:, words:]
    first_B = history_BW[np.arange(len(history_BW)), (history_BW != NOTHING).argmax(1)]
    end_B = length_G[parts.end_K[task_B]]
    first_end_B = length_G[segment_BW[:, :words]].sum(1) + length_G[first_B] + end_B
    return np.where(walk_B, length_G[segment_BW].sum(1) - length_G[target_B] - end_B, first_end_B)


def row_labels(batch: TokenBatch, given_B: np.ndarray) -> Tensor:
    """(B, S): the row's own tokens behind the given ones, -100 before them and at padding."""
    behind_BS = torch.arange(batch["input_ids"].shape[1]) >= torch.from_numpy(given_B)[:, None]
    return batch["input_ids"].masked_fill(~(behind_BS & (batch["attention_mask"] != 0)), IGNORED_LABEL)


def packed(batch: TokenBatch, num_tokens: int) -> TokenBatch:
    """The samples of a batch (B, S) one behind the other in fewer rows (R, P), P at most ``num_tokens``.

    Longest first, each goes into the first row with room (first-fit decreasing). ``position_ids`` start again with
    every sample, and with the padding behind the last one.
    """
    length_B = batch["attention_mask"].sum(1).tolist()
    members: list[list[int]] = []
    used: list[int] = []
    for sample in sorted(range(len(length_B)), key=lambda sample: -length_B[sample]):
        room = next((row for row, number in enumerate(used) if number + length_B[sample] <= num_tokens), len(used))
        if room == len(used):
            members.append([])
            used.append(0)
        members[room].append(sample)
        used[room] += length_B[sample]
    filling = {"input_ids": 0, "attention_mask": 0, "row_labels": IGNORED_LABEL}
    found = {name: batch[name].new_full((len(members), max(used)), value) for name, value in filling.items()}
    found["position_ids"] = torch.arange(max(used)).repeat(len(members), 1)
    for row, samples in enumerate(members):
        start = 0
        for sample in samples:
            place = slice(start, start + length_B[sample])
            for name in filling:
                found[name][row, place] = batch[name][sample, : length_B[sample]]
            found["position_ids"][row, place] = torch.arange(length_B[sample])
            start = place.stop
        found["position_ids"][row, start:] = torch.arange(max(used) - start)
    return found
