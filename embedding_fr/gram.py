"""Gram matrices of binary histories: summed, packed as triangles, cleaned of noise, and the short forms of EASE.

Shape legend: C clients of a block, I items, T items of one client, L = I (I + 1) / 2 entries of an upper triangle (row
by row), K entries kept of a column, R eigenvectors.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedecider.federation.method import Tree

SCALE_BITS = 16
"""Scales are multiples of 2^-16, so that sums of them are exact in float64 whatever their order."""


def triangle_size(num_items: int) -> int:
    """Entries i <= j of a symmetric matrix."""
    return num_items * (num_items + 1) // 2


def from_triangle(triangle_L: Tensor, num_items: int) -> Tensor:
    """(I, I) symmetric."""
    gram_II = triangle_L.new_zeros(num_items, num_items)
    row_L, column_L = torch.triu_indices(num_items, num_items, device=triangle_L.device)
    gram_II[row_L, column_L] = triangle_L
    gram_II[column_L, row_L] = triangle_L
    return gram_II


def client_triangle(history_I: Tensor, scale: float) -> Tensor:
    """(L,) float64: ``scale`` at each pair of items of one client, an item with itself included."""
    num_items = len(history_I)
    item_T = history_I.nonzero()[:, 0]
    first, second = torch.combinations(item_T, with_replacement=True).unbind(1)
    triangle_L = torch.zeros(triangle_size(num_items), dtype=torch.float64, device=history_I.device)
    triangle_L[first * num_items - first * (first - 1) // 2 + second - first] = scale
    return triangle_L


def client_scales(history_CI: Tensor, bound: float) -> Tensor:
    """(C,) float64 ``min(1, bound / ||triangle of x x^T||_2)``, rounded down to a multiple of 2^-16.

    n items make n (n + 1) / 2 ones in the triangle, so that its norm is the root of that.
    """
    count_C = history_CI.sum(1).double()
    norm_C = (count_C * (count_C + 1.0) / 2.0).sqrt()
    return ((bound / norm_C).clamp(max=1.0) * 2.0**SCALE_BITS).floor() / 2.0**SCALE_BITS


def add_gram(gram_II: Tensor, history_CI: Tensor, scale_C: Tensor) -> None:
    """``gram += X^T diag(scale) X`` in place; exact while the sums stay below 2^37."""
    history_CI = history_CI.double()
    gram_II.addmm_(history_CI.T, history_CI * scale_C[:, None])


def denoise(gram_II: Tensor, std: float) -> tuple[Tensor, float]:
    """A positive semi-definite matrix from a Gram matrix with noise, and what to add to the regularisation.

    Symmetric noise of standard deviation ``std`` an entry has its eigenvalues within 2 s, s = std sqrt(I) (Wigner's
    semicircle). Eigenvalues are moved down by s and cut at 0, and s goes to the regularisation: chosen on ML-100K's
    validation items as a rule without a knob. Only the noisy matrix is used, so no budget is spent. Time I^3.
    """
    spread = std * math.sqrt(len(gram_II))
    value_I, vector_II = torch.linalg.eigh(gram_II)
    clean_II = (vector_II * (value_I - spread).clamp(min=0.0)) @ vector_II.T
    return (clean_II + clean_II.T) / 2.0, spread


def sparse_columns(weight_II: Tensor, top_k: int) -> Tree:
    """The ``top_k`` entries of each column of B that are largest in size.

    ``index`` int32 (I, K), ascending, and ``value`` (I, K); row j holds column j.
    """
    index_IK = weight_II.T.abs().topk(top_k, dim=1).indices.sort(dim=1).values
    return {"index": index_IK.to(torch.int32), "value": weight_II.T.gather(1, index_IK)}


def sparse_scores(history_CI: Tensor, index_IK: Tensor, value_IK: Tensor) -> Tensor:
    """(C, I) ``x B`` with B from :func:`sparse_columns`."""
    weight_II = torch.zeros(len(index_IK), len(index_IK), dtype=value_IK.dtype, device=value_IK.device)
    weight_II.scatter_(1, index_IK.long(), value_IK)
    return history_CI.to(value_IK.dtype) @ weight_II.T


def leading_eigenpairs(gram_II: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The ``rank`` largest eigenvalues (R,), falling, and their vectors (I, R); float64, Lanczos from a fixed start.

    ``rank`` must be below I. Rows of items without any count are exactly 0, as their scores are.
    """
    from scipy.sparse.linalg import eigsh  # half a second that no other use of this module needs

    start_I = np.ones(len(gram_II)) / math.sqrt(len(gram_II))
    value_R, vector_IR = eigsh(gram_II.cpu().numpy(), k=rank, which="LA", v0=start_I)
    order_R = np.argsort(-value_R, kind="stable")
    vector = torch.from_numpy(vector_IR[:, order_R]).to(gram_II.device)
    vector[gram_II.diagonal() == 0.0] = 0.0
    return torch.from_numpy(value_R[order_R]).to(gram_II.device), vector


def low_rank_scores(history_CI: Tensor, value_R: Tensor, vector_IR: Tensor, regularisation: Tensor | float) -> Tensor:
    """(C, I) ``x B`` of EASE for ``G = V diag(g) V^T``, without any (I, I) matrix.

    ``P = (I - V diag(g / (g + lambda)) V^T) / lambda`` and ``x B = x - (x P) / diag P``.
    """
    history_CI = history_CI.to(value_R.dtype)
    shrunk_R = value_R / (value_R + regularisation)
    product_CI = history_CI - (history_CI @ vector_IR * shrunk_R) @ vector_IR.T  # lambda x P
    diagonal_I = 1.0 - (vector_IR.square() * shrunk_R).sum(1)  # lambda diag P
    return history_CI - product_CI / diagonal_I
