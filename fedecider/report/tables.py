"""Result tables: entries with intervals, a block per domain and one for the macro mean; terminal, Markdown, CSV.

Every cell carries its interval and every table its protocol. Only distinguishable winners are bold.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text

from fedecider.evaluation.metrics import MACRO, user_metrics
from fedecider.evaluation.protocols import Protocol, stamp
from fedecider.evaluation.statistics import (
    Comparison,
    Interval,
    PerDomain,
    Persons,
    paired_difference,
    shared_persons,
    table_intervals,
)

METRICS = ("hit@5", "hit@10", "ndcg@5", "ndcg@10")
"""What a table shows."""
COMPARED = ("hit@10", "ndcg@10")
"""What is tested between rows."""
BASKET_METRICS = ("recall@5", "recall@10", "ndcg@5", "ndcg@10", "hit@10")
BASKETS_COMPARED = ("recall@10", "ndcg@10")
"""The same where whole baskets are held out."""
LEADS = (COMPARED[0], BASKETS_COMPARED[0])
"""By which results are told: share of users who find their item, or of the items of a basket that are found."""
CANARY = "memoriser"
"""The baseline that learns nothing, by name."""


def shown_metrics(values: Collection[str]) -> tuple[str, ...]:
    """What a table shows of entries with these metrics."""
    return BASKET_METRICS if BASKETS_COMPARED[0] in values else METRICS


def compared(values: Collection[str]) -> tuple[str, str]:
    """What is tested between entries with these metrics, and what they are told by first."""
    return BASKETS_COMPARED if BASKETS_COMPARED[0] in values else COMPARED


def compared_by(positions: Mapping[str, PerDomain]) -> tuple[str, str]:
    """`compared` of positions as tables take them, label -> domain -> (S, U) or (U,), of baskets (S, U, T)."""
    is_of_baskets = any(one.ndim == 3 for per_domain in positions.values() for one in per_domain.values())
    return BASKETS_COMPARED if is_of_baskets else COMPARED


def seed_gains(
    positions: Mapping[str, PerDomain], subject: str, alone: str, users: Mapping[str, Sequence[str]]
) -> tuple[list[float], float]:
    """The difference of the subject and what is alone in each training run, mean over clients, by what they are told
    by; and the share of its variance that runs have. ``positions``: entry -> client -> (S, U), of baskets (S, U, T)."""

    def values(label: str) -> dict[str, torch.Tensor]:
        every = {client: [user_metrics(place) for place in of_client] for client, of_client in positions[label].items()}
        lead = compared(next(iter(every.values()))[0])[0]
        return {client: torch.stack([of_run[lead] for of_run in runs]) for client, runs in every.items()}

    first, second = values(subject), values(alone)
    gain_S = torch.stack([(first[client] - second[client]).double().mean(1) for client in first]).mean(0)
    return gain_S.tolist(), paired_difference(first, second, shared_persons(users)).seed_share


class ResultRow(NamedTuple):
    """One row of a table: ``values`` is domain (or "macro") -> metric -> interval."""

    label: str
    values: Mapping[str, Mapping[str, Interval]]
    kind: str = "method"
    """"method", "baseline" or "canary"; the canary's macro hit@10 enters the stamp of a leaking protocol."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """What a table shows of it."""
        return shown_metrics(next(iter(self.values.values())))


def result_rows(
    methods: Mapping[str, PerDomain],
    baselines: Mapping[str, PerDomain] | None = None,
    persons: Persons | None = None,
) -> list[ResultRow]:
    """One row for each label with its intervals, baselines last; the memoriser among them is the canary.

    Both map a label to domain -> positions, (S, U) or (U,), of baskets (S, U, T).
    """
    baselines = baselines or {}
    kinds = {**dict.fromkeys(methods, "method"), **dict.fromkeys(baselines, "baseline")}
    kinds |= {CANARY: "canary"} if CANARY in baselines else {}
    intervals = table_intervals({**methods, **baselines}, persons=persons)
    return [ResultRow(label, intervals[label], kind) for label, kind in kinds.items()]


def rows_data(rows: Sequence[ResultRow], domain: str) -> dict[str, dict[str, dict[str, float]]]:
    """The rows of one domain as plain data: label -> metric -> mean, low, high."""
    return {row.label: {name: value._asdict() for name, value in row.values[domain].items()} for row in rows}


def comparisons_data(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Paired tests as plain data, for JSON and for `fedecider.report.conclusion`."""
    return [{**one._asdict(), "difference": one.difference._asdict()} for one in comparisons]


def variant_labels(method: str, variants: Sequence[str]) -> dict[str, str]:
    """Variant -> label of its row: the method's name, with the variant where it has several."""
    return {variant: f"{method} ({variant})" if len(variants) > 1 else method for variant in variants}


def variant_of(label: str) -> str:
    """``global`` of ``fedavg (global)``."""
    return label.rpartition("(")[2].rstrip(")")


ENDS = ("mean", "low", "high")


class ResultTable(NamedTuple):
    """All rows of a table with what must be said under it."""

    rows: Sequence[ResultRow]
    protocol: Protocol
    notes: Sequence[str] = ()
    bold: Collection[tuple[str, str, str]] = ()
    """(domain, metric, label) of distinguishable winners, from ``statistics.distinguishable_winners``."""


def caption(table: ResultTable) -> list[str]:
    """What stands under a table: protocol stamp, what the intervals are, notes."""
    scope = shown_domains(table.rows)[-1]
    canary = [row.values[scope]["hit@10"].mean for row in table.rows if row.kind == "canary"]
    bold = ["bold: distinguishably above every other method (paired t test, Holm)"] if table.bold else []
    interval = "brackets: 95 % intervals over users, and seeds where there are several"
    return [stamp(table.protocol, canary[0] if canary else None), interval, *bold, *table.notes]


def rich_table(table: ResultTable, title: str | None = None) -> Table:
    """The table for a terminal (fits 80 columns): a line a row, the intervals beside the means."""
    said, metrics = caption(table), compared(table.rows[0].metrics)
    out = Table(title=title, caption="\n".join(said), caption_justify="left", show_edge=False, pad_edge=False)
    out.add_column("")
    for metric in metrics:
        out.add_column(metric, justify="right", no_wrap=True)
    domains = shown_domains(table.rows)
    for domain in domains:
        if len(domains) > 1:
            out.add_row(Text(domain, style="bold cyan"))
        for row in table.rows:
            cells = [_rich_cell(row, domain, metric, table.bold) for metric in metrics]
            out.add_row(Text(f"  {row.label}", style="" if row.kind == "method" else "dim"), *cells)
        out.add_section()
    return out


def markdown_table(table: ResultTable, title: str | None = None) -> str:
    """The table as Markdown, ending in a line break."""
    domains = shown_domains(table.rows)
    metrics, rows = table.rows[0].metrics, []
    for domain in domains:
        for row in table.rows:
            label = row.label if row.kind == "method" else f"*{row.label}*"
            values = ((metric, row.values[domain][metric]) for metric in metrics)
            cells = [interval_text(value, bold=(domain, metric, row.label) in table.bold) for metric, value in values]
            rows.append([domain, label, *cells])
    heading = [f"### {title}", ""] if title else []
    grid = markdown_grid(["domain", "method", *metrics], rows, metrics)
    return "\n".join([*heading, *grid, "", *(f"- {note}" for note in caption(table))]) + "\n"


def markdown_grid(header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Lines of a Markdown table; the columns named in ``right`` are set to the right."""
    ends = ["---:" if name in right else "---" for name in header]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(header)} |", f"|{'|'.join(ends)}|", *(f"| {' | '.join(row)} |" for row in cells)]


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Header and rows as CSV, numbers unrounded."""
    import pandas as pd  # --help does without

    return pd.DataFrame(list(rows), columns=list(header), dtype=object).to_csv(index=False)


def comparisons_csv(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Paired tests (`comparisons_data`) as CSV, numbers unrounded."""
    import pandas as pd

    names = ["domain", "metric", "first", "second", "difference", "low", "high", "p_value", "p_holm", "effect_size"]
    rows = [{**test, **test["difference"], "difference": test["difference"]["mean"]} for test in comparisons]
    return pd.DataFrame(rows, dtype=object).to_csv(index=False, columns=names)


def interval_text(value: Interval | Mapping[str, Any] | None, digits: int = 4, bold: bool = False) -> str:
    """``0.1234 [0.1100, 0.1400]``; a dash for what there is none of."""
    if value is None:
        return "-"
    found = value._asdict() if isinstance(value, Interval) else value
    mean, low, high = (number_text(found[name], digits) for name in ENDS)
    return f"{f'**{mean}**' if bold else mean} [{low}, {high}]"


def percent_text(value: Interval | Mapping[str, Any] | float | None) -> str:
    """``12.3``, or ``12.3 [11.0, 14.0]``: times 100, as the page of a run shows scores; a dash for what is not
    finite."""
    if isinstance(value, Interval | Mapping):
        of_end = value._asdict() if isinstance(value, Interval) else value
        mean, low, high = (percent_text(of_end[end]) for end in ENDS)
        return mean if "-" in (mean, low, high) else f"{mean} [{low}, {high}]"
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.1f}"


def number_text(value: float | None, digits: int = 4) -> str:
    """The number with so many decimals; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def shown_domains(rows: Sequence[ResultRow]) -> list[str]:
    """Domains in the order of the first row, the macro mean last; it is left out beside a single domain."""
    if not rows:
        raise ValueError("got a table without rows, expected at least one method")
    domains = [domain for domain in rows[0].values if domain != MACRO]
    other = [row.label for row in rows if set(row.values) != set(rows[0].values)]
    if other:
        raise ValueError(f"got other domains for {other} than for {rows[0].label}, expected the same in every row")
    return domains if len(domains) == 1 else [*domains, MACRO]


def _rich_cell(row: ResultRow, domain: str, metric: str, bold: Collection[tuple[str, str, str]]) -> Text:
    value = row.values[domain][metric]
    style = "bold" if (domain, metric, row.label) in bold else ""
    low, high = (f"{end:.3f}".removeprefix("0") for end in (value.low, value.high))
    return Text.assemble((f"{value.mean:.3f}", style), (f" [{low}, {high}]", "dim"))
