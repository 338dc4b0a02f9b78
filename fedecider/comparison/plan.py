"""A whole table of federated runs: rows x seeds, equal tuning on validation, several runs at once, resumable.

Every run is one call of ``scripts/federate.py`` in a process of its own, in a folder named after the content of its
settings and data: a finished one is not run again, one that was killed goes on after its last round.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

from fedecider.bounds import OneOrMore, ZeroOrMore, at_least, check
from fedecider.comparison.baselines import BASELINES, WITHOUT_ROUNDS
from fedecider.data.encoders import load_encoder
from fedecider.evaluation.metrics import MACRO
from fedecider.llm.baselines import TEACHER
from fedecider.llm.commands import parse_settings
from fedecider.llm.federate import beside_data
from fedecider.llm.memories import MEMORY_ROW, OWN_MEMORY_ROW, with_memory
from fedecider.llm.run_words import valid_means
from fedecider.llm.setup import Settings, load_data
from fedecider.methods import METHODS, RATES, TRAINING_SPACE
from fedecider.running.damage import damage_names, read_object
from fedecider.running.progress import say
from fedecider.running.run_folder import RunFolder, check_output, fingerprint, locked
from fedecider.running.stages import content_key
from fedecider.running.yaml_file import PACKAGE
from fedecider.tuning.search import Search, Tried, check_budget, proposal, search_of, shortfall
from fedecider.tuning.space import Setting
from idgen.ranking_config import RankingConfig

OWN = ("config", "data", "cache", "output", "seed", "resume", "num_threads", "encoder")
"""Options that the table sets for all runs."""
ALIKE = (
    "domains",
    "public_domains",
    "protocol",
    "pretrain",
    "distill",
    "teacher_row",
    *RankingConfig.__dataclass_fields__,
)
"""Options that a row may not have for itself: its numbers would not be comparable with those of the others."""


@dataclass(frozen=True)
class CompareConfig:
    """Comparison: what is compared with what.

    Args:
        runs: The YAML file of the options that all runs share, as scripts/federate.py takes them.
        rows: Name of a row -> its options; without ``method`` the name is the method. A row with no other option is
            tuned, one with options of its own is run as it is given.
        baselines: Rows that are not federated; they see the public pool and the clients' train parts of a domain.
        against: Rows that every other row is tested against; ``fedecider + memory`` is that row with its memory,
            ``fedecider + own memory`` with a memory without the counts of siblings.
        analysed: Row whose run with seed 0 is analysed in the page (distances, groups of users and items, weights),
            and the row beside it; empty for no analyses.
        data: The folder of prepared domains; if empty, the embedded sample is used.
        domains: The domains of the comparison, separated by commas, ``*`` in a name for any letters; if empty, those of
            ``runs``.
        cache: The folder in which pre-training, distillation and trained baselines are kept.
        output: The folder of the runs and of the table.
        seeds: Runs of every row, seeds 0, 1, ...
        tune: Settings that are tried on validation with seed 0, the same number for every tuned row: those of the
            method's grid (the default first), then other learning rates, then drawn ones (docs/tune.md); 1 takes the
            default.
        jobs: The number of runs at the same time; 0 takes as many as the machine has cores for, and one where there is
            a GPU.
        num_threads: The number of CPU threads of each run.
        encoder: The encoder of the texts whose distances the page of the table shows; the pages of the runs, whose
            distances are the same, take tfidf.
    """

    runs: str = ""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    baselines: tuple[str, ...] = WITHOUT_ROUNDS
    against: tuple[str, ...] = ()
    analysed: tuple[str, ...] = ()
    data: str = ""
    domains: str = ""
    cache: str = ".cache"
    output: str = "runs/compare"
    seeds: OneOrMore = 3
    tune: OneOrMore = 1
    jobs: ZeroOrMore = 0
    num_threads: Annotated[int, at_least(1, most=1024)] = 1
    encoder: str = "auto"

    def __post_init__(self) -> None:
        check(self)
        if self.seeds > 1 and not self.data:
            raise ValueError(
                "got several seeds without data: the embedded sample is drawn anew for every seed, so its "
                "users cannot be compared. Prepare data (scripts/prepare_data.py), or give seeds 1"
            )
        if not self.rows:
            raise ValueError("got no rows, expected some, such as rows: {fedavg: {}, local: {}}")
        for label, options in self.rows.items():
            if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
                raise ValueError(f"got {options!r} for the row {label}, expected its options, or {{}}")
            if not re.fullmatch(r"[A-Za-z0-9_.]+", label):
                raise ValueError(f"got the row {label!r}, expected letters, digits, _ and . (it names folders)")
            if label in (*BASELINES, MACRO):
                raise ValueError(f"got the row {label}, which is the name of a baseline; choose another")
            foreign = [name for name in options if name.partition(".")[0] in (*OWN, *ALIKE)]
            if foreign:
                raise ValueError(f"got {foreign[0]} in the row {label}, expected it once for the whole table")
            method = options.get("method", label)
            if not isinstance(method, str) or method not in METHODS:
                raise ValueError(f"got method {method!r} in {label}, expected one of {', '.join(sorted(METHODS))}")
        if len(self.analysed) not in (0, 2):
            raise ValueError(f"got analysed {list(self.analysed)}, expected two rows, or none")
        if self.encoder not in ("auto", "tfidf") and self.analysed:
            load_encoder(self.encoder)  # a name that is not known should not come out after the last run
        rows = (*self.rows, *map(with_memory, self.rows), *(with_memory(row, OWN_MEMORY_ROW) for row in self.rows))
        for name, known in (("baselines", BASELINES), ("against", rows), ("analysed", self.rows)):
            unknown = [one for one in getattr(self, name) if one not in known]
            if unknown:
                raise ValueError(f"got {name} {unknown}, expected some of {', '.join(known)}")

    @property
    def num_jobs(self) -> int:
        if self.jobs or torch.cuda.is_available():
            return self.jobs or 1
        return max(1, (os.cpu_count() or 1) // self.num_threads)


class Run(NamedTuple):
    """One run of the table."""

    label: str
    seed: int
    options: dict[str, Any]
    settings: Settings
    folder: RunFolder

    @property
    def finished(self) -> bool:
        return self.folder.results.is_file()


class RowRuns(NamedTuple):
    """One row of the table and its finished runs, by seed."""

    label: str
    method: str
    chosen: dict[str, Any]
    """Options beyond the shared ones."""
    tried: list[dict[str, Any]]
    """``options`` and ``valid`` (ndcg@10) of every setting that was tried."""
    runs: list[Run]


def shown_as(row: RowRuns) -> dict[str, str]:
    """What the runs of ``row`` call its model, alone and with memories -> the labels under which the table shows it."""
    path = row.runs[0].folder.metrics
    content = read_object(path)
    with damage_names(path):
        views = next(iter(content["domains"].values()))["test"]
        reported = content["reported"]
    memories = {with_memory(row.method, one): with_memory(row.label, one) for one in (MEMORY_ROW, OWN_MEMORY_ROW)}
    return {reported: row.label, **{name: label for name, label in memories.items() if name in views}}


def plan(config: CompareConfig) -> dict[str, list[list[Run]]]:
    """label -> setting -> runs by seed, of the candidates that are known ahead; every option is checked before anything
    runs.

    Raises:
        ValueError: a setting that cannot be; the message names the row.
    """
    check_output(Path(config.output))
    planned: dict[str, list[list[Run]]] = {}
    hashes: dict[str, str] = {}
    for label, options in config.rows.items():
        start = {**options, "method": options.get("method", label)}
        first = _parsed(config, label, start)
        if TEACHER in config.baselines and not first.run.teacher_row:
            raise ValueError(f"got the baseline {TEACHER!r} with teacher_row false, expected one without the other")
        if not hashes:
            hashes = _hashes(first)
        settings: Sequence[Setting] = ({},)
        asked = [one for row in (MEMORY_ROW, OWN_MEMORY_ROW) if (one := with_memory(label, row)) in config.against]
        if asked and first.run.memory.kind == "none":
            raise ValueError(f"got {asked[0]!r} in against, but {label} is run with memory.kind none")
        if _is_tuned(options):
            search = _search(first)
            check_budget(search, config.tune)
            settings = search.firsts[: config.tune]
        planned[label] = []
        for setting in settings:
            options = {**start, **setting}
            parsed = _parsed(config, label, options) if setting else first
            planned[label].append(_runs(config, label, options, parsed, hashes))
    return planned


def fill(config: CompareConfig, planned: Mapping[str, list[list[Run]]]) -> list[RowRuns]:
    """Run what is missing: the shared stages of every seed, all settings with seed 0, then the best one's other seeds.

    A row one of whose runs fails is left out, and said so: the others are worth having.
    """
    runs = [run for settings in planned.values() for of_setting in settings for run in of_setting]
    stages = {content_key([run.seed, run.settings.run.pretrain, run.settings.run.distill]): run for run in runs}
    _work(config, [("distill", run) for run in stages.values()])
    _work(config, [("federate", of_setting[0]) for settings in planned.values() for of_setting in settings])
    searched = _searched(config, planned)
    rows = [row for label, settings in searched.items() if (row := _chosen(label, settings)) is not None]
    _work(config, [("federate", run) for row in rows for run in row.runs[1:]])
    failed = [row.label for row in rows if not all(run.finished for run in row.runs)]
    if failed:
        say(f"left out: {', '.join(failed)}")
    return [row for row in rows if row.label not in failed]


def _searched(config: CompareConfig, planned: Mapping[str, list[list[Run]]]) -> dict[str, list[list[Run]]]:
    """``planned`` with drawn settings up to the budget: one a row at a time, so that a draw knows those before."""
    found = {label: list(settings) for label, settings in planned.items()}
    failed: dict[str, list[Tried]] = {label: [] for label in found}
    open_rows = [label for label in found if _is_tuned(config.rows[label])]
    while True:
        missing = []
        for label in list(open_rows):
            settings, first = found[label], found[label][0][0]
            if len(settings) + len(failed[label]) >= config.tune:
                continue
            search = _search(first.settings)
            tried = [Tried(_setting(runs[0]), _valid_score(runs[0])) for runs in settings] + failed[label]
            setting = proposal(search, tried)
            if setting is None:
                say(f"{label}: {shortfall(search, tried, config.tune)}")
                open_rows.remove(label)
                continue
            try:
                options = {**first.options, **setting}
                runs = _runs(config, label, options, _parsed(config, label, options), _hashes(first.settings))
            except ValueError as error:
                say(f"{label} {setting}: {error}")
                failed[label].append(Tried(setting, None))
                runs = []
            missing.append(runs)
            settings += [runs] if runs else []
        if not missing:
            return found
        _work(config, [("federate", runs[0]) for runs in missing if runs])


def _is_tuned(options: Mapping[str, Any]) -> bool:
    return set(options) <= {"method"}


def _search(start: Settings) -> Search:
    method = METHODS[start.run.method]
    return search_of(start, {**TRAINING_SPACE, **method.space}, (*method.grid, *RATES), 0)


def _setting(run: Run) -> Setting:
    return {name: value for name, value in run.options.items() if name != "method"}


def _chosen(label: str, settings: list[list[Run]]) -> RowRuns | None:
    """The setting with the best validation ndcg@10 at seed 0, the earlier one on ties."""
    tried = [(valid, runs) for runs in settings if (valid := _valid_score(runs[0])) is not None]
    if not tried:
        say(f"left out: {label}")
        return None
    best = max(tried, key=lambda entry: entry[0])[1]
    record = [{"options": runs[0].options, "valid": valid} for valid, runs in tried]
    return RowRuns(label, best[0].settings.run.method, best[0].options, record, best)


def _valid_score(run: Run) -> float | None:
    """Validation ndcg@10 of the reported model, with the share of its update that it has been given; None where the run
    did not finish."""
    if not run.finished:
        return None
    path = run.folder.metrics
    content = read_object(path)
    with damage_names(path):
        of_rounds = content["best_valid_ndcg@10"]  # all that runs of before have
        return float(valid_means(content, "ndcg@10").get(content["reported"], of_rounds))


def _parsed(config: CompareConfig, label: str, options: Mapping[str, Any]) -> Settings:
    try:
        return parse_settings("", [*_shared_words(config), *_words(options)])
    except (ValueError, SystemExit) as error:  # an option called help ends the parser
        raise ValueError(f"the row {label} cannot be run: {error}") from error


def _hashes(settings: Settings) -> dict[str, str]:
    return {name: domain.content_hash() for name, domain in load_data(settings.run).items()}


def _runs(
    config: CompareConfig, label: str, options: dict[str, Any], parsed: Settings, hashes: Mapping[str, str]
) -> list[Run]:
    """One row's runs with these options, by seed."""
    found = []
    for seed in range(config.seeds):
        settings = parsed._replace(run=dataclasses.replace(parsed.run, seed=seed))
        key = fingerprint({"config": settings.as_record(), "data": {**hashes, **beside_data(settings.run)}})
        folder = RunFolder(Path(config.output) / "runs" / f"{label}-{seed}-{key}")
        found.append(Run(label, seed, options, settings, folder))
    return found


def _work(config: CompareConfig, jobs: Sequence[tuple[str, Run]]) -> None:
    """All of ``jobs`` that are not finished, ``num_jobs`` at a time, longest waiting first."""
    missing = [(stage, run) for stage, run in jobs if stage != "federate" or not run.finished]
    with ThreadPoolExecutor(config.num_jobs) as pool:
        for stage, run, problem in pool.map(lambda job: (*job, _call(config, *job)), missing):
            done = f"failed: {problem}" if problem else "done"
            words = [run.label, *_texts(run.options)] if stage == "federate" else ["shared stages"]
            say(f"{', '.join(words)}, seed {run.seed}: {done}")


def _call(config: CompareConfig, stage: str, run: Run) -> str:
    """Run ``stage`` in a process of its own; returns what went wrong, or nothing."""
    words = [*_shared_words(config), *_words(run.options), "--seed", str(run.seed), *_precisions(run.settings)]
    place = run.folder.root if stage == "federate" else run.folder.root.with_name(f"stages-{run.seed}")
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.with_name(f"{place.name}.lock")) as lock, place.with_name(f"{place.name}.log").open("a") as log:
        if stage == "federate":
            if run.finished:  # by another process that held the lock
                return ""
            words += ["--output", str(place), "--resume", str(run.folder.record.exists()).lower()]
        command = [sys.executable, "-m", "fedecider.commands.main", stage, *words]
        # The same code, wherever the table is made: neither another installed copy nor the present folder.
        paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        own = {"OMP_NUM_THREADS": str(config.num_threads), "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        code = subprocess.run(
            command, stdout=log, stderr=log, env={**os.environ, **own}, pass_fds=[lock.fileno()], check=False
        ).returncode
    if code == 0:
        return ""
    last = [line for line in Path(log.name).read_text().splitlines() if line.strip()][-1:]
    return f"exit code {code}, {last[0] if last else 'no output'} (see {log.name})"


def _precisions(settings: Settings) -> list[str]:
    """As they were settled here: measured once more, beside other runs, ``auto`` could be another one."""
    run = settings.run
    found = {
        "precision": settings.training.precision,
        "distill.precision": run.distill.precision,
        "pretrain.train.precision": run.pretrain.train.precision,
    }
    return _words(found)


def _shared_words(config: CompareConfig) -> list[str]:
    words = ["--config", config.runs] if config.runs else []
    words += ["--data", config.data] if config.data else []
    words += ["--domains", config.domains] if config.domains else []
    own = {"cache": config.cache, "num_threads": config.num_threads, "encoder": "tfidf"}
    return [*words, *_words(own)]


def _words(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", _plain(value))]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _texts(options: Mapping[str, Any]) -> list[str]:
    return [f"{name} {_plain(value)}" for name, value in options.items() if name != "method"]
