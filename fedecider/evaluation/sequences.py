"""The events of many users as one array of numbers and one of offsets, as Arrow keeps lists.

Shape legend: E events, U users, N chosen users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, SupportsIndex, overload

import numpy as np

ROWS_AT_ONCE = 4096
"""Rows that become lists together when all of them are gone through."""
PIECE = 250_000
"""Numbers of whole rows that are sorted at once: bounds the memory of it."""


class SequenceArray(Sequence[list[int]]):
    """One sequence of whole numbers for each user; reads as a list of lists of int, and holds none.

    ``sequences[u]`` makes a list of one row, a slice shares the memory of the whole. What goes over all users works on
    ``value_E`` and ``start_U``: row u is ``value_E[start_U[u] : start_U[u + 1]]``.

    Args:
        start_U: (U + 1,) int64 offsets, rising, the first 0, the last E.
        value_E: (E,) whole numbers, all rows one after the other; may be a file mapped into memory.
        fine_E: (E,) int64 the same numbers in a finer unit, such as microseconds of times in seconds, where they are
            known: goes with ``value_E`` into parts of it, and is no part of what is equal, kept or hashed.
        basket_E: (E,) whole numbers, alike for the events of one basket and rising from basket to basket of a row; goes
            with ``value_E`` into parts of it. None: every event is a basket of its own. Negative where baskets have
            places that rows may lack: -1 in the last place of all, -2 in the one before it.
    """

    __slots__ = ("basket_E", "fine_E", "start_U", "value_E")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        start_U: np.ndarray,
        value_E: np.ndarray,
        fine_E: np.ndarray | None = None,
        basket_E: np.ndarray | None = None,
    ) -> None:
        self.start_U, self.value_E, self.fine_E, self.basket_E = start_U, value_E, fine_E, basket_E

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> SequenceArray:
        """The same rows as arrays: ``rows`` itself where it is one, else int64."""
        if isinstance(rows, SequenceArray):
            return rows
        start_U = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=start_U[1:])
        return cls(start_U, np.fromiter(chain.from_iterable(rows), np.int64, int(start_U[-1])))

    @classmethod
    def of_lengths(cls, length_U: np.ndarray, value_E: np.ndarray, basket_E: np.ndarray | None = None) -> SequenceArray:
        """Rows of these lengths, which ``value_E`` has one after the other."""
        start_U = np.zeros(len(length_U) + 1, np.int64)
        np.cumsum(length_U, out=start_U[1:])
        return cls(start_U, value_E, basket_E=basket_E)

    def __len__(self) -> int:
        return len(self.start_U) - 1

    @overload
    def __getitem__(self, place: SupportsIndex) -> list[int]: ...
    @overload
    def __getitem__(self, place: slice) -> SequenceArray: ...
    def __getitem__(self, place: SupportsIndex | slice) -> list[int] | SequenceArray:
        if isinstance(place, slice):
            first, last, step = place.indices(len(self))
            if step != 1:
                return self.take(np.arange(first, last, step))
            start_U = self.start_U[first : max(first, last) + 1]
            part = slice(start_U[0], start_U[-1])
            basket_E = None if self.basket_E is None else self.basket_E[part]
            return SequenceArray(start_U - start_U[0], self.value_E[part], basket_E=basket_E)
        row = range(len(self))[place]
        found: list[int] = self.value_E[self.start_U[row] : self.start_U[row + 1]].tolist()
        return found

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, len(self), ROWS_AT_ONCE):
            part = self[first : first + ROWS_AT_ONCE]
            values, starts = part.value_E.tolist(), part.start_U.tolist()
            for row in range(len(part)):
                yield values[starts[row] : starts[row + 1]]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SequenceArray):
            if (self.basket_E is None) != (other.basket_E is None):
                return False
            same = np.array_equal(self.start_U, other.start_U) and np.array_equal(self.value_E, other.value_E)
            return same and (self.basket_E is None or np.array_equal(self.is_new_basket_E, other.is_new_basket_E))
        if isinstance(other, list | tuple):
            return len(self) == len(other) and all(a == list(b) for a, b in zip(self, other, strict=True))
        return NotImplemented

    def __repr__(self) -> str:
        return f"SequenceArray({len(self):,} sequences, {len(self.value_E):,} numbers)"

    @property
    def length_U(self) -> np.ndarray:
        """(U,) int64 numbers of each row."""
        return np.diff(self.start_U)

    @property
    def row_E(self) -> np.ndarray:
        """(E,) int64 row of every number."""
        return np.repeat(np.arange(len(self)), self.length_U)

    def of_type(self, dtype: Any) -> SequenceArray:
        """The same numbers in an array of this type."""
        return SequenceArray(self.start_U, self.value_E.astype(dtype, copy=False), basket_E=self.basket_E)

    def with_baskets(self, basket_E: np.ndarray | None) -> SequenceArray:
        """The same numbers in these baskets; in none, where each of them would be a basket of its own."""
        found = SequenceArray(self.start_U, self.value_E, self.fine_E, basket_E)
        numbers = None if found.is_new_basket_E.all() else found.baskets
        return SequenceArray(self.start_U, self.value_E, self.fine_E, None if numbers is None else numbers.value_E)

    @property
    def baskets(self) -> SequenceArray | None:
        """The basket of every number, counted 0, 1, ... in each row, as int32; None where there are none."""
        if self.basket_E is None:
            return None
        number_E = np.cumsum(self.is_new_basket_E)
        first_U = number_E[np.minimum(self.start_U[:-1], max(len(number_E) - 1, 0))] if len(number_E) else number_E
        return SequenceArray(self.start_U, (number_E - np.repeat(first_U, self.length_U)).astype(np.int32))

    @property
    def is_first_in_basket_E(self) -> np.ndarray:
        """(E,) bool: the first time that its basket has this number."""
        if self.basket_E is None:
            return np.ones(len(self.value_E), bool)
        start_N = np.append(np.flatnonzero(self.is_new_basket_E), len(self.value_E))
        return SequenceArray(start_N, self.value_E).is_first_E

    def keep(self, kept_E: np.ndarray) -> SequenceArray:
        """The rows with some of their numbers, (E,) bool."""
        length_U = np.bincount(self.row_E[kept_E], minlength=len(self))
        basket_E = None if self.basket_E is None else self.basket_E[kept_E]
        return SequenceArray.of_lengths(length_U, self.value_E[kept_E], basket_E)

    def take(self, row_N: Any) -> SequenceArray:
        """The chosen rows in this order: their numbers, or (U,) bool."""
        row_N = np.asarray(row_N)
        row_N = np.flatnonzero(row_N) if row_N.dtype == bool else row_N.astype(np.int64)
        return self._cut(self.start_U[row_N], self.length_U[row_N])

    @property
    def is_new_basket_E(self) -> np.ndarray:
        """(E,) bool: the first event of its basket."""
        if self.basket_E is None:
            return np.ones(len(self.value_E), bool)
        new_E = np.ones(len(self.value_E), bool)
        new_E[1:] = self.basket_E[1:] != self.basket_E[:-1]
        new_E[self.start_U[:-1][self.length_U > 0]] = True
        return new_E

    @property
    def num_after_E(self) -> np.ndarray:
        """(E,) int64: baskets of its row behind that of the event, 0 in the last one; with places, these."""
        if self.basket_E is None:
            return np.repeat(self.start_U[1:], self.length_U) - 1 - np.arange(len(self.value_E))
        if self.basket_E.max(initial=-1) < 0:
            return -1 - self.basket_E
        number_E = np.cumsum(self.is_new_basket_E)
        last_U = number_E[np.maximum(self.start_U[1:] - 1, 0)] if len(number_E) else number_E
        return np.repeat(last_U, self.length_U) - number_E

    @property
    def num_baskets_U(self) -> np.ndarray:
        """(U,) int64 baskets of each row."""
        return np.bincount(self.row_E[self.is_new_basket_E], minlength=len(self))

    def without_last(self, num: int) -> SequenceArray:
        """All rows without their last ``num`` baskets; of one that has no more than that nothing is left. Baskets
        with places have none in what is left: it ends with the last one that is there."""
        if self.basket_E is None:
            return self._cut(self.start_U[:-1], np.maximum(self.length_U - num, 0))
        kept = self.keep(self.num_after_E >= num)
        if self.basket_E.max(initial=-1) < 0:
            kept.basket_E = np.cumsum(kept.is_new_basket_E)
        return kept

    def basket(self, num_after: int = 0) -> SequenceArray:
        """The basket of each row behind which ``num_after`` others stand, each item once; empty where there is none."""
        found = self.keep(self.num_after_E == num_after)
        found = found.keep(found.is_first_E)
        return SequenceArray(found.start_U, found.value_E)

    def newest(self, num: int) -> SequenceArray:
        """The last ``num`` numbers of each row, or what there is."""
        length_U = np.minimum(self.length_U, num)
        return self._cut(self.start_U[1:] - length_U, length_U)

    def last(self, num_after: int = 0) -> np.ndarray:
        """(U,) the number of each row behind which ``num_after`` others stand; every row must have it."""
        return self.value_E[self.start_U[1:] - 1 - num_after]

    @property
    def is_first_E(self) -> np.ndarray:
        """(E,) bool: the first time that its row has this number."""
        first_E = np.zeros(len(self.value_E), bool)
        for part in self.pieces():
            number_P, row_P = self.value_E[part], self.rows_of(part)
            order_P = np.lexsort((number_P, row_P))  # stable: of equal numbers the first one stays in front
            number_P, row_P = number_P[order_P], row_P[order_P]
            new_P = np.ones(len(order_P), bool)
            new_P[1:] = (row_P[1:] != row_P[:-1]) | (number_P[1:] != number_P[:-1])
            first_E[part.start + order_P[new_P]] = True
        return first_E

    @property
    def num_repeats_U(self) -> np.ndarray:
        """(U,) int64 numbers that a row had before."""
        return np.bincount(self.row_E[~self.is_first_E], minlength=len(self))

    def pairs(self) -> Iterator[tuple[int, np.ndarray]]:
        """Each distance 1, 2, ... with the places of the numbers that have another one of their row so far behind.

        What is done is in proportion to the pairs, not to the numbers times the longest row.
        """
        left_E, place_P = np.repeat(self.start_U[1:], self.length_U) - np.arange(len(self.value_E)), None
        for distance in range(1, int(self.length_U.max(initial=0))):
            if place_P is None:
                place_P = np.flatnonzero(left_E > distance)
            else:
                place_P = place_P[left_E[place_P] > distance]
            yield distance, place_P

    def pieces(self) -> Iterator[slice]:
        """Places of the numbers of whole rows, some 250,000 at a time: bounds the memory of what sorts them."""
        row = 0
        while row < len(self):
            first = int(self.start_U[row])
            row = max(int(np.searchsorted(self.start_U, first + PIECE, side="right")) - 1, row + 1)
            yield slice(first, int(self.start_U[row]))

    def rows_of(self, part: slice) -> np.ndarray:
        """Row of the numbers at the places of ``part``, int64."""
        low, high = np.searchsorted(self.start_U, (part.start, part.stop))
        first, last = max(int(low) - 1, 0), int(high)
        end_U = np.clip(self.start_U[first : last + 1], part.start, part.stop)
        return np.repeat(np.arange(first, last), np.diff(end_U))

    def _cut(self, first_N: np.ndarray, length_N: np.ndarray) -> SequenceArray:
        """Rows of ``length_N`` numbers from ``first_N`` on, copied."""
        cut = SequenceArray.of_lengths(length_N, self.value_E)
        place_E = np.repeat(first_N - cut.start_U[:-1], length_N)
        place_E += np.arange(len(place_E))
        fine_E, basket_E = (None if part_E is None else part_E[place_E] for part_E in (self.fine_E, self.basket_E))
        return SequenceArray(cut.start_U, self.value_E[place_E], fine_E, basket_E)
