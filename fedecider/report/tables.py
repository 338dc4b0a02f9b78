"""Result tables: one block per domain and one for the macro mean, one line per method or baseline.

Every cell carries its interval and every table its protocol. Only distinguishable winners are bold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedecider.evaluation.metrics import CUTOFFS, MACRO
from fedecider.evaluation.protocols import Protocol, stamp
from fedecider.evaluation.statistics import Interval, Persons, metric_intervals

METRICS = ("hit@5", "hit@10", "ndcg@5", "ndcg@10")


class ResultRow(NamedTuple):
    """One line of a table: ``values`` is domain (or "macro") -> metric -> interval."""

    label: str
    values: Mapping[str, Mapping[str, Interval]]
    kind: str = "method"
    """"method", "baseline" or "canary"; the canary's macro hit@10 enters the stamp of a leaking protocol."""


class ResultTable(NamedTuple):
    """All lines of a table with what must be said under it."""

    rows: Sequence[ResultRow]
    protocol: Protocol
    notes: Sequence[str] = ()
    bold: Collection[tuple[str, str, str]] = ()
    """(domain, metric, label) of distinguishable winners, from ``statistics.distinguishable_winners``."""


def result_row(
    label: str,
    positions: Mapping[str, Tensor],
    generator: torch.Generator,
    kind: str = "method",
    cutoffs: Sequence[int] = CUTOFFS,
    persons: Persons | None = None,
) -> ResultRow:
    """The line of one method from its positions, domain -> (S, U) or (U,)."""
    return ResultRow(label, metric_intervals(positions, generator, cutoffs, persons=persons), kind)


def caption(table: ResultTable) -> list[str]:
    """The lines under a table: protocol stamp, what the intervals are, notes."""
    canary = [row.values[MACRO]["hit@10"].mean for row in table.rows if row.kind == "canary"]
    bold = ["bold: distinguishably above every other method (paired permutation test, Holm)"] if table.bold else []
    interval = "brackets: 95 % cluster bootstrap over users (and seeds, where there are several)"
    return [stamp(table.protocol, canary[0] if canary else None), interval, *bold, *table.notes]


def rich_table(table: ResultTable, metrics: Sequence[str] = METRICS, title: str | None = None) -> Table:
    """The table for a terminal (fits 80 columns): the interval stands under each mean."""
    out = Table(title=title, caption="\n".join(caption(table)), caption_justify="left", show_edge=False, pad_edge=False)
    out.add_column("")
    for metric in metrics:
        out.add_column(metric, justify="right")
    for domain in shown_domains(table.rows):
        out.add_row(Text(domain, style="bold cyan"))
        for row in table.rows:
            cells = [_rich_cell(row, domain, metric, table.bold) for metric in metrics]
            out.add_row(Text(f"  {row.label}", style="" if row.kind == "method" else "dim"), *cells)
        out.add_section()
    return out


def markdown_table(table: ResultTable, metrics: Sequence[str] = METRICS, title: str | None = None) -> str:
    """The table as Markdown, ending in a line break."""
    lines = [f"### {title}", ""] if title else []
    lines += ["| domain | method | " + " | ".join(metrics) + " |", "|---|---|" + "---:|" * len(metrics)]
    for domain in shown_domains(table.rows):
        for row in table.rows:
            cells = [_markdown_cell(row, domain, metric, table.bold) for metric in metrics]
            label = row.label.replace("|", "\\|")
            lines.append(
                f"| {domain} | {label if row.kind == 'method' else f'*{label}*'} | " + " | ".join(cells) + " |"
            )
    return "\n".join([*lines, "", *(f"- {line}" for line in caption(table))]) + "\n"


def table_data(table: ResultTable) -> dict[str, Any]:
    """The table as plain data for JSON: protocol, stamp, notes, rows -> domain -> metric -> mean, low, high."""
    rows = [
        {
            "label": row.label,
            "kind": row.kind,
            "values": {d: {name: value._asdict() for name, value in m.items()} for d, m in row.values.items()},
        }
        for row in table.rows
    ]
    lines = caption(table)
    bold = sorted(list(key) for key in table.bold)
    return {"protocol": table.protocol.name, "stamp": lines[0], "notes": lines[1:], "bold": bold, "rows": rows}


def plain_text(table: Table, width: int = 100) -> str:
    """A rich table as text without colours, for logs and tests."""
    console = Console(width=width, color_system=None, force_terminal=False, record=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def shown_domains(rows: Sequence[ResultRow]) -> list[str]:
    """Domains in the order of the first row, the macro mean last; it is left out when there is one domain only."""
    if not rows:
        raise ValueError("got a table without rows, expected at least one method")
    domains = [domain for domain in rows[0].values if domain != MACRO]
    other = [row.label for row in rows if set(row.values) != set(rows[0].values)]
    if other:
        raise ValueError(f"got other domains for {other} than for {rows[0].label}, expected the same in every row")
    return domains + ([MACRO] if len(domains) > 1 else [])


def _rich_cell(row: ResultRow, domain: str, metric: str, bold: Collection[tuple[str, str, str]]) -> Text:
    value = row.values[domain][metric]
    style = "bold" if (domain, metric, row.label) in bold else ""
    low, high = (f"{end:.3f}".removeprefix("0") for end in (value.low, value.high))
    return Text.assemble((f"{value.mean:.4f}", style), (f"\n[{low}, {high}]", "dim"))


def _markdown_cell(row: ResultRow, domain: str, metric: str, bold: Collection[tuple[str, str, str]]) -> str:
    value = row.values[domain][metric]
    mean = f"**{value.mean:.4f}**" if (domain, metric, row.label) in bold else f"{value.mean:.4f}"
    return f"{mean} [{value.low:.4f}, {value.high:.4f}]"
