"""Finished runs of any track beside each other, read from their folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedecider.comparison.compare import Cell, Entry, Plan, Row, collect
from fedecider.engine.result import RunResult
from fedecider.engine.track import track_of_config
from fedecider.evaluation.protocols import get_protocol
from fedecider.evaluation.statistics import shared_persons
from fedecider.federation.record import write_text
from fedecider.report.tables import ResultRow, ResultTable, caption, compared, shown_domains
from fedecider.running.run_folder import RunFolder, check_output

ALONE = "alone"
"""Row of what companies have alone."""


class Comparison(NamedTuple):
    """Runs of several labels on the same data: means over seeds and users, paired tests against the first label."""

    table: Any
    """One row a label: ``seeds``; hit@10 and ndcg@10 as mean over clients, with ``_low`` and ``_high`` (95 % t
    intervals over users and seeds) and ``_p_holm`` against the first label, NaN for that one."""
    per_client: Any
    """One row a label and client, with the columns of ``table`` but the tests."""
    tests: Any
    """One row a test: ``metric``, ``first`` and ``second`` label, ``difference`` (second minus first) with ``low`` and
    ``high``, ``p_value``, ``p_holm``, ``effect_size``."""
    caption: Sequence[str]
    """What the numbers are, in sentences."""
    recommendation: str = ""
    """As `fedecider.result.Result.recommendation`, over all runs of the best label on validation."""
    verdict: str = ""
    """The same as `fedecider.result.Result.verdict`."""

    def __str__(self) -> str:
        table = self.table.to_string(float_format="{:.4f}".format)
        return "\n".join([table, *self.caption, *([self.verdict] if self.verdict else [])])

    def _repr_html_(self) -> str:
        said = "".join(f"<div>{escape(line)}</div>" for line in self.caption)
        return self.table.to_html(float_format="{:.4f}".format) + said

    def save(self, folder: str | Path) -> Path:
        """Write ``table.csv``, ``per_client.csv``, ``tests.csv`` and ``table.html`` into ``folder``, and return it."""
        root = Path(folder)
        check_output(root)
        root.mkdir(parents=True, exist_ok=True)
        self.table.to_csv(root / "table.csv")
        self.per_client.to_csv(root / "per_client.csv")
        self.tests.to_csv(root / "tests.csv", index=False)
        write_text(root / "table.html", f"<!doctype html><meta charset=utf-8>{self._repr_html_()}\n")
        return root


def compare_runs(labels: Mapping[str, Sequence[str | Path]]) -> Comparison:
    """Finished output directories beside each other, one per seed and label, of whatever track.

    A row is what each run would use, with its ensemble; ``alone`` is what companies have alone, where they
    trained beside the rounds. Users are paired, and who is a user of several clients is one person
    (`fedecider.evaluation.statistics`).

    Raises:
        ValueError: no label; a run that did not finish or stands there twice; labels with different numbers of runs;
            runs on other data or under another protocol than the first one.
        FileNotFoundError: a folder holds no run.
    """
    import pandas as pd  # --help does without

    if not labels or not all(labels.values()):
        raise ValueError(f"got {dict(labels)}, expected label -> folders of finished runs, one at least for each label")
    sizes = {label: len(folders) for label, folders in labels.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"got numbers of runs {sizes}, expected the same seeds for every label")
    every = [Path(folder).resolve() for folders in labels.values() for folder in folders]
    if twice := [str(folder) for folder in dict.fromkeys(every) if every.count(folder) > 1]:
        raise ValueError(f"got the run {twice[0]} twice, expected each once: one per label and seed")
    runs = {label: [_finished(Path(folder)) for folder in folders] for label, folders in labels.items()}
    base = next(iter(labels))
    first = runs[base][0]
    for label, of_label in runs.items():
        for folder, run in zip(labels[label], of_label, strict=True):
            alike = zip(("protocol", "data", "users"), _on_what(run), _on_what(first), strict=True)
            if other := [name for name, own, expected in alike if own != expected]:
                raise ValueError(
                    f"got other {other[0]} in {folder} ({label}) than in {labels[base][0]}, expected the same in all "
                    "runs that are compared"
                )
    rows = [_row_of(label, of_label, _subject) for label, of_label in runs.items()]
    with_alone = [of_label for of_label in runs.values() if all(map(_alone, of_label))]
    if with_alone and not {ALONE, "local"} & {*runs}:
        rows.append(_row_of(ALONE, with_alone[0], _alone))
    entries = [row.entry for row in rows]
    plan = Plan("", Path(), entries, [first.protocol], first.users, sizes[base], against=[base], each_client=False)
    results = collect(plan, rows).results[first.protocol]
    scope, shown = shown_domains(results.rows)[-1], [row.label for row in results.rows]
    corrected = {(one.second, one.metric): one.p_holm for one in results.tests}
    tested = compared(results.rows[0].metrics)
    holm = {name: [corrected.get((label, name), math.nan) for label in shown] for name in tested}
    notes = [f"p: paired t test over users and seeds against {base}, Holm over the table"] if results.tests else []
    notes += ["who is a user of several clients counts once"] if shared_persons(first.users) else []
    table = pd.DataFrame([_values(row, scope, plan.seeds) for row in results.rows], index=shown)
    tests = []
    for one in results.tests:
        mean, low, high = one.difference
        tests.append({**one._asdict(), "difference": -mean, "low": -high, "high": -low})
    columns = ["metric", "first", "second", "difference", "low", "high", "p_value", "p_holm", "effect_size"]
    per_client = {(row.label, name): _values(row, name, plan.seeds) for row in results.rows for name in first.users}
    return Comparison(
        table.assign(**{f"{name}_p_holm": column for name, column in holm.items()}).rename_axis("label"),
        pd.DataFrame.from_dict(per_client, orient="index").rename_axis(["label", "client"]),
        pd.DataFrame(tests, columns=columns),
        caption(ResultTable(results.rows, get_protocol(first.protocol), notes)),
        *_answer(runs),
    )


def _finished(root: Path) -> RunResult:
    if RunFolder(root).record.is_file() and not RunFolder(root).results.is_file():
        raise ValueError(f"got {root}, a run that did not finish, expected finished ones: go on with it (resume)")
    run = RunResult.read(root)
    if run.reported not in run.positions:
        raise ValueError(f"got no users of {run.reported} in {root}, expected those of the run")
    return run


def _on_what(run: RunResult) -> tuple[str, dict[str, str], Mapping[str, Sequence[str]]]:
    """Protocol, hash of the data by client, users by client."""
    return run.protocol, {name: run.record["data"].get(name, "") for name in run.positions[run.reported]}, run.users


def _row_of(label: str, runs: Sequence[RunResult], entry_of: Callable[[RunResult], str]) -> Row:
    def cell(run: RunResult) -> Cell:
        return Cell({label: math.nan}, lambda: {run.protocol: {label: dict(run.positions[entry_of(run)])}})

    cells = [cell(run) for run in runs]
    return Row(Entry(label, label, "", [runs[0].protocol], lambda setting, seed: cells[seed]), {}, [], cells)


def _subject(run: RunResult) -> str:
    """The entry that one would use."""
    track = track_of_config(run.settings)
    return str(track.part("conclusion")(run).answer.subject) if track.conclusion else run.reported


def _alone(run: RunResult) -> str:
    """The entry of what companies have alone; empty where nobody trained alone."""
    return str(run.metrics.get("joining", {}).get("alone", ""))


def _answer(runs: Mapping[str, Sequence[RunResult]]) -> tuple[str, str]:
    """Recommendation and verdict of the label that is best on validation, over its runs; empty where no track has
    any."""
    joined = {label: of_label for label, of_label in runs.items() if track_of_config(of_label[0].settings).over_runs}
    if not joined:
        return "", ""

    def valid(label: str) -> float:
        return fmean(run.valid_means("ndcg@10").get(_subject(run), 0.0) for run in joined[label])

    with_alone = [label for label, of_label in joined.items() if all(map(_alone, of_label))]
    best = joined[max(with_alone or joined, key=valid)]
    track = track_of_config(best[0].settings)
    said = track.part("conclusion")(track.part("over_runs")(best)).answer
    return said.recommendation, said.text


def _values(row: ResultRow, scope: str, seeds: int) -> dict[str, float]:
    named = {name: zip(("", "_low", "_high"), row.values[scope][name], strict=True) for name in compared(row.metrics)}
    return {"seeds": seeds, **{f"{name}{part}": value for name, of in named.items() for part, value in of}}
