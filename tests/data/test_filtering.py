"""k-core, order and repeats."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.data.filtering import compress, count_exact_duplicates, first_occurrences, k_core, order_events, take
from fedecider.data.readers.reading import events_of_columns


def table(rows, with_order=False):
    """Events of (user, item, time, order), of which the last two may lack."""
    users, items, times, orders = zip(*(row + (-1, 0)[len(row) - 2 :] for row in rows), strict=True)
    keys = [pa.chunked_array([list(column)], pa.string()) for column in (users, items)]
    return events_of_columns(*keys, np.array(times), np.array(orders) if with_order else None)


def as_dict(sequences):
    bounds = sequences.start_U.tolist()
    return {
        user: [sequences.items[i] for i in sequences.item_E[bounds[u] : bounds[u + 1]].tolist()]
        for u, user in enumerate(sequences.users)
    }


def test_k_core_by_hand():
    # a and b share x and y; c has x and z; z is too rare, so c falls, which leaves x and y with two events each.
    rows = [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y"), ("c", "x"), ("c", "z")]
    events = table(rows)
    kept = k_core(events.user_E, events.item_E, 2, 2)
    assert kept.tolist() == [True, True, True, True, False, False]
    assert not k_core(events.user_E, events.item_E, 2, 3).any()
    assert k_core(events.user_E, events.item_E, 1, 1).all()
    # Two thresholds: three events a user, none needed of an item.
    assert k_core(events.user_E, events.item_E, 3, 1).sum() == 0


def naive_core(rows, min_user, min_item):
    rows = list(enumerate(rows))
    while True:
        users, items = Counter(r[0] for _, r in rows), Counter(r[1] for _, r in rows)
        left = [(n, r) for n, r in rows if users[r[0]] >= min_user and items[r[1]] >= min_item]
        if len(left) == len(rows):
            return {n for n, _ in left}
        rows = left


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=60),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_k_core_is_the_naive_one(rows, min_user, min_item):
    user_E = np.array([r[0] for r in rows], np.int32)
    item_E = np.array([r[1] for r in rows], np.int32)
    kept = k_core(user_E, item_E, min_user, min_item)
    assert set(np.flatnonzero(kept).tolist()) == naive_core(rows, min_user, min_item)


def test_order_is_time_then_file_order():
    rows = [("b", "p", 5), ("a", "q", 9), ("b", "r", 3), ("a", "s", 2), ("b", "t", 3), ("a", "u", 2)]
    events = table(rows)
    sequences = order_events(compress(events, np.ones(6, bool)))
    assert as_dict(sequences) == {"a": ["s", "u", "q"], "b": ["r", "t", "p"]}
    kept = np.array([True, True, False, True, True, False])
    assert as_dict(order_events(compress(events, kept))) == {"a": ["s", "q"], "b": ["t", "p"]}


def test_a_given_order_wins_over_time():
    rows = [("a", "late", 1, 2), ("a", "first", 9, 0), ("a", "middle", 5, 1)]
    sequences = order_events(compress(table(rows, with_order=True), np.ones(3, bool)))
    assert as_dict(sequences) == {"a": ["first", "middle", "late"]}
    assert sequences.time_E.tolist() == [9, 5, 1]


@pytest.mark.parametrize("piece", [1, 3, 5, 1000])
def test_repeats_and_exact_duplicates(monkeypatch, piece):
    monkeypatch.setattr("fedecider.evaluation.sequences.PIECE", piece)
    rows = [("a", "x", 1), ("b", "x", 1), ("a", "y", 2), ("a", "x", 3), ("a", "y", 2), ("b", "z", -1), ("b", "z", -1)]
    sequences = order_events(compress(table(rows), np.ones(len(rows), bool)))
    assert count_exact_duplicates(sequences) == 1  # a, y, 2; unknown times say nothing
    once = take(sequences, first_occurrences(sequences))
    assert as_dict(once) == {"a": ["x", "y"], "b": ["z", "x"]}
    assert as_dict(take(once, once.time_E == 1)) == {"a": ["x"], "b": ["x"]}
