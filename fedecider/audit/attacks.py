"""What an audit found: its rows, the file in the output directory, the printed table, and the section of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from fedecider.bounds import OneOrMore, Seed, ZeroOrMore, dataclass
from fedecider.engine.result import RunResult, damage_is_bad_input
from fedecider.evaluation.statistics import Interval
from fedecider.federation.record import write_json
from fedecider.report.page import PageTable, Section
from fedecider.report.tables import interval_text, number_text
from fedecider.running.manifest import note_changed
from fedecider.running.run_folder import RunFolder, read_run, refuse_site


@dataclass(frozen=True)
class AuditConfig:
    """Audit: of which run, and how far.

    Args:
        run: The output directory that scripts/federate.py printed.
        data: The folder of the data, when it is not where the run found it: prepared domains (cross-silo track) or the
            raw files (cross-device track).
        num_rounds: Cross-device track: the number of rounds, from the first on, that are done again and watched; never
            more than the run had.
        num_clients: Cross-device track: the number of clients, drawn once, that are attacked; 0 takes all.
        num_events: Cross-silo track: the number of newest train events of a user that the attack asks the model about.
        num_users: Cross-silo track: the largest number of members, and of others, of a client that are attacked, drawn
            once; 0 takes all.
        seed: The seed of what is drawn here: who is attacked, halves of clients, intervals.
    """

    run: str
    data: str = ""
    num_rounds: OneOrMore = 3
    num_clients: ZeroOrMore = 200
    num_events: OneOrMore = 5
    num_users: ZeroOrMore = 0
    seed: Seed = 0


HEADER = ("who, and what it sees", "AUC", "TPR at 1 % FPR", "attack")
READING = (
    "AUC: the chance that a member scores above another; 0.5 is guessing. Brackets: 95 % intervals. Of a fixed family "
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
    """At `fedecider.audit.separation.FALSE_POSITIVES`; None where members are items of one client."""


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


def utility_of(result: RunResult, root: Path) -> Interval:
    """Test ndcg@10 of the reported entry of the run in ``root``, with its interval."""
    with damage_is_bad_input(root):
        best = result.test[result.reported]["ndcg@10"]
        return Interval(*(float(best[name]) for name in Interval._fields))


def finished(root: Path) -> tuple[RunFolder, RunResult]:
    """Folder and result of a run that has ended.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it did not finish, or a file is damaged.
    """
    folder = RunFolder(root)
    refuse_site(root, read_run(root))
    if not folder.results.is_file():
        raise ValueError(
            f"no results.md in {root}: the run did not finish, expected one that did. Go on with it: "
            f"scripts/federate.py --resume true --output {root} and the settings of the run"
        )
    return folder, RunResult.read(root)


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
    note_changed(folder.root, [folder.audit])


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
