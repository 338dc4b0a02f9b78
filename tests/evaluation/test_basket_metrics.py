"""Metrics and places of held-out baskets, by hand and against a sort of the whole list."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.evaluation.metrics import (
    NO_ITEM,
    NOT_RANKED,
    SparseScores,
    catalogue_positions,
    mean_metrics,
    part_of,
    positions_from_scores,
    ranked_share,
    sparse_positions,
    user_metrics,
)
from fedecider.evaluation.protocols import (
    NEXT_BASKET,
    chance_hit,
    check_sequences,
    held_out,
    is_repeat,
    rank_held_out,
)
from fedecider.evaluation.sequences import SequenceArray

NAN = math.nan


def rows_of(users):
    """Baskets of users, such as [[[0, 1], [2], [0]]]."""
    rows = SequenceArray.of([[item for basket in baskets for item in basket] for baskets in users])
    basket_E = [number for baskets in users for number, basket in enumerate(baskets) for _ in basket]
    return SequenceArray(rows.start_U, rows.value_E, basket_E=np.array(basket_E))


def test_metrics_of_baskets_by_hand():
    # three items, of which those at places 0 and 3 are among five; one item at place 9; two that were not ranked
    position_UT = torch.tensor([[0, 3, 12], [9, NAN, NAN], [NOT_RANKED, NOT_RANKED, NAN]], dtype=torch.float64)
    found = {name: value.tolist() for name, value in user_metrics(position_UT, (5, 10)).items()}
    assert found["recall@5"] == pytest.approx([2 / 3, 0, 0])
    assert found["recall@10"] == pytest.approx([2 / 3, 1, 0])
    assert found["hit@10"] == [1, 1, 0]
    best = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert found["ndcg@5"] == pytest.approx([(1 + 1 / math.log2(5)) / best, 0, 0])
    assert found["ndcg@10"] == pytest.approx([(1 + 1 / math.log2(5)) / best, 1 / math.log2(11), 0])
    assert found["mrr@10"] == pytest.approx([1, 0.1, 0])
    assert mean_metrics(position_UT)["recall@10"] == pytest.approx(5 / 9)
    assert ranked_share(position_UT) == pytest.approx(4 / 6)
    # twelve items cannot all be among ten: the best list has ndcg@10 1 and recall@10 10/12
    perfect = user_metrics(torch.arange(12.0)[None], (10,))
    assert float(perfect["ndcg@10"]) == pytest.approx(1.0)
    assert float(perfect["recall@10"]) == pytest.approx(10 / 12)


def test_a_basket_of_one_has_the_metrics_of_one_item():
    position_U = torch.tensor([0.0, 4.5, 9.0, 30.0, NOT_RANKED], dtype=torch.float64)
    one, basket = user_metrics(position_U), user_metrics(torch.stack([position_U, torch.full_like(position_U, NAN)], 1))
    for name, value_U in one.items():
        assert torch.allclose(basket[name], value_U), name
    assert torch.equal(basket["recall@10"], one["hit@10"])


def test_bad_positions_of_baskets_are_named():
    with pytest.raises(ValueError, match="1 baskets without items"):
        user_metrics(torch.tensor([[NAN, NAN], [1.0, NAN]]))
    with pytest.raises(ValueError, match="1 positions below 0"):
        user_metrics(torch.tensor([[-1.0, 2.0]]))


def test_held_out_baskets_repeats_and_their_parts():
    rows = rows_of([[[3, 1], [2], [1, 0, 4]], [[0], [0, 2], [5]], [[0, 1], [3], [3, 2], [3, 0]]])
    assert held_out(rows, "test").tolist() == [[1, 0, 4], [5, NO_ITEM, NO_ITEM], [3, 0, NO_ITEM]]
    assert held_out(rows, "valid").tolist() == [[2, NO_ITEM], [0, 2], [3, 2]]
    assert is_repeat(rows, "test").tolist() == [[True, False, False], [False] * 3, [True, True, False]]
    assert is_repeat(rows, "valid").tolist() == [[False, False], [True, False], [True, False]]
    position_UT = torch.tensor([[5, 1, 2], [7, NAN, NAN], [0, 9, NAN]], dtype=torch.float64)
    repeats = part_of(position_UT, is_repeat(rows, "test"))
    assert repeats[:, :2].nan_to_num(-1).tolist() == [[5, -1], [0, 9]]
    assert len(part_of(position_UT, ~is_repeat(rows, "test"))) == 2
    assert chance_hit(rows, 40, "test", NEXT_BASKET) == 0.25
    with pytest.raises(ValueError, match="got 2 baskets for user 1"):
        check_sequences(rows_of([[[0], [1], [2]], [[0, 1, 2], [1]]]), 6)


def sorted_places(score_I, targets, candidates):
    """Mean places by a sort, one list for each order of ties that matters: by counting, slowly."""
    found = []
    for target in targets:
        above = sum(score_I[other] > score_I[target] for other in candidates)
        tied = sum(score_I[other] == score_I[target] for other in candidates) - 1
        found.append(above + tied / 2 if target in candidates else NOT_RANKED)
    return found


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_places_of_baskets_are_those_in_the_sorted_list(data):
    num_items, num_rows = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 4))
    items = st.integers(0, num_items - 1)
    baskets = [data.draw(st.lists(items, min_size=1, max_size=num_items, unique=True)) for _ in range(num_rows)]
    seen = [data.draw(st.lists(items, max_size=3)) for _ in range(num_rows)]
    scores = data.draw(
        st.lists(
            st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=num_items, max_size=num_items),
            min_size=num_rows,
            max_size=num_rows,
        )
    )
    score_BI = torch.tensor(scores, dtype=torch.float64)
    width = max(map(len, baskets))
    target_BT = torch.tensor([basket + [NO_ITEM] * (width - len(basket)) for basket in baskets])
    candidate_BI = torch.ones(num_rows, num_items, dtype=torch.bool)
    for row, gone in enumerate(seen):
        candidate_BI[row, gone] = False
    expected = [
        sorted_places(scores[row], baskets[row], [item for item in range(num_items) if item not in seen[row]])
        for row in range(num_rows)
    ]
    sparse = SparseScores(scipy.sparse.csr_array(np.where(score_BI > 0, score_BI, 0)), np.zeros(num_items))
    row_N = np.array([row for row, gone in enumerate(seen) for _ in gone], np.int64)
    item_N = np.array([item for gone in seen for item in gone], np.int64)
    for found in (
        positions_from_scores(score_BI, target_BT, candidate_BI),
        catalogue_positions(score_BI, target_BT, seen),
        sparse_positions(sparse, target_BT.numpy(), row_N, item_N),
    ):
        assert found.dtype == torch.float64
        for row, places in enumerate(expected):
            assert found[row, : len(places)].tolist() == places
            assert found[row, len(places) :].isnan().all()


def test_a_protocol_ranks_whole_baskets_of_the_whole_catalogue():
    rows = rows_of([[[3, 1], [2], [1, 0]], [[0], [4, 2], [2]]])
    score_UI = torch.tensor([[0.1, 0.9, 0.5, 0.3, 0.2], [0.5, 0.4, 0.1, 0.2, 0.3]])
    found = rank_held_out(lambda user_B: score_UI[user_B], rows, 5, "test", NEXT_BASKET)
    assert found.nan_to_num(-1).tolist() == [[0, 4], [4, -1]]
    found = rank_held_out(lambda user_B: score_UI[user_B], rows, 5, "test", NEXT_BASKET, users=torch.tensor([1]))
    assert found.nan_to_num(-1).tolist() == [[4, -1]]
