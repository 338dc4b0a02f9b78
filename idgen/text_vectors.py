"""Item vectors from item texts, and the table of token vectors that a backbone starts from.

Shape legend: I items of all domains, E width of the sentence encoder, D width of the table, V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

SPECTRUM_POWER = 0.5
"""How much of the spectrum is kept: 1 keeps distances, 0 whitens."""


def item_vectors(
    encoded: Mapping[str, Tensor], width: int, *, spectrum_power: float = SPECTRUM_POWER, zero_fill: bool = False
) -> dict[str, Tensor]:
    """Domain -> (I_k, D) vectors of length 1 from the encoded texts (I_k, E) of its catalogue.

    All domains are centred on their own mean, which says only what the domain is, and stacked: X = U S V^T; an item's
    vector is its row of the first D columns of U S^power, at length 1. One decomposition for all domains, so that
    related items of different domains point the same way. Columns have the sign that makes their largest entry
    positive, which makes the result the same on every machine. Items without any text direction get zeros. With
    ``zero_fill`` columns beyond what the texts span are zero.

    Raises:
        ValueError: no domain, different encoder widths, or ``width`` above what the texts span without ``zero_fill``.
    """
    if not encoded:
        raise ValueError("got no domains, expected the encoded item texts of one at least")
    widths = {vectors.shape[1] for vectors in encoded.values()}
    if len(widths) != 1:
        raise ValueError(f"got text vectors of the widths {sorted(widths)}, expected one encoder for all domains")
    stacked_IE = torch.cat([vectors.double() - vectors.double().mean(0) for vectors in encoded.values()])
    left_IR, values_R, _ = torch.linalg.svd(stacked_IE, full_matrices=False)
    rank = int((values_R > values_R[0] * 1e-9).sum()) if len(values_R) else 0
    if width > rank and not zero_fill:
        raise ValueError(
            f"got width {width}, expected at most {rank}: {len(stacked_IE)} item texts under an encoder of width "
            f"{widths.pop()} span no more dimensions. Use a smaller d_model or a wider encoder"
        )
    kept = min(width, rank)
    column_ID = torch.zeros(len(stacked_IE), width, dtype=torch.float64)
    column_ID[:, :kept] = left_IR[:, :kept] * values_R[:kept] ** spectrum_power
    sign_D = column_ID.gather(0, column_ID.abs().argmax(0, keepdim=True)).sign()
    vector_ID = normalize(column_ID * sign_D, dim=1).float()
    return dict(zip(encoded, vector_ID.split([len(vectors) for vectors in encoded.values()]), strict=True))


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
