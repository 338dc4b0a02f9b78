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
from fedecider.evaluation.metrics import NO_ITEM, activity_buckets, popularity_groups, user_metrics
from fedecider.evaluation.protocols import held_out, train_parts
from fedecider.evaluation.statistics import bootstrap_intervals
from fedecider.federation.streams import stream
from fedecider.report.figures import group_bars
from fedecider.report.page import PageTable, Section
from fedecider.report.tables import interval_text

NUM_BUCKETS = 5
BUCKET_METRICS = ("hit@5", "ndcg@5")
INTERVALS = "Bars and whiskers: 95 % bootstrap over the users of the group."
SHARE_GROUPS = ("bottom 20 %", "middle 60 %", "top 20 %")
PAPER_GROUPS = ("inactive (bottom 2 % of items)", "active")

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
        counts = train_parts(domain.clients.sequences).length_U.tolist()
        num_buckets = min(NUM_BUCKETS, len(counts))
        bucket_U = activity_buckets(counts, domain.clients.users, num_buckets)
        count_U = torch.tensor(counts)
        tables[name] = [
            {
                "num_users": int((bucket_U == bucket).sum()),
                "train_events": _span(count_U[bucket_U == bucket]),
                "lines": _group_metrics(positions, name, bucket_U == bucket, f"activity {bucket}"),
            }
            for bucket in range(num_buckets)
        ]
    buckets = [bucket["lines"] for table in tables.values() for bucket in table]
    wins = {label: sum(_is_best(label, rows) for rows in buckets) for label in positions}
    return {"domains": tables, "wins": wins, "ties": len(buckets) - sum(wins.values())}


def popularity_table(
    domains: Mapping[str, Domain | Interactions], positions: RowPositions, kinds: Sequence[str] = ("shares", "paper")
) -> dict[str, Any]:
    """Domain -> groups of test cases by the training frequency of their target, each row's metrics with intervals.

    The frequency counts the train events of the domain's client users and nothing else. ``shares``: the test cases are
    sorted by frequency (ties by item key, then user key) and cut at 20 % and 80 %. ``paper`` (FeDecider, Fig. 7): the
    distinct targets of all domains together are sorted in the same way and the bottom 2 % are inactive. Both with
    ``num_cases`` and ``train_count`` [least, most]. ``warnings`` name empty groups; their values are None. ``kinds``:
    which of the two are wanted.
    Differs from the paper: the tie rule is ours, it has none.
    """
    counts = {name: train_counts(domain) for name, domain in domains.items()}
    held = {name: held_out(domain.clients.sequences, "test") for name, domain in domains.items()}
    is_case = {name: target_U != NO_ITEM for name, target_U in held.items()}  # of a basket every item is one
    targets = {name: target_U[is_case[name]] for name, target_U in held.items()}
    positions = {label: {name: one[is_case[name]] for name, one in of.items()} for label, of in positions.items()}
    inactive = _inactive(domains, counts, targets)
    result: dict[str, Any] = {**{kind: {} for kind in kinds}, "warnings": []}
    for name, domain in domains.items():
        count_U = counts[name][targets[name]]
        users = [domain.clients.users[row] for row in is_case[name].nonzero()[:, 0].tolist()]
        cases = [
            f"{domain.item_keys[item]}\x1f{user}" for item, user in zip(targets[name].tolist(), users, strict=True)
        ]
        if len(cases) >= NUM_BUCKETS:
            fifth_U = activity_buckets(count_U, cases, NUM_BUCKETS)
            masks = {SHARE_GROUPS[0]: fifth_U == 0, SHARE_GROUPS[1]: (fifth_U > 0) & (fifth_U < 4)}
            masks[SHARE_GROUPS[2]] = fifth_U == 4
        else:
            masks = {group: torch.zeros(len(cases), dtype=torch.bool) for group in SHARE_GROUPS}
        paper = dict(zip(PAPER_GROUPS, (inactive[name], ~inactive[name]), strict=True))
        tables = {"shares": masks, "paper": paper}
        for kind, groups in ((kind, tables[kind]) for kind in kinds):
            result[kind][name] = {
                group: {
                    "num_cases": int(mask_U.sum()),
                    "train_count": _span(count_U[mask_U]),
                    "lines": _group_metrics(positions, name, mask_U, group),
                }
                for group, mask_U in groups.items()
            }
            empty = [group for group, mask_U in groups.items() if not mask_U.any()]
            result["warnings"] += [f"{name} has no test case in the group {group}" for group in empty]
    return result


def train_counts(domain: Domain | Interactions) -> Tensor:
    """(I,) int64: how often each item occurs in the train parts of the client users."""
    events = train_parts(domain.clients.sequences).value_E.astype(np.int64)
    return torch.bincount(torch.from_numpy(events), minlength=len(domain.item_keys))


def _inactive(
    domains: Mapping[str, Domain | Interactions], counts: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Domain -> (U,) bool; the catalogues are laid end to end, so equal keys of two domains stay two items."""
    keys = [f"{key}\x1f{name}" for name, domain in domains.items() for key in domain.item_keys]
    pooled, offset = [], 0
    for name, domain in domains.items():
        pooled.append(targets[name] + offset)
        offset += len(domain.item_keys)
    mask = popularity_groups(torch.cat(pooled), torch.cat(list(counts.values())), keys)
    return dict(zip(domains, mask.split([len(target) for target in pooled]), strict=True))


def _group_metrics(positions: RowPositions, domain: str, mask_U: Tensor, group: str) -> dict[str, Any]:
    """Row -> metric -> interval over the users in ``mask_U``; None where there are none."""
    if not mask_U.any():
        return {label: dict.fromkeys(BUCKET_METRICS) for label in positions}
    values = {
        (label, metric): value_U[mask_U]
        for label, per_domain in positions.items()
        for metric, value_U in user_metrics(per_domain[domain], (5,)).items()
        if metric in BUCKET_METRICS
    }
    intervals = bootstrap_intervals(values, stream(0, "bootstrap", domain, group))  # all rows are resampled alike
    return {label: {metric: intervals[label, metric]._asdict() for metric in BUCKET_METRICS} for label in positions}


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
    paragraphs = [f"Users of each domain in five equal groups by number of train events, ties by user key. {INTERVALS}"]
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
    header = ["domain", "group", "train events", "users", "model", *BUCKET_METRICS]
    figure = group_bars(groups, "Test metrics by user activity (1 = fewest train events)", colours=colours)
    return Section("Active and less active users", paragraphs, [PageTable(header, rows, INTERVALS)], [figure])


def popularity_section(
    domains: Mapping[str, Domain], positions: RowPositions, colours: Mapping[str, str] = {}
) -> Section:
    """Of `popularity_table`."""
    found = popularity_table(domains, positions)
    paragraphs = [
        "Test cases by how often their target occurs in the train events of the domain's clients. Shares: the cases "
        "sorted by that count (ties by item key) and cut at 20 % and 80 %. Paper: the distinct targets of all domains "
        "together, the least frequent 2 % of them are inactive. Counts tie massively at the low end, so look at the "
        "counts beside the names."
    ]
    paragraphs += [f"Warning: {warning}." for warning in found["warnings"]]
    tables, figures = [], []
    for kind, title in (("shares", "Shares of the test cases"), ("paper", "The paper's definition")):
        rows = []
        for name, groups in found[kind].items():
            for label, group in groups.items():
                rows += group_rows([name, label, span(group["train_count"])], group["num_cases"], group)
        header = ["domain", "group", "train count of the target", "test cases", "model", *BUCKET_METRICS]
        tables.append(PageTable(header, rows, f"{title}. {INTERVALS}"))
        drawn = {
            name: {label: group["lines"] for label, group in groups.items()} for name, groups in found[kind].items()
        }
        figures.append(
            group_bars(drawn, f"Test metrics by popularity of the target ({title.lower()})", colours=colours)
        )
    return Section("Frequent and rare items", paragraphs, tables, figures)


def group_rows(start: Sequence[str], size: int, group: Mapping[str, Any]) -> list[list[str]]:
    """One row for each model; the group is named in the first one only."""
    return [
        [*(start if number == 0 else [""] * len(start)), str(size) if number == 0 else "", label]
        + [interval_text(metrics[metric], 3) for metric in BUCKET_METRICS]
        for number, (label, metrics) in enumerate(group["lines"].items())
    ]


def _bucket_label(number: int, bucket: Mapping[str, Any]) -> str:
    return f"{number + 1} ({span(bucket['train_events'])})"


def span(bounds: Sequence[int] | None) -> str:
    if bounds is None:
        return "-"
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"
