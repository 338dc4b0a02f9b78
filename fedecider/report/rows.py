"""The rows of a result table, for both tracks: what they are called, of which kind they are, and their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedecider.evaluation.persons import PerDomain, Persons
from fedecider.evaluation.statistics import Comparison, Interval, table_intervals
from fedecider.federation.streams import stream

METRICS = ("hit@5", "hit@10", "ndcg@5", "ndcg@10")
"""What a table shows."""
COMPARED = ("hit@10", "ndcg@10")
"""What is tested between rows."""
CANARY = "memoriser"
"""The baseline that learns nothing, by name."""


class ResultRow(NamedTuple):
    """One row of a table: ``values`` is domain (or "macro") -> metric -> interval."""

    label: str
    values: Mapping[str, Mapping[str, Interval]]
    kind: str = "method"
    """"method", "baseline" or "canary"; the canary's macro hit@10 enters the stamp of a leaking protocol."""


def result_rows(
    methods: Mapping[str, PerDomain],
    baselines: Mapping[str, PerDomain] | None = None,
    persons: Persons | None = None,
) -> list[ResultRow]:
    """One row for each label with its intervals, baselines last; the memoriser among them is the canary.

    Both map a label to domain -> positions, (S, U) or (U,). Every row is resampled alike, whatever stands beside it.
    """
    baselines = baselines or {}
    kinds = {**dict.fromkeys(methods, "method"), **dict.fromkeys(baselines, "baseline")}
    kinds |= {CANARY: "canary"} if CANARY in baselines else {}
    intervals = table_intervals({**methods, **baselines}, stream(0, "bootstrap"), persons=persons)
    return [ResultRow(label, intervals[label], kind) for label, kind in kinds.items()]


def rows_data(rows: Sequence[ResultRow], domain: str) -> dict[str, dict[str, dict[str, float]]]:
    """The rows of one domain as plain data: label -> metric -> mean, low, high."""
    return {row.label: {name: value._asdict() for name, value in row.values[domain].items()} for row in rows}


def comparisons_data(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Paired tests as plain data, for JSON and for `fedecider.report.verdict`."""
    return [{**one._asdict(), "difference": one.difference._asdict()} for one in comparisons]


def view_labels(method: str, views: Sequence[str]) -> dict[str, str]:
    """View -> label of its row: the method's name, with the view where it has several."""
    return {view: f"{method} ({view})" if len(views) > 1 else method for view in views}


def view_of(label: str) -> str:
    """``global`` of ``fedavg (global)``."""
    return label.rpartition("(")[2].rstrip(")")
