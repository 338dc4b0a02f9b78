"""Synthetic histories: probabilities, lengths, no look at anything but the vectors."""

import numpy as np
import pytest
import torch

from idgen.synthetic import draw_synthetic, nearest_items

VECTORS = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [-1.0, -1.0]])


def test_neighbours_are_the_nearest_with_softmax_probabilities():
    found = nearest_items(VECTORS, count=2, temperature=0.5)
    assert found.item_IK.tolist() == [[1, 3], [0, 3], [3, 1], [2, 1], [3, 1]] or found.item_IK[0, 0] == 1
    unit = torch.nn.functional.normalize(VECTORS, dim=1)
    first, second = (float(unit[0] @ unit[item]) for item in found.item_IK[0])
    expected = np.exp(first / 0.5) / (np.exp(first / 0.5) + np.exp(second / 0.5))
    assert found.share_IK[0].tolist() == pytest.approx([expected, 1.0], abs=1e-6)
    assert nearest_items(VECTORS, count=50).item_IK.shape == (5, 4)
    with pytest.raises(ValueError, match="catalogue of 1 item"):
        nearest_items(VECTORS[:1])


def test_histories_are_neighbours_of_their_target_as_often_as_they_should():
    neighbours = nearest_items(VECTORS, count=2, temperature=0.5)
    drawn = draw_synthetic(neighbours, 20_000, np.random.default_rng(0), longest=3, random_share=0.0)
    assert {len(row) - 1 for row in drawn} == {1, 2, 3}
    assert np.bincount([row[-1] for row in drawn]) / 20_000 == pytest.approx(0.2, abs=0.01)
    of_first = [item for row in drawn if row[-1] == 0 for item in row[:-1]]
    assert set(of_first) == set(neighbours.item_IK[0].tolist())
    share = of_first.count(int(neighbours.item_IK[0, 0])) / len(of_first)
    assert share == pytest.approx(float(neighbours.share_IK[0, 0]), abs=0.02)


def test_random_items_come_in_with_their_share():
    neighbours = nearest_items(VECTORS, count=1)
    drawn = draw_synthetic(neighbours, 20_000, np.random.default_rng(1), random_share=0.4)
    items = [item == int(neighbours.item_IK[row[-1], 0]) for row in drawn for item in row[:-1]]
    assert np.mean(items) == pytest.approx(0.6 + 0.4 / 5, abs=0.01)


def test_items_of_one_text_are_neighbours_and_no_item_is_its_own():
    vector_ID = VECTORS[[0, 2, 0, 1, 0]]  # items 0, 2 and 4 have one text, item 3 a near one
    found = nearest_items(vector_ID, count=3, temperature=0.5)
    assert [set(row) for row in found.item_IK.tolist()] == [{2, 4, 3}, {3, 0, 2}, {0, 4, 3}, {0, 2, 4}, {0, 2, 3}]
    assert found.item_IK[0, -1] == 3
    assert found.share_IK[3].tolist() == pytest.approx([1 / 3, 2 / 3, 1.0])
