"""Counts of events and of pairs of events, in whole numbers: sums and differences of users are exact in any order.

Shape legend: I items, P pairs of one distance, E events of all users.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy

FRACTION_BITS = 16
UNIT = 2.0**-FRACTION_BITS
"""What a stored 1 of ``pair_II`` is worth: 1 / distance is rounded to multiples of it."""
MAX_PAIRS = 4_000_000


class Counts(NamedTuple):
    """What some users' events say."""

    pair_II: scipy.sparse.csr_array
    """int64, symmetric: the sum of 1 / distance over all pairs of events of a user, in units of ``UNIT``."""
    event_I: np.ndarray
    """int64: events of each item."""

    @property
    def num_items(self) -> int:
        return len(self.event_I)

    def plus(self, other: Counts) -> Counts:
        """Counts of the users of both."""
        return Counts(scipy.sparse.csr_array(self.pair_II + other.pair_II), self.event_I + other.event_I)

    def with_items(self, num_items: int) -> Counts:
        """The same counts with so many more items, behind the others, that nobody has."""
        pair_II, total = self.pair_II.copy(), self.num_items + num_items
        pair_II.resize((total, total))
        return Counts(pair_II, np.concatenate([self.event_I, np.zeros(num_items, np.int64)]))


def no_counts(num_items: int) -> Counts:
    """Counts of nobody."""
    return Counts(scipy.sparse.csr_array((num_items, num_items), dtype=np.int64), np.zeros(num_items, np.int64))


def pair_weight(distance_P: np.ndarray) -> np.ndarray:
    """1 / distance of pairs of events in units of ``UNIT``, int64."""
    return np.rint(2**FRACTION_BITS / distance_P).astype(np.int64)


def count_events(parts: Sequence[Sequence[int]], num_items: int) -> Counts:
    """Counts of users whose events are ``parts``, oldest first; give train parts only.

    The pairs are those of `fedecider.baselines.counts.cooccurrence_matrix` with ``window=None, directed=False``.
    """
    item_E = np.fromiter((item for part in parts for item in part), dtype=np.int64)
    owner_E = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    total, pending = no_counts(num_items).pair_II, []
    for distance in range(1, max((len(part) for part in parts), default=1)):
        same = owner_E[:-distance] == owner_E[distance:]
        weight = pair_weight(np.full(int(same.sum()), distance))
        pending.append((item_E[:-distance][same], item_E[distance:][same], weight))
        if sum(len(weight) for *_, weight in pending) > MAX_PAIRS:  # one sparse sum per few million pairs
            total, pending = total + _summed(pending, num_items), []
    total = total + _summed(pending, num_items)
    return Counts(scipy.sparse.csr_array(total + total.T), np.bincount(item_E, minlength=num_items).astype(np.int64))


def _summed(pending: Sequence[tuple[np.ndarray, ...]], num_items: int) -> scipy.sparse.csr_array:
    first, second, weight = (
        np.concatenate([pairs[column] for pairs in pending]) if pending else np.zeros(0, np.int64)
        for column in range(3)
    )
    return scipy.sparse.coo_array((weight, (first, second)), shape=(num_items, num_items)).tocsr()
