"""Item vectors from item texts, and the table of token vectors that a backbone starts from.

Shapes: I items of all domains, N texts, E width of the sentence encoder, D width of the table, V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

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
