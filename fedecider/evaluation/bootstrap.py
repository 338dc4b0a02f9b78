"""Draws of the cluster bootstrap, the same ones for several values.

Shape legend: M metrics, S seeds (runs), U users of a domain, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 4_000_000  # resampled entries held at once: bounds memory near 100 MB
DRAWN = 200_000  # draws counted at once: they fit the caches


def bootstrap_alike(
    values: Sequence[Tensor],
    generator: torch.Generator,
    num_resamples: int,
    seed_count_RS: Tensor | None = None,
) -> list[Tensor]:
    """:func:`fedecider.evaluation.statistics.bootstrap_means` of several (M, S, U) of one shape, with the same draws.

    One product for each of them, not one for all: so each is, to the last bit, what it is alone.
    """
    values = [value_MSU.to(torch.float64) for value_MSU in values]
    num_metrics, num_seeds, num_users = values[0].shape
    if seed_count_RS is None:
        seed_count_RS = counts(num_resamples, num_seeds, generator)
    means: list[list[Tensor]] = [[] for _ in values]
    for count_RS in seed_count_RS.split(max(1, CHUNK // num_users)):
        count_RU = counts(len(count_RS), num_users, generator)
        for value_MSU, found in zip(values, means, strict=True):
            per_seed_RMS = (count_RU @ value_MSU.reshape(-1, num_users).T).view(-1, num_metrics, num_seeds)
            found.append((per_seed_RMS * count_RS[:, None]).sum(2) / (num_users * num_seeds))
    return [torch.cat(found) for found in means]


def counts(num_rows: int, size: int, generator: torch.Generator) -> Tensor:
    """How often each of ``size`` units is drawn in ``size`` draws with replacement, float64 (num_rows, size)."""
    if size == 1:
        return torch.ones(num_rows, 1, dtype=torch.float64)
    count = torch.empty(num_rows, size, dtype=torch.float64)
    for part in count.split(max(1, DRAWN // size)):
        drawn = torch.randint(size, part.shape, generator=generator)
        drawn += torch.arange(len(part))[:, None] * size
        part.copy_(torch.bincount(drawn.view(-1), minlength=part.numel()).view(part.shape))
    return count
