"""How well scores tell members from all others, with intervals; and which attack of a family is reported.

Shape legend: A attacks, P members, N others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.evaluation.statistics import Interval

FALSE_POSITIVES = 0.01
"""Share of others that :func:`true_positives` lets pass."""
NUM_RESAMPLES = 1000


class Scored(NamedTuple):
    """Scores of one client's members (P,) and of others (N,); higher: likelier a member."""

    member_P: Tensor
    other_N: Tensor


def auc(scored: Scored) -> float:
    """Area under the ROC curve: the chance that a member scores above another, ties counted half.

    The Mann-Whitney statistic over P N. 1/2 is guessing. ``ValueError`` when there are no members or no others.
    """
    member_P, other_N = _both(scored)
    sorted_N = other_N.sort().values
    below_P = torch.searchsorted(sorted_N, member_P, right=False) + torch.searchsorted(sorted_N, member_P, right=True)
    return float(below_P.double().mean()) / (2 * len(other_N))


def true_positives(scored: Scored, false_positives: float = FALSE_POSITIVES) -> float:
    """Share of members above the lowest threshold that at most ``false_positives`` of the others exceed.

    With the right threshold a guess of nothing gets ``false_positives``. What matters where few members are found, but
    surely (Carlini et al., 2022).
    """
    member_P, other_N = _both(scored)
    num_passing = math.floor(false_positives * len(other_N))
    threshold = other_N.sort(descending=True).values[min(num_passing, len(other_N) - 1)]
    return float((member_P > threshold).double().mean())


def interval_over_users(
    statistic: Callable[[Scored], float],
    scored: Sequence[Scored],
    generator: torch.Generator,
    num_resamples: int = NUM_RESAMPLES,
    level: float = 0.95,
) -> Interval:
    """Mean over clients of ``statistic`` with its percentile bootstrap: members and others of every client are drawn
    with replacement, apart from each other."""
    values = [_mean([statistic(one) for one in scored])]
    for _ in range(num_resamples):
        values.append(_mean([statistic(Scored(*(_redrawn(part, generator) for part in one))) for one in scored]))
    bounds = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.tensor(values[1:], dtype=torch.float64), bounds).tolist()
    return Interval(values[0], low, high)


def chosen_on_others(value_AC: Tensor, fold_C: Tensor) -> Tensor:
    """(C,) number of the attack for each client: the best mean over the clients of all other folds.

    An attack that is chosen where it is reported would be flattered. With one fold the first attack stands for all.
    """
    chosen_C = torch.zeros_like(fold_C)
    for fold in fold_C.unique():
        others_C = fold_C != fold
        if others_C.any():
            chosen_C[~others_C] = value_AC[:, others_C].mean(1).argmax()
    return chosen_C


def _both(scored: Scored) -> tuple[Tensor, Tensor]:
    member_P, other_N = (torch.as_tensor(part).double() for part in scored)
    if not len(member_P) or not len(other_N):
        raise ValueError(f"got {len(member_P)} members and {len(other_N)} others, expected some of both")
    return member_P, other_N


def _redrawn(value_P: Tensor, generator: torch.Generator) -> Tensor:
    return value_P[torch.randint(len(value_P), (len(value_P),), generator=generator)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
