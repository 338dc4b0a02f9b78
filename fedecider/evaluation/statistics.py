"""Intervals, paired tests and choices on validation items: what a table may claim.

Intervals and tests are of one family, t on two levels. Of values d_su of S runs (seeds) and U users of a domain, with
effects of both, the mean m over all has the variance a + b:

    a = var_u(mean_s d_su) / U                            users, and the residual
    b = max(0, var_s(mean_u d_su) / S - MS_res / (U S))   seeds; 0 of a single run
    MS_res = sum (d_su - d_s. - d_.u + m)^2 / ((S - 1) (U - 1))
    interval m +- t(.975, nu) sqrt(a + b), p two-sided of m / sqrt(a + b), nu = (a + b)^2 / (a^2 / nu_a + b^2 / (S - 1))

with sample variances (n - 1), nu_a = U - 1 and Satterthwaite's degrees of freedom (Biometrics Bulletin 2, 1946). The
macro mean counts each of K domains once: a = sum_k a_k / K^2 with nu_a = a^2 / sum_k ((a_k / K^2)^2 / (U_k - 1)), and b
is of the macro mean of each run, since one run trains all domains, with sum_k MS_res,k / (U_k S) / K^2. ``persons``
says who is a user of several domains; then persons are the units. With one run this is the paired t test, which says
what other users would have given, not what another run would. It takes means as normal: of hits, ten users that differ
are few. Bounds stay in the range of a metric, 0 to 1, and of a difference, -1 to 1; a domain of a single user leaves
that whole range. Differs from the textbooks: where all differences are equal, and not 0, p is the chance 2^(1 - U) that
U signs agree.

Shape legend: M metrics, S seeds (runs), U users of a domain, P persons, N choices, K domains or clients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.evaluation.metrics import CUTOFFS, MACRO, user_metrics

PerDomain = Mapping[str, Tensor]
"""Domain -> values (S, U), or (U,) for a single run."""
Persons = Mapping[str, Sequence[str]]
"""Domain -> key of every user; equal keys are one person."""


def shared_persons(users: Mapping[str, Sequence[str]]) -> Persons | None:
    """``users``, domain -> keys, where some person is in several domains; None where nobody is."""
    return users if len(set().union(*users.values())) < sum(map(len, users.values())) else None


ONE_SIDED = 1.645
"""Standard errors of a one-sided paired test at 95 %: a choice that is to be wrong in one case of twenty at most."""


def clearly_above(first_KU: Sequence[np.ndarray], second_KU: Sequence[np.ndarray], errors: float = 1.0) -> bool:
    """Whether the first figures are higher than the second ones by more than ``errors`` standard errors.

    Both hold a figure of every user, client by client, and the same users stand in the same places. The difference is
    the mean over clients of the mean over their users, its standard error ``sqrt(sum_k s_k^2 / U_k) / K`` with the
    sample variance s_k^2 of the differences of client k. Of a client with fewer than two users it cannot be told, and
    the answer is no. A client needs to tell two numbers for it.
    """
    difference_KU = [first_U - second_U for first_U, second_U in zip(first_KU, second_KU, strict=True)]
    if any(len(one_U) < 2 for one_U in difference_KU):
        return False
    mean = np.mean([one_U.mean() for one_U in difference_KU])
    variance = np.sum([one_U.var(ddof=1) / len(one_U) for one_U in difference_KU]) / len(difference_KU) ** 2
    return bool(mean > errors * np.sqrt(variance))


def clearly_best(gain_NKU: Sequence[Sequence[np.ndarray]]) -> int:
    """Number of the best of N choices by their mean over clients, among those that are `clearly_above` the first.

    The first is what is taken where nothing speaks against it: 0 where no other is clearly above it.
    """
    clear = [number for number in range(1, len(gain_NKU)) if clearly_above(gain_NKU[number], gain_NKU[0])]
    return max(clear, key=lambda number: np.mean([gain_U.mean() for gain_U in gain_NKU[number]]), default=0)


class Interval(NamedTuple):
    """A mean with the bounds of its confidence interval, in the unit of the values (a metric: 0 to 1)."""

    mean: float
    low: float
    high: float


class Comparison(NamedTuple):
    """One paired comparison of a table; ``p_holm`` is corrected over all comparisons of that table."""

    domain: str
    metric: str
    first: str
    second: str
    difference: Interval
    """first minus second."""
    p_value: float
    p_holm: float
    effect_size: float
    """Mean over standard deviation of the users' differences (Cohen's d for pairs)."""

    def distinguishable(self, level: float = 0.05) -> bool:
        """Whether the difference is significant: the corrected p is below ``level``."""
        return self.p_holm < level


class Difference(NamedTuple):
    """A mean of paired differences with its test."""

    interval: Interval
    p_value: float
    seed_share: float
    """Share of the variance that is of the seeds, b / (a + b); 0 of a single run."""


def mean_interval(values: Tensor, level: float = 0.95) -> Interval:
    """The mean of a metric, ``values`` (S, U) or (U,) for one run, with its two-level t interval.

    Raises:
        ValueError: no user, another shape, NaN, or values outside 0 to 1 (for differences see `paired_difference`).
    """
    value_SU = _as_SU(values)
    if bool((value_SU < 0).any() or (value_SU > 1).any()):
        raise ValueError(f"got values from {value_SU.min()} to {value_SU.max()}, expected those of a metric, 0 to 1")
    return _intervals(two_levels({"": value_SU[None]}), 0.0, level)[0]


def paired_difference(
    first: Tensor | PerDomain, second: Tensor | PerDomain, persons: Persons | None = None
) -> Difference:
    """First minus second of the same users and seeds: (S, U) or (U,) values of a metric, or domain -> such values.

    Several domains: their macro mean. ``ValueError`` when users or seeds are not the same.
    """
    parts = two_levels({domain: value_SU[None] for domain, value_SU in _paired(first, second).items()}, persons)
    share = float(parts.seeds_M / (parts.users_M + parts.seeds_M))
    return Difference(_intervals(parts, -1.0)[0], _p_values(parts)[0], 0.0 if math.isnan(share) else share)


def table_intervals(
    rows: Mapping[str, PerDomain],
    cutoffs: Sequence[int] = CUTOFFS,
    level: float = 0.95,
    persons: Persons | None = None,
) -> dict[str, dict[str, dict[str, Interval]]]:
    """Every metric of every row with its interval, per domain and for ``"macro"``: row -> domain -> metric -> interval.

    ``rows``: row -> domain -> (S, U) or (U,) positions. ``persons``: domain -> whose positions these are, where one
    person is a user of several domains and counts as one.

    Raises:
        ValueError: no domain, other numbers of seeds in two domains, or positions that are none.
    """
    intervals = {}
    for label, positions in rows.items():
        metrics = {domain: _metrics(position, cutoffs) for domain, position in positions.items()}
        values = {domain: torch.stack(list(of_domain.values())) for domain, of_domain in metrics.items()}
        of_scope = {MACRO: two_levels(values, persons)}
        of_scope = {domain: two_levels({domain: value_MSU}) for domain, value_MSU in values.items()} | of_scope
        names = list(next(iter(metrics.values())))
        intervals[label] = {
            scope: dict(zip(names, _intervals(parts, 0.0, level), strict=True)) for scope, parts in of_scope.items()
        }
    return intervals


def effect_size(first: Tensor | PerDomain, second: Tensor | PerDomain) -> float:
    """Cohen's d for pairs: mean of the users' differences over their standard deviation; 0 when nothing differs.

    Several domains: mean of the domains' values. Infinite when every user differs by the same amount.
    """
    return _effect_sizes({domain: value_SU[None] for domain, value_SU in _paired(first, second).items()})[0]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the given order: max over j <= i of (m - j) p_(j), at most 1."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for step, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if not 0 <= p_values[index] <= 1:
            raise ValueError(f"got p-value {p_values[index]}, expected a number from 0 to 1")
        highest = max(highest, min(1.0, (len(p_values) - step) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def compare_table(
    positions: Mapping[str, PerDomain],
    metrics: Sequence[str] = ("hit@10", "ndcg@10"),
    pairs: Iterable[tuple[str, str]] | None = None,
    persons: Persons | None = None,
    each_domain: bool = True,
) -> list[Comparison]:
    """All paired comparisons of one table, Holm-corrected together.

    ``positions``: method -> domain -> (S, U) or (U,), of baskets (S, U, T), users in the same order for every method.
    ``pairs``: which methods to compare (None: all pairs). Each metric is compared in each domain and, with several, for
    the macro mean; without ``each_domain`` for the macro mean alone where there are several.
    ``ValueError`` when methods do not share domains, seeds or users, or a metric is unknown.
    """
    pairs = list(combinations(positions, 2)) if pairs is None else list(pairs)
    values = {method: _metric_values(per_domain, metrics) for method, per_domain in positions.items()}
    table: list[Comparison] = []
    for first, second in pairs:
        if first not in values or second not in values:
            raise ValueError(f"got the pair {(first, second)}, expected two of {list(values)}")
        if list(values[first]) != list(values[second]):
            raise ValueError(
                f"got other domains for {first} than for {second}, expected the same domains in the same order"
            )
        difference = _paired(values[first], values[second])
        alone = list(difference) if each_domain or len(difference) == 1 else []
        scopes = {domain: two_levels({domain: difference[domain]}) for domain in alone}
        sizes = {domain: _effect_sizes({domain: difference[domain]}) for domain in alone}
        if len(difference) > 1:
            scopes[MACRO], sizes[MACRO] = two_levels(difference, persons), _effect_sizes(difference)
        intervals = {scope: _intervals(parts, -1.0) for scope, parts in scopes.items()}
        p_values = {scope: _p_values(parts) for scope, parts in scopes.items()}
        table += [
            Comparison(scope, metric, first, second, intervals[scope][m], p_values[scope][m], 1.0, sizes[scope][m])
            for m, metric in enumerate(metrics)
            for scope in scopes
        ]
    adjusted = holm([comparison.p_value for comparison in table])
    return [comparison._replace(p_holm=p_holm) for comparison, p_holm in zip(table, adjusted, strict=True)]


def verdict(comparison: Comparison, level: float = 0.05) -> str:
    """The comparison in words: which one is above and by how much, or "not distinguishable"."""
    c, d = comparison, comparison.difference
    figures = f"{d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}], Holm p {c.p_holm:.3g}, d {c.effect_size:+.2f}"
    if not c.distinguishable(level):
        return f"{c.first} and {c.second} are not distinguishable ({c.domain}, {c.metric}: {figures})"
    return f"{c.first} is {'above' if d.mean > 0 else 'below'} {c.second} ({c.domain}, {c.metric}: {figures})"


def distinguishable_winners(comparisons: Sequence[Comparison], level: float = 0.05) -> set[tuple[str, str, str]]:
    """(domain, metric, method) of every method that is distinguishably above all it was compared with.

    Only these may be bold in a table. A method that was not compared with every other one is never among them.
    """
    wins: dict[tuple[str, str, str], int] = {}
    methods: dict[tuple[str, str], set[str]] = {}
    for c in comparisons:
        methods.setdefault((c.domain, c.metric), set()).update((c.first, c.second))
        if c.distinguishable(level):
            key = (c.domain, c.metric, c.first if c.difference.mean > 0 else c.second)
            wins[key] = wins.get(key, 0) + 1
    return {key for key, num in wins.items() if num == len(methods[key[:2]]) - 1}


class TwoLevels(NamedTuple):
    """Means (M,) with the parts of their variance; see the head of this file."""

    mean_M: Tensor
    users_M: Tensor
    """a: users and residual; infinite where a domain has a single user."""
    seeds_M: Tensor
    """b."""
    freedom_M: Tensor
    num_units: int
    """Users, or persons."""
    rounding_M: Tensor
    """Standard errors and means below it are 0."""


def two_levels(values: PerDomain, persons: Persons | None = None) -> TwoLevels:
    """Of domain -> values or differences (M, S, U): their mean, with several domains the macro mean.

    Raises:
        ValueError: no domain, or other numbers of seeds in two domains.
    """
    if not values:
        raise ValueError("got no domain, expected positions of at least one")
    num_seeds = {domain: value_MSU.shape[1] for domain, value_MSU in values.items()}
    seeds = next(iter(num_seeds.values()))
    if len(set(num_seeds.values())) > 1:
        raise ValueError(f"got seeds per domain {num_seeds}, expected the same number for all domains")
    size_K = torch.tensor([value_MSU.shape[2] for value_MSU in values.values()])
    parts = [_parts(value_MSU) for value_MSU in values.values()]
    users_KM, residual_KM = (torch.stack(part) / len(values) ** 2 for part in zip(*parts, strict=True))
    users_M, residual_M, num_units = users_KM.sum(0), residual_KM.sum(0), int(size_K.sum())
    own_freedom_M = (users_M**2 / (users_KM**2 / (size_K - 1)[:, None]).sum(0)).nan_to_num(1.0)
    if persons is not None and len(values) > 1:
        value_MSP = by_person(values, persons)
        num_units = value_MSP.shape[2]
        own_freedom_M = own_freedom_M.clamp(max=num_units - 1)
        users_M, residual_M = _parts(value_MSP)
    if int(size_K.min()) == 1:
        users_M = torch.full_like(users_M, math.inf)
    mean_MS = torch.stack([value_MSU.mean(2) for value_MSU in values.values()]).mean(0)
    seeds_M = torch.zeros_like(users_M)
    if seeds > 1:
        seeds_M = (mean_MS.var(1, correction=1) / seeds - residual_M.nan_to_num(0.0)).clamp(min=0.0)
    spread_M = users_M**2 / own_freedom_M + seeds_M**2 / max(seeds - 1, 1)
    freedom_M = ((users_M + seeds_M) ** 2 / spread_M).nan_to_num(1.0)
    rounding_M = 1e-12 * torch.stack([value_MSU.abs().amax((1, 2)) for value_MSU in values.values()]).amax(0)
    return TwoLevels(mean_MS.mean(1), users_M, seeds_M, freedom_M, num_units, rounding_M)


def _parts(value_MSU: Tensor) -> tuple[Tensor, Tensor]:
    """(M,) variance of the mean by users, and MS_res / (U S); NaN of a single user, the second of a single run too."""
    _, num_seeds, num_users = value_MSU.shape
    user_MU, mean_M11 = value_MSU.mean(1), value_MSU.mean((1, 2), keepdim=True)
    users_M = (user_MU - mean_M11[:, 0]).square().sum(1) / (num_users - 1) / num_users
    residual_MSU = value_MSU - user_MU[:, None] - value_MSU.mean(2, keepdim=True) + mean_M11
    freedom = (num_seeds - 1) * (num_users - 1)
    return users_M, residual_MSU.square().sum((1, 2)) / freedom / (num_seeds * num_users)


def by_person(values: PerDomain, persons: Persons) -> Tensor:
    """(M, S, P) of domain -> (M, S, U), with the macro means of the seeds as means over persons.

    A domain's mean is a ratio, sum over number of its users. This is the ratio's linear part, what each user is from
    the mean of domain and seed: so it is no part of the spread how many users a domain happens to have.
    """
    place = {person: number for number, person in enumerate(sorted(set().union(*(persons[d] for d in values))))}
    shape = next(iter(values.values())).shape[:2]
    total_MSP, mean_MS1 = (torch.zeros(*shape, size, dtype=torch.float64) for size in (len(place), 1))
    for domain, value_MSU in values.items():
        num_users, of_domain_MS1 = value_MSU.shape[2], value_MSU.mean(2, keepdim=True)
        if len(persons[domain]) != num_users:
            raise ValueError(f"got {len(persons[domain])} persons for {num_users} users of {domain}")
        index_U = torch.tensor([place[person] for person in persons[domain]])
        total_MSP.index_add_(2, index_U, (value_MSU - of_domain_MS1) / (num_users * len(values)))
        mean_MS1 += of_domain_MS1 / len(values)
    return total_MSP * len(place) + mean_MS1


def _intervals(parts: TwoLevels, least: float, level: float = 0.95) -> list[Interval]:
    """Of each metric, between ``least`` and 1."""
    error_M = (parts.users_M + parts.seeds_M).sqrt()
    half_M = torch.from_numpy(scipy.special.stdtrit(parts.freedom_M.numpy(), (1 + level) / 2)) * error_M
    half_M = half_M.where(error_M > parts.rounding_M, 0.0)
    low_M, high_M = (parts.mean_M - half_M).clamp(min=least), (parts.mean_M + half_M).clamp(max=1.0)
    return [Interval(*ends) for ends in torch.stack([parts.mean_M, low_M, high_M], 1).tolist()]


def _p_values(parts: TwoLevels) -> list[float]:
    error_M = (parts.users_M + parts.seeds_M).sqrt()
    p_M = 2 * torch.from_numpy(scipy.special.stdtr(parts.freedom_M.numpy(), -(parts.mean_M.abs() / error_M).numpy()))
    p_M = p_M.where(error_M > parts.rounding_M, 2.0 ** (1 - parts.num_units))
    return p_M.where(parts.mean_M.abs() > parts.rounding_M, 1.0).tolist()


def of_one_run(positions: Mapping[str, PerDomain]) -> dict[str, dict[str, Tensor]]:
    """Positions of one run, label -> domain -> (U,) or baskets (U, T), as tables take them: baskets are (1, U, T)."""
    return {
        label: {domain: one if one.ndim == 1 else one[None] for domain, one in per_domain.items()}
        for label, per_domain in positions.items()
    }


def _metrics(position: Tensor, cutoffs: Sequence[int]) -> dict[str, Tensor]:
    """Metric -> (S, U), of positions (U,), (S, U), or of baskets (S, U, T)."""
    place = torch.as_tensor(position).to(torch.float64)
    place = place if place.ndim == 3 else _as_SU(place)
    found = user_metrics(place.flatten(0, 1), cutoffs)
    return {name: value.view(place.shape[:2]) for name, value in found.items()}


def _as_SU(values: Tensor) -> Tensor:
    value_SU = torch.as_tensor(values).to(torch.float64)
    value_SU = value_SU[None] if value_SU.ndim == 1 else value_SU
    if value_SU.ndim != 2 or 0 in value_SU.shape or bool(torch.isnan(value_SU).any()):
        raise ValueError(
            f"got values of shape {tuple(value_SU.shape)} with {int(torch.isnan(value_SU).sum())} NaN, "
            "expected numbers of shape (seeds, users) or (users,) with at least one user"
        )
    return value_SU


def _paired(first: Tensor | PerDomain, second: Tensor | PerDomain) -> dict[str, Tensor]:
    """Domain -> first less second, of (S, U), (U,), or (M, S, U)."""
    a, b = (
        {"": _as_SU(values)}
        if isinstance(values, Tensor)
        else {domain: value if value.ndim == 3 else _as_SU(value) for domain, value in values.items()}
        for values in (first, second)
    )
    if not a or {d: v.shape for d, v in a.items()} != {d: v.shape for d, v in b.items()}:
        raise ValueError(
            f"got shapes { {d: tuple(v.shape) for d, v in a.items()} } and "
            f"{ {d: tuple(v.shape) for d, v in b.items()} }, expected the same users and seeds in both"
        )
    return {domain: a[domain] - b[domain] for domain in a}


def _effect_sizes(difference: PerDomain) -> list[float]:
    """`effect_size` of domain -> differences (M, S, U), metric by metric."""
    size_KM = []
    for value_MSU in difference.values():
        value_MU = value_MSU.mean(1)
        mean_M = value_MU.mean(1)
        spread_M = value_MU.std(1, correction=1) if value_MU.shape[1] > 1 else torch.zeros_like(mean_M)
        size_KM.append((mean_M / spread_M).where(mean_M != 0, 0.0))
    return torch.stack(size_KM).mean(0).tolist()


def _metric_values(per_domain: PerDomain, metrics: Sequence[str]) -> dict[str, Tensor]:
    """Domain -> (M, S, U)."""
    odd = [name for name in metrics if not re.fullmatch(r"(hit|ndcg|mrr|recall)@[1-9][0-9]*", str(name))]
    if odd or not metrics:
        raise ValueError(f"got metrics {odd or list(metrics)}, expected hit@k, ndcg@k or mrr@k, of baskets recall@k")
    cutoffs = sorted({int(name.partition("@")[2]) for name in metrics})
    values = {domain: _metrics(position, cutoffs) for domain, position in per_domain.items()}
    unknown = [name for name in metrics if any(name not in v for v in values.values())]
    if unknown:
        raise ValueError(f"got metrics {unknown}, expected hit@k, ndcg@k or mrr@k, of baskets recall@k")
    return {domain: torch.stack([v[name] for name in metrics]) for domain, v in values.items()}
