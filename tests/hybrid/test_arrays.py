"""What is worked out over arrays is what a loop over users gives: windows, contexts, users who fit weights, counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.evaluation.protocols import train_part
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import stream
from fedecider.models import counts
from fedecider.models.counts import calibration_users, count_events, training_contexts
from idgen.events import event_table, window_ends

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
