"""From raw events to ordered sequences: k-core, repeats, order of time.

Shape legend: E events, U users, I items.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedecider.data.baskets import by_time
from fedecider.data.domain import NO_EVENTS, UNKNOWN_TIME, EventArrays, Events
from fedecider.data.dropped import Size
from fedecider.data.readers.reading import RawEvents, finer_than_seconds
from fedecider.evaluation.sequences import SequenceArray


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
    fine_E: np.ndarray | None = None
    """Microseconds since 1970, where the source tells more than seconds."""
    basket_E: np.ndarray | None = None
    """Alike for the events of one basket, where order numbers tell; None: times do."""

    def used_items(self) -> list[str]:
        """Sorted keys of the items that are left."""
        return sorted(self.items[i] for i in np.flatnonzero(np.bincount(self.item_E)).tolist())

    def size(self) -> Size:
        """The users, items and events that are left."""
        return Size(len(self.users), int(np.count_nonzero(np.bincount(self.item_E))), len(self.item_E))


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
        basket_E=None if events.basket_E is None else events.basket_E[kept_E],
    )


def order_events(events: RawEvents) -> Sequences:
    """Events by user and within a user by the source's order or time, ties in file order.

    A basket stands together, where its first event does.
    """
    order_E, basket_E = events.time_E if events.order_E is None else events.order_E, events.basket_E
    keys: tuple[np.ndarray, ...] = (order_E, events.user_E)
    if basket_E is not None:
        _, place_E = np.unique(basket_E, return_inverse=True)
        first_B = np.full(int(place_E.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first_B, place_E, order_E)
        keys = (order_E, basket_E, first_B[place_E], events.user_E)
    rows = np.lexsort(keys)  # stable
    count_U = np.bincount(events.user_E, minlength=len(events.users))
    return Sequences(
        users=events.users,
        items=events.items,
        start_U=np.concatenate([[0], np.cumsum(count_U)]).astype(np.int64),
        item_E=events.item_E[rows],
        time_E=events.time_E[rows],
        fine_E=order_E[rows] if finer_than_seconds(events) else None,
        basket_E=None if basket_E is None else basket_E[rows],
    )


def first_occurrences(sequences: Sequences) -> np.ndarray:
    """(E,) bool: the first event of each user with each item."""
    return SequenceArray(sequences.start_U, sequences.item_E).is_first_E


def count_exact_duplicates(sequences: Sequences) -> int:
    """Events that repeat user, item and (known) timestamp of another one."""
    count, rows = 0, SequenceArray(sequences.start_U, sequences.item_E)
    exact_E = sequences.time_E if sequences.fine_E is None else sequences.fine_E
    for part in rows.pieces():
        user_P, item_P, time_P = rows.rows_of(part), sequences.item_E[part], exact_E[part]
        order_P = np.lexsort((time_P, item_P, user_P))
        u, i, t = user_P[order_P], item_P[order_P], time_P[order_P]
        same = (u[1:] == u[:-1]) & (i[1:] == i[:-1]) & (t[1:] == t[:-1]) & (t[1:] != UNKNOWN_TIME)
        count += int(same.sum())
    return count


def take(sequences: Sequences, kept_E: np.ndarray) -> Sequences:
    """The kept events; users without any are dropped."""
    count_U = np.bincount(user_rows(sequences)[kept_E], minlength=len(sequences.users))
    left = np.flatnonzero(count_U)
    start_U = np.concatenate([[0], np.cumsum(count_U[left])]).astype(np.int64)
    users = [sequences.users[u] for u in left.tolist()]
    return sequences._replace(
        users=users,
        start_U=start_U,
        item_E=sequences.item_E[kept_E],
        time_E=sequences.time_E[kept_E],
        fine_E=None if sequences.fine_E is None else sequences.fine_E[kept_E],
        basket_E=None if sequences.basket_E is None else sequences.basket_E[kept_E],
    )


def filter_core(sequences: Sequences, min_user: int, min_item: int) -> Sequences:
    """``k_core`` on ordered events."""
    return take(sequences, k_core(user_rows(sequences), sequences.item_E, min_user, min_item))


def chosen_events(sequences: Sequences, chosen_U: np.ndarray, max_length: int | None) -> EventArrays:
    """The users of ``chosen_U`` (U,) bool, items numbered as in ``sequences``; times where one of them is known.

    Of each user the newest ``max_length`` events, None: all.
    """
    places = np.flatnonzero(chosen_U)
    if not len(places):
        return NO_EVENTS.arrays()
    columns = ((sequences.item_E, None, sequences.basket_E), (sequences.time_E, sequences.fine_E))
    parts = [SequenceArray(sequences.start_U, *column).take(places) for column in columns]
    items, times = parts if max_length is None else [part.newest(max_length) for part in parts]
    items = items.with_baskets(by_time(times) if items.basket_E is None else items.basket_E)
    known = bool((times.value_E != UNKNOWN_TIME).any())
    return EventArrays([sequences.users[place] for place in places.tolist()], items, times if known else None)


def numbered(events: EventArrays, number_I: np.ndarray) -> Events:
    """The same events with the catalogue's numbers of items in the place of those that :class:`Sequences` has."""
    if not events.users:
        return NO_EVENTS
    rows = events.sequences
    items = SequenceArray(rows.start_U, number_I[rows.value_E], basket_E=rows.basket_E)
    return Events(events.users, items, events.timestamps)


def user_rows(sequences: Sequences) -> np.ndarray:
    """(E,) int32 user number of each event."""
    lengths_U = np.diff(sequences.start_U)
    return np.repeat(np.arange(len(sequences.users), dtype=np.int32), lengths_U)
