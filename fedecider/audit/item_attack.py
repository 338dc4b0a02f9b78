"""Which items a client trained on, guessed from how the rows of its item tables moved: a small family of attacks.

A client's tables change where it has examples, its own items and the negatives that it drew; to first order a row moves
by ``(y - sigmoid(z)) p_u``, along the client's vector for an own item and against it for a negative, and there are more
negatives. Own items come back in every round, negatives are drawn anew, so that rounds add up.

Shape legend: C clients, I items, D numbers of a row, A attacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

ATTACKS = (
    "moved at all",
    "size of the move",
    "along the main direction",
    "against the mean direction",
    "size of the move, less the others' mean",
    "along the main direction, less the others' mean",
    "against the mean direction, less the others' mean",
)
"""In the order of :func:`move_scores`; the first one needs nothing but to look."""


def move_scores(move_CID: Tensor) -> Tensor:
    """(A, C, I) float32 scores of every item for every client, from the moves of all audited clients in one round.

    Moves are what was uploaded less what was downloaded. The last three attacks see each move less the mean of the
    other clients' moves: what all of them do alike, a regulariser for instance, says nothing about one.
    """
    alone_CID = move_CID - _mean_of_others(move_CID)
    size_CI = torch.linalg.vector_norm(move_CID, dim=2)
    return torch.stack(
        [
            (size_CI > 0.0).float(),
            size_CI,
            along_main_direction(move_CID),
            against_mean(move_CID),
            torch.linalg.vector_norm(alone_CID, dim=2),
            along_main_direction(alone_CID),
            against_mean(alone_CID),
        ]
    ).float()


def along_main_direction(move_CID: Tensor) -> Tensor:
    """(C, I) ``m_i . v`` over the largest product of a client, v the first right singular vector of its moves.

    A vector has two signs: v is turned so that the sum of the products is negative, since negatives are the most.
    """
    gram_CDD = move_CID.double().transpose(1, 2) @ move_CID.double()
    main_CD = torch.linalg.eigh(gram_CDD).eigenvectors[:, :, -1].to(move_CID)
    product_CI = (move_CID @ main_CD[:, :, None])[:, :, 0]
    sign_C1 = torch.where(product_CI.sum(1, keepdim=True) > 0.0, -1.0, 1.0)
    return _scaled(product_CI * sign_C1)


def against_mean(move_CID: Tensor) -> Tensor:
    """(C, I) ``- m_i . sum_j m_j`` over the largest product of a client: the sum of all moves points where negatives
    go."""
    return _scaled(-(move_CID @ move_CID.sum(1)[:, :, None])[:, :, 0])


def _scaled(score_CI: Tensor) -> Tensor:
    """So that every round and client counts alike in a sum over rounds."""
    return score_CI / score_CI.abs().amax(1, keepdim=True).clamp(min=torch.finfo(score_CI.dtype).tiny)


def _mean_of_others(move_CID: Tensor) -> Tensor:
    others = max(1, len(move_CID) - 1)
    return (move_CID.sum(0) - move_CID) / others if len(move_CID) > 1 else torch.zeros_like(move_CID)
