"""What is worked out over arrays is what a loop over users gives: windows, contexts, users who fit weights, counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.data.store import load_domains, save_domain
from fedecider.evaluation.protocols import train_part
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import stream
from fedecider.models import counts
from fedecider.models.counts import calibration_users, count_events, training_contexts
from idgen.events import event_table, merge_events, window_ends

USERS = st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=9), min_size=2, max_size=7)


@settings(deadline=None, max_examples=60)
@given(USERS, st.integers(1, 5), st.booleans())
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


@settings(deadline=None, max_examples=60)
@given(USERS)
def test_events_of_several_tasks_in_one_table(users):
    one = event_table(users, True)
    both, size = merge_events([one, one]), len(one.item_E)
    for name in ("first_E", "train_end_E", "end_E"):
        assert getattr(both, name).tolist() == [*getattr(one, name), *(getattr(one, name) + size)]
    assert both.task_E.tolist() == [0] * size + [1] * size
    assert merge_events([one]) is one


@settings(deadline=None, max_examples=60)
@given(USERS)
def test_contexts_are_those_of_a_loop(users):
    found = training_contexts(users, stream(0, "toy"), 10**6)
    parts = [list(train_part(user)) for user in users]
    places = [(p, n) for p, part in enumerate(parts) for n in range(1, len(part)) if part[n] not in part[:n]]
    assert found.histories == [parts[p][:n] for p, n in places]
    assert found.targets == [parts[p][n] for p, n in places]
    assert found.left_out == [parts[p] for p, _ in places]


@settings(deadline=None, max_examples=60)
@given(USERS)
def test_users_who_fit_the_weights_have_two_different_events(users):
    good = [place for place, user in enumerate(users) if len(set(train_part(user))) > 1]
    if len(good) < 2:
        with pytest.raises(ValueError, match="two different train events"):
            calibration_users(users, 0.99, torch.Generator())
    else:
        assert calibration_users(users, 1.0, torch.Generator()) == good


@settings(deadline=None, max_examples=60)
@given(USERS, st.integers(1, 6))
def test_counts_are_those_of_a_loop(users, at_once):
    pair_II, event_I = np.zeros((5, 5), np.int64), np.zeros(5, np.int64)
    for user in users:
        np.add.at(event_I, user, 1)
        for first in range(len(user)):
            for second in range(first + 1, len(user)):
                weight = round(2**16 / (second - first))
                pair_II[user[first], user[second]] += weight
                pair_II[user[second], user[first]] += weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "MAX_PAIRS", at_once)
        found = count_events(SequenceArray.of(users), 5)
    assert found.pair_II.toarray().tolist() == pair_II.tolist()
    assert found.event_I.tolist() == event_I.tolist()


def test_prepared_events_stay_where_arrow_has_them(tmp_path, monkeypatch):
    """No list of numbers is made between the file and the samples."""
    users = [[place % 5, 1, 2, place % 3] for place in range(50)]
    keys = [f"k{number}" for number in range(5)]
    events = Events([f"u{place}" for place in range(50)], users, [[1, 2, 3, 4]] * 50)
    save_domain(Domain("games", Catalogue("games", keys, keys, keys), events, Events([], [], None), {}), tmp_path)

    def refused(*_):
        raise AssertionError("made a list")

    for name in ("__iter__", "__getitem__"):
        monkeypatch.setattr(SequenceArray, name, refused)
    read = load_domains(tmp_path)["games"].clients
    arrays = read.arrays()
    assert arrays.sequences is read.sequences
    assert isinstance(read.timestamps, SequenceArray)
    assert arrays.sequences.value_E.dtype == np.int32
    assert not arrays.sequences.value_E.flags.owndata
    table = event_table(read.sequences, True)
    assert np.shares_memory(table.item_E, arrays.sequences.value_E)
    assert table.item_E.tolist() == [item for user in users for item in user]
