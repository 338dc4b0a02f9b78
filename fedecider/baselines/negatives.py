"""Training negatives of many users at once: exactly uniform over the items that a user's negatives may be.

The rank of a draw inside the complement is drawn and turned into an item, so nothing is rejected and nothing is
enumerated: the r-th item outside of e_0 < e_1 < ... is ``r + #{j: e_j - j <= r}``.

Shape legend: U users, I items, E excluded (user, item) pairs, N draws (any shape).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.baselines.interactions import distinct_pairs
from fedecider.evaluation.protocols import Protocol, Sequences
from fedecider.evaluation.split import train_part


class Excluded(NamedTuple):
    """Excluded items of all users, flat, ready for :func:`items_outside`."""

    key_E: Tensor
    """``user * (I + 1) + e_j - j``, ascending, int64."""
    start_U: Tensor
    """Where a user's keys begin, int64."""
    pool_U: Tensor
    """How many items are left, int64."""
    num_items: int


def excluded_items(sequences: Sequences, num_items: int, protocol: Protocol) -> Excluded:
    """Items that are never negatives: train items (``strict``), or the items of all splits (``paper``, a leak).

    ``ValueError`` when a user has no item left.
    """
    whole = protocol.negatives_avoid == "all"
    return outside_of([s if whole else train_part(s) for s in sequences], num_items)


def outside_of(parts: Sequences, num_items: int) -> Excluded:
    """The items of ``parts``, row by row, are never negatives. ``ValueError`` when a user has no item left."""
    user_E, item_E = distinct_pairs(parts, num_items)
    count_U = torch.bincount(user_E, minlength=len(parts))
    if len(count_U) and int(count_U.max()) >= num_items:
        raise ValueError(
            f"got a user who touched all {num_items} items, expected one item at least to use as a negative"
        )
    start_U = count_U.cumsum(0) - count_U
    place_E = torch.arange(len(user_E)) - start_U[user_E]
    return Excluded(user_E * (num_items + 1) + item_E - place_E, start_U, num_items - count_U, num_items)


def items_outside(excluded: Excluded, user_N: Tensor, rank_N: Tensor) -> Tensor:
    """The ``rank_N``-th item (from 0, ascending) outside of the excluded items of ``user_N``, int64, same shape."""
    key_N = user_N * (excluded.num_items + 1) + rank_N
    return rank_N + torch.searchsorted(excluded.key_E, key_N, right=True) - excluded.start_U[user_N]


def draw_outside(excluded: Excluded, user_N: Tensor, generator: torch.Generator) -> Tensor:
    """One negative per entry of ``user_N``, independent, int64 (the remainder's bias is below 1e-14)."""
    rank_N = torch.randint(2**62, user_N.shape, generator=generator) % excluded.pool_U[user_N]
    return items_outside(excluded, user_N, rank_N)
