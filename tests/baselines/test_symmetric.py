"""Half a matrix and its inverse in place: against torch's own functions, at sizes that end inside a block."""

import pytest
import torch

from fedecider.baselines import ease
from fedecider.baselines import ease as symmetric
from fedecider.baselines.ease import BLOCK, antisymmetric_columns, invert, mirror, symmetric_columns, symmetric_product

SIZE = BLOCK + 37
FORMATS = [torch.float64, torch.float32]


def gram(num_items, dtype=torch.float64, seed=0):
    """Counts of a popularity-skewed catalogue: some items are in most histories, most are in few."""
    generator = torch.Generator().manual_seed(seed)
    chance_I = 0.8 / (1.0 + torch.arange(num_items)).sqrt()
    counts_UI = (torch.rand(400, num_items, generator=generator) < chance_I).double()
    return (counts_UI.T @ counts_UI).to(dtype)


def with_order(gram_II, seed=1):
    """Order in the strict upper triangle, and the antisymmetric matrix that it stands for."""
    order_II = torch.randn(gram_II.shape, dtype=gram_II.dtype, generator=torch.Generator().manual_seed(seed)).triu(1)
    return gram_II.tril() + order_II, order_II - order_II.T


def test_columns_and_products_are_those_of_the_whole_matrix():
    whole_II = gram(SIZE)
    square_II, order_II = with_order(whole_II)
    before = square_II.clone()
    for first, last in [(0, 1), (0, BLOCK), (5, 300), (BLOCK, SIZE), (SIZE - 1, SIZE)]:
        assert torch.equal(symmetric_columns(square_II, first, last), whole_II[first:last])
        assert torch.equal(antisymmetric_columns(square_II, first, last), order_II.T[first:last])
    right_IK = torch.randn(SIZE, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(symmetric_product(square_II, right_IK), whole_II @ right_IK)
    assert torch.equal(square_II, before)
    assert torch.equal(mirror(square_II), whole_II)


@pytest.mark.parametrize("num_items", [1, 5, BLOCK, SIZE])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_inverse_takes_the_place_of_the_lower_triangle_alone(num_items, dtype):
    square_II, _ = with_order(gram(num_items, dtype))
    upper_II, place = square_II.triu(1), square_II.data_ptr()
    expected_II = torch.linalg.inv(gram(num_items) + 3.0 * torch.eye(num_items, dtype=torch.float64))
    residual = invert(square_II, 3.0)
    assert square_II.data_ptr() == place
    assert torch.equal(square_II.triu(1), upper_II)
    error = (mirror(square_II).double() - expected_II).abs().max() / expected_II.abs().max()
    assert error < (1e-12 if dtype == torch.float64 else 1e-4)
    assert residual < (1e-11 if dtype == torch.float64 else 1e-4)


def test_the_residual_is_that_of_the_inverse_found():
    """P (G + lambda I) - I in the columns of the most and the least counted item and six between them."""
    gram_II = gram(300)
    square_II = gram_II.float()
    residual = invert(square_II, 1.0)
    shifted_II = gram_II + torch.eye(300, dtype=torch.float64)
    rest_II = mirror(square_II).double() @ shifted_II - torch.eye(300, dtype=torch.float64)
    order_I = gram_II.diagonal().argsort(descending=True, stable=True)
    measured = rest_II[:, order_I[torch.linspace(0, 299, 8).long()]].abs().max().item()
    assert residual == pytest.approx(measured, rel=0.5)
    assert residual <= 1.5 * rest_II.abs().max().item()
    assert residual > 1e-8  # float32


def test_what_the_number_format_does_not_carry_is_refused():
    ones_II = torch.full((40, 40), 1e6, dtype=torch.float64)
    assert invert(ones_II.clone(), 1.0) < 1e-6
    with pytest.raises(ValueError, match=r"regularisation 1\.0, expected .*: raise the reg.* or set precision float64"):
        invert(ones_II.float(), 1.0)
    with pytest.raises(ValueError, match=r"not positive definite .*: raise the regularisation$"):
        invert(-ones_II, 1.0)


def test_a_large_residual_is_refused(monkeypatch):
    monkeypatch.setattr(symmetric, "RESIDUAL", 1e-9)
    assert invert(gram(60), 1.0) < 1e-9
    with pytest.raises(ValueError, match=r"residual of .* expected at most 1e-09: raise .* or set precision float64"):
        invert(gram(60, torch.float32), 1.0)


def test_weights_in_place_are_the_weights():
    gram_II = gram(SIZE)
    kept_II, shifted_II = gram_II.clone(), gram_II + 7.0 * torch.eye(SIZE, dtype=torch.float64)
    found_II = ease.ease_weights(gram_II, 7.0)
    assert torch.equal(gram_II, kept_II)
    inverse_II = torch.linalg.inv(shifted_II)
    torch.testing.assert_close(found_II, (-inverse_II / inverse_II.diagonal()).fill_diagonal_(0.0))
    short_II = ease.ease_weights_in_place(gram_II.float(), 7.0)
    assert short_II.dtype == torch.float32
    assert (short_II - found_II).abs().max() < 1e-5 * found_II.abs().max()
