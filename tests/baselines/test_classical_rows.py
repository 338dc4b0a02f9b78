"""Rows in closed form beside the counts: EASE without an (I, I), ALS row by row, what stands where."""

import numpy as np
import pytest
import torch
from scipy import sparse

from fedecider.baselines import als, counts, ease
from fedecider.baselines.counts import CLASSICAL, EASE, ITEM_KNN, Votes, heuristic_positions, is_small
from fedecider.baselines.item_knn import ItemKnnConfig, neighbour_similarities
from fedecider.evaluation.protocols import histories, rank_held_out, train_parts

NO_TEXTS = Votes(sparse.csr_array((6, 6)), np.zeros(6))
ROWS = [[0, 1, 2, 3], [1, 1, 4, 5, 0], [2, 0, 3, 4], [5, 2, 1, 0, 4], [3, 1, 0, 5]]
PUBLIC = [[0, 1, 5], [4, 2]]


def sets(rows):
    return np.array([[float(item in row) for item in range(6)] for row in rows])


@pytest.mark.parametrize("num_users", [3, 11])
def test_ease_is_the_same_by_users_and_by_items(num_users):
    matrix = sparse.csr_array((np.random.default_rng(2).random((num_users, 7)) < 0.4).astype(float))
    history = sparse.csr_array((np.random.default_rng(3).random((4, 7)) < 0.5).astype(float))
    gram = torch.from_numpy((matrix.T @ matrix).toarray(order="C"))
    expected = history @ ease.ease_weights(gram, 0.7).numpy()
    assert ease.scores_of(matrix, 0.7)(history) == pytest.approx(expected, abs=1e-9)
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("split", ["valid", "test"])
def test_closed_forms_count_train_parts_and_public_users_and_read_what_lies_before(split):
    found = heuristic_positions(ROWS, 6, [split], NO_TEXTS, extra=PUBLIC)[split]
    known, history = sets([*train_parts(ROWS), *PUBLIC]), sets(histories(ROWS, split))
    tie = 1e-9 * known.sum(0)
    near = neighbour_similarities(sparse.csr_array(known), ItemKnnConfig().num_neighbours, ItemKnnConfig().shrinkage)
    weights = ease.ease_weights(torch.from_numpy(known.T @ known), ease.EaseConfig().regularisation).numpy()
    for label, score in ((ITEM_KNN, history @ near.toarray().T), (EASE, history @ weights)):
        expected = rank_held_out(lambda user_B, of=score: torch.from_numpy(of + tie)[user_B], ROWS, 6, split)
        assert torch.equal(found[label], expected)
    assert not torch.equal(found[ITEM_KNN], found[counts.POPULARITY])


def test_closed_forms_stand_where_they_take_seconds(monkeypatch):
    sizes = [(10**6, 4_000), (4_000, 20_000), (4_001, 4_001), (10, 20_001)]
    assert [is_small(*size) for size in sizes] == [True, True, False, False]
    monkeypatch.setattr(counts.ease, "MOST", 4)
    assert not {*CLASSICAL} & set(heuristic_positions(ROWS, 6, ["test"], NO_TEXTS)["test"])


def test_als_solves_the_weighted_squares_of_every_row():
    config, other = als.AlsConfig(embedding_size=2), np.array([[1.0, 0.5], [-0.5, 2.0], [0.3, 0.1]])
    matrix = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    found = als.solved(sparse.csr_array(matrix), other, config)
    for row, of_row in zip(found, matrix, strict=True):
        norm = config.regularisation * (of_row.sum() + config.unobserved_weight * 3)
        slope = other.T @ (of_row * (other @ row - 1)) + config.unobserved_weight * other.T @ (other @ row) + norm * row
        assert slope == pytest.approx(np.zeros(2), abs=1e-12)
    assert np.abs(found).min() > 0.01
