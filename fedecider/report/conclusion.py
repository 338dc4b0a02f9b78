"""What stands first on a page: the answer, the few rows that it is about as a table, and a figure of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from rich.table import Table
from rich.text import Text

from fedecider.report.answer import Evidence, answer_of, best_rule, difference, finite, points, units
from fedecider.report.figures import client_bars, colours_of
from fedecider.report.page import Conclusion, PageTable
from fedecider.report.tables import compared, percent_text

DRAWN = 12
"""Companies whose bars still fit a phone, one below the other."""
FIRST = 3
"""Rows of it that a terminal shows."""
RULE = "best baseline"
MARK = "▶ "
"""Before the row that the answer is about."""


def conclusion(evidence: Evidence, about: Sequence[str] = ()) -> Conclusion:
    """The answer with its table and figure; ``about``: what was run, and what else is worth a paragraph."""
    return Conclusion(answer_of(evidence), about, _table(evidence), _figure(evidence))


def shown_rows(evidence: Evidence) -> dict[str, str]:
    """The rows that a reader asks for first -> what each is: the subject, what is alone, the best baseline."""
    best = best_rule(evidence)
    rows = {
        evidence.subject: "together" if evidence.alone else "what would be used",
        **({evidence.alone: "each company alone"} if evidence.alone else {}),
        **({best: RULE} if best else {}),
        **evidence.beside,
        **evidence.before_rounds,
    }
    return {label: what for label, what in rows.items() if label in evidence.rows}


def _table(evidence: Evidence) -> PageTable:
    rows, metrics = [], compared(evidence.rows[evidence.subject])
    for label, what in shown_rows(evidence).items():
        hit, ndcg = (percent_text(evidence.rows[label][metric]) for metric in metrics)
        gain = difference(evidence, evidence.subject, label)
        less = points(gain) if gain is not None else "-"
        if label == evidence.subject:
            what, less = f"{MARK}{what}", ""
        rows.append([what, label, hit, less, ndcg])
    caption = (
        f"{metrics[0]}: of 100 {units(evidence)[0]}, how many {units(evidence)[1]}. ndcg@10, also up to 100, counts "
        "higher places more. Brackets and bars: 95 % intervals over customers. "
        f"{MARK}leads by: {metrics[0]} of {MARK}minus that of the row. Baselines need no training and know a company's "
        "own data"
    )
    return PageTable(("", "name in files", metrics[0], f"{MARK}leads by", "ndcg@10"), rows, caption)


def console_table(conclusion: Conclusion) -> Table:
    """The first rows of the table of a conclusion for a terminal of 80 columns."""
    assert conclusion.table is not None, "a conclusion has a table"
    out = Table(box=None, pad_edge=False)
    for number, name in enumerate(("", *conclusion.table.header[2:4])):
        out.add_column(name, justify="right" if number else "left", no_wrap=bool(number))
    for what, label, hit, gain, _ in conclusion.table.rows[:FIRST]:
        name = f"{RULE}: {label}" if what == RULE else what
        out.add_row(*map(Text, (name, hit, gain)), style="bold" if what.startswith(MARK) else "")
    return out


def _figure(evidence: Evidence) -> go.Figure:
    """The subject, what is alone and the best baseline, company by company; the mean alone where they are many."""
    kept = [label for label in shown_rows(evidence) if label in (evidence.subject, evidence.alone, best_rule(evidence))]
    shown = evidence.domains if len(evidence.domains) <= DRAWN else {}
    parts = {"mean" if evidence.domains else f"all {units(evidence)[0]}": evidence.rows, **shown}
    values = {
        label: {name: _of_100(rows.get(label, {}).get(evidence.lead)) for name, rows in parts.items()} for label in kept
    }
    title = f"Of 100 {units(evidence)[0]}, how many {units(evidence)[1]}"
    if len(evidence.domains) > DRAWN:
        title += f". The mean alone: {len(evidence.domains)} companies are too many for one figure, see Joining"
    if any(interval is None for of_label in values.values() for interval in of_label.values()):
        title += ". No bar: it is not a number"
    return client_bars(values, title, colours_of(list(evidence.rows)))


def _of_100(value: Mapping[str, Any] | None) -> dict[str, float] | None:
    """None for what is not a number."""
    if value is None or not all(finite(value[end]) for end in ("mean", "low", "high")):
        return None
    return {end: 100 * value[end] for end in ("mean", "low", "high")}
