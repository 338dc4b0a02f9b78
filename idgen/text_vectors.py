"""Item vectors from item texts, and the table of token vectors that a backbone starts from.

Shapes: V vocabulary, D model width, I items, E events.

Shape legend: I items of all domains, N texts, E width of the sentence encoder, D width of the table, V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import scipy.linalg as linalg
import scipy.sparse as sparse
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import T5ForConditionalGeneration

from fedecider.evaluation.sequences import SequenceArray

# Item vectors from item texts, and the table of token vectors that a backbone starts from.

SPECTRUM_POWER = 0.5
"""How much of the spectrum is kept: 1 keeps distances, 0 whitens."""


class TextProjection(NamedTuple):
    """The linear map from encoded texts to item vectors, which later texts take as well."""

    mean: dict[str, Tensor]
    """Domain -> (E,) float64 mean of its encoded texts."""
    basis_ED: Tensor
    """float64; of width 0 where no table is made of vectors."""

    def rows(self, domain: str, text_NE: Tensor) -> Tensor:
        """(N, D) float32 vectors of length 1 of encoded texts of ``domain``: normalise((x - mean) basis).

        Zeros for a text that is its domain's mean.

        Raises:
            ValueError: the texts were encoded by an encoder of another width.
        """
        if text_NE.shape[1] != len(self.basis_ED):
            raise ValueError(
                f"got text vectors of width {text_NE.shape[1]}, expected {len(self.basis_ED)}: use the encoder of the "
                "item texts from which the projection was made"
            )
        return normalize((text_NE.double() - self.mean[domain]) @ self.basis_ED, dim=1).float()


def means_alone(encoded: Mapping[str, Tensor]) -> TextProjection:
    """The means of encoded texts (I_k, E) of every domain, where no table is made of vectors."""
    mean = {name: vectors.double().mean(0) for name, vectors in encoded.items()}
    return TextProjection(mean, torch.zeros(len(next(iter(mean.values()))), 0, dtype=torch.float64))


def text_projection(
    encoded: Mapping[str, Tensor], width: int, *, spectrum_power: float = SPECTRUM_POWER, zero_fill: bool = False
) -> TextProjection:
    """What makes item vectors of the encoded texts (I_k, E) of every domain's catalogue.

    All domains are centred on their own mean, which says only what the domain is, and stacked: X = U S V^T. The basis
    is the first D columns of V S^(power - 1), so that X basis is those of U S^power. One decomposition for all
    domains, so that related items of different domains point the same way. Columns have the sign that makes their
    largest entry positive, which makes the result the same on every machine. With ``zero_fill`` columns beyond what the
    texts span are zero.

    Raises:
        ValueError: no domain, different encoder widths, or ``width`` above what the texts span without ``zero_fill``.
    """
    if not encoded:
        raise ValueError("got no domains, expected the encoded item texts of one at least")
    widths = {vectors.shape[1] for vectors in encoded.values()}
    if len(widths) != 1:
        raise ValueError(f"got text vectors of the widths {sorted(widths)}, expected one encoder for all domains")
    mean = {name: vectors.double().mean(0) for name, vectors in encoded.items()}
    stacked_IE = torch.cat([vectors.double() - mean[name] for name, vectors in encoded.items()])
    left_IR, values_R, right_RE = torch.linalg.svd(stacked_IE, full_matrices=False)
    rank = int((values_R > values_R[0] * 1e-9).sum()) if len(values_R) else 0
    if width > rank and not zero_fill:
        raise ValueError(
            f"got width {width}, expected at most {rank}: {len(stacked_IE)} item texts under an encoder of width "
            f"{widths.pop()} span no more dimensions. Use a smaller d_model or a wider encoder"
        )
    kept = min(width, rank)
    sign_K = left_IR[:, :kept].gather(0, left_IR[:, :kept].abs().argmax(0, keepdim=True)).sign()
    basis_ED = torch.zeros(stacked_IE.shape[1], width, dtype=torch.float64)
    basis_ED[:, :kept] = right_RE[:kept].T * values_R[:kept] ** (spectrum_power - 1) * sign_K
    return TextProjection(mean, basis_ED)


def item_vectors(
    encoded: Mapping[str, Tensor], width: int, *, spectrum_power: float = SPECTRUM_POWER, zero_fill: bool = False
) -> dict[str, Tensor]:
    """Domain -> (I_k, D) vectors of length 1 from the encoded texts (I_k, E) of its catalogue: `text_projection`."""
    projection = text_projection(encoded, width, spectrum_power=spectrum_power, zero_fill=zero_fill)
    return {name: projection.rows(name, vectors) for name, vectors in encoded.items()}


def token_vectors(
    vectors: Mapping[str, Tensor], token_ids: Mapping[str, Sequence[Sequence[int]]], num_tokens: int
) -> Tensor:
    """(V, D): for every token the mean vector, at length 1, of the items whose IDs hold it; zeros for other tokens.

    ``vectors``: domain -> (I, D), as `idgen.text_vectors.item_vectors` makes them; ``token_ids``: domain -> tokens of
    each item's ID. An ID of one token gives that token the item's own vector.
    """
    width = next(iter(vectors.values())).shape[1]
    table_VD = torch.zeros(num_tokens, width)
    for domain, vector_ID in vectors.items():
        pairs = [(token, item) for item, tokens in enumerate(token_ids[domain]) for token in set(tokens)]
        token_P, item_P = torch.tensor(pairs).T
        table_VD.index_add_(0, token_P, vector_ID[item_P].float())
    return normalize(table_VD, dim=1)


# Token embeddings that know which items go together, before a single training step.


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
