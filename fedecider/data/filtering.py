"""From raw events to ordered sequences: k-core, repeats, order of time.

Shape legend: E events, U users, I items.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from fedecider.data.domain import NO_EVENTS, UNKNOWN_TIME, Events, Size
from fedecider.data.readers.raw import RawEvents


class Sequences(NamedTuple):
    """Events grouped by user, oldest first: user ``users[u]`` owns rows ``start_U[u]:start_U[u + 1]``."""

    users: list[str]
    """Sorted keys of the users that are left."""
    items: list[str]
    """All item keys of the raw domain; ``item_E`` points into it."""
    start_U: np.ndarray
    """(U + 1,) int64."""
    item_E: np.ndarray
    time_E: np.ndarray

    def used_items(self) -> list[str]:
        """Sorted keys of the items that are left."""
        return sorted(self.items[i] for i in np.unique(self.item_E).tolist())

    def size(self) -> Size:
        """The users, items and events that are left."""
        return Size(len(self.users), len(np.unique(self.item_E)), len(self.item_E))


def k_core(user_E: np.ndarray, item_E: np.ndarray, min_user: int, min_item: int) -> np.ndarray:
    """(E,) bool: the largest set of events in which each user has ``min_user`` and each item ``min_item`` events."""
    kept_E = np.ones(len(user_E), dtype=bool)
    while kept_E.any():
        user_count = np.bincount(user_E[kept_E], minlength=1)
        item_count = np.bincount(item_E[kept_E], minlength=1)
        # Counts of dropped users may be missing at the end of the array: they are 0 anyway.
        enough_U = np.zeros(int(user_E.max()) + 1, dtype=bool)
        enough_I = np.zeros(int(item_E.max()) + 1, dtype=bool)
        enough_U[: len(user_count)] = user_count >= min_user
        enough_I[: len(item_count)] = item_count >= min_item
        next_E = kept_E & enough_U[user_E] & enough_I[item_E]
        if next_E.sum() == kept_E.sum():
            break
        kept_E = next_E
    return kept_E


def compress(events: RawEvents, kept_E: np.ndarray) -> RawEvents:
    """Copies of the kept events, with the users that are left numbered in the order of their keys.

    All events can be freed before the kept ones are sorted: at 2 GB of raw gzip, memory is counted in bytes an event.
    """
    user_E = events.user_E[kept_E]
    numbers = np.flatnonzero(np.bincount(user_E, minlength=1)).tolist() if len(user_E) else []
    numbers.sort(key=events.users.__getitem__)
    place_of = np.zeros(len(events.users), dtype=np.int32)
    place_of[numbers] = np.arange(len(numbers), dtype=np.int32)
    return events._replace(
        users=[events.users[number] for number in numbers],
        user_E=place_of[user_E],
        item_E=events.item_E[kept_E],
        time_E=events.time_E[kept_E],
        order_E=None if events.order_E is None else events.order_E[kept_E],
    )


def order_events(events: RawEvents) -> Sequences:
    """Events by user and within a user by the source's order or time, ties in file order."""
    order_E = events.time_E if events.order_E is None else events.order_E
    rows = np.lexsort((order_E, events.user_E))  # stable
    count_U = np.bincount(events.user_E, minlength=len(events.users))
    return Sequences(
        users=events.users,
        items=events.items,
        start_U=np.concatenate([[0], np.cumsum(count_U)]).astype(np.int64),
        item_E=events.item_E[rows],
        time_E=events.time_E[rows],
    )


def first_occurrences(sequences: Sequences) -> np.ndarray:
    """(E,) bool: the first event of each user with each item."""
    kept_E = np.zeros(len(sequences.item_E), dtype=bool)
    for start, user_E, item_E, _ in _pieces(sequences):
        rows = np.lexsort((item_E, user_E))  # stable: within a pair, oldest first
        user_E, item_E = user_E[rows], item_E[rows]
        first_E = np.ones(len(rows), dtype=bool)
        first_E[1:] = (user_E[1:] != user_E[:-1]) | (item_E[1:] != item_E[:-1])
        kept_E[start + rows[first_E]] = True
    return kept_E


def count_exact_duplicates(sequences: Sequences) -> int:
    """Events that repeat user, item and (known) timestamp of another one."""
    count = 0
    for _, user_E, item_E, time_E in _pieces(sequences):
        rows = np.lexsort((time_E, item_E, user_E))
        u, i, t = user_E[rows], item_E[rows], time_E[rows]
        same = (u[1:] == u[:-1]) & (i[1:] == i[:-1]) & (t[1:] == t[:-1]) & (t[1:] != UNKNOWN_TIME)
        count += int(same.sum())
    return count


PIECE_EVENTS = 250_000


def _pieces(sequences: Sequences) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """(first row, user_E, item_E, time_E) of whole users, some 250,000 events at a time, to bound the memory."""
    first = 0
    while first < len(sequences.users):
        start = int(sequences.start_U[first])
        last = int(np.searchsorted(sequences.start_U, start + PIECE_EVENTS, side="right")) - 1
        last = min(max(last, first + 1), len(sequences.users))
        end = int(sequences.start_U[last])
        user_E = np.repeat(np.arange(first, last, dtype=np.int32), np.diff(sequences.start_U[first : last + 1]))
        yield start, user_E, sequences.item_E[start:end], sequences.time_E[start:end]
        first = last


def take(sequences: Sequences, kept_E: np.ndarray) -> Sequences:
    """The kept events; users without any are dropped."""
    count_U = np.bincount(user_rows(sequences)[kept_E], minlength=len(sequences.users))
    left = np.flatnonzero(count_U)
    start_U = np.concatenate([[0], np.cumsum(count_U[left])]).astype(np.int64)
    users = [sequences.users[u] for u in left.tolist()]
    return sequences._replace(
        users=users, start_U=start_U, item_E=sequences.item_E[kept_E], time_E=sequences.time_E[kept_E]
    )


def filter_core(sequences: Sequences, min_user: int, min_item: int) -> Sequences:
    """``k_core`` on ordered events."""
    return take(sequences, k_core(user_rows(sequences), sequences.item_E, min_user, min_item))


UserRow = tuple[str, list[int], list[int]]
"""A user's key, items and times, oldest first."""


def rows_of(sequences: Sequences, chosen: Collection[str], max_length: int | None) -> list[UserRow]:
    """The rows of the ``chosen`` users; of each the newest ``max_length`` events, None: all."""
    rows = []
    for u, user in enumerate(sequences.users):
        if user in chosen:
            start, end = int(sequences.start_U[u]), int(sequences.start_U[u + 1])
            if max_length is not None:
                start = max(start, end - max_length)
            rows.append((user, sequences.item_E[start:end].tolist(), sequences.time_E[start:end].tolist()))
    return rows


def numbered(rows: list[UserRow], number_of: Mapping[int, int]) -> Events:
    """The rows with the catalogue's numbers of items in the place of those that :class:`Sequences` has."""
    if not rows:
        return NO_EVENTS
    known = any(time != UNKNOWN_TIME for _, _, times in rows for time in times)
    return Events(
        users=[user for user, _, _ in rows],
        sequences=[[number_of[item] for item in items] for _, items, _ in rows],
        timestamps=[times for _, _, times in rows] if known else None,
    )


def user_rows(sequences: Sequences) -> np.ndarray:
    """(E,) int32 user number of each event."""
    lengths_U = np.diff(sequences.start_U)
    return np.repeat(np.arange(len(sequences.users), dtype=np.int32), lengths_U)
