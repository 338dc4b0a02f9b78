"""Tables of entries x data x seeds x protocols, tuned alike on validation; finished runs beside each other.

A track says which entries there are and how one cell of them is run (`Track.comparison`). Everything else is here:
which settings are tried, which seeds follow, what is tested against what. Cells are kept by their content, so a table
that was stopped goes on where it was.

Shape legend: S seeds, U users.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.bounds import is_out_of_memory
from fedecider.comparison.tuning import (
    ONE_SETTING,
    Search,
    Tried,
    best_of,
    check_budget,
    proposal,
    setting_text,
    shortfall,
)
from fedecider.data.domain import Domain
from fedecider.engine.track import Track
from fedecider.evaluation.protocols import get_protocol
from fedecider.evaluation.statistics import Comparison as PairedTest
from fedecider.evaluation.statistics import Persons, compare_table, shared_persons
from fedecider.federation.record import write_text
from fedecider.federation.streams import stream
from fedecider.report.analyses import mean_bytes, near_round
from fedecider.report.tables import CANARY, COMPARED, ResultRow, ResultTable, caption, result_rows, shown_domains
from fedecider.running.progress import log_line
from fedecider.running.run_folder import RunFolder, check_output, read_object, read_run
from fedecider.search_space import Setting

Positions = dict[str, Tensor]
"""Client or data set -> positions of the test items, (S, U) or (U,)."""

# What a table is made of.


class Course(NamedTuple):
    """How the rounds of a cell went. Sums come with the number of their terms."""

    curve: list[list[float]]
    """[[round, validation ndcg@10], ...]."""
    best_round: int
    last_round: int
    seconds: tuple[float, int]
    up: tuple[float, int]
    """Bytes that clients sent."""
    down: tuple[float, int]


class Cell(NamedTuple):
    """One finished run of an entry: a setting with a seed."""

    valid: Mapping[str, float]
    """Validation ndcg@10 of every row that the cell gives; by that of the entry's own label settings are chosen."""
    positions: Callable[[], Mapping[str, Mapping[str, Positions]]]
    """Protocol -> model -> client -> (U,) test positions: the rows of ``valid``; ``label: variant`` of what is not
    reported; baselines that stand in the cell."""
    course: Callable[[], Course] | None = None
    """Of a federated run."""
    folder: Path = Path()
    further: Mapping[str, float] = {}
    """Other columns of the table."""
    hits: Mapping[str, float] = {}
    """Validation hit@10 of models of the cell, where it is known."""
    kinds: Mapping[str, str] = {}
    """Kinds of rows that are not that of the entry."""


class Entry(NamedTuple):
    """A line of the plan: a method, a baseline."""

    label: str
    method: str
    kind: str
    """``federated``, ``local``, ``central`` (all data in one place), ``baseline``."""
    protocols: Sequence[str]
    """Those that its cells serve."""
    run: Callable[[Setting, int], Cell]
    """setting, seed -> the cell, made where it is missing. ``ValueError`` where that fails: the message says why."""
    search: Search = ONE_SETTING
    budget: int = 1
    """Settings that are tried at most."""
    said: Callable[[Setting], str] = setting_text
    """A setting in words."""
    trial: Callable[[Setting, int], Cell] | None = None
    """A shorter run, by which :data:`FINALISTS` of the drawn settings are chosen; None where a trial is the run itself,
    which is not made again."""


class Row(NamedTuple):
    """An entry with its chosen setting and the cells of all seeds."""

    entry: Entry
    setting: Setting
    tried: Sequence[Tried]
    """With seed 0, in full: what the choice was made of."""
    cells: Sequence[Cell]
    trials: Sequence[Tried] = ()
    """Shorter runs, where the entry has them: the best of these ran in full."""

    @property
    def labels(self) -> list[str]:
        """Of its rows in the table, its own first."""
        return list(self.cells[0].valid)


class Plan(NamedTuple):
    """A table before anything is run; whatever can be refused was refused."""

    name: str
    """Of its files."""
    root: Path
    entries: Sequence[Entry]
    protocols: Sequence[str]
    users: Mapping[str, Sequence[str]]
    """Client or data set -> its users; equal keys are one person."""
    seeds: int
    beside: Sequence[Entry] = ()
    """Baselines with cells of their own."""
    baselines: Sequence[str] = ()
    """Rows of ``beside`` and of what stands in cells, in the order of the table."""
    against: Sequence[str] | None = ()
    """Rows that every other row is tested against; None: all pairs, and the table is a ranking."""
    permutations: int = 10_000
    """Of a test, at least."""
    each_client: bool = True
    """False: tests are of the mean over clients alone."""
    jobs: int = 1
    """Cells of ``entries`` that are made at the same time."""
    writes: bool = True
    """False: cells alone are made."""
    prepare: Callable[[], None] = lambda: None
    """Makes what cells share."""
    words: Words | None = None
    """What pages say; None for a table without files."""


class Words(NamedTuple):
    """What a track says of a table."""

    heading: Callable[[Table], list[str]]
    """Data, how rows were chosen, where the runs come from."""
    chance: Mapping[str, Mapping[str, float]]
    """Protocol -> client or data set -> hit@10 of random scores."""
    num_clients: int
    simple: Sequence[str]
    """Rows that need no training."""
    choices: Sequence[str] = ("federated",)
    """Kinds of the rows that one could switch on."""
    beside: Mapping[str, str] = {}
    """Other rows that a reader will ask for -> what each is."""
    before: Sequence[str] = ()
    """Rows of what was there before any round."""
    planted: bool = False
    sections: Callable[[Table, str | None], tuple[list[Any], list[Any]]] = lambda table, chosen: ([], [])
    """Those before and after what every page has; the row that the page is about."""
    seconds: str = "s a round (median)"
    """What `Course.seconds` are."""


class Cost(NamedTuple):
    """What an entry costs, and how fast it is there."""

    seconds: float
    up: float
    """Bytes that a client sends per round."""
    down: float
    best_rounds: list[int]
    last_rounds: list[int]
    near_rounds: list[int]
    """First round within 1 % of the best validation ndcg@10, per seed."""


class Results(NamedTuple):
    """What a table shows under one protocol."""

    rows: list[ResultRow]
    """Those of ``kinds``: entries first, then baselines; in a ranking by ndcg@10."""
    variants: list[ResultRow]
    """Other models of the entries."""
    tests: list[PairedTest]
    kinds: dict[str, str]
    entries: dict[str, Row]
    """Row -> whose cells it comes from."""
    valid: dict[str, float]
    """Mean over the seeds, of every row of the entries."""
    costs: dict[str, Cost]
    curves: dict[str, list[list[float]]]
    """Label -> [[round, mean validation ndcg@10 over the seeds], ...]."""
    further: dict[str, dict[str, float]]
    missing: list[str]
    """Entries one of whose runs failed."""


class Table(NamedTuple):
    """A finished table."""

    plan: Plan
    rows: list[Row]
    results: dict[str, Results]
    """By protocol."""


class Shared(NamedTuple):
    """What all rows of a table over prepared domains have in common."""

    domains: Mapping[str, Domain]
    protocol: str
    tune: int
    cache: Path
    device: str


class TrackRows(NamedTuple):
    """What a track gives to tables: its part ``comparison``."""

    configs: tuple[type, ...] = ()
    """Dataclasses of a table's command line."""
    plan: Callable[..., Plan] | None = None
    """Instances of ``configs`` -> the plan."""
    guest: Callable[[str, Shared], Entry] | None = None
    """(method, shared) -> its row in a table of another track over prepared domains."""
    texts: Callable[[], dict[str, str]] = dict
    """Help texts of options that depend on what is installed."""


def guest_of(track: Track) -> Callable[[str, Shared], Entry] | None:
    """How methods of a track stand in other tables; None where they do not."""
    return track.part("comparison").guest if track.comparison else None


FINALISTS = 3
"""Drawn settings whose shorter trials were best, which run in full with seed 0, as do all that are known ahead: few
rounds prefer what learns fast, and published settings may be slow."""

# The engine: settings with seed 0 wave by wave, then the other seeds of those that were chosen.


def make(plan: Plan) -> Table:
    """Run what is missing and collect it.

    Raises:
        ValueError: no entry could be run; a search needs optuna, which is not installed.
    """
    for entry in (*plan.entries, *plan.beside):
        check_budget(entry.search, entry.budget)
    plan.prepare()
    rows = fill(plan.entries, plan.seeds, plan.jobs)
    if not rows:
        names = ", ".join(dict.fromkeys(entry.label for entry in plan.entries))
        raise ValueError(f"got no row from {names}, expected one at least: see the messages above")
    return collect(plan, rows, fill(plan.beside, plan.seeds))


def fill(entries: Sequence[Entry], seeds: int, jobs: int = 1) -> list[Row]:
    """Run what is missing: of every entry the settings that are known ahead, all at once; then drawn ones, one an entry
    at a time, so that a draw knows those before; where trials were shorter, those known ahead and the
    best of the drawn ones in full (:data:`FINALISTS`); then the other seeds of the best one, the earlier one on ties.

    What fails is said. A setting that fails with any seed is not taken, and the next best follows; an entry without one
    is left out, since the others are worth having.
    """
    tried: list[list[Tried]] = [[] for _ in entries]
    first: list[list[Cell | None]] = [[] for _ in entries]
    open_places = set(range(len(entries)))
    while open_places:
        wave: list[tuple[int, Setting]] = []
        for place in sorted(open_places):
            entry, known = entries[place], tried[place]
            settings = entry.search.firsts[: entry.budget] if not known else []
            if not settings and len(known) < entry.budget:
                drawn = proposal(entry.search, known)
                settings = [] if drawn is None else [drawn]
                if drawn is None and entry.search.is_tunable:
                    log_line(f"{entry.label}: {shortfall(entry.search, known, entry.budget)}")
            if not settings:
                open_places.remove(place)
            wave += [(place, setting) for setting in settings]
        found = _played(
            [(entries[place].trial or entries[place].run, entries[place], setting, 0) for place, setting in wave], jobs
        )
        for (place, setting), cell in zip(wave, found, strict=True):
            tried[place].append(Tried(setting, None if cell is None else cell.valid[entries[place].label]))
            first[place].append(cell)
    final = [list(one) for one in tried]
    ahead: list[tuple[int, int]] = []
    for place, entry in enumerate(entries):
        if entry.trial:
            final[place] = [one._replace(valid=None) for one in tried[place]]
            ahead += [(place, number) for number in _finalists(tried[place], len(entry.search.firsts))]
    found = _played(
        [(entries[place].run, entries[place], tried[place][number].setting, 0) for place, number in ahead], jobs
    )
    for (place, number), cell in zip(ahead, found, strict=True):
        first[place][number] = cell
        valid = None if cell is None else cell.valid[entries[place].label]
        final[place][number] = final[place][number]._replace(valid=valid)
    judged = [
        [final[place][number] for number in range(len(final[place])) if (place, number) in ahead or not entry.trial]
        for place, entry in enumerate(entries)
    ]
    rows: dict[int, Row] = {}
    waiting = set(range(len(entries)))
    while waiting:
        bests = [(place, best_of(final[place])) for place in sorted(waiting)]
        best = {place: number for place, number in bests if number is not None}
        asked = [
            (entries[place].run, entries[place], tried[place][number].setting, seed)
            for place, number in best.items()
            for seed in range(1, seeds)
        ]
        others = iter(_played(asked, jobs))
        for place, number in best.items():
            cells = [first[place][number], *(next(others) for _ in range(1, seeds))]
            whole = [cell for cell in cells if cell is not None]
            if len(whole) == seeds:
                trials = tried[place] if entries[place].trial else ()
                rows[place] = Row(entries[place], tried[place][number].setting, judged[place], whole, trials)
            final[place][number] = final[place][number]._replace(valid=None)  # where a seed failed, the next best one
        waiting = set(best) - set(rows)
    for place, entry in enumerate(entries):
        if place not in rows:
            log_line(f"left out: {entry.label} ({', '.join(entry.protocols)})")
    return [rows[place] for place in sorted(rows)]


def _finalists(tried: Sequence[Tried], known: int) -> list[int]:
    """The numbers of the trials that run in full: the first ``known`` ones, and the best :data:`FINALISTS` others."""
    drawn = [number for number in range(known, len(tried)) if tried[number].valid is not None]
    best = sorted(drawn, key=lambda number: -(tried[number].valid or 0.0))[:FINALISTS]
    return [*range(min(known, len(tried))), *sorted(best)]


Run = tuple[Callable[[Setting, int], Cell], Entry, Setting, int]
"""What is called, for which entry, with which setting and seed."""


def _played(asked: Sequence[Run], jobs: int) -> list[Cell | None]:
    """The cells, None for those that failed."""

    def play(one: Run) -> Cell | None:
        run, entry, setting, seed = one
        try:
            return run(setting, seed)
        except ValueError as error:  # such as a run that diverged
            problem = str(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            problem = f"out of memory ({error}): fewer items or users take less"
        log_line(f"{entry.label}, {setting_text(setting)}, seed {seed}: failed: {' '.join(problem.split())}")
        return None

    if jobs == 1:
        return [play(one) for one in asked]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(play, asked))


# What a table shows, from its cells.


def collect(plan: Plan, rows: Sequence[Row], beside: Sequence[Row] = ()) -> Table:
    """Means with intervals, paired tests, costs and curves, under every protocol."""
    found = {}
    for protocol in plan.protocols:
        own, others = ([row for row in some if protocol in row.entry.protocols] for some in (rows, beside))
        found[protocol] = _results(plan, protocol, own, others)
    return Table(plan, list(rows), found)


def _results(plan: Plan, protocol: str, rows: Sequence[Row], beside: Sequence[Row]) -> Results:
    own: dict[str, Positions] = {}
    variants: dict[str, Positions] = {}
    standing: dict[str, Positions] = {}
    entries: dict[str, Row] = {}
    for row in (*rows, *beside):
        for label, found in positions_of(row, protocol).items():
            position = {name: found[name] for name in plan.users}  # files keep no order
            if label in row.labels and row.entry.label not in plan.baselines:
                own[label] = position
                entries[label] = row
            elif label.startswith(f"{row.entry.label}: "):
                variants[label] = position
            elif label in plan.baselines:
                standing.setdefault(label, position)  # in every cell that has it it is the same
    baselines = {label: standing[label] for label in plan.baselines if label in standing}
    persons = shared_persons(plan.users)
    shown = result_rows(own, baselines, persons) if own or baselines else []
    if plan.against is None:
        scope = shown_domains(shown)[-1] if shown else ""
        shown.sort(key=lambda row: -row.values[scope]["ndcg@10"].mean)
    kinds = dict.fromkeys((row.label for row in shown), "baseline")
    kinds |= {label: row.cells[0].kinds.get(label, row.entry.kind) for label, row in entries.items()}
    costed = {row.entry.label: row for row in (*rows, *beside) if row.cells[0].course is not None}
    courses = {label: [cell.course() for cell in row.cells if cell.course is not None] for label, row in costed.items()}
    return Results(
        rows=shown,
        variants=result_rows(variants, persons=persons) if variants else [],
        tests=_tests(plan, list(own), {**own, **baselines}, persons),
        kinds=kinds,
        entries=entries,
        valid={label: statistics.fmean(cell.valid[label] for cell in row.cells) for label, row in entries.items()},
        costs={label: _cost(of_label) for label, of_label in courses.items()},
        curves={label: _curve(of_label) for label, of_label in courses.items() if label in entries},
        further={
            label: {name: statistics.fmean(cell.further[name] for cell in row.cells) for name in row.cells[0].further}
            for label, row in entries.items()
            if label == row.entry.label
        },
        missing=[
            entry.label
            for entry in plan.entries
            if protocol in entry.protocols and entry.label not in {row.entry.label for row in rows}
        ],
    )


def positions_of(row: Row, protocol: str) -> dict[str, Positions]:
    """model -> client -> (S, U), seeds in order."""
    per_seed = [cell.positions()[protocol] for cell in row.cells]
    return {label: stacked([one[label] for one in per_seed]) for label in per_seed[0]}


def stacked(per_seed: Sequence[Positions]) -> Positions:
    """(S, U) by client, seeds in order."""
    return {client: torch.stack([one[client] for one in per_seed]) for client in per_seed[0]}


def _tests(
    plan: Plan, own: Sequence[str], positions: Mapping[str, Positions], persons: Persons | None
) -> list[PairedTest]:
    """Every pair, or every row of ``against`` with every other one, each pair once; the canary with none."""
    tested = {label: position for label, position in positions.items() if label != CANARY}
    if plan.against is None:
        pairs = list(combinations(tested, 2))
    else:
        anchors = [label for label in plan.against if label in own]  # a row whose run failed is none
        pairs = [
            (anchor, label)
            for number, anchor in enumerate(anchors)
            for label in tested
            if label not in anchors[: number + 1]
        ]
    if not pairs:
        return []
    asked = (tested, stream(0, "comparisons"), COMPARED, pairs, plan.permutations)
    return compare_table(*asked, persons=persons, each_domain=plan.each_client)


def _cost(courses: Sequence[Course]) -> Cost:
    def mean(name: str) -> float:
        sums = [getattr(course, name) for course in courses]
        return sum(total for total, _ in sums) / sum(num for _, num in sums)

    near = [near_round([{"round": round, "score": score} for round, score in course.curve]) for course in courses]
    best, last = [course.best_round for course in courses], [course.last_round for course in courses]
    return Cost(mean("seconds"), mean("up"), mean("down"), best, last, near)


def _curve(courses: Sequence[Course]) -> list[list[float]]:
    per_seed = [{int(round): score for round, score in course.curve} for course in courses]
    common = sorted(set.intersection(*(set(one) for one in per_seed)))
    return [[round, statistics.fmean(one[round] for one in per_seed)] for round in common]


def course_of(records: Sequence[Mapping[str, Any]], best_round: int) -> Course:
    """From the records of rounds that were all validated; seconds are those of a client's local training."""
    num = len(records)
    return Course(
        [[record["round"], record["score"]] for record in records],
        best_round,
        records[-1]["round"],
        (sum(record["train_s"] / len(record["clients"]) for record in records), num),
        (sum(mean_bytes(record, "up") for record in records), num),
        (sum(mean_bytes(record, "down") for record in records), num),
    )


# Finished runs of any track beside each other.


class Comparison(NamedTuple):
    """Runs of several labels on the same data: means over seeds and users, paired tests against the first label."""

    table: Any
    """One row a label: ``seeds``; hit@10 and ndcg@10 as mean over clients, with ``_low`` and ``_high`` (95 % cluster
    bootstrap over users and seeds) and ``_p_holm`` against the first label, NaN for that one."""
    per_client: Any
    """One row a label and client, with the columns of ``table`` but the tests."""
    tests: Any
    """One row a test: ``metric``, ``first`` and ``second`` label, ``difference`` (second minus first) with ``low`` and
    ``high``, ``p_value``, ``p_holm``, ``effect_size``."""
    caption: Sequence[str]
    """What the numbers are, in sentences."""

    def __str__(self) -> str:
        return "\n".join([self.table.to_string(float_format="{:.4f}".format), *self.caption])

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
    """Finished run folders beside each other, one per seed and label, of whatever track.

    Read is the model that each run reports, from ``metrics.json`` and ``per_user.parquet``. Users are paired, and who
    is a user of several clients is one person (`fedecider.evaluation.statistics`).

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
            if other := [name for name in ("protocol", "data", "users") if getattr(run, name) != getattr(first, name)]:
                raise ValueError(
                    f"got other {other[0]} in {folder} ({label}) than in {labels[base][0]}, expected the same in all "
                    "runs that are compared"
                )
    rows = [_row_of(label, of_label) for label, of_label in runs.items()]
    entries = [row.entry for row in rows]
    plan = Plan("", Path(), entries, [first.protocol], first.users, sizes[base], against=[base], each_client=False)
    results = collect(plan, rows).results[first.protocol]
    scope = shown_domains(results.rows)[-1]
    corrected = {(one.second, one.metric): one.p_holm for one in results.tests}
    holm = {name: [corrected.get((label, name), math.nan) for label in labels] for name in COMPARED}
    notes = [f"p: paired permutation test over users against {base}, Holm over the table"] if results.tests else []
    notes += ["who is a user of several clients counts once"] if shared_persons(first.users) else []
    table = pd.DataFrame([_values(row, scope, plan.seeds) for row in results.rows], index=[*labels])
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
    )


class _Finished(NamedTuple):
    """What is compared of a run."""

    protocol: str
    data: dict[str, str]
    """Client or data set -> hash."""
    users: dict[str, Sequence[str]]
    """Client or data set -> its users."""
    position: Positions
    """(U,) of the model that the run reports."""


def _finished(root: Path) -> _Finished:
    from fedecider.evaluation.per_user import read_per_user  # --help does without pyarrow

    folder, record = RunFolder(root), read_run(root)
    if not folder.results.is_file():
        raise ValueError(f"got {root}, a run that did not finish, expected finished ones: go on with it (resume)")
    content = read_object(folder.metrics, {"reported": str, "protocol": str})
    reported = [one for one in read_per_user(folder.per_user) if one.variant == content["reported"]]
    if not reported:
        raise ValueError(f"got no users of {content['reported']} in {folder.per_user}, expected those of the run")
    return _Finished(
        content["protocol"],
        {one.domain: record["data"].get(one.domain, "") for one in reported},
        {one.domain: one.users for one in reported},
        {one.domain: one.position_U for one in reported},
    )


def _row_of(label: str, runs: Sequence[_Finished]) -> Row:
    def cell(number: int) -> Cell:
        run = runs[number]
        return Cell({label: math.nan}, lambda: {run.protocol: {label: run.position}})

    cells = [cell(number) for number in range(len(runs))]
    return Row(Entry(label, label, "", [runs[0].protocol], lambda setting, seed: cells[seed]), {}, [], cells)


def _values(row: ResultRow, scope: str, seeds: int) -> dict[str, float]:
    named = {name: zip(("", "_low", "_high"), row.values[scope][name], strict=True) for name in COMPARED}
    return {"seeds": seeds, **{f"{name}{part}": value for name, of in named.items() for part, value in of}}
