"""What an audit found: rows, the file in the run folder, the printed table, the section of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from fedecider.evaluation.statistics import Interval
from fedecider.federation.record import write_json
from fedecider.report.page import PageTable, Section
from fedecider.report.tables import interval_text, number_text
from fedecider.running.damage import read_object
from fedecider.running.run_folder import RunFolder, read_run

HEADER = ("who, and what it sees", "AUC", "TPR at 1 % FPR", "attack")
READING = (
    "AUC: the chance that a member scores above another; 0.5 is guessing. Brackets: 95 % bootstrap. Of a fixed family "
    "of attacks the one is reported that did best on other clients. A low number says that these attacks found "
    "nothing, not that nothing is there."
)


class AuditRow(NamedTuple):
    """How well one party tells members from others by what it sees."""

    party: str
    sees: str
    attack: str
    """The attack that was chosen most often."""
    auc: Interval
    true_positives: Interval | None
    """At `fedecider.audit.scores.FALSE_POSITIVES`; None where members are items of one client."""


class Outcome(NamedTuple):
    """An audit of one run."""

    run: str
    method: str
    about: str
    """What is guessed: ``items`` that a client trained on, or ``users`` on whom it trained."""
    utility: Interval
    """Test ndcg@10 of the reported row."""
    epsilon: str
    """As the run reports it, else ``none``."""
    bytes_up: float
    """Of a client in a round, mean."""
    rows: Sequence[AuditRow]
    notes: Sequence[str]


def finished(root: Path) -> tuple[RunFolder, dict[str, Any], dict[str, Any]]:
    """Folder, record and metrics of a run that has ended.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it did not finish, or a file is damaged.
    """
    folder, record = RunFolder(root), read_run(root)
    if not folder.results.is_file():
        raise ValueError(
            f"no results.md in {root}: the run did not finish, expected one that did. Go on with it: "
            f"scripts/federate.py --resume true --output {root} and the settings of the run"
        )
    return folder, record, read_object(folder.metrics)


def epsilon_of(metrics: Mapping[str, Any]) -> str:
    """``epsilon 3.2 at delta 1e-05`` where ``metrics.json`` states a guarantee, else ``none``.

    It holds one text, or one for each unit that is protected, such as ``users``.
    """
    stated = metrics.get("privacy", "")
    texts = {"": stated} if isinstance(stated, str) else {what: entry["text"] for what, entry in stated.items()}
    found = {what: text.partition(" over ")[0] for what, text in texts.items() if text.startswith("epsilon")}
    return ", ".join(f"{what}: {text}" if what else text for what, text in found.items()) or "none"


def write_outcome(folder: RunFolder, outcome: Outcome) -> None:
    """``audit.json``; a row has all that the table says of it, so that rows of several runs can be put together."""
    common = {name: value for name, value in _plain(outcome).items() if name not in ("rows", "notes")}
    rows = [{**common, **_plain(row)} for row in outcome.rows]
    write_json(folder.audit, {**common, "rows": rows, "notes": list(outcome.notes)})


def outcome_table(outcome: Outcome) -> Table:
    """For a terminal."""
    table = Table(title=f"Audit of {outcome.run}", show_edge=False, caption_justify="left")
    table.caption = "\n".join([_summary(_plain(outcome)), READING, *outcome.notes])
    for name in HEADER:
        table.add_column(name)
    for row in outcome.rows:
        table.add_row(*_cells(_plain(row)))
    return table


def audit_section(content: Mapping[str, Any]) -> list[Section]:
    """``audit.json`` as a section of a run's page; nothing for a run that was not audited."""
    if not content:
        return []
    table = PageTable(HEADER, [_cells(row) for row in content["rows"]])
    return [Section("Audit", [_summary(content), READING, *content["notes"]], [table])]


def _plain(value: Outcome | AuditRow) -> dict[str, Any]:
    return {name: one._asdict() if isinstance(one, Interval) else one for name, one in value._asdict().items()}


def _cells(row: Mapping[str, Any]) -> list[str]:
    found = row["true_positives"]
    rate = "-" if found is None else interval_text(found, 3)
    return [f"{row['party']}: {row['sees']}", interval_text(row["auc"], 3), rate, row["attack"]]


def _summary(content: Mapping[str, Any]) -> str:
    what = {"items": "which items a client trained on", "users": "which users a client trained on"}[content["about"]]
    return (
        f"{content['method']}, guessed is {what}; test ndcg@10 {interval_text(content['utility'])}, epsilon: "
        f"{content['epsilon']}, {number_text(content['bytes_up'], 0)} bytes up a client and round."
    )
