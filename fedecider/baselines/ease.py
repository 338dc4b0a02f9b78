"""EASE (Steck, WWW 2019): item-item weights in closed form, in the memory of one Gram matrix.

A symmetric matrix is held by its lower triangle, diagonal included, of a square (I, I) in rows; what the strict upper
triangle holds is not read and not changed, unless a function says so. So one square is all that a solution needs, and
the upper half has room for a second, antisymmetric sum.

Shape legend: I items, J items first to last - 1 of them, K columns, B users of a batch, U users.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy
import torch
from scipy.linalg import lapack
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedecider.baselines.fitting import Pooled, train_matrix
from fedecider.bounds import Positive, dataclass
from fedecider.evaluation.protocols import ScoreUsers
from fedecider.search_space import Real, Space

BLOCK = 512
"""Rows that are worked on at once: large enough for the processor's full speed, a small part of a large square."""
PROBES = 8
"""Columns of the inverse that are checked, from the most to the least frequent item."""
RESIDUAL = 1e-2
"""The largest residual of an inverse that is taken."""


def invert(square_II: Tensor, regularisation: float) -> float:
    """G becomes P = (G + lambda I)^-1, in place (in rows, contiguous); returns the residual.

    Cholesky factorisation and inverse (LAPACK potrf, potri), I^3 multiplications and additions, in the number format of
    the square, float32 or float64; no second square on a CPU, three on a GPU. The residual is the largest size of an
    entry in 8 columns of P (G + lambda I) - I, of items from the most to the least counted. With R that difference,
    the P found is (I + R) times the exact one: R is a relative error, and the measured one, not a bound.

    Raises:
        ValueError: G + lambda I is not positive definite, as happens with noise, or the residual is above 1e-2.
    """
    square_II.diagonal().add_(regularisation)
    order_I = square_II.diagonal().argsort(descending=True, stable=True)
    probe_K = order_I[torch.linspace(0, len(order_I) - 1, min(PROBES, len(order_I))).long()]
    column_IK = torch.stack([symmetric_columns(square_II, item, item + 1)[0] for item in probe_K.tolist()], 1)
    failed = _invert_on_cpu(square_II) if square_II.device.type == "cpu" else _invert_on_gpu(square_II)
    advice = "raise the regularisation" + (", or set precision float64" if square_II.dtype == torch.float32 else "")
    if failed:
        raise ValueError(
            f"got a Gram matrix that is not positive definite with regularisation {regularisation}, "
            f"expected a symmetric X^T X: {advice}"
        )
    rest_IK = symmetric_product(square_II, column_IK)
    rest_IK[probe_K, torch.arange(len(probe_K), device=probe_K.device)] -= 1.0
    residual = float(rest_IK.abs().max())
    if not residual <= RESIDUAL:
        raise ValueError(
            f"got a residual of {residual:.2g} for the inverse of a Gram matrix with regularisation {regularisation}, "
            f"expected at most {RESIDUAL}: {advice}"
        )
    return residual


def _invert_on_cpu(square_II: Tensor) -> int:
    assert square_II.is_contiguous(), "LAPACK works in place"
    in_columns = square_II.numpy().T  # a square in rows is its mirror image in columns: lower is upper
    single = square_II.dtype == torch.float32
    factor, inverse = (lapack.spotrf, lapack.spotri) if single else (lapack.dpotrf, lapack.dpotri)
    with threadpool_limits(torch.get_num_threads(), "blas"):
        found, failed = factor(in_columns, lower=0, clean=0, overwrite_a=1)
        if not failed:
            _, failed = inverse(found, lower=0, overwrite_c=1)
    return int(failed)


def _invert_on_gpu(square_II: Tensor) -> int:
    factor_II, failed = torch.linalg.cholesky_ex(square_II)  # reads the lower triangle
    if not int(failed):
        upper_II = square_II.triu(1)
        square_II.copy_(torch.cholesky_inverse(factor_II).tril_()).add_(upper_II)
    return int(failed)


def mirror(square_II: Tensor) -> Tensor:
    """Write the lower triangle over the upper one, in place; returns the square."""
    for first, last in _blocks(len(square_II)):
        square_II[first:last] = symmetric_columns(square_II, first, last)
    return square_II


def symmetric_columns(square_II: Tensor, first: int, last: int) -> Tensor:
    """(J, I): row j is column j of the symmetric matrix. A copy."""
    column_JI = torch.cat([square_II[first:last, :last], square_II[last:, first:last].T], 1)
    corner_JJ = column_JI[:, first:last].tril()
    column_JI[:, first:last] = corner_JJ + corner_JJ.tril(-1).T
    return column_JI


def antisymmetric_columns(square_II: Tensor, first: int, last: int) -> Tensor:
    """(J, I): row j is column j of the antisymmetric matrix whose strict upper triangle the square holds. A copy."""
    column_JI = torch.cat([square_II[:last, first:last].T, -square_II[first:last, last:]], 1)
    corner_JJ = column_JI[:, first:last].tril(-1)
    column_JI[:, first:last] = corner_JJ - corner_JJ.T
    return column_JI


def symmetric_product(square_II: Tensor, right_IK: Tensor) -> Tensor:
    """(I, K) the symmetric matrix times ``right_IK``."""
    product_IK = torch.empty_like(right_IK)
    for first, last in _blocks(len(square_II)):
        corner_JJ = square_II[first:last, first:last].tril()
        rows_JK = (corner_JJ + corner_JJ.tril(-1).T) @ right_IK[first:last]
        rows_JK.addmm_(square_II[first:last, :first], right_IK[:first])
        product_IK[first:last] = rows_JK.addmm_(square_II[last:, first:last].T, right_IK[last:])
    return product_IK


def _blocks(num_items: int) -> list[tuple[int, int]]:
    return [(first, min(first + BLOCK, num_items)) for first in range(0, num_items, BLOCK)]


GRID: tuple[dict, ...] = (
    {},
    {"regularisation": 500.0},
    {"regularisation": 100.0},
    {"regularisation": 1000.0},
    {"regularisation": 50.0},
    {"regularisation": 2000.0},
    {"regularisation": 20.0},
)
SPACE: Space = {"regularisation": Real(10.0, 5000.0, log=True)}


@dataclass(frozen=True)
class EaseConfig:
    """Settings of EASE.

    Args:
        regularisation: lambda, the L2 weight; scales with the number of users.
    """

    regularisation: Positive = 200.0


def ease_weights(gram_II: Tensor, regularisation: float) -> Tensor:
    """B minimising ``||X - X B||_F^2 + regularisation ||B||_F^2`` with a zero diagonal, from ``gram_II = X^T X``.

    Float64 (I, I), on the device of ``gram_II``: P = (X^T X + lambda I)^-1, B = I - P diag(1 / diag P), so that
    column j predicts item j. Memory 8 I^2 bytes besides ``gram_II``, time I^3. ``ValueError`` when the sum is not
    positive definite, as happens when noise was added to ``gram_II``. Source: Steck 2019, equation 8. Differs from the
    paper: nothing.
    """
    return ease_weights_in_place(gram_II.to(torch.float64, copy=True), regularisation)


def ease_weights_in_place(square_II: Tensor, regularisation: float) -> Tensor:
    """:func:`ease_weights` of the Gram matrix in the lower triangle, in its number format, over the whole square."""
    invert(square_II, regularisation)
    own_I = square_II.diagonal().clone()
    return mirror(square_II).div_(own_I).neg_().fill_diagonal_(0.0)


MOST = 4_000
"""Customers or items, whichever are fewer, up to which a company's weights are a matter of seconds and 130 MB."""


def scores_of(
    matrix_UI: scipy.sparse.csr_array, regularisation: float
) -> Callable[[scipy.sparse.csr_array], np.ndarray]:
    """Histories, sparse (B, I) of zeros and ones, -> (B, I) = x B with the B of :func:`ease_weights`.

    Of more items than users no (I, I) is made. By the Woodbury identity, with the (U, U) matrix
    K = (X X^T + lambda I)^-1 and d_i = 1 - x_i^T K x_i of the columns x_i of X, lambda P = I - X^T K X has the diagonal
    d, so that x B = x - (x - x X^T K X) / d. Float64; memory 8 min(U, I)^2 bytes, time its power of 3.
    """
    num_users, num_items = matrix_UI.shape
    if num_items < num_users:
        gram_II = torch.from_numpy((matrix_UI.T @ matrix_UI).toarray(order="C"))
        weight_II = ease_weights_in_place(gram_II, regularisation).numpy()
        return lambda history_BI: history_BI @ weight_II
    gram_UU = torch.from_numpy((matrix_UI @ matrix_UI.T).toarray(order="C"))
    invert(gram_UU, regularisation)
    inverse_UU, by_item_IU = mirror(gram_UU).numpy(), scipy.sparse.csr_array(matrix_UI.T)
    own_I = np.concatenate(
        [
            1.0 - np.asarray(by_item_IU[first:last].multiply(by_item_IU[first:last] @ inverse_UU).sum(1)).ravel()
            for first, last in _blocks(num_items)
        ]
    )

    def scores(history_BI: scipy.sparse.csr_array) -> np.ndarray:
        known_BI = history_BI.toarray()
        like_BU = (history_BI @ by_item_IU) @ inverse_UU  # few users share an item: sparse
        return known_BI - (known_BI - like_BU @ matrix_UI) / own_I

    return scores


def fit(data: Pooled, config: EaseConfig) -> ScoreUsers:
    """score(u, .) = x_u B, with x_u the distinct train items of u.

    Nothing is random and there are no epochs: protocol, seed and ``valid`` are not used.
    """
    matrix_UI = train_matrix(data.sequences, data.num_items)
    gram_II = torch.from_numpy((matrix_UI.T @ matrix_UI).toarray(order="C")).to(data.device)
    weight_II = ease_weights_in_place(gram_II, config.regularisation)

    def score(user_B: Tensor) -> Tensor:
        return torch.from_numpy(matrix_UI[user_B.cpu().numpy()].toarray()).to(data.device) @ weight_II

    return score
