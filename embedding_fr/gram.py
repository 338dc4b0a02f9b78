"""Gram matrices of binary histories: summed, packed as triangles, cleaned of noise, and the short forms of EASE.

A sum is a square whose lower triangle holds G (:mod:`fedecider.baselines.ease`).

Shape legend: C clients of a block, I items, J some of them, T items of one client, L = I (I + 1) / 2 entries of an
upper triangle (row by row), K entries kept of a column, R eigenvectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fedecider.baselines.ease import (
    BLOCK,
    antisymmetric_columns,
    ease_weights_in_place,
    invert,
    symmetric_columns,
    symmetric_product,
)
from fedecider.federation.method import Tree

FORMATS = {"float32": torch.float32, "float64": torch.float64}

SMALLER_SERVER: tuple[dict[str, Any], ...] = ({"precision": "float32"}, {"precision": "float32", "top_k": 1000})
"""Rounding comes before cutting: float32 changed no hit where it was measured, a cut moved hit@10 by 0.001 to 0.007."""
MAX_UPLOAD_BYTES = 4 << 30
"""Of the uploads of a block, which are held at once."""
SCALE_BITS = 16
"""Scales are multiples of 2^-16, so that sums of them are exact in float64 whatever their order."""


def triangle_size(num_items: int) -> int:
    """Entries i <= j of a symmetric matrix."""
    return num_items * (num_items + 1) // 2


def triangle_rows(triangle_L: Tensor, num_items: int) -> Iterator[Tensor]:
    """Row by row the entries i <= j of row i, (I - i,) each. Variants."""
    return iter(triangle_L.split(list(range(num_items, 0, -1))))


def add_triangle(square_II: Tensor, triangle_L: Tensor) -> None:
    """Add a packed triangle to the lower triangle of ``square_II``, diagonal included."""
    for i, row in enumerate(triangle_rows(triangle_L, len(square_II))):
        square_II[i:, i] += row.to(square_II)


def add_order(square_II: Tensor, triangle_L: Tensor) -> None:
    """Add a packed triangle, without its diagonal, to the strict upper triangle of ``square_II``."""
    for i, row in enumerate(triangle_rows(triangle_L, len(square_II))):
        square_II[i, i + 1 :] += row[1:].to(square_II)


def check_masked(num_items: int, num_planes: int, bits: int, num_clients: int = 1) -> None:
    """``ValueError`` where masked uploads of a block are too long to be made.

    Masks must cover every pair of items: the places of a sparse upload would tell which items a client has.
    """
    size = num_clients * num_planes * triangle_size(num_items) * bits // 8
    if size > MAX_UPLOAD_BYTES and num_clients == 1:
        raise ValueError(
            f"got secure with {num_items:,} items, by which each client sends {size / 2**30:.1f} GiB, expected at most "
            f"{MAX_UPLOAD_BYTES / 2**30:.0f}: masks cover every pair of items, since the places of fewer numbers would "
            "tell the items. Take fewer items (min_item_events), or leave secure out"
        )
    if size > MAX_UPLOAD_BYTES:
        raise ValueError(
            f"got a block of {num_clients} clients with uploads of {size / 2**30:.1f} GiB, expected at most "
            f"{MAX_UPLOAD_BYTES / 2**30:.0f}: put fewer clients into a block (client_bytes)"
        )


def check_scales(scale_C: Tensor, clients: Tensor, bound: float) -> None:
    """``ValueError`` where a bound is so small that nothing of a client is counted: below 2^-16 everything is 0."""
    least = int(scale_C.argmin())
    if scale_C[least] < 2.0**-SCALE_BITS:
        raise ValueError(
            f"got a bound of {bound:g}, under which nothing of client {int(clients[least])} is counted, expected a "
            f"larger one: numbers of a sum are multiples of 2^-{SCALE_BITS}. Raise clip"
        )


def add_histories(
    square_II: Tensor, histories: Sequence[Tensor], scale_C: Tensor, reach: float = math.inf, *, ordered: bool = False
) -> None:
    """Add what clients count for their pairs, oldest item first: :func:`embedding_fr.compiled.counts.add_pairs`.

    In place, on the CPU, client by client: in float64 the sums are exact, in float32 whole numbers up to 2^24 are, and
    others are rounded alike wherever a block ends, as long as clients come in the same order.
    """
    from embedding_fr.compiled.counts import add_pairs  # Numba: half a second that --help does without

    if not histories:
        return  # all clients of a block are away
    item_CT = torch.nn.utils.rnn.pad_sequence(list(histories), batch_first=True).cpu()
    count_C = torch.tensor([len(item_T) for item_T in histories])
    steps = 2.0**SCALE_BITS
    add_pairs(
        item_CT.numpy(), count_C.numpy(), scale_C.cpu().double().numpy(), reach, steps, ordered, square_II.numpy()
    )


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


def item_weights(
    square_II: Tensor, regularisation: float, top_k: int, dtype: torch.dtype, direction: float = 0.0
) -> Tree:
    """What clients download of ``B = Z(I) + direction * Z(P O)``: ``weights``, or ``index`` and ``value``.

    ``square_II`` holds G in its lower triangle and, with ``direction``, the antisymmetric O in its strict upper one; it
    is overwritten. P = (G + lambda I)^-1 and Z(M) = M - P diag(diag M / diag P) has a zero diagonal; Z(I) is EASE. One
    factorisation serves both terms. With ``top_k`` columns are made, cut and let go in blocks; the whole of B takes the
    place of G where no other square is needed.
    """
    if not top_k and not direction and square_II.dtype == dtype:
        return {"weights": ease_weights_in_place(square_II, regularisation)}
    num_items = len(square_II)
    invert(square_II, regularisation)
    own_I = square_II.diagonal().clone()
    weight_II = torch.empty(0 if top_k else num_items, num_items, dtype=dtype, device=square_II.device)
    short: list[tuple[Tensor, Tensor]] = []
    for first in range(0, num_items, BLOCK):
        last = min(first + BLOCK, num_items)
        inverse_JI = symmetric_columns(square_II, first, last)
        place_J = torch.arange(last - first, device=square_II.device)
        column_JI = (inverse_JI / own_I[first:last, None]).neg_()
        if direction:
            order_JI = symmetric_product(square_II, antisymmetric_columns(square_II, first, last).T).T
            middle_J1 = (order_JI[place_J, first + place_J] / own_I[first:last])[:, None]
            column_JI += direction * (order_JI - inverse_JI * middle_J1)
        column_JI[place_J, first + place_J] = 0.0
        if top_k:
            short.append(largest_entries(column_JI.to(dtype), top_k))
        else:
            weight_II[:, first:last] = column_JI.T
    if not top_k:
        return {"weights": weight_II}
    index, value = zip(*short, strict=True)
    return {"index": torch.cat(index), "value": torch.cat(value)}


def largest_entries(column_JI: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The ``top_k`` entries of each row that are largest in size: int32 (J, K) places, ascending, and (J, K) values."""
    index_JK = column_JI.abs().topk(top_k, dim=1).indices.sort(dim=1).values
    return index_JK.to(torch.int32), column_JI.gather(1, index_JK)


def sparse_scores(history_CI: Tensor, index_IK: Tensor, value_IK: Tensor) -> Tensor:
    """(C, I) ``x B``, with row j of ``index_IK`` and ``value_IK`` what there is of column j of B."""
    history_IC = history_CI.T.to(value_IK.dtype).contiguous()
    return embedding_bag(index_IK, history_IC, per_sample_weights=value_IK, mode="sum").T


def solution_bytes(num_items: int, precision: str, dtype: str, top_k: int, *, ordered: bool = False) -> int:
    """Peak memory of a plain sum and :func:`item_weights` on a CPU: the square, B if it needs a place of its own, and
    blocks of columns with what is kept of them."""
    number, sent = FORMATS[precision].itemsize, FORMATS[dtype].itemsize
    in_place = not top_k and not ordered and precision == dtype
    whole = 0 if top_k or in_place else sent * num_items**2
    num_blocks = 13 if ordered else 8
    return number * num_items**2 + whole + num_blocks * number * BLOCK * num_items + 24 * num_items * top_k


def masking_bytes(num_items: int, num_planes: int, noise: bool) -> int:
    """Peak memory of a simulated secure sum: a client's planes while they are masked, their sum, and the square."""
    return 20 * num_items**2 * (1 + num_planes + int(noise))


def denoising_bytes(num_items: int, precision: str) -> int:
    """Peak memory of :func:`denoise`, its result and the square with noise included."""
    return 11 * FORMATS[precision].itemsize * num_items**2 // 2


def leading_eigenpairs(gram_II: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The ``rank`` largest eigenvalues (R,), falling, and their vectors (I, R); float64, of a symmetric matrix.

    At most I of them; fewer come by Lanczos from a fixed start. Rows of items without any count are exactly 0 then, as
    their scores are, and of a matrix of zeros everything is.

    Raises:
        ValueError: Lanczos does not find them.
    """
    if rank >= len(gram_II):
        value_I, vector_II = torch.linalg.eigh(gram_II)
        return value_I.flip(0), vector_II.flip(1)
    if not gram_II.any():
        return gram_II.new_zeros(rank), gram_II.new_zeros(len(gram_II), rank)
    from scipy.sparse.linalg import ArpackError, eigsh  # half a second that no other use of this module needs

    start_I = np.ones(len(gram_II)) / math.sqrt(len(gram_II))
    try:
        value_R, vector_IR = eigsh(gram_II.cpu().numpy(), k=rank, which="LA", v0=start_I)
    except ArpackError as error:  # among them that it does not converge
        raise ValueError(
            f"got a matrix of {len(gram_II)} items whose {rank} leading eigenpairs cannot be found ({error}), expected "
            "one where they can: take another number of them (num_vectors)"
        ) from error
    order_R = np.argsort(-value_R, kind="stable")
    vector = torch.from_numpy(vector_IR[:, order_R]).to(gram_II.device)
    vector[gram_II.diagonal() == 0.0] = 0.0
    return torch.from_numpy(value_R[order_R]).to(gram_II.device), vector
