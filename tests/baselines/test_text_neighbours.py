"""Text neighbours: one score by hand with all its factors, the order of a toy catalogue, nothing held out is read."""

import math

import pytest
import torch
from text_scores import text_and_count_scores, text_neighbour_scores

from fedecider.baselines.counts import cooccurrence_scores
from fedecider.data.near_texts import nearest_texts
from fedecider.evaluation.protocols import rank_held_out

USER = torch.tensor([0])


def on_circle(*degrees, length=1.0):
    """Unit vectors at these angles, and as many opposite ones: the mean of the catalogue is 0."""
    angle = torch.tensor([*degrees, *(d + 180 for d in degrees)], dtype=torch.float64) * math.pi / 180
    return length * torch.stack([angle.cos(), angle.sin()], 1)


def test_one_score_by_hand():
    vector_ID = on_circle(0, 60, 90)  # opposite ones are 3, 4, 5
    # valid: the history is 1, then 0, the newest; each votes with cos^3 / (age + 1)
    score_I = text_neighbour_scores(vector_ID, [[1, 0, 2, 4]], "valid")(USER)[0]
    expected = [1 + 0.5**3 / 2, 0.5**3 + 1 / 2, 0 + math.cos(math.pi / 6) ** 3 / 2, 0.0, 0.0, 0.0]
    assert score_I.tolist() == pytest.approx(expected, abs=1e-6)  # cosines are float32
    # test: item 2 is the newest now
    score_I = text_neighbour_scores(vector_ID, [[1, 0, 2, 4]], "test", num_context=2)(USER)[0]
    expected = [0 + 1 / 2, math.cos(math.pi / 6) ** 3 + 0.5**3 / 2, 1.0, 0.0, 0.0, 0.0]
    assert score_I.tolist() == pytest.approx(expected, abs=1e-6)  # cosines are float32


def test_vectors_are_centred_and_their_length_does_not_count():
    moved_ID = on_circle(0, 60, 90, length=7.0) + torch.tensor([100.0, -3.0])
    sequences = [[1, 0, 2, 4], [5, 5, 1, 0, 3]]
    users = torch.tensor([1, 0])
    plain = text_neighbour_scores(on_circle(0, 60, 90), sequences, "test")(users)
    assert torch.allclose(text_neighbour_scores(moved_ID, sequences, "test")(users), plain, atol=1e-5)


def test_the_nearest_unseen_item_comes_first():
    # 0 and 1 are near each other, 2 and 3 are, and the held-out item is the near one
    vector_ID = torch.tensor([[1.0, 0.1], [1.0, 0.2], [-1.0, 0.1], [-1.0, 0.3], [0.0, -9.0]])
    sequences = [[4, 0, 1], [4, 2, 3]]
    assert rank_held_out(text_neighbour_scores(vector_ID, sequences, "test"), sequences, 5, "test").tolist() == [0, 0]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_items_change_nothing(split):
    vector_ID, users = on_circle(0, 20, 60, 90), torch.tensor([0])
    ahead = {"valid": ([1, 0, 2, 4], [1, 0, 7, 6]), "test": ([1, 0, 2, 4], [1, 0, 2, 6])}[split]
    first, second = (text_and_count_scores(vector_ID, [sequence], split, [[3, 5]])(users) for sequence in ahead)
    assert torch.equal(first, second)


def test_counts_and_text_add_up():
    vector_ID, sequences, extra = on_circle(0, 60, 90), [[1, 0, 2, 4]], [[0, 3, 5], [1, 5]]
    counts = cooccurrence_scores(sequences, 6, "test", extra, window=None, directed=False, num_context=10)(USER)
    text = text_neighbour_scores(vector_ID, sequences, "test")(USER)
    both = text_and_count_scores(vector_ID, sequences, "test", extra, text_weight=0.3)(USER)
    assert torch.allclose(both, counts + 0.3 * text, atol=1e-12)
    assert not torch.allclose(both, counts)


@pytest.mark.parametrize("num_nearest", [2, 4, 9])
def test_items_of_one_text_count_each(num_nearest):
    unit_ID = on_circle(0, 50, 80).float()[[0, 1, 0, 2, 0, 1]].numpy()
    near = nearest_texts(unit_ID, num_nearest=num_nearest)
    for item, cosine_I in enumerate(unit_ID @ unit_ID.T):
        cube_I = cosine_I.clip(min=0).astype(float) ** 3
        order_I = (-cosine_I.round(5)).argsort(kind="stable")
        row_I = near.cube_II.toarray()[item] + near.far_cube_I[item]
        expected = cube_I.copy()
        expected[order_I[num_nearest:]] = cube_I[order_I[num_nearest:]].mean() if num_nearest < 6 else 0.0
        assert row_I == pytest.approx(expected, abs=1e-6)
