"""Intervals, paired tests and choices on validation items: what a table may claim.

Several domains are handled as a mapping from domain to values. The macro mean counts each domain once, and is resampled
domain by domain, unless ``persons`` says who is the same in several of them: then persons are the units.
Values are averages over users first, then over seeds.

Shape legend: M metrics, S seeds (runs), U users of a domain, R resamples, P persons, N choices, K clients, U users of
a client, R resamples or permutations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedecider.evaluation.metrics import CUTOFFS, MACRO, user_metrics

CHUNK = 4_000_000  # resampled entries held at once: bounds memory near 100 MB
DRAWN = 200_000  # draws counted at once: they fit the caches


def bootstrap_alike(
    values: Sequence[Tensor],
    generator: torch.Generator,
    num_resamples: int,
    seed_count_RS: Tensor | None = None,
) -> list[Tensor]:
    """Means of ``num_resamples`` cluster resamples, float64 (R, M) each, of several (M, S, U) of one shape.

    Users and seeds are drawn with replacement, independently (crossed clusters: all seeds have the same users), and
    each cell counts as often as its user times its seed. One seed alone is kept as it is, so the interval then covers
    users only; with few seeds the spread over seeds is underestimated by about (S - 1) / S.
    ``seed_count_RS`` shares one draw of the seeds between domains. All have the same draws. One
    product for each of them, not one for all: so each is, to the last bit, what it is alone.
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


PERMUTATIONS_PER_TEST = 400  # the smallest p-value that Holm's correction can then leave is 0.0025
HELD = 25_000_000  # differences of users that are held at once: 200 MB
Name = TypeVar("Name", bound=Hashable)


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
        """Whether the difference is more than chance: the corrected p is below ``level``."""
        return self.p_holm < level


def bootstrap_interval(
    values: Tensor, generator: torch.Generator, num_resamples: int = 2000, level: float = 0.95
) -> Interval:
    """Percentile cluster-bootstrap interval of the mean of ``values`` (S, U), or (U,) for one run.

    Users, and seeds where there are several, are drawn with replacement ``num_resamples`` times (`bootstrap_alike`);
    the bounds are the (1 - level) / 2 and (1 + level) / 2 quantiles of the means (Efron, 1979).

    Raises:
        ValueError: no user, another shape, or NaN.
    """
    return bootstrap_intervals({"": values}, generator, num_resamples, level)[""]


def bootstrap_intervals(
    values: Mapping[Name, Tensor], generator: torch.Generator, num_resamples: int = 2000, level: float = 0.95
) -> dict[Name, Interval]:
    """:func:`bootstrap_interval` of several values of the same users, all of one shape, from one set of draws.

    The draws are most of the time, and each interval is the one that its values alone would get from ``generator``.
    """
    found = {name: _as_SU(value) for name, value in values.items()}
    resampled = bootstrap_alike([value_SU[None] for value_SU in found.values()], generator, num_resamples)
    return {
        name: _interval(value_SU.mean(), mean_R1[:, 0], level)
        for (name, value_SU), mean_R1 in zip(found.items(), resampled, strict=True)
    }


def table_intervals(
    rows: Mapping[str, PerDomain],
    generator: torch.Generator,
    cutoffs: Sequence[int] = CUTOFFS,
    num_resamples: int = 2000,
    level: float = 0.95,
    persons: Persons | None = None,
) -> dict[str, dict[str, dict[str, Interval]]]:
    """Every metric of every row with its interval, per domain and for ``"macro"``: row -> domain -> metric -> interval.

    ``rows``: row -> domain -> (S, U) or (U,) positions. The seeds are resampled jointly for all domains, since one run
    trains all of them. ``persons``: domain -> whose positions these are, where one person is a user of several domains
    and counts as one. All rows of the same shapes are resampled alike, in one go: each row gets the
    intervals that it would get alone from ``generator`` as it is given.

    Raises:
        ValueError: no domain, other numbers of seeds in two domains, or positions that are none.
    """
    shapes: dict[tuple, list[str]] = {}
    for label, positions in rows.items():
        shape = tuple((domain, tuple(torch.as_tensor(position).shape)) for domain, position in positions.items())
        shapes.setdefault(shape, []).append(label)
    start = generator.get_state()
    found: dict[str, dict[str, dict[str, Interval]]] = {}
    for labels in shapes.values():
        generator.set_state(start)
        alike = _intervals_alike([rows[label] for label in labels], generator, cutoffs, num_resamples, level, persons)
        found.update(zip(labels, alike, strict=True))
    return {label: found[label] for label in rows}


def paired_permutation_test(
    first: Tensor | PerDomain,
    second: Tensor | PerDomain,
    generator: torch.Generator,
    num_permutations: int = 10_000,
    persons: Persons | None = None,
) -> float:
    """Two-sided p-value of the paired permutation test over users, at least 1 / (num_permutations + 1).

    Under the null a user's two results may be exchanged, so the sign of each user's difference (mean over seeds) is
    flipped at random: p = (1 + #{|permuted| >= |observed|}) / (1 + num_permutations). With several domains the
    statistic is the macro mean. Seeds are averaged, not tested: the claim is about users, for these runs. All
    differences of one of the ``persons`` are flipped together.
    """
    return _p_values([_paired(first, second)], generator, num_permutations, persons)[0]


def effect_size(first: Tensor | PerDomain, second: Tensor | PerDomain) -> float:
    """Cohen's d for pairs: mean of the users' differences over their standard deviation; 0 when nothing differs.

    Several domains: mean of the domains' values. Infinite when every user differs by the same amount.
    """
    return _effect_size(_paired(first, second))


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
    generator: torch.Generator,
    metrics: Sequence[str] = ("hit@10", "ndcg@10"),
    pairs: Iterable[tuple[str, str]] | None = None,
    num_resamples: int = 2000,
    persons: Persons | None = None,
    each_domain: bool = True,
) -> list[Comparison]:
    """All paired comparisons of one table, Holm-corrected together.

    ``positions``: method -> domain -> (S, U) or (U,), of baskets (S, U, T), users in the same order for every method.
    ``pairs``: which methods to compare (None: all pairs). Each metric is compared in each domain and, with several, for
    the macro mean; without ``each_domain`` for the macro mean alone where there are several.
    There are 10,000 permutations, or 400 per test, so that Holm's correction leaves something to find. All comparisons
    of the same domains and shapes are resampled and permuted alike, since the draws are most of the time: each gets the
    interval and the p-value that it would get alone from ``generator`` as it is given.
    ``ValueError`` when methods do not share domains, seeds or users, or a metric is unknown.
    """
    pairs = list(combinations(positions, 2)) if pairs is None else list(pairs)
    values = {method: _metric_values(per_domain, metrics) for method, per_domain in positions.items()}
    num_domains = max((len(per_domain) for per_domain in positions.values()), default=0)
    num_scopes = num_domains + (num_domains > 1) if each_domain else 1
    num_permutations = max(10_000, PERMUTATIONS_PER_TEST * len(pairs) * len(metrics) * num_scopes)
    names: list[tuple[str, str, str, str]] = []
    alike: dict[tuple, list[int]] = {}
    for first, second in pairs:
        if first not in values or second not in values:
            raise ValueError(f"got the pair {(first, second)}, expected two of {list(values)}")
        if list(values[first][metrics[0]]) != list(values[second][metrics[0]]):
            raise ValueError(
                f"got other domains for {first} than for {second}, expected the same domains in the same order"
            )
        paired = _paired(values[first][metrics[0]], values[second][metrics[0]])
        shapes = {domain: tuple(difference_SU.shape) for domain, difference_SU in paired.items()}
        scopes = [*shapes, *([MACRO] if len(shapes) > 1 else [])][-num_scopes:]
        for metric in metrics:
            for domain in scopes:
                alike.setdefault((domain, tuple(shapes.items())), []).append(len(names))
                names.append((domain, metric, first, second))
    drawn: dict[int, tuple[Interval, float, float]] = {}
    start = generator.get_state()
    for (domain, shapes_of), members in alike.items():
        at_once = max(1, HELD // sum(math.prod(shape) for _, shape in shapes_of))
        for begin in range(0, len(members), at_once):
            some = members[begin : begin + at_once]
            differences = [_difference_of(values, *names[member]) for member in some]
            units = persons if domain == MACRO else None
            generator.set_state(start)
            intervals = _difference_intervals(differences, generator, num_resamples, units)
            p_values = _p_values(differences, generator, num_permutations, units)
            drawn.update(zip(some, zip(intervals, p_values, map(_effect_size, differences), strict=True), strict=True))
    found = [drawn[member] for member in range(len(names))]
    adjusted = holm([p_value for _, p_value, _ in found])
    return [
        Comparison(*name, interval, p_value, p_holm, size)
        for name, (interval, p_value, size), p_holm in zip(names, found, adjusted, strict=True)
    ]


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


def _intervals_alike(
    rows: Sequence[PerDomain],
    generator: torch.Generator,
    cutoffs: Sequence[int],
    num_resamples: int,
    level: float,
    persons: Persons | None,
) -> list[dict[str, dict[str, Interval]]]:
    """:func:`table_intervals` of rows whose positions have the same shapes."""
    values = [{domain: _metrics_MSU(position, cutoffs) for domain, position in row.items()} for row in rows]
    if not values[0]:
        raise ValueError("got no domain, expected positions of at least one")
    num_seeds = {domain: value_MSU.shape[1] for domain, value_MSU in values[0].items()}
    if len(set(num_seeds.values())) > 1:
        raise ValueError(f"got seeds per domain {num_seeds}, expected the same number for all domains")
    seed_count_RS = counts(num_resamples, next(iter(num_seeds.values())), generator)
    resampled: list[dict[str, Tensor]] = [{} for _ in rows]
    for domain in values[0]:
        drawn = bootstrap_alike([of_row[domain] for of_row in values], generator, num_resamples, seed_count_RS)
        for of_row, mean_RM in zip(resampled, drawn, strict=True):
            of_row[domain] = mean_RM
    for of_row in resampled:
        of_row[MACRO] = torch.stack(list(of_row.values())).mean(0)
    if persons is not None:
        num_metrics = len(next(iter(values[0].values())))
        per_person = [
            torch.stack([for_resampling({d: v[m] for d, v in of_row.items()}, persons) for m in range(num_metrics)])
            for of_row in values
        ]
        drawn = bootstrap_alike(per_person, generator, num_resamples, seed_count_RS)
        for of_row, mean_RM in zip(resampled, drawn, strict=True):
            of_row[MACRO] = mean_RM
    names = list(_metrics(next(iter(rows[0].values())), cutoffs))
    found = []
    for of_row, drawn_of in zip(values, resampled, strict=True):
        means = {domain: value_MSU.mean((1, 2)) for domain, value_MSU in of_row.items()}
        means[MACRO] = torch.stack(list(means.values())).mean(0)
        found.append(
            {
                domain: {name: _interval(mean_M[m], drawn_of[domain][:, m], level) for m, name in enumerate(names)}
                for domain, mean_M in means.items()
            }
        )
    return found


def _metrics_MSU(position: Tensor, cutoffs: Sequence[int]) -> Tensor:
    return torch.stack(list(_metrics(position, cutoffs).values()))


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


def _interval(mean: Tensor, resampled_R: Tensor, level: float) -> Interval:
    bounds = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(resampled_R, bounds).tolist()
    return Interval(float(mean), low, high)


def _per_domain(values: Tensor | PerDomain) -> dict[str, Tensor]:
    return {"": _as_SU(values)} if isinstance(values, Tensor) else {d: _as_SU(v) for d, v in values.items()}


def _paired(first: Tensor | PerDomain, second: Tensor | PerDomain) -> dict[str, Tensor]:
    a, b = _per_domain(first), _per_domain(second)
    if not a or {d: v.shape for d, v in a.items()} != {d: v.shape for d, v in b.items()}:
        raise ValueError(
            f"got shapes { {d: tuple(v.shape) for d, v in a.items()} } and "
            f"{ {d: tuple(v.shape) for d, v in b.items()} }, expected the same users and seeds in both"
        )
    return {domain: a[domain] - b[domain] for domain in a}


def _difference_of(
    values: Mapping[str, Mapping[str, PerDomain]], domain: str, metric: str, first: str, second: str
) -> dict[str, Tensor]:
    """The first method's values minus the second's, in one domain or in all."""
    difference = _paired(values[first][metric], values[second][metric])
    return difference if domain == MACRO else {domain: difference[domain]}


def _difference_intervals(
    paired: Sequence[PerDomain], generator: torch.Generator, num_resamples: int, persons: Persons | None
) -> list[Interval]:
    """The interval of each macro mean of differences, all of one shape, from the same draws."""
    if persons is not None:
        by_person = {member: for_resampling(difference, persons) for member, difference in enumerate(paired)}
        return list(bootstrap_intervals(by_person, generator, num_resamples).values())
    seed_count_RS = counts(num_resamples, next(iter(paired[0].values())).shape[0], generator)
    resampled = [
        bootstrap_alike([difference[domain][None] for difference in paired], generator, num_resamples, seed_count_RS)
        for domain in paired[0]
    ]
    means = [torch.stack([value_SU.mean() for value_SU in difference.values()]).mean() for difference in paired]
    return [
        _interval(mean, torch.stack([mean_R1[:, 0] for mean_R1 in per_domain]).mean(0), 0.95)
        for mean, per_domain in zip(means, zip(*resampled, strict=True), strict=True)
    ]


def _p_values(
    paired: Sequence[PerDomain], generator: torch.Generator, num_permutations: int, persons: Persons | None
) -> list[float]:
    """:func:`paired_permutation_test` of each of the differences (K of them), all of one shape, by the same flips."""
    if num_permutations < 1:
        raise ValueError(f"got num_permutations {num_permutations}, expected at least 1")
    term_KU = torch.stack([_terms(difference, persons) for difference in paired])
    total_K, num_extreme_K, left = term_KU.sum(1), torch.zeros(len(paired), dtype=torch.long), num_permutations
    least_K = total_K.abs() - 1e-9 * term_KU.abs().sum(1)  # rounding makes no permutation less extreme
    while left > 0:
        rows = min(left, max(1, CHUNK // max(term_KU.shape)))
        flip_RU = torch.randint(0, 2, (rows, term_KU.shape[1]), generator=generator, dtype=torch.int8)
        permuted_RK = 2.0 * (flip_RU.to(torch.float64) @ term_KU.T) - total_K
        num_extreme_K += (permuted_RK.abs() >= least_K).sum(0)
        left -= rows
    return ((1 + num_extreme_K).double() / (1 + num_permutations)).tolist()


def _terms(difference: PerDomain, persons: Persons | None) -> Tensor:
    """(U,) what every user adds to the macro mean of the differences; a person, where ``persons`` says who is one."""
    if persons is not None:
        return by_person(difference, persons).mean(0)
    return torch.cat([value_SU.mean(0) / value_SU.shape[1] for value_SU in difference.values()])


def _effect_size(difference: PerDomain) -> float:
    sizes = []
    for value_SU in difference.values():
        value_U = value_SU.mean(0)
        mean, spread = float(value_U.mean()), float(value_U.std(correction=1)) if len(value_U) > 1 else 0.0
        sizes.append(0.0 if mean == 0 else mean / spread if spread > 0 else math.copysign(math.inf, mean))
    return sum(sizes) / len(sizes)


def _metric_values(per_domain: PerDomain, metrics: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    odd = [name for name in metrics if not re.fullmatch(r"(hit|ndcg|mrr|recall)@[1-9][0-9]*", str(name))]
    if odd or not metrics:
        raise ValueError(f"got metrics {odd or list(metrics)}, expected hit@k, ndcg@k or mrr@k, of baskets recall@k")
    cutoffs = sorted({int(name.partition("@")[2]) for name in metrics})
    values = {domain: _metrics(position, cutoffs) for domain, position in per_domain.items()}
    unknown = [name for name in metrics if any(name not in v for v in values.values())]
    if unknown:
        raise ValueError(f"got metrics {unknown}, expected hit@k, ndcg@k or mrr@k, of baskets recall@k")
    return {name: {domain: v[name] for domain, v in values.items()} for name in metrics}
