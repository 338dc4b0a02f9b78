"""Metrics per user: hand numbers, an independent library, properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import label_ranking_average_precision_score, ndcg_score, top_k_accuracy_score

from fedecider.evaluation.metrics import (
    NOT_RANKED,
    activity_buckets,
    macro_mean,
    mean_metrics,
    positions_from_scores,
    user_metrics,
)

places = st.lists(st.one_of(st.integers(0, 40), st.just(NOT_RANKED)), min_size=1, max_size=30)


def test_hand_numbers():
    metrics = user_metrics(torch.tensor([0, 4, 5, 9, 19, 20, NOT_RANKED]))
    assert metrics["hit@5"].tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert metrics["hit@20"].tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert metrics["ndcg@5"].tolist() == pytest.approx([1, 1 / math.log2(6), 0, 0, 0, 0, 0])
    assert metrics["ndcg@10"][2].item() == pytest.approx(0.3562071871)
    assert metrics["ndcg@20"][4].item() == pytest.approx(1 / math.log2(21))
    assert metrics["mrr@10"].tolist() == pytest.approx([1, 0.2, 1 / 6, 0.1, 0, 0, 0])
    means = mean_metrics(torch.tensor([0, 4, NOT_RANKED]))
    assert means["hit@5"] == pytest.approx(2 / 3)
    assert means["ndcg@5"] == pytest.approx((1 + 0.3868528072) / 3)


@pytest.mark.parametrize("bad", [[-1.0], [float("nan")], [0.0, -0.5]])
def test_bad_positions_are_refused(bad):
    with pytest.raises(ValueError, match="expected numbers from 0 up"):
        user_metrics(torch.tensor(bad))


def test_equals_an_independent_library():
    rng = np.random.default_rng(3)
    score, target = rng.normal(size=(40, 31)), rng.integers(0, 31, 40)
    metrics = user_metrics(positions_from_scores(torch.from_numpy(score), torch.from_numpy(target)))
    one_hot = np.eye(31)[target]
    for k in (5, 10, 20):
        ndcg = [ndcg_score(one_hot[[u]], score[[u]], k=k) for u in range(40)]
        assert metrics[f"ndcg@{k}"].tolist() == pytest.approx(ndcg)
        accuracy = top_k_accuracy_score(target, score, k=k, labels=np.arange(31))
        assert metrics[f"hit@{k}"].mean().item() == pytest.approx(accuracy)
    whole = user_metrics(positions_from_scores(torch.from_numpy(score), torch.from_numpy(target)), (31,))
    assert whole["mrr@31"].mean().item() == pytest.approx(label_ranking_average_precision_score(one_hot, score))


@given(places, st.randoms())
def test_bounds_and_invariance_to_order_and_shards(positions, random):
    metrics = user_metrics(torch.tensor(positions))
    for k in (5, 10, 20):
        assert (metrics[f"mrr@{k}"] <= metrics[f"ndcg@{k}"]).all()
        assert (metrics[f"ndcg@{k}"] <= metrics[f"hit@{k}"]).all()
    for name in ("hit", "ndcg", "mrr"):
        assert (metrics[f"{name}@5"] <= metrics[f"{name}@10"]).all()
        assert (metrics[f"{name}@10"] <= metrics[f"{name}@20"]).all()
    shuffled = random.sample(positions, len(positions))
    assert mean_metrics(torch.tensor(shuffled)) == mean_metrics(torch.tensor(positions))
    cut = random.randint(0, len(positions))
    shards = [user_metrics(torch.tensor(part)) for part in (positions[:cut], positions[cut:])]
    for name, value_U in metrics.items():
        assert torch.equal(torch.cat([shard[name] for shard in shards]), value_U)


def test_macro_counts_each_domain_once():
    domains = {"crime": mean_metrics(torch.tensor([0])), "comics": mean_metrics(torch.tensor([NOT_RANKED] * 9))}
    assert macro_mean(domains)["hit@10"] == 0.5


def test_positions_with_ties_and_masks():
    score = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0], [5.0, 4.0, 3.0, 2.0, -1.0]])
    target = torch.tensor([2, 3])
    assert positions_from_scores(score, target).tolist() == [2.0, 3.0]  # places 1, 2, 3 in equal shares
    assert positions_from_scores(score, target, ties="best").tolist() == [1.0, 3.0]
    assert positions_from_scores(score, target, ties="worst").tolist() == [3.0, 3.0]
    mask = torch.tensor([[False, True, True, False, True], [True, True, True, False, True]])
    assert positions_from_scores(score, target, mask).tolist() == [0.5, NOT_RANKED]


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=8), st.data())
def test_expected_position_is_the_mean_over_all_orders_of_ties(scores, data):
    target = data.draw(st.integers(0, len(scores) - 1))
    above = sum(s > scores[target] for s in scores)
    tied = sum(s == scores[target] for s in scores)
    expected = sum(above + place for place in range(tied)) / tied
    assert positions_from_scores(torch.tensor([scores]).float(), torch.tensor([target])).item() == expected


def test_nan_is_an_error_among_candidates_only():
    score = torch.tensor([[0.1, float("nan"), 0.3]])
    with pytest.raises(ValueError, match="NaN scores for 1 of 1 users"):
        positions_from_scores(score, torch.tensor([1]))
    with pytest.raises(ValueError, match="NaN"):
        positions_from_scores(score, torch.tensor([0]))
    assert positions_from_scores(score, torch.tensor([0]), torch.tensor([[True, False, True]])).tolist() == [1.0]


def test_infinite_scores_are_ordered():
    score = torch.tensor([[float("-inf"), float("inf"), 0.0]])
    assert positions_from_scores(score.expand(3, -1), torch.tensor([0, 1, 2])).tolist() == [2, 0, 1]


def test_activity_buckets_are_equal_and_break_ties_by_key():
    counts, users = [5, 1, 5, 9, 5, 2, 5], ["c", "g", "a", "b", "d", "e", "f"]
    # order: g(1) e(2) a c d f (5) b(9); seven users in three buckets: 3, 2, 2
    bucket = dict(zip(users, activity_buckets(counts, users, 3).tolist(), strict=True))
    assert bucket == {"g": 0, "e": 0, "a": 0, "c": 1, "d": 1, "f": 2, "b": 2}
    with pytest.raises(ValueError, match="at least 9"):
        activity_buckets(counts, users, 9)
