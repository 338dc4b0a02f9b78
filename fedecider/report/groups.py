"""Figures of users by how active they are and of items by how often they are taken, as FeDecider's figures 6 and 7.

Shape legend: U users of a domain, I items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedecider.data.domain import Domain
from fedecider.data.interactions import Interactions
from fedecider.evaluation.metrics import NO_ITEM, activity_buckets, user_metrics
from fedecider.evaluation.protocols import held_out, train_parts, with_target
from fedecider.evaluation.statistics import mean_interval
from fedecider.report.figures import group_bars
from fedecider.report.page import PageTable, Section
from fedecider.report.tables import percent_text

NUM_BUCKETS = 5
BUCKET_METRICS = ("hit@5", "ndcg@5")
INTERVALS = "Bars and whiskers: 95 % intervals over the users of the group."
SHARE_GROUPS = ("bottom 20 %", "middle 60 %", "top 20 %")

RowPositions = Mapping[str, Mapping[str, Tensor]]
"""Label of a row -> domain -> (U,) test positions, users in the domain's order."""


def activity_table(domains: Mapping[str, Domain | Interactions], positions: RowPositions) -> dict[str, Any]:
    """Domain -> five equal groups of users by train events (ties by user key), each row's metrics with intervals.

    Per bucket: ``num_users``, ``train_events`` [least, most], ``lines``: row -> metric -> interval. Fewer groups when
    a domain has fewer than five users. ``wins``: row -> buckets (of all domains) in which its hit@5 is strictly
    above every other row's; ``ties``: the remaining buckets (FeDecider, Fig. 6).
    """
    tables: dict[str, Any] = {}
    for name, domain in domains.items():
        count_U = torch.from_numpy(train_parts(domain.clients.sequences).length_U)
        tested = with_target(domain.clients.sequences, "test").tolist()
        num_buckets = min(NUM_BUCKETS, len(tested))
        bucket_U = torch.full_like(count_U, -1)
        users = [domain.clients.users[user] for user in tested]
        bucket_U[tested] = activity_buckets(count_U[tested], users, num_buckets)
        tables[name] = [
            {
                "num_users": int((bucket_U == bucket).sum()),
                "train_events": _span(count_U[bucket_U == bucket]),
                "lines": _group_metrics(positions, name, bucket_U == bucket),
            }
            for bucket in range(num_buckets)
        ]
    buckets = [bucket["lines"] for table in tables.values() for bucket in table]
    wins = {label: sum(_is_best(label, rows) for rows in buckets) for label in positions}
    return {"domains": tables, "wins": wins, "ties": len(buckets) - sum(wins.values())}


def popularity_table(
    domains: Mapping[str, Domain | Interactions], positions: RowPositions
) -> dict[str, dict[str, Any]]:
    """Domain -> groups of test cases by the training frequency of their target, each row's metrics with intervals.

    The frequency counts the train events of the domain's client users and nothing else. The test cases are sorted by it
    (ties by item key, then user key) and cut at 20 % and 80 %; with ``num_cases`` and ``train_count`` [least, most].
    Differs from FeDecider, Fig. 7: there the 2 % of the targets with the lowest frequency stand against all others.
    """
    result: dict[str, dict[str, Any]] = {}
    for name, domain in domains.items():
        target_U = held_out(domain.clients.sequences, "test")
        is_case = target_U != NO_ITEM  # of a basket every item is one
        item_N, of_rows = target_U[is_case], {label: {name: of[name][is_case]} for label, of in positions.items()}
        count_N = train_counts(domain)[item_N]
        users = [domain.clients.users[row] for row in is_case.nonzero()[:, 0].tolist()]
        cases = [f"{domain.item_keys[item]}\x1f{user}" for item, user in zip(item_N.tolist(), users, strict=True)]
        fifth_N = torch.full((len(cases),), -1)
        if len(cases) >= NUM_BUCKETS:
            fifth_N = activity_buckets(count_N, cases, NUM_BUCKETS)
        masks = (fifth_N == 0, (fifth_N > 0) & (fifth_N < 4), fifth_N == 4)
        result[name] = {
            group: {
                "num_cases": int(mask_N.sum()),
                "train_count": _span(count_N[mask_N]),
                "lines": _group_metrics(of_rows, name, mask_N),
            }
            for group, mask_N in zip(SHARE_GROUPS, masks, strict=True)
        }
    return result


def train_counts(domain: Domain | Interactions) -> Tensor:
    """(I,) int64: how often each item occurs in the train parts of the client users."""
    events = train_parts(domain.clients.sequences).value_E.astype(np.int64)
    return torch.bincount(torch.from_numpy(events), minlength=len(domain.item_keys))


def _group_metrics(positions: RowPositions, domain: str, mask_U: Tensor) -> dict[str, Any]:
    """Row -> metric -> interval over the users in ``mask_U``; None where there are none."""
    if not mask_U.any():
        return {label: dict.fromkeys(BUCKET_METRICS) for label in positions}
    values = {label: user_metrics(per_domain[domain][mask_U], (5,)) for label, per_domain in positions.items()}
    return {
        label: {metric: mean_interval(of_label[metric])._asdict() for metric in BUCKET_METRICS}
        for label, of_label in values.items()
    }


def _is_best(label: str, rows: Mapping[str, Any]) -> bool:
    means = {name: metrics["hit@5"]["mean"] for name, metrics in rows.items()}
    return all(means[label] > mean for name, mean in means.items() if name != label)


def _span(count_U: Tensor) -> list[int] | None:
    return [int(count_U.min()), int(count_U.max())] if len(count_U) else None


def activity_section(
    domains: Mapping[str, Domain], positions: RowPositions, colours: Mapping[str, str] = {}
) -> Section:
    """Of `activity_table`. ``colours``: of rows, as the other figures of the page show them."""
    found, labels = activity_table(domains, positions), list(positions)
    paragraphs = [
        f"Users of each company in five equal groups by number of train events, ties by user key. {INTERVALS}"
    ]
    if len(labels) > 1:
        wins = ", ".join(f"{label} {found['wins'][label]}" for label in labels)
        paragraphs.append(
            f"Groups in which a model's mean hit@5 is above: {wins}; equal: {found['ties']}. These counts ignore the "
            "intervals; where those overlap widely a win says little."
        )
    groups, rows = {}, []
    for name, buckets in found["domains"].items():
        groups[name] = {_bucket_label(number, bucket): bucket["lines"] for number, bucket in enumerate(buckets)}
        for number, bucket in enumerate(buckets):
            rows += group_rows([name, str(number + 1), span(bucket["train_events"])], bucket["num_users"], bucket)
    header = ["company", "group", "train events", "users", "model", *BUCKET_METRICS]
    figure = group_bars(groups, "Test metrics by user activity (1 = fewest train events)", colours=colours)
    return Section("Active and less active users", paragraphs, [PageTable(header, rows, INTERVALS)], [figure])


def popularity_section(
    domains: Mapping[str, Domain], positions: RowPositions, colours: Mapping[str, str] = {}
) -> Section:
    """Of `popularity_table`."""
    found, title = popularity_table(domains, positions), "Test metrics by popularity of the item"
    paragraph = (
        "Test cases in three groups by how often their item occurs in the company's train events: the lowest 20 %, the "
        "middle 60 %, the highest 20 %. Many items occur equally often, so look at the counts."
    )
    rows = []
    for name, groups in found.items():
        for label, group in groups.items():
            rows += group_rows([name, label, span(group["train_count"])], group["num_cases"], group)
    header = ["company", "group", "train events of the item", "test cases", "model", *BUCKET_METRICS]
    drawn = {name: {label: group["lines"] for label, group in groups.items()} for name, groups in found.items()}
    figure = group_bars(drawn, title, colours=colours)
    return Section("Frequent and rare items", [paragraph], [PageTable(header, rows, INTERVALS)], [figure])


def group_rows(start: Sequence[str], size: int, group: Mapping[str, Any]) -> list[list[str]]:
    """One row for each model; the group is named in the first one only."""
    return [
        [*(start if number == 0 else [""] * len(start)), str(size) if number == 0 else "", label]
        + [percent_text(metrics[metric]) for metric in BUCKET_METRICS]
        for number, (label, metrics) in enumerate(group["lines"].items())
    ]


def _bucket_label(number: int, bucket: Mapping[str, Any]) -> str:
    return f"{number + 1} ({span(bucket['train_events'])})"


def span(bounds: Sequence[int] | None) -> str:
    if bounds is None:
        return "-"
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"
