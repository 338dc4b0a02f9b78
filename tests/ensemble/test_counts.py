"""Counts: contexts and sums as a loop gives them, who is left out, the sources, and secure sums of clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ensemble_toys import NUM_ITEMS, dense_experts, sequences, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.baselines.counts import cooccurrence_matrix, train_counts
from fedecider.data.near_texts import nearest_texts, unit_vectors
from fedecider.evaluation.protocols import train_part
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import stream
from fedecider.models import counts
from fedecider.models import counts as experts
from fedecider.models import counts as others
from fedecider.models.counts import (
    Contexts,
    calibration_users,
    count_events,
    held_out_contexts,
    no_counts,
    training_contexts,
)
from idgen.events import event_table, window_ends

USERS = sequences()


PARTS = [train_part(sequence) for sequence in USERS]


COUNTS = count_events(PARTS, NUM_ITEMS)


def same(one, other) -> bool:
    return (one.pair_II != other.pair_II).nnz == 0 and np.array_equal(one.event_I, other.event_I)


def test_counts_are_those_of_the_counting_baseline(monkeypatch):
    expected = cooccurrence_matrix(USERS, NUM_ITEMS, window=None, directed=False).toarray()
    assert np.allclose(COUNTS.pair_II.toarray() / 2**16, expected, atol=1e-3)
    assert COUNTS.event_I.tolist() == train_counts(USERS, NUM_ITEMS).tolist()
    monkeypatch.setattr("fedecider.models.counts.MAX_PAIRS", 3)
    assert same(count_events(PARTS, NUM_ITEMS), COUNTS)


def test_by_hand():
    counts = count_events([[0, 1, 0], [1, 2]], 3)
    assert (counts.pair_II.toarray() / 2**16).tolist() == [[1.0, 2.0, 0.0], [2.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    assert counts.event_I.tolist() == [2, 2, 1]


def test_users_add_up():
    parts = count_events(PARTS[:4], NUM_ITEMS).plus(count_events(PARTS[4:], NUM_ITEMS))
    assert same(parts, COUNTS)
    assert same(no_counts(NUM_ITEMS).plus(COUNTS), COUNTS)


@pytest.mark.parametrize("max_pairs", [7, 4_000_000])
def test_leaving_a_user_out_is_counting_without_them(monkeypatch, max_pairs):
    monkeypatch.setattr(experts, "MAX_PAIRS", max_pairs)
    contexts = training_contexts(USERS, stream(0, "toy"))
    assert len({tuple(events) for events in contexts.left_out}) > 4
    found = experts.evidence(COUNTS, contexts, 4)
    for row, left_out in enumerate(contexts.left_out):
        without = count_events([part for part in PARTS if list(part) != left_out], NUM_ITEMS)
        alone = Contexts([contexts.histories[row]], [0], [[]])
        expected = experts.evidence(without, alone, 4)
        own = found.newest.row_T == row
        assert np.array_equal(found.pair_TI.toarray()[own], expected.pair_TI.toarray())
        assert np.array_equal(found.total_T[own], expected.total_T)
        assert np.allclose(found.popularity_B[row], expected.popularity_B[0], rtol=1e-14)
        assert np.array_equal(experts.known(found)[row], experts.known(expected)[0])


@pytest.mark.parametrize("split", ["valid", "test"])
def test_users_are_left_out_of_their_own_held_out_contexts(split):
    contexts = held_out_contexts(USERS, split)
    assert contexts.left_out == [list(part) for part in PARTS]
    assert contexts.targets == [sequence[{"valid": -2, "test": -1}[split]] for sequence in USERS]
    assert contexts.histories == [sequence[: {"valid": -2, "test": -1}[split]] for sequence in USERS]


def probs_of(counts, contexts, unit_ID=None, num_context=10, num_nearest=None):
    unit_ID = unit_vectors(vectors(counts.num_items)) if unit_ID is None else unit_ID
    probs = experts.expert_probs(
        experts.evidence(counts, contexts, num_context), nearest_texts(unit_ID, num_nearest=num_nearest)
    )
    return {name: prob_BI.numpy() for name, prob_BI in probs.each().items()}


def test_count_probs_by_hand():
    counts = count_events([[0, 1], [0, 2], [0, 2], [3]], 4)
    contexts = Contexts([[1, 0]], [2], [[]])
    popularity = {2: 2.1 / 3.2, 3: 1.1 / 3.2}
    newest = {2: (2 + 10 * popularity[2]) / 13, 3: 10 * popularity[3] / 13}  # 0 stood once beside 1 and twice beside 2
    older = {item: 10 * popularity[item] / 11 for item in (2, 3)}  # 1 stood beside 0 alone, which is seen
    votes = [(newest[item] + older[item] / 2) ** 1.5 for item in (2, 3)]
    expected = [0, 0, *(vote / sum(votes) for vote in votes)]
    assert probs_of(counts, contexts)["counts"][0].tolist() == pytest.approx(expected)
    assert experts.known(experts.evidence(counts, contexts, 10)).tolist() == [3.0]


@pytest.mark.parametrize("num_nearest", [NUM_ITEMS, 3])
@pytest.mark.parametrize("which", ["train", "test"])
def test_sparse_experts_are_the_dense_ones(which, num_nearest):
    """Also where the left-out user has items that its history does not hold, and where no text is near."""
    contexts = training_contexts(USERS, stream(0, "toy")) if which == "train" else held_out_contexts(USERS, "test")
    unit_ID = unit_vectors(vectors())
    unit_ID[contexts.histories[0][-1]] = 0.0
    assert len(contexts.histories[0]) == 1 or which == "test"
    found = probs_of(COUNTS, contexts, unit_ID, num_nearest=num_nearest)
    expected = dense_experts([list(part) for part in PARTS], contexts, unit_ID, num_nearest=num_nearest)
    for name, expected_BI in expected.items():
        assert np.allclose(found[name], expected_BI, rtol=1e-5, atol=1e-9), name  # cosines of float32
        assert np.allclose(found[name].sum(1), 1.0)
        assert all((row_I[items] == 0).all() for row_I, items in zip(found[name], contexts.histories, strict=True))
    assert (found["text"][0].max() == found["uniform"][0].max()) == (which == "train")


def test_mixtures_are_sums_of_the_experts():
    contexts = held_out_contexts(USERS, "test")
    probs = experts.expert_probs(experts.evidence(COUNTS, contexts, 10), nearest_texts(unit_vectors(vectors())))
    weight_BE = torch.rand(len(USERS), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected_BI = sum(weight_BE[:, [number]] * prob_BI for number, prob_BI in enumerate(probs.each().values()))
    torch.testing.assert_close(probs.mixture(weight_BE), expected_BI)


@pytest.mark.parametrize("num_clients", [2, 4])
def test_the_secure_sum_is_the_sum(num_clients, monkeypatch):
    monkeypatch.setattr(others, "NUMBERS_AT_ONCE", 40)  # several pieces
    clients = [
        count_events([train_part(sequence) for sequence in sequences(5 + n, seed=n)], NUM_ITEMS)
        for n in range(num_clients)
    ]
    summed = others.securely_summed(clients, seed=3)
    plain = no_counts(NUM_ITEMS)
    for one in clients:
        plain = plain.plus(one)
    assert same(summed.total, plain)
    rest = no_counts(NUM_ITEMS)
    for one in clients[1:]:
        rest = rest.plus(one)
    assert same(others.without(summed.total, clients[0]), rest)
    others_n = num_clients - 1
    protocol_up, protocol_down = 96 + 82 * others_n + 33 * num_clients, (96 + 82) * others_n + 1
    assert summed.bytes_up == 8 * (17 * 18 // 2 + 17) + protocol_up
    upper = np.triu(plain.pair_II.toarray())
    assert summed.bytes_down == 16 * int((upper != 0).sum()) + 8 * 17 + protocol_down


def test_a_sum_of_one_is_refused():
    with pytest.raises(ValueError, match="expected two or more"):
        others.securely_summed([COUNTS], seed=3)


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


@settings(deadline=None, max_examples=60)
@given(SEQUENCES_OF_USERS)
def test_contexts_are_those_of_a_loop(users):
    found = training_contexts(users, stream(0, "toy"), 10**6)
    parts = [list(train_part(user)) for user in users]
    places = [(p, n) for p, part in enumerate(parts) for n in range(1, len(part)) if part[n] not in part[:n]]
    assert found.histories == [parts[p][:n] for p, n in places]
    assert found.targets == [parts[p][n] for p, n in places]
    assert found.left_out == [parts[p] for p, _ in places]


@settings(deadline=None, max_examples=60)
@given(SEQUENCES_OF_USERS)
def test_users_who_fit_the_weights_have_two_different_events(users):
    good = [place for place, user in enumerate(users) if len(set(train_part(user))) > 1]
    if len(good) < 2:
        with pytest.raises(ValueError, match="two different train events"):
            calibration_users(users, 0.99, torch.Generator())
    else:
        assert calibration_users(users, 1.0, torch.Generator()) == good


@settings(deadline=None, max_examples=60)
@given(SEQUENCES_OF_USERS, st.integers(1, 6))
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
