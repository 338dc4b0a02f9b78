"""Rules for customers who buy again, by hand numbers: own frequency, TIFU-KNN, transitions by text; what they read."""

import math

import numpy as np
import pytest
import scipy
import torch

from fedecider.baselines import baskets
from fedecider.baselines.counts import (
    ALL,
    LIKE_USERS,
    NEW,
    OWN_FREQUENCY,
    POPULARITY,
    REPEATED,
    REPEATS,
    TRANSITIONS,
    UNTRAINED,
    Votes,
    cooccurrence_matrix,
    heuristic_lists,
    heuristic_positions,
    newest_weights,
    text_votes,
)
from fedecider.data.near_texts import nearest_texts
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.evaluation.protocols import held_out, histories
from fedecider.evaluation.sequences import SequenceArray

NO_TEXTS = Votes(scipy.sparse.csr_array((6, 6)), np.zeros(6))


def in_baskets(*users):
    """``users``: lists of baskets, which are lists of items."""
    events = [[item for basket in user for item in basket] for user in users]
    number_E = [number for user in users for number, basket in enumerate(user) for _ in basket]
    return SequenceArray(SequenceArray.of(events).start_U, SequenceArray.of(events).value_E, None, np.array(number_E))


def test_own_frequency_by_hand():
    rows = in_baskets([[0, 1], [1], [2, 1, 1]], [[3]])
    found = baskets.own_frequency(rows, 4, 0.5).toarray()
    assert found.tolist() == [[0.25, 1.75, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]  # twice in a basket is once
    events = SequenceArray.of([[0, 1, 1]])
    assert baskets.own_frequency(events, 2, 0.5).toarray().tolist() == [[0.25, 1.5]]


def test_temporal_frequency_by_hand(monkeypatch):
    monkeypatch.setattr(baskets, "NUM_GROUPS", 2)
    monkeypatch.setattr(baskets, "WITHIN_DECAY", 0.5)
    monkeypatch.setattr(baskets, "GROUP_DECAY", 0.1)
    rows = in_baskets([[0], [1], [2], [3], [0, 4]], [[1, 2]], [[3], [3]])
    # five baskets: the newest three are a group, the oldest two the other; a single basket is one group alone
    expected = [
        [(0.1 * 0.5 / 2 + 1.0 / 3) / 2, 0.1 * 1.0 / 2 / 2, 0.25 / 3 / 2, 0.5 / 3 / 2, 1.0 / 3 / 2],
        [0.0, 1.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, (0.1 + 1.0) / 2, 0.0],
    ]
    np.testing.assert_allclose(baskets.temporal_frequency(rows, 5).toarray(), expected, rtol=1e-12)


def test_like_users_by_hand(monkeypatch):
    monkeypatch.setattr(baskets, "NUM_NEIGHBOURS", 1)
    vector_VI = scipy.sparse.csr_array(np.array([[1.0, 0.0, 0.0], [0.8, 0.5, 0.0], [0.0, 0.0, 2.0]]))
    found = baskets.like_users(vector_VI[[0, 2]], vector_VI, np.array([0, 2])).toarray()
    # squared distances: 0 to 1 .29, to 2 5; 2 to 0 5, to 1 4.89: the second user is the neighbour of both
    np.testing.assert_allclose(found, [[0.94, 0.15, 0.0], [0.24, 0.15, 1.4]])
    whole = baskets.like_users(vector_VI[[0]], vector_VI, np.array([-1])).toarray()
    np.testing.assert_allclose(whole, [[1.0, 0.0, 0.0]])  # somebody else with the same vector is a neighbour
    monkeypatch.setattr(baskets, "NUM_NEIGHBOURS", 300)
    every = baskets.like_users(vector_VI[[0]], vector_VI, np.array([0])).toarray()
    np.testing.assert_allclose(every, [[0.7 + 0.3 * 0.4, 0.3 * 0.25, 0.3 * 1.0]])


def test_transitions_by_text_by_hand():
    next_II = scipy.sparse.csr_array(np.array([[0, 3, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], float))
    edge_II = baskets.transition_edges(next_II)
    np.testing.assert_allclose(edge_II.toarray()[:2], [[0, 1.0, 0.5, 0], [0, 0, 1.0, 0]])  # log 4, log 2; log 2
    cosine_II = scipy.sparse.csr_array(np.array([[1, 0, 0.6, 0.9], [0, 1, 0, 0], [0.6, 0, 1, 0], [0.9, 0, 0, 1]]))
    newest_BI = scipy.sparse.csr_array(np.array([[1.0, 0, 0, 0], [1.0, 1.0, 0, 0], [0, 0, 0, 0]]))
    found = baskets.transitions_by_text(newest_BI, edge_II, cosine_II).toarray()
    expected = [[1.0, 1.5, 1.85, 0.9], [0.5, 1.75, 1.0 + 0.375 + 0.3, 0.45], [0, 0, 0, 0]]
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(found[1, 1], 1.0 + 0.25 + 0.5)  # followed half of the basket, and is in it


def test_pairs_of_baskets_by_hand():
    rows = in_baskets([[0, 1], [1, 2], [9, 9], [9]], [[2], [0, 2], [9], [8, 9]], [[3], [9], [9]])
    found = cooccurrence_matrix(rows, 10).toarray()
    assert {(a, b): found[a, b] for a, b in zip(*found.nonzero(), strict=True)} == {
        (0, 1): 1, (0, 2): 1, (1, 1): 1, (1, 2): 1, (2, 0): 1, (2, 2): 1,
    }  # fmt: skip
    both = cooccurrence_matrix(rows, 10, window=None, directed=False).toarray()
    assert both[0, 1] == both[1, 0] == 2  # in one basket, and in the next
    assert both[1, 1] == both[2, 2] == 2  # the next basket has it again, either way
    assert both[0, 2] == both[2, 0] == 3
    assert both[3].sum() == both[9].sum() == 0
    public = in_baskets([[3, 4], [3]])
    assert cooccurrence_matrix(rows, 10, public).toarray()[3:5, 3].tolist() == [1, 1]
    weight_BI = newest_weights(rows, torch.tensor([0, 1]), "test", 10, 2).toarray()
    assert weight_BI[0].tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, 0, 0, 2]  # of the basket before the last, twice 9
    assert weight_BI[1].tolist() == [0.5, 0, 0.5, 0, 0, 0, 0, 0, 0, 1]


AGAIN = [[0, 1, 0, 2, 0, 3], [1, 1, 4, 1, 5, 1], [2, 0, 2, 4, 3, 3]]


def test_rows_for_repeats_stand_where_nothing_is_dropped_and_users_buy_again():
    once = [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert not {*REPEATS} & set(heuristic_positions(AGAIN, 6, ["test"], NO_TEXTS)["test"])
    assert not {*REPEATS} & set(heuristic_positions(once, 6, ["test"], NO_TEXTS, drop_seen=False)["test"])
    assert list(heuristic_positions(AGAIN, 6, ["test"], NO_TEXTS, drop_seen=False)["test"]) == list(UNTRAINED)


def test_three_lists_of_own_frequency_by_hand():
    found = heuristic_lists(AGAIN, 6, ["test"], NO_TEXTS)
    own, popular = ({name: found[name]["test"][row].tolist() for name in found} for row in (OWN_FREQUENCY, POPULARITY))
    # train events: 0 three times, 1 four, 2 three, 4 twice, 3 and 5 never
    # user 0 has 0 1 2, wants 3: all 0 2 1 4 (3 5); user 1 has 1 4 5, wants 1; user 2 has 0 2 3 4, wants 3, the newest
    # of the part that an item is not in, it has no place
    nan = pytest.approx(math.nan, nan_ok=True)
    assert own[ALL] == [4.5, 0.0, 1.0]
    assert own[REPEATED] == [nan, 0.0, 1.0]
    assert own[NEW] == [1.5, nan, nan]
    assert popular[ALL] == [4.5, 0.0, 4.5]
    assert popular[REPEATED] == [nan, 0.0, 3.0]  # of 0 2 3 4
    assert popular[NEW] == [1.5, nan, nan]
    dropped = heuristic_positions(AGAIN, 6, ["test"], NO_TEXTS)["test"][POPULARITY]
    assert dropped.tolist() == [1.5, NOT_RANKED, NOT_RANKED]


def with_other_ends(rows, user, split):
    """The held-out basket of ``split`` of one user and what comes later are other items."""
    value_E = rows.value_E.copy()
    changed_E = (rows.row_E == user) & (rows.num_after_E <= {"valid": 1, "test": 0}[split])
    value_E[changed_E] = (value_E[changed_E] + 3) % 12
    return SequenceArray(rows.start_U, value_E, None, rows.basket_E)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_baskets_reach_no_list(split):
    generator = np.random.default_rng(3)
    users = [
        [generator.integers(0, 12, generator.integers(1, 5)).tolist() for _ in range(generator.integers(4, 12))]
        for _ in range(9)
    ]
    rows = in_baskets(*users)
    near = nearest_texts(np.eye(12) * 0.8 + 0.2 * np.roll(np.eye(12), 1, 0))
    before = heuristic_lists(rows, 12, [split], text_votes(near))
    for user in (0, 8):
        other = with_other_ends(rows, user, split)
        assert not torch.equal(held_out(rows, split)[user], held_out(other, split)[user])
        after = heuristic_lists(other, 12, [split], text_votes(near))
        for name in (ALL, REPEATED, NEW):
            assert set(before[name][split]) == set(UNTRAINED)
            for row in UNTRAINED:
                same = [place for place in range(9) if place != user]
                assert np.array_equal(before[name][split][row][same], after[name][split][row][same], equal_nan=True)


def test_lists_agree_with_each_other_and_with_baskets_of_one_item():
    rows = SequenceArray.of(AGAIN)
    single = SequenceArray(rows.start_U, rows.value_E, None, np.arange(len(rows.value_E)))
    plain, basket = (heuristic_lists(one, 6, ["test"], NO_TEXTS) for one in (rows, single))
    for row in (OWN_FREQUENCY, LIKE_USERS, TRANSITIONS, POPULARITY):
        for name in plain:
            assert plain[name]["test"][row].tolist() == pytest.approx(
                basket[name]["test"][row][:, 0].tolist(), nan_ok=True
            )
    assert histories(single, "test")[0] == AGAIN[0][:-1]
