"""k-means (Lloyd, 1982), started as k-means++ (Arthur and Vassilvitskii, 2007), the same bits wherever it runs.

Shape legend: N points, K clusters, D dims.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# k-means (Lloyd, 1982), started as k-means++ (Arthur and Vassilvitskii, 2007), the same bits wherever it runs.

DISTANCES = 1 << 22
"""Distances that are held at a time."""


class Clusters(NamedTuple):
    """Where each point belongs. Fewer different points than clusters leave clusters without points."""

    label_N: Tensor
    """int64 number of the nearest centroid, the lower one on ties."""
    centroid_KD: Tensor
    """float64."""


def k_means(point_ND: Tensor, num_clusters: int, generator: torch.Generator, num_steps: int = 20) -> Clusters:
    """At most ``num_clusters`` clusters (one for each point at most) after ``num_steps`` steps.

    A step takes every centroid to the mean of its points; a centroid without points goes to the point that is farthest
    from its own centroid. ``generator`` is one of the CPU and decides the start alone.
    """
    point_ND = point_ND.double()
    centroid_KD = _spread(point_ND, min(num_clusters, len(point_ND)), generator)
    for _ in range(num_steps):
        label_N, square_N = nearest(point_ND, centroid_KD)
        count_K = torch.bincount(label_N, minlength=len(centroid_KD))
        total_KD = torch.zeros_like(centroid_KD).index_add_(0, label_N, point_ND)
        centroid_KD = total_KD / count_K.clamp(min=1)[:, None]
        empty_E = (count_K == 0).nonzero()[:, 0]
        far_E = square_N.sort(descending=True, stable=True).indices[: len(empty_E)]
        centroid_KD[empty_E] = point_ND[far_E]
    return Clusters(nearest(point_ND, centroid_KD)[0], centroid_KD)


def nearest(point_ND: Tensor, centroid_KD: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) number of the nearest centroid, the lower one on ties, and the squared distance to it, float64."""
    label, square = [], []
    for part_PD in point_ND.double().split(max(1, DISTANCES // len(centroid_KD))):
        square_PK = (
            part_PD.square().sum(1, keepdim=True) - 2.0 * (part_PD @ centroid_KD.T) + centroid_KD.square().sum(1)
        ).clamp(min=0.0)
        label.append(square_PK.argmin(1))
        square.append(square_PK.gather(1, label[-1][:, None])[:, 0])
    return torch.cat(label), torch.cat(square)


def _spread(point_ND: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """(K, D) points drawn one after the other with weights ``min_k ||x - c_k||^2``, the first one alike."""
    num_points = len(point_ND)
    chosen = [int(torch.randint(num_points, (1,), generator=generator))]
    square_N = nearest(point_ND, point_ND[chosen])[1]
    for number in range(1, num_clusters):
        draw = float(torch.rand(1, generator=generator, dtype=torch.float64))
        until_N = square_N.cumsum(0)
        total = float(until_N[-1])
        place = int(torch.searchsorted(until_N, until_N.new_tensor([draw * total]), right=True))
        # Where nothing is left to spread, points are alike, and any will do.
        chosen.append(min(place, num_points - 1) if total > 0.0 else number)
        square_N = torch.minimum(square_N, nearest(point_ND, point_ND[chosen[-1:]])[1])
    return point_ND[chosen]
