"""Places from sparse scores are those of the dense ones, bit for bit; so are those that are counted without a mask."""

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedecider.evaluation.metrics import (
    NOT_RANKED,
    SparseScores,
    catalogue_positions,
    positions_from_scores,
    sparse_positions,
)


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
