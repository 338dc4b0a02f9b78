"""Token embeddings that know which items go together, from co-occurrence, before a single training step.

Shapes: V vocabulary, D model width, I items, E events.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import scipy.linalg as linalg
import scipy.sparse as sparse
import torch
from torch import Tensor
from transformers import T5ForConditionalGeneration

from fedecider.evaluation.sequences import SequenceArray

WINDOW = 5
"""Two events of a user that are at most so far apart are near each other and count 1 / distance."""
SMOOTHING = 0.75
"""The power on the context counts: rare contexts are held back (Levy, Goldberg and Dagan, TACL 2015)."""
POWER = 0.5
"""The power on the singular values."""


def word_vectors(
    sequences: Sequence[Sequence[Sequence[int]]],
    token_ids: Sequence[Sequence[Sequence[int]]],
    num_tokens: int,
    width: int,
    seed: int = 0,
) -> Tensor:
    """(V, D) vectors of length 1 for tokens that co-occur; zeros for all other tokens.

    ``sequences[k]``: item numbers of the users of catalogue k, oldest first, no held-out events; ``token_ids[k]``:
    the item IDs. Token v and token w co-occur when a user has an item with v and an item with w near each other.
    Rows are U S^power of the positive pointwise mutual information with smoothed contexts (Levy, Goldberg and Dagan,
    TACL 2015). Errors: ``ValueError`` when fewer tokens than ``width`` co-occur with anything.
    """
    count_VV = sparse.csr_matrix((num_tokens, num_tokens))
    for users, ids in zip(sequences, token_ids, strict=True):
        holds_IV = _tokens_of_items(ids, num_tokens)
        count_VV = count_VV + holds_IV.T @ _near_items(users, len(ids), WINDOW) @ holds_IV
    known = np.flatnonzero(np.asarray(count_VV.sum(1)).ravel())
    if len(known) < width:
        raise ValueError(
            f"only {len(known)} tokens of item IDs occur near others, fewer than the {width} dimensions of the model; "
            "expected more. Use a larger public pool, a smaller d_model or random embeddings"
        )
    ppmi = _ppmi(count_VV[known][:, known].tocoo(), SMOOTHING)
    left, values = leading_singular(ppmi, width, seed % 2**32)
    rows = left * values**POWER
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    vector_VD = torch.zeros(num_tokens, width)
    vector_VD[torch.from_numpy(known)] = torch.from_numpy(np.where(length > 1e-6, rows / length, 0.0)).float()
    return vector_VD


def start_from_word_vectors(model: T5ForConditionalGeneration, vector_VD: Tensor) -> int:
    """Overwrite the embeddings of tokens that have a vector, in place; the number of rows written.

    Rows get length sqrt(D), so that entries have the size of T5's own start (standard deviation 1); other rows stay.
    """
    table_VD = model.get_input_embeddings().weight
    known_V = vector_VD.norm(dim=1) > 0
    with torch.no_grad():
        table_VD[known_V] = (vector_VD[known_V] * vector_VD.shape[1] ** 0.5).to(table_VD)
    return int(known_V.sum())


def leading_singular(matrix: sparse.csr_matrix, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` largest singular values of a square matrix (count,) and their left vectors (V, count).

    Randomised (Halko, Martinsson and Tropp 2011): random vectors, 10 more than asked for, go through the matrix and its
    transpose four times. Numbers are bit for bit those of scikit-learn's ``randomized_svd``, whose import takes longer.
    The largest entry of a vector is positive.
    """
    size = (matrix.shape[1], count + 10)
    basis = np.random.RandomState(seed).normal(size=size)
    for _ in range(4):
        for side in (matrix, matrix.T):
            basis, _ = linalg.lu(side @ basis, permute_l=True, check_finite=False)
    basis, _ = linalg.qr(matrix @ basis, mode="economic", check_finite=False)
    left, values, _ = linalg.svd(basis.T @ matrix, full_matrices=False, lapack_driver="gesdd")
    left = basis @ left
    left *= np.sign(left[np.abs(left).argmax(0), np.arange(left.shape[1])])
    return left[:, :count], values[:count]


def _tokens_of_items(token_ids: Sequence[Sequence[int]], num_tokens: int) -> sparse.csr_matrix:
    """(I, V), 1 where the item ID holds the token."""
    pairs = {(item, token) for item, tokens in enumerate(token_ids) for token in tokens}
    item, token = np.array(sorted(pairs)).T
    return sparse.csr_matrix((np.ones(len(item)), (item, token)), (len(token_ids), num_tokens))


def _near_items(sequences: Sequence[Sequence[int]], num_items: int, window: int) -> sparse.csr_matrix:
    """(I, I) symmetric: sum of 1 / distance over events of the same user."""
    rows = SequenceArray.of(sequences)
    item_E, near = rows.value_E, sparse.csr_matrix((num_items, num_items))
    for distance, earlier in islice(rows.pairs(), window):
        weight = np.full(len(earlier), 1 / distance)
        near = near + sparse.csr_matrix((weight, (item_E[earlier], item_E[earlier + distance])), near.shape)
    return near + near.T


def _ppmi(count: sparse.coo_matrix, smoothing: float) -> sparse.csr_matrix:
    total_V = np.asarray(count.sum(1)).ravel()
    context_V = total_V**smoothing
    expected = total_V[count.row] * context_V[count.col] / context_V.sum()
    value = np.maximum(np.log(count.data / expected), 0)
    ppmi = sparse.csr_matrix((value, (count.row, count.col)), count.shape)
    return (ppmi + ppmi.T) / 2
