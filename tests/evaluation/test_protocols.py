"""Protocols: candidates, negatives, repeats, separate draws; places from sparse scores are those of the dense ones."""

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.evaluation.metrics import (
    NOT_RANKED,
    SparseScores,
    catalogue_positions,
    positions_from_scores,
    sparse_positions,
)
from fedecider.evaluation.protocols import (
    PROTOCOLS,
    STRICT,
    candidate_mask,
    chance_hit,
    draw_negatives,
    held_out,
    is_repeat,
    negative_pool,
    no_negatives,
    rank_held_out,
    sampled_candidates,
    stamp,
)

SEQUENCES = [[0, 1, 2, 3], [4, 4, 5], [6, 0, 6], [1, 2, 2]]


events = st.lists(st.lists(st.integers(0, 14), min_size=3, max_size=9), min_size=1, max_size=6)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_whole_catalogue_candidates_by_hand():
    valid = candidate_mask(SEQUENCES, 7, "valid")
    test = candidate_mask(SEQUENCES, 7, "test")
    assert valid.nonzero()[valid.nonzero()[:, 0] == 0][:, 1].tolist() == [2, 3, 4, 5, 6]  # the test item 3 stays
    assert test[0].nonzero()[:, 0].tolist() == [3, 4, 5, 6]
    assert test[1].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 5, 6]
    assert candidate_mask(SEQUENCES, 7, "test", drop_seen=False).all()


def test_held_out_items_and_repeats():
    assert held_out(SEQUENCES, "valid").tolist() == [2, 4, 0, 2]
    assert held_out(SEQUENCES, "test").tolist() == [3, 5, 6, 2]
    assert is_repeat(SEQUENCES, "valid").tolist() == [False, True, False, False]
    assert is_repeat(SEQUENCES, "test").tolist() == [False, False, True, True]  # also when only the valid item repeats


def test_repeat_is_not_ranked_unless_seen_items_are_kept():
    score = lambda user_B: torch.arange(7.0).expand(len(user_B), -1)  # noqa: E731
    assert rank_held_out(score, SEQUENCES, 7, "test").tolist() == [3, 1, NOT_RANKED, NOT_RANKED]
    kept = rank_held_out(score, SEQUENCES, 7, "test", PROTOCOLS["strict/keep_seen"])
    assert kept.tolist() == [3, 1, 0, 4]
    wide = lambda user_B: torch.arange(50.0).expand(len(user_B), -1)  # noqa: E731
    few = PROTOCOLS["strict/sampled99"]
    with pytest.raises(ValueError, match="at least 99"):
        sampled_candidates(SEQUENCES, 50, generator(), 99)
    candidates = sampled_candidates(SEQUENCES, 50, generator(), 9)
    sampled = rank_held_out(wide, SEQUENCES, 50, "test", few, candidates=candidates)
    assert sampled[2:].tolist() == [NOT_RANKED, NOT_RANKED]
    assert (sampled[:2] <= 9).all()


def test_sampled_candidates_by_hand_scores():
    candidates = {"test": torch.tensor([[3, 9, 8, 7], [5, 1, 0, 2]])}
    score = torch.tensor([[0, 0, 0, 0.5, 0, 0, 0, 0.7, 0.5, 0.1], [9, 3, 1, 9, 9, 2, 9, 9, 9, 9.0]])
    ranked = rank_held_out(
        lambda u: score[u], [[0, 1, 2, 3], [6, 4, 5]], 10, "test", PROTOCOLS["paper"], candidates=candidates
    )
    assert ranked.tolist() == [1.5, 2.0]


@given(events)
@settings(max_examples=40, deadline=None)
def test_sampled_candidates_are_distinct_unseen_and_drawn_apart(sequences):
    drawn = sampled_candidates(sequences, 40, generator(7), 20)
    for split in ("valid", "test"):
        assert torch.equal(drawn[split][:, 0], held_out(sequences, split))
        for row, sequence in zip(drawn[split].tolist(), sequences, strict=True):
            assert len(set(row)) == 21
            assert not set(row[1:]) & set(sequence)
    assert not torch.equal(drawn["valid"][:, 1:], drawn["test"][:, 1:])
    again = sampled_candidates(sequences, 40, generator(7), 20)
    assert all(torch.equal(drawn[split], again[split]) for split in drawn)


def pool(sequence, num_items, protocol, candidates=()):
    of_user = {"test": torch.tensor([list(candidates)], dtype=torch.int64)} if candidates else {}
    return negative_pool(no_negatives([sequence], protocol, of_user)[0], num_items)


@given(events)
@settings(max_examples=40, deadline=None)
def test_strict_pool_knows_nothing_of_what_is_held_out(sequences):
    for sequence in sequences:
        strict = pool(sequence, 20, STRICT)
        other = pool([*sequence[:-2], 17, 18], 20, STRICT)
        assert torch.equal(strict, other)  # changing the held-out items changes nothing
        assert set(strict.tolist()) == set(range(20)) - set(sequence[:-2])
        assert set(pool(sequence, 20, PROTOCOLS["paper"]).tolist()) == set(range(20)) - set(sequence)


def test_isolated_pool_holds_no_candidate_of_the_user():
    sequences = [[0, 1, 2, 3], [4, 5, 6]]
    candidates = sampled_candidates(sequences, 40, generator(3), 9)
    avoided = no_negatives(sequences, PROTOCOLS["isolated99"], candidates)
    for user, sequence in enumerate(sequences):
        asked = {item for split in candidates.values() for item in split[user].tolist()}
        assert set(negative_pool(avoided[user], 40).tolist()) == set(range(40)) - set(sequence) - asked
    assert no_negatives(sequences, PROTOCOLS["paper"], candidates) == [[0, 1, 2, 3], [4, 5, 6]]


def test_negatives_are_uniform_over_the_pool():
    pool = torch.tensor([2, 5, 6, 11])
    counts = torch.bincount(draw_negatives(pool, 40_000, generator(1)), minlength=12)
    assert counts.nonzero()[:, 0].tolist() == pool.tolist()
    chi_square = ((counts[pool] - 10_000).double() ** 2 / 10_000).sum().item()
    assert chi_square < 16.27  # 3 degrees of freedom, one in a thousand


def test_batches_subsets_and_order_of_users_do_not_matter():
    torch.manual_seed(2)
    sequences = [torch.randperm(30)[: 3 + n % 5].tolist() for n in range(17)]
    score_UI = torch.randint(0, 4, (17, 30)).float()
    whole = rank_held_out(lambda u: score_UI[u], sequences, 30, "test")
    assert torch.equal(whole, rank_held_out(lambda u: score_UI[u], sequences, 30, "test"))
    users = torch.tensor([11, 2, 16])
    assert torch.equal(whole[users], rank_held_out(lambda u: score_UI[u], sequences, 30, "test", users=users))


def test_chance_by_hand():
    # candidates for test: 4 of user 0, 6 of user 1, repeats count as zero
    assert chance_hit(SEQUENCES, 7, "test", STRICT, k=3) == pytest.approx((3 / 4 + 3 / 6 + 0 + 0) / 4)
    assert chance_hit(SEQUENCES, 7, "test", PROTOCOLS["strict/keep_seen"], k=3) == pytest.approx(3 / 7)
    assert chance_hit([[0, 1, 2]], 500, "test", PROTOCOLS["paper"]) == pytest.approx(0.1)


def test_the_leak_is_stamped():
    assert (
        stamp(PROTOCOLS["paper"], 0.9876)
        == "paper protocol: LEAKS the held-out item; the memoriser scores hit@10 0.988"
    )
    assert "do not publish" in stamp(PROTOCOLS["paper"])
    assert "LEAK" not in stamp(STRICT, 0.9)
    assert [p.name for p in PROTOCOLS.values()] == list(PROTOCOLS)
    assert [name for name, p in PROTOCOLS.items() if p.leaks] == ["paper"]
    assert PROTOCOLS["isolated99"].selection == "last"
    assert "no training negatives" in stamp(PROTOCOLS["isolated99"])
    assert (PROTOCOLS["paper"].selection, STRICT.selection) == ("last", "best_valid")


@st.composite
def cases(draw):
    """Few different numbers, so that there are ties within and across what is stored, and users of uneven length."""
    num_rows, num_items = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    value_BI = np.where(rng.random((num_rows, num_items)) < 0.4, rng.integers(-1, 3, (num_rows, num_items)) / 2, np.nan)
    other_I = rng.integers(-1, 3, num_items) / 2
    seen = [rng.integers(0, num_items, rng.integers(0, 2 * num_items)).tolist() for _ in range(num_rows)]
    return value_BI, other_I, seen, rng.integers(0, num_items, num_rows)


def stored(value_BI, other_I):
    row_S, item_S = np.nonzero(~np.isnan(value_BI))
    shape = (value_BI[row_S, item_S], (row_S, item_S))
    return SparseScores(scipy.sparse.csr_array(shape, shape=value_BI.shape), other_I)


def with_all(seen, score_BI, target_B):
    candidate_BI = torch.ones_like(score_BI, dtype=torch.bool)
    for row, items in enumerate(seen):
        candidate_BI[row, items] = False
    return positions_from_scores(score_BI, torch.from_numpy(target_B), candidate_BI)


@given(cases())
def test_sparse_places_are_the_dense_ones(case):
    value_BI, other_I, seen, target_B = case
    score = stored(value_BI, other_I)
    dense_BI = torch.from_numpy(np.where(np.isnan(value_BI), other_I, value_BI))
    assert torch.equal(score.dense(), dense_BI)
    row_N = np.repeat(np.arange(len(seen)), [len(items) for items in seen])
    item_N = np.array([item for items in seen for item in items], np.int64)
    expected = with_all(seen, dense_BI, target_B)
    assert torch.equal(sparse_positions(score, target_B, row_N, item_N), expected)
    assert torch.equal(catalogue_positions(dense_BI, torch.from_numpy(target_B), seen), expected)
    everything = with_all([[]] * len(seen), dense_BI, target_B)
    assert torch.equal(catalogue_positions(dense_BI, torch.from_numpy(target_B), None), everything)


def test_ties_by_hand():
    """Items 1 and 3 tie with the target 0 at what all have, 2 is above; 3 is seen."""
    score = stored(np.array([[np.nan, 0.5, 2.0, np.nan, np.nan]]), np.array([0.5, 9.0, 0.0, 0.5, 0.1]))
    found = sparse_positions(score, np.array([0]), np.array([0]), np.array([3]))
    assert found.tolist() == [1.5]
    assert sparse_positions(score, np.array([3]), np.array([0, 0]), np.array([3, 3])).tolist() == [NOT_RANKED]


def test_what_is_no_number_never_gets_a_place():
    nan = float("nan")
    score_BI = torch.tensor([[0.1, nan, 0.3]])
    with pytest.raises(ValueError, match="got NaN scores"):
        catalogue_positions(score_BI, torch.tensor([0]), [[2]])
    assert catalogue_positions(score_BI, torch.tensor([0]), [[1]]).tolist() == [1.0]
    dense = SparseScores(scipy.sparse.csr_array(np.array([[nan, 0.5]])), np.zeros(2))
    with pytest.raises(ValueError, match="got NaN scores"):
        sparse_positions(dense, np.array([1]), np.zeros(0, np.int64), np.zeros(0, np.int64))
