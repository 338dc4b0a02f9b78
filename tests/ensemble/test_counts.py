"""Counts by hand and as a loop gives them, and secure sums of clients."""

from __future__ import annotations

import numpy as np
import pytest
from ensemble_toys import NUM_ITEMS, baskets_of, sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.evaluation.protocols import train_parts
from fedecider.models import counts
from fedecider.models.counts import count_events, no_counts
from idgen.events import event_table, window_ends

USERS = sequences()
PARTS = train_parts(USERS)
COUNTS = count_events(PARTS, NUM_ITEMS)


def same(one, other, successors: bool = True) -> bool:
    matrices = ("pair_II", "next_II") if successors else ("pair_II",)
    alike = all((getattr(one, name) != getattr(other, name)).nnz == 0 for name in matrices)
    return alike and np.array_equal(one.event_I, other.event_I)


def dense(count_II) -> list[list[float]]:
    return (count_II.toarray() / 2**16).tolist()


def test_by_hand():
    found = count_events([[0, 1, 0], [1, 2]], 3)
    assert dense(found.pair_II) == [[1.0, 2.0, 0.0], [2.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    assert dense(found.next_II) == [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert found.event_I.tolist() == [2, 2, 1]


def test_baskets_by_hand():
    """{0, 1}, {1, 2}, {3}: within a basket 1; 1 and 1 of neighbours 1 each way; 0 and 3 are too far apart."""
    found = count_events(baskets_of([[[0, 1], [2, 1], [3]]]), 4)
    assert dense(found.pair_II) == [
        [0.0, 2.0, 1.0, 0.0],
        [2.0, 2.0, 2.0, 1.0],
        [1.0, 2.0, 0.0, 1.0],
        [0.0, 1.0, 1.0, 0.0],
    ]
    assert dense(found.next_II) == [
        [0.0, 1.0, 1.0, 0.0],
        [0.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 0.0, 1.0],
        [0.0, 0.0, 0.0, 0.0],
    ]
    assert found.event_I.tolist() == [1, 2, 1, 1]
    assert found.pair_II.dtype == found.next_II.dtype == np.int64  # masks are taken off whole numbers alone


def test_pairs_far_apart_are_none():
    found = count_events([[0, *[1] * 19, 2, 3]], 4)
    assert dense(found.pair_II)[0][2] == round(2**16 / 20) / 2**16
    assert dense(found.pair_II)[0][3] == 0.0


def test_users_add_up():
    parts = count_events(PARTS[:4], NUM_ITEMS).plus(count_events(PARTS[4:], NUM_ITEMS))
    assert same(parts, COUNTS)
    assert same(no_counts(NUM_ITEMS).plus(COUNTS), COUNTS)


BASKETS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(st.lists(BASKETS, min_size=1, max_size=4), st.booleans())
def test_counts_are_those_of_a_loop(users, in_baskets):
    events = baskets_of(users)
    if not in_baskets:
        events = events.with_baskets(None)
        users = [[[item] for item in user] for user in events]
    pair_II, next_II, event_I = np.zeros((5, 5), np.int64), np.zeros((5, 5), np.int64), np.zeros(5, np.int64)
    for user in users:
        for first, earlier in enumerate(user):
            np.add.at(event_I, earlier, 1)
            for a in set(earlier):
                for b in set(earlier) - {a}:
                    pair_II[a, b] += 2**16
            for second in range(first + 1, len(user)):
                if in_baskets and second > first + 1:
                    continue
                for a in set(earlier):
                    for b in set(user[second]):
                        pair_II[a, b] += round(2**16 / (second - first))
                        pair_II[b, a] += round(2**16 / (second - first))
                        next_II[a, b] += 2**16 * (second == first + 1)
    found = count_events(events, 5)
    assert found.pair_II.toarray().tolist() == pair_II.tolist()
    assert found.next_II.toarray().tolist() == next_II.tolist()
    assert found.event_I.tolist() == event_I.tolist()


@pytest.mark.parametrize("num_clients", [2, 4])
def test_the_secure_sum_is_the_sum_without_successors(num_clients, monkeypatch):
    monkeypatch.setattr(counts, "NUMBERS_AT_ONCE", 40)  # several pieces
    clients = [count_events(train_parts(sequences(5 + n, seed=n)), NUM_ITEMS) for n in range(num_clients)]
    summed = counts.securely_summed(clients, seed=3)
    plain, rest = no_counts(NUM_ITEMS), no_counts(NUM_ITEMS)
    for number, one in enumerate(clients):
        plain = plain.plus(one)
        rest = rest.plus(one) if number else rest
    assert same(summed.total, plain, successors=False)
    assert same(counts.without(summed.total, clients[0]), rest, successors=False)
    assert summed.total.next_II.nnz == 0 < plain.next_II.nnz
    others_n = num_clients - 1
    protocol_up, protocol_down = 96 + 82 * others_n + 33 * num_clients, (96 + 82) * others_n + 1
    assert summed.bytes_up == 8 * (17 * 18 // 2 + 17) + protocol_up
    upper = np.triu(plain.pair_II.toarray())
    assert summed.bytes_down == 16 * int((upper != 0).sum()) + 8 * 17 + protocol_down


def test_a_sum_of_one_is_refused():
    with pytest.raises(ValueError, match="expected two or more"):
        counts.securely_summed([COUNTS], seed=3)


SEQUENCES_OF_USERS = st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=9), min_size=2, max_size=7)


@settings(deadline=None, max_examples=60)
@given(SEQUENCES_OF_USERS, st.integers(1, 5), st.booleans())
def test_windows_are_those_of_a_loop(users, longest, hold_out):
    events = event_table(users, hold_out)
    costs = np.arange(len(events.item_E)) % 3 + 1
    total, room, ends, first = np.concatenate([[0], np.cumsum(costs)]), 6, [], 0
    for user in users:
        end = first + (len(user) - 2 if hold_out else len(user)) - 1
        while end > first:
            ends.append(end)
            fits = int(np.searchsorted(total, total[end + 1] - room))
            end = min(max(first, end - longest, fits), end - 1)
        first += len(user)
    assert window_ends(events, longest, costs, room).tolist() == sorted(ends)
