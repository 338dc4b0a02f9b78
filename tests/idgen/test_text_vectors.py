"""Item vectors: centring, width, order of neighbours, errors."""

import pytest
import torch

from idgen.text_vectors import item_vectors, text_projection


def encoded(num_items, width, seed, shift=0.0):
    return torch.randn(num_items, width, generator=torch.Generator().manual_seed(seed)) + shift


def test_full_width_keeps_the_angles_of_the_centred_texts():
    texts = {"a": encoded(30, 6, 0, shift=4.0), "b": encoded(20, 6, 1, shift=-3.0)}
    vectors = item_vectors(texts, 6, spectrum_power=1.0)
    for name, text_IE in texts.items():
        centred = torch.nn.functional.normalize(text_IE.double() - text_IE.double().mean(0), dim=1)
        assert torch.allclose(vectors[name].double() @ vectors[name].double().T, centred @ centred.T, atol=1e-5)


def test_rows_have_length_one_and_dimensions_fall_in_weight():
    texts = {"a": encoded(200, 8, 0) * torch.tensor([9.0, 5.0, 3.0, 1.0, 0.1, 0.1, 0.1, 0.1])}
    vector_ID = item_vectors(texts, 4)["a"]
    assert torch.allclose(vector_ID.norm(dim=1), torch.ones(200))
    spread_D = vector_ID.square().mean(0)
    assert spread_D.tolist() == sorted(spread_D.tolist(), reverse=True)
    whitened_D = item_vectors(texts, 4, spectrum_power=0.0)["a"].square().mean(0)
    assert float(whitened_D[0] / whitened_D[-1]) < float(spread_D[0] / spread_D[-1])


def test_the_sign_does_not_depend_on_the_decomposition():
    texts = {"a": encoded(40, 5, 3)}
    mirrored = {"a": texts["a"] @ torch.diag(torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0]))}
    assert torch.allclose(item_vectors(texts, 3)["a"], item_vectors(mirrored, 3)["a"], atol=1e-5)


def test_columns_beyond_what_the_texts_span_may_be_zero():
    texts = {"a": encoded(5, 8, 0)}  # centred, five texts span four dimensions
    filled_ID = item_vectors(texts, 6, zero_fill=True)["a"]
    assert torch.equal(filled_ID[:, :4], item_vectors(texts, 4)["a"])
    assert not filled_ID[:, 4:].any()
    assert torch.equal(item_vectors(texts, 3, zero_fill=True)["a"], item_vectors(texts, 3)["a"])


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="no domains"):
        item_vectors({}, 4)
    with pytest.raises(ValueError, match="widths"):
        item_vectors({"a": encoded(9, 4, 0), "b": encoded(9, 5, 0)}, 2)
    with pytest.raises(ValueError, match="smaller d_model"):
        item_vectors({"a": encoded(3, 8, 0)}, 4)


def test_a_later_text_gets_the_row_that_it_would_have_had():
    texts = {"a": encoded(40, 6, 0, shift=4.0), "b": encoded(20, 6, 1, shift=-3.0)}
    projection, vectors = text_projection(texts, 4), item_vectors(texts, 4)
    for name, text_IE in texts.items():
        again = torch.cat([projection.rows(name, text_IE[item : item + 1]) for item in range(len(text_IE))])
        assert torch.allclose(again, vectors[name], atol=1e-6)
    left_IR, values_R, _ = torch.linalg.svd(
        torch.cat([text_IE.double() - text_IE.double().mean(0) for text_IE in texts.values()]), full_matrices=False
    )
    expected_ID = torch.nn.functional.normalize(left_IR[:, :4] * values_R[:4].sqrt(), dim=1).float()
    assert torch.allclose(torch.cat(list(vectors.values())).abs(), expected_ID.abs(), atol=1e-5)
    with pytest.raises(ValueError, match="width 5, expected 6"):
        projection.rows("a", encoded(2, 5, 0))
