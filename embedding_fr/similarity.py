"""How alike two clients' item tables are, and the weights of a personal mix that follow from it (FedEM, equation 13).

Shape legend: V clients of the cohort (U the ones a mix is for), I items, D dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAME = 0.9
"""The public code takes two clients for the same above this similarity."""


def similarity_weights(share_V: Tensor, distance_VV: Tensor, alpha: float) -> Tensor:
    """(V, V) ``w_uv = (p_v + alpha sigma_uv) / (1 + alpha)``, each row divided by its sum.

    This is where ``sum_v (w_uv - p_v)^2 + alpha (w_uv - sigma_uv)^2`` (equation 13) is least; sigma_uv = 1 / (1 +
    ||Q_u - Q_v||^2). Ours: the division. The rows of the solution sum to (1 + alpha sum_v sigma_uv) / (1 + alpha),
    which is 1 for a client far from all others, and grows with the number of near ones: its table would grow as well.
    """
    weight_VV = (share_V.to(distance_VV) + alpha / (1.0 + distance_VV)) / (1.0 + alpha)
    return weight_VV / weight_VV.sum(1, keepdim=True)


def code_weights(share_V: Tensor, distance_VV: Tensor, alpha: float) -> Tensor:
    """(V, V) the public code's weights: ``p_v + alpha s_uv``, projected on the simplex.

    s_uv = 1 / (1 + distance), plain and not squared, and 1 above 0.9. ``distance_VV`` holds squares here too.
    """
    return project_on_simplex(share_V.to(distance_VV) + alpha * code_similarity(distance_VV))


def code_similarity(distance_VV: Tensor) -> Tensor:
    """(V, V) the public code's ``1 / (1 + distance)``, 1 above 0.9, from squared distances."""
    alike_VV = 1.0 / (1.0 + distance_VV.sqrt())
    return torch.where(alike_VV > SAME, 1.0, alike_VV)


def cosines(gram_VV: Tensor) -> Tensor:
    """(V, V) ``<x_u, x_v> / (||x_u|| ||x_v||)`` from inner products; 0 beside a vector of zeros."""
    norm_V = gram_VV.diagonal().sqrt().clamp(min=1e-300)
    return gram_VV / norm_V / norm_V[:, None]


def project_on_simplex(value_UV: Tensor) -> Tensor:
    """Each row's nearest point with entries >= 0 that sum to 1: ``max(v - t, 0)`` for one t (Held et al., 1974).

    A constant added to a row changes nothing, so its largest entry is taken off: beside large entries 1 would be lost.
    """
    value_UV = value_UV - value_UV.amax(1, keepdim=True)
    falling_UV = value_UV.sort(1, descending=True).values
    surplus_UV = falling_UV.cumsum(1) - 1.0
    place_V = torch.arange(1, value_UV.shape[1] + 1, device=value_UV.device)
    num_positive_U1 = (falling_UV * place_V > surplus_UV).sum(1, keepdim=True)
    threshold_U1 = surplus_UV.gather(1, num_positive_U1 - 1) / num_positive_U1
    return (value_UV - threshold_U1).clamp(min=0.0)


def first_components(table_VID: Tensor) -> Tensor:
    """(V, I) every item's coordinate on the first principal component of its table.

    The sign of a component is free; here its largest entry is positive, so that equal tables have equal coordinates.
    """
    centred_VID = (table_VID - table_VID.mean(1, keepdim=True)).double()
    axis_VD = torch.linalg.eigh(centred_VID.transpose(1, 2) @ centred_VID).eigenvectors[:, :, -1]
    largest_V1 = axis_VD.gather(1, axis_VD.abs().argmax(1, keepdim=True))
    return (centred_VID @ (axis_VD * largest_V1.sign())[:, :, None])[:, :, 0]
