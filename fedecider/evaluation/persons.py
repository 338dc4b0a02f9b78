"""Persons who are users of several domains: what each of them adds to a mean over domains.

Shape legend: S seeds (runs), U users of a domain, P persons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

PerDomain = Mapping[str, Tensor]
"""Domain -> values (S, U), or (U,) for a single run."""
Persons = Mapping[str, Sequence[str]]
"""Domain -> key of every user; equal keys are one person."""


def shared_persons(users: Mapping[str, Sequence[str]]) -> Persons | None:
    """``users``, domain -> keys, where some person is in several domains; None where nobody is."""
    return users if len(set().union(*users.values())) < sum(map(len, users.values())) else None


def by_person(values: PerDomain, persons: Persons) -> Tensor:
    """(S, P): what every person adds to the macro mean, times P, so that the mean over persons is the macro mean."""
    place = {person: number for number, person in enumerate(sorted(set().union(*(persons[d] for d in values))))}
    total_SP = torch.zeros(next(iter(values.values())).shape[0], len(place), dtype=torch.float64)
    for domain, value_SU in values.items():
        if len(persons[domain]) != value_SU.shape[1]:
            raise ValueError(f"got {len(persons[domain])} persons for {value_SU.shape[1]} users of {domain}")
        index_U = torch.tensor([place[person] for person in persons[domain]])
        total_SP.index_add_(1, index_U, value_SU.to(torch.float64) / (value_SU.shape[1] * len(values)))
    return total_SP * len(place)


def for_resampling(values: PerDomain, persons: Persons) -> Tensor:
    """(S, P) with the macro mean as its mean over persons, which stays one of means however many users a domain draws.

    A resample's mean of a domain is a ratio, sum over number of its users; this is the ratio's linear part, what each
    user is from the mean of the domain.
    """
    mean = {domain: value_SU.mean() for domain, value_SU in values.items()}
    deviation = {domain: value_SU - mean[domain] for domain, value_SU in values.items()}
    return by_person(deviation, persons) + torch.stack(list(mean.values())).mean()
