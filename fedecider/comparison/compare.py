"""Tables of entries x data x seeds x protocols, tuned alike on validation.

A track says which entries there are and how one cell of them is run (`Track.comparison`). Everything else is here:
which settings are tried, which seeds follow, what is tested against what. Cells are kept by their content, so a table
that was stopped goes on where it was.

Shape legend: S seeds, U users.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.bounds import is_out_of_memory
from fedecider.comparison.search import ONE_SETTING, Search, Study, Tried, best_of, check_budget, setting_text
from fedecider.data.domain import Domain
from fedecider.engine.track import Track
from fedecider.evaluation.statistics import Comparison as PairedTest
from fedecider.evaluation.statistics import Persons, compare_table, shared_persons
from fedecider.report.costs import mean_bytes, near_round
from fedecider.report.tables import BASKETS_COMPARED, CANARY, COMPARED, ResultRow, result_rows, shown_domains
from fedecider.running.progress import log_line
from fedecider.search_space import Setting

Positions = dict[str, Tensor]
"""Client or data set -> positions of the test items, (S, U) or (U,)."""


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


class Row(NamedTuple):
    """An entry with its chosen setting and the cells of all seeds."""

    entry: Entry
    setting: Setting
    tried: Sequence[Tried]
    """With seed 0: what the choice was made of."""
    cells: Sequence[Cell]

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
    companies: bool
    """Whether clients are companies, whose users are customers."""
    simple: Sequence[str]
    """Rows that need no training."""
    choices: Sequence[str] = ("federated",)
    """Kinds of the rows that one could use."""
    beside: Mapping[str, str] = {}
    """Other rows that a reader will ask for -> what each is."""
    before: Sequence[str] = ()
    """Rows of what was there before any round."""
    planted: bool = False
    sections: Callable[[Table, str | None], list[Any]] = lambda table, chosen: []
    """Those before what every page has; the row that the page is about."""
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


def compare(plan: Plan) -> Table:
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
    """Run what is missing, ``jobs`` cells at a time; an entry without a setting that can be run is left out, since the
    others are worth having."""
    if jobs == 1 or not entries:
        rows = [_filled(entry, seeds, map) for entry in entries]
    else:
        with ThreadPoolExecutor(jobs) as cells, ThreadPoolExecutor(len(entries)) as lines:
            rows = list(lines.map(lambda entry: _filled(entry, seeds, cells.map), entries))
    return [row for row in rows if row is not None]


def _filled(entry: Entry, seeds: int, over: Callable[..., Iterable[Cell | None]]) -> Row | None:
    """With seed 0 the candidates, all at once, then drawn settings, which know those before; then the other seeds of
    the best one, or where one of these fails of the next best. ``over`` is ``map`` or works like it."""
    tried: list[Tried] = []
    first: list[Cell | None] = []

    def trials(settings: Sequence[Setting]) -> None:
        for setting, cell in zip(settings, over(partial(_cell, entry, 0), settings), strict=True):
            tried.append(Tried(setting, None if cell is None else cell.valid[entry.label]))
            first.append(cell)

    search, budget = entry.search, entry.budget
    trials(search.candidates[:budget])
    if budget > len(tried) and search.left(()) != []:
        study = Study(search)
        for trial in tried:
            study.ask()
            study.tell(trial.valid)
        while len(tried) < budget and (drawn := study.ask()) is not None:
            trials([drawn])
            study.tell(tried[-1].valid)
    if len(tried) < budget and (search.space or len(search.candidates) > 1):
        log_line(f"{entry.label}: every setting of the search was tried: {len(tried)} trials instead of {budget}")
    left = list(tried)
    while (best := best_of(left)) is not None:
        setting = tried[best].setting
        cells = [first[best], *over(lambda seed, setting=setting: _cell(entry, seed, setting), range(1, seeds))]
        if whole := [cell for cell in cells if cell is not None] if None not in cells else []:
            return Row(entry, setting, tried, whole)
        left[best] = left[best]._replace(valid=None)
    log_line(f"left out: {entry.label} ({', '.join(entry.protocols)})")
    return None


def _cell(entry: Entry, seed: int, setting: Setting) -> Cell | None:
    """None where the run failed, which is said."""
    try:
        return entry.run(setting, seed)
    except ValueError as error:  # such as a run that diverged
        problem = str(error)
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        problem = f"out of memory ({error}): fewer items or users take less"
    log_line(f"{entry.label}, {setting_text(setting)}, seed {seed}: failed: {' '.join(problem.split())}")
    return None


def collect(plan: Plan, rows: Sequence[Row], beside: Sequence[Row] = ()) -> Table:
    """Means with intervals, paired tests, costs and curves, under every protocol."""
    results = {}
    for protocol in plan.protocols:
        own, others = ([row for row in some if protocol in row.entry.protocols] for some in (rows, beside))
        results[protocol] = _results(plan, protocol, own, others)
    return Table(plan, list(rows), results)


def _results(plan: Plan, protocol: str, rows: Sequence[Row], beside: Sequence[Row]) -> Results:
    own: dict[str, Positions] = {}
    variants: dict[str, Positions] = {}
    standing: dict[str, Positions] = {}
    entries: dict[str, Row] = {}
    for row in (*rows, *beside):
        for label, of_label in positions_of(row, protocol).items():
            position = {name: of_label[name] for name in plan.users}  # files keep no order
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
    return {
        label: {client: torch.stack([models[label][client] for models in per_seed]) for client in of_label}
        for label, of_label in per_seed[0].items()
    }


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
    is_of_baskets = any(one.ndim == 3 for per_client in tested.values() for one in per_client.values())
    metrics = BASKETS_COMPARED if is_of_baskets else COMPARED
    return compare_table(tested, metrics, pairs, persons=persons, each_domain=plan.each_client)


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
