"""What a memory is asked: histories with their next items; and on which train events its weights are fitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fedecider.evaluation.split import history, target, train_part


class Contexts(NamedTuple):
    """Histories, oldest first, the item that followed each, and whose events they are."""

    histories: list[list[int]]
    targets: list[int]
    left_out: list[list[int]]
    """Events that are taken out of all counts before this context is scored: the user's own; empty for none."""


def calibration_users(sequences: Sequence[Sequence[int]], share: float, generator: torch.Generator) -> list[int]:
    """Rows of the users whose train events fit the weights and train no adapter: a draw, rising, of at least one.

    Drawn are users with two different train events: others give nothing to fit on.

    Raises:
        ValueError: there are not two such users, one to fit on and one to train on.
    """
    drawn = [user for user, sequence in enumerate(sequences) if len(set(train_part(sequence))) > 1]
    if len(drawn) < 2:
        raise ValueError(
            f"got {len(drawn)} users with two different train events, expected two for a memory, one to fit its "
            "weights on and one to train on: prepare the data with more users or a larger min_length, or set "
            "memory.kind to none"
        )
    order = torch.randperm(len(drawn), generator=generator).tolist()
    return sorted(drawn[place] for place in order[: max(1, round(share * len(drawn)))])


def training_contexts(sequences: Sequence[Sequence[int]], max_contexts: int, generator: torch.Generator) -> Contexts:
    """Every event of each user's train part from the second on, behind the events before it, with the user left out.

    Events that the user had before are left out too: seen items are no candidates. Of more than ``max_contexts`` a draw
    of ``generator``, in order. Held-out events are not read.
    """
    parts = [list(train_part(sequence)) for sequence in sequences]
    places = [
        (user, place)
        for user, part in enumerate(parts)
        for place in range(1, len(part))
        if part[place] not in part[:place]
    ]
    chosen = torch.randperm(len(places), generator=generator)[:max_contexts].sort().values.tolist()
    picked = [places[number] for number in chosen]
    return Contexts(
        [parts[user][:place] for user, place in picked],
        [parts[user][place] for user, place in picked],
        [parts[user] for user, _ in picked],
    )


def held_out_contexts(sequences: Sequence[Sequence[int]], split: str) -> Contexts:
    """What each user is asked in ``split``, with the user left out of the counts of train parts."""
    return Contexts(
        [list(history(sequence, split)) for sequence in sequences],
        [target(sequence, split) for sequence in sequences],
        [list(train_part(sequence)) for sequence in sequences],
    )


def new_contexts(histories: Sequence[Sequence[int]]) -> Contexts:
    """Histories of readers who are in no count; nothing is known of what follows (target -1)."""
    return Contexts([list(items) for items in histories], [-1] * len(histories), [[] for _ in histories])
