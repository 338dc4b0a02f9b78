"""Tables of the cross-silo track: what is compared, runs in processes of their own, what their page says.

Every run is one call of ``fedecider federate``, in a folder named after the content of its settings and data: a
finished one is not run again, one that was killed goes on after its last round. Methods of other tracks over prepared
domains stand beside (`TrackRows.guest`).

Shape legend: U users.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field

from fedecider.baselines.counts import TEXT, TEXT_AND_COUNTS, UNTRAINED
from fedecider.baselines.own import own_baselines
from fedecider.bounds import Int, OneOrMore, ZeroOrMore, dataclass
from fedecider.comparison import compare
from fedecider.comparison.search import ONE_SETTING, search_of, setting_text
from fedecider.cross_silo.command_line import make_settings
from fedecider.cross_silo.ensembles import ENSEMBLE_ROW, OWN_ENSEMBLE_ROW, with_ensemble
from fedecider.cross_silo.entries import STUDENT, TEACHER
from fedecider.cross_silo.federate import beside_data, file_settings
from fedecider.cross_silo.page import example_section
from fedecider.cross_silo.prepare import Settings, decided
from fedecider.cross_silo.sasrec_entries import FACTORS, SASREC, SASREC_TEXT, factors, own_baseline, sasrec
from fedecider.data.domain import Domain, clients_of
from fedecider.data.encoders import encoder_label
from fedecider.data.protocol import customers_tested
from fedecider.engine.result import EXAMPLES_FILE, RunResult
from fedecider.engine.track import track_of
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import chance_hit, get_protocol
from fedecider.methods import METHODS
from fedecider.methods.config import LOCAL
from fedecider.methods.entries import RATES, TRAINING_SPACE
from fedecider.report.page import Section
from fedecider.report.tables import CANARY, variant_of
from fedecider.running import damage, plain, run_folder
from fedecider.running.progress import log_line
from fedecider.running.settings_files import PACKAGE, load_config, write_settings
from fedecider.search_space import Setting
from idgen.ranking_config import RankingConfig

FITTED = (*FACTORS, SASREC, SASREC_TEXT)
WITHOUT_ROUNDS = (TEACHER, STUDENT, *UNTRAINED, ENSEMBLE_ROW, *FITTED, CANARY)
"""All but ``FITTED`` stand in ``per_user.parquet`` of every run; ensembles in those of runs that have some."""
BASELINES = (*WITHOUT_ROUNDS, OWN_ENSEMBLE_ROW)
"""Besides, what a company alone has of counts and texts, where others share its catalogue."""
OWN = ("config", "data", "cache", "output", "seed", "resume", "num_threads")
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
        baselines: Rows without a language model of their own: counts, als, bpr, sasrec, methods of other tracks over
            prepared domains (fedsasrec); they see the public pool and the clients' train parts of a domain.
        against: Rows that every other row is tested against; ``fedecider + ensemble`` is that row with its ensemble,
            ``fedecider + own ensemble`` with an ensemble without the counts of other clients.
        data: The folder of prepared domains; if empty, the embedded sample is used.
        domains: The domains of the comparison, separated by commas, ``*`` in a name for any letters; if empty, those of
            ``runs``.
        cache: The folder in which pre-training, distillation and trained baselines are kept.
        output: The folder of the runs and of the table.
        seeds: Runs of every row, seeds 0, 1, ...
        tune: Settings that are tried on validation with seed 0, the same number for every tuned row: those of the
            method's grid (the default first), then other learning rates, then drawn ones (docs/compare.md); 1 takes the
            default.
        jobs: The number of runs at the same time; 0 takes as many as the machine has cores for, and one where there is
            a GPU.
        num_threads: The number of CPU threads of each run.
    """

    runs: str = ""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    baselines: tuple[str, ...] = field(default_factory=lambda: (*WITHOUT_ROUNDS, *own_baselines()))
    against: tuple[str, ...] = ()
    data: str = ""
    domains: str = ""
    cache: str = ".cache"
    output: str = "runs/compare"
    seeds: OneOrMore = 3
    tune: OneOrMore = 1
    jobs: ZeroOrMore = 0
    num_threads: Annotated[Int, Field(ge=1, le=1024)] = 1

    def __post_init__(self) -> None:
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
            if not isinstance(label, str) or not re.fullmatch(r"[A-Za-z0-9_.]+", label):
                raise ValueError(f"got the row {label!r}, expected letters, digits, _ and . (it names folders)")
            if label in (*BASELINES, *own_baselines(), *self.baselines, MACRO):
                raise ValueError(f"got the row {label}, which is the name of a baseline; choose another")
            foreign = [name for name in options if name.partition(".")[0] in (*OWN, *ALIKE)]
            if foreign:
                raise ValueError(f"got {foreign[0]} in the row {label}, expected it once for the whole table")
            method = options.get("method", label)
            if not isinstance(method, str) or method not in METHODS:
                raise ValueError(f"got method {method!r} in {label}, expected one of {', '.join(sorted(METHODS))}")
        rows = (
            *self.rows,
            *map(with_ensemble, self.rows),
            *(with_ensemble(row, OWN_ENSEMBLE_ROW) for row in self.rows),
        )
        for name, known in (("baselines", (*BASELINES, *own_baselines())), ("against", rows)):
            unknown = [one for one in getattr(self, name) if one not in known]
            unknown = [one for one in unknown if name != "baselines" or not _is_guest(one)]
            if unknown:
                raise ValueError(f"got {name} {unknown}, expected some of {', '.join(known)}")

    @property
    def num_jobs(self) -> int:
        if self.jobs or torch.cuda.is_available():
            return self.jobs or 1
        return max(1, (os.cpu_count() or 1) // self.num_threads)


def _is_guest(name: str) -> bool:
    """Whether a method of another track can stand in a table of this one."""
    try:
        return compare.guest_of(track_of(name)) is not None
    except ValueError:
        return False


class Run(NamedTuple):
    """One run of the table."""

    settings: Settings
    folder: run_folder.RunFolder


class Scope(NamedTuple):
    """What the words of a table know: its settings and data."""

    config: CompareConfig
    settings: Settings
    """Of the first row."""
    domains: Mapping[str, Domain]
    """Clients."""


def plan(config: CompareConfig) -> compare.Plan:
    """The table; every option is checked before anything runs.

    Raises:
        ValueError: a setting that cannot be; the message names the row.
    """
    run_folder.check_output(Path(config.output))
    parsed = {label: _parsed(config, label) for label in config.rows}
    first = next(iter(parsed.values()))
    shared, data, why = decided(first.run)
    first = first._replace(run=shared)
    for line in why:
        log_line(line)
    hashes = {name: domain.content_hash() for name, domain in data.items()}
    ahead: list[Run] = []
    entries = []
    for label, settings in parsed.items():
        if TEACHER in config.baselines and not settings.run.teacher_row:
            raise ValueError(f"got the baseline {TEACHER!r} with teacher_row false, expected one without the other")
        ensembles = [
            one for row in (ENSEMBLE_ROW, OWN_ENSEMBLE_ROW) if (one := with_ensemble(label, row)) in config.against
        ]
        if ensembles and settings.run.ensemble.kind == "none":
            raise ValueError(f"got {ensembles[0]!r} in against, but {label} is run with ensemble.kind none")
        run_of = partial(_run_of, config, label, shared.protocol, hashes)
        search, budget = ONE_SETTING, 1
        if set(config.rows[label]) <= {"method"}:
            method = METHODS[settings.run.method]
            space, grid = {**TRAINING_SPACE, **method.space}, (*method.grid, *RATES)
            search, budget = search_of(settings, space, grid), config.tune
        ahead += [run_of(setting, seed) for setting in search.candidates[:budget] for seed in range(config.seeds)]
        name = settings.run.method
        kind = "central" if METHODS[name].pooled else LOCAL if name == LOCAL else "federated"
        said, run = partial(_said, config, label), partial(_played, run_of, label)
        entries.append(compare.Entry(label, name, kind, [first.run.protocol], run, search, budget, said))
    scope = Scope(config, first, clients_of(data))
    return compare.Plan(
        "compare",
        Path(config.output),
        entries,
        [first.run.protocol],
        {name: customers_tested(domain) for name, domain in scope.domains.items()},
        config.seeds,
        beside=_beside(scope),
        baselines=config.baselines,
        against=config.against,
        jobs=config.num_jobs,
        prepare=partial(_build_stages, config, ahead),
        words=words_of(scope),
    )


def _options(config: CompareConfig, label: str, setting: Setting | None = None) -> dict[str, Any]:
    """Those of a row; ``local`` is a row of its own."""
    return {
        "local_row": "off",
        **config.rows[label],
        "method": config.rows[label].get("method", label),
        **(setting or {}),
    }


def _said(config: CompareConfig, label: str, setting: Setting) -> str:
    options = _options(config, label, setting)
    return setting_text({name: value for name, value in options.items() if name != "method"})


def _parsed(config: CompareConfig, label: str, setting: Setting | None = None) -> Settings:
    shared = {"data": config.data, "domains": config.domains, "cache": config.cache, "num_threads": config.num_threads}
    given = {name: value for name, value in shared.items() if value}
    runs = load_config(config.runs) if config.runs else None
    try:
        return make_settings({**given, **_options(config, label, setting)}, runs)
    except ValueError as error:
        raise ValueError(f"the row {label} cannot be run: {error}") from error


def _run_of(
    config: CompareConfig, label: str, protocol: str, hashes: Mapping[str, str], setting: Setting, seed: int
) -> Run:
    parsed = _parsed(config, label, setting)
    settings = parsed._replace(run=dataclasses.replace(parsed.run, seed=seed, seeds=1, protocol=protocol))
    key = run_folder.fingerprint({"config": settings.as_record(), "data": {**hashes, **beside_data(settings.run)}})
    return Run(settings, run_folder.RunFolder(Path(config.output) / "runs" / f"{label}-{seed}-{key}"))


def _build_stages(config: CompareConfig, runs: Sequence[Run]) -> None:
    """Pre-training and distillation that runs share, before several of them would build the same.

    Raises:
        ValueError: none could be built, such as where the folder of a pretrained model is missing.
    """
    first_runs = {}
    for one in runs:
        run = one.settings.run
        first_runs[run.seed, plain.content_key([run.pretrain, run.distill])] = one
    with ThreadPoolExecutor(config.num_jobs) as pool:
        problems = list(pool.map(partial(_call, "distill"), first_runs.values()))
    for (seed, _), problem in zip(first_runs, problems, strict=True):
        log_line(f"shared stages, seed {seed}: {f'failed: {problem}' if problem else 'done'}")
    if problems and all(problems):
        raise ValueError(f"got no shared stages, expected those of a seed at least: {problems[0]}")


def _played(run_of: Callable[[Setting, int], Run], label: str, setting: Setting, seed: int) -> compare.Cell:
    run = run_of(setting, seed)
    if not run.folder.results.is_file():
        if problem := _call("federate", run):
            raise ValueError(problem)
        log_line(f"{label}, {setting_text(setting)}, seed {seed}: done")
    return cell_of(label, run.settings.run.method, run.folder.root)


def _call(stage: str, run: Run) -> str:
    """Run ``stage`` in a process of its own; returns what went wrong, or nothing.

    Its settings are those of the run as they were parsed here: number formats are measured once.
    """
    folder, threads = run.folder, run.settings.run.num_threads
    place = folder.root if stage == "federate" else folder.root.with_name(f"stages-{run.settings.run.seed}")
    place.parent.mkdir(parents=True, exist_ok=True)
    file, log_file = (place.with_name(f"{place.name}.{ending}") for ending in ("yaml", "log"))
    with run_folder.locked(place.with_name(f"{place.name}.lock")) as lock, log_file.open("a") as log:
        words = ["--config", str(file)]
        if stage == "federate":
            if folder.results.is_file():  # by another process that held the lock
                return ""
            words += ["--output", str(place), "--resume", str(folder.record.exists()).lower()]
        write_settings(file, file_settings(run.settings))
        # The same code, wherever the table is made: neither another installed copy nor the present folder.
        paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        kept = [] if os.name == "nt" else [lock]  # where it can, the process keeps the lock when this one is killed
        own = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", "fedecider.cli.main", stage, *words]
        code = subprocess.run(
            command, stdout=log, stderr=log, env={**os.environ, **own}, pass_fds=kept, check=False
        ).returncode
    if code == 0:
        return ""
    last = [line for line in log_file.read_text().splitlines() if line.strip()][-1:]
    return f"exit code {code}, {last[0] if last else 'no output'} (see {log_file})"


def cell_of(label: str, method: str, root: Path) -> compare.Cell:
    """A finished run of ``method`` as a cell of the row ``label``.

    Validation ndcg@10 is that of the reported model, with the share of its update that it has been given.

    Raises:
        ValueError: a file is damaged.
    """
    result = RunResult.read(root)
    with damage.damage_names(run_folder.RunFolder(root).metrics):
        ensembles = {with_ensemble(method, one): with_ensemble(label, one) for one in (ENSEMBLE_ROW, OWN_ENSEMBLE_ROW)}
        rows = {result.reported: label, **{name: one for name, one in ensembles.items() if name in result.test}}
        means = result.valid_means("ndcg@10")
        valid = {row: means[name] for name, row in rows.items() if name == result.reported or name in means}
        protocol, best_round = result.protocol, result.best_round
        hits = {rows.get(name, name): value for name, value in result.valid_means("hit@10").items()}
    beside = (*BASELINES, *result.metrics.get("baselines", ()))

    def positions() -> dict[str, dict[str, compare.Positions]]:
        named = {name: name if name in beside else f"{label}: {variant_of(name)}" for name in result.positions}
        return {protocol: {{**named, **rows}[name]: dict(of) for name, of in result.positions.items()}}

    # counts of other clients are sent
    counted = [with_ensemble(label)] if with_ensemble(label, OWN_ENSEMBLE_ROW) in valid else []
    course = partial(compare.course_of, result.rounds, best_round)
    return compare.Cell(valid, positions, course, root, hits=hits, kinds=dict.fromkeys(counted, "federated"))


def _beside(scope: Scope) -> list[compare.Entry]:
    config, run = scope.config, scope.settings.run
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shared = compare.Shared(scope.domains, run.protocol, config.tune, Path(config.cache), device)
    entries = []
    for name in config.baselines:
        if name in (SASREC, SASREC_TEXT):
            entries.append(sasrec(shared, None if name == SASREC else run.pretrain.text_encoder))
        elif name in FACTORS:
            entries.append(factors(shared, name))
        elif name in own_baselines():
            entries.append(own_baseline(shared, name))
        elif name not in BASELINES and (guest := compare.guest_of(track_of(name))):
            entries.append(guest(name, shared))
    return entries


def _examples(config: CompareConfig, table: compare.Table, best: str | None) -> list[Section]:
    """Of the chosen row and another one, from ``against`` if it can be, seed 0; the files may have been deleted."""
    files = {row.entry.label: row.cells[0].folder / EXAMPLES_FILE for row in table.rows}
    # examples are those of a model, whatever ensemble stands beside it
    chosen = next((row.entry.label for row in table.rows if best in row.labels), next(iter(files)))
    other = [label for label in (*config.against, *files) if label != chosen and label in files][:1]
    return example_section(
        {label: damage.read_object(files[label]) for label in (chosen, *other) if files[label].is_file()}
    )


def _heading(scope: Scope, table: compare.Table) -> list[str]:
    """Data, and where the runs come from; the record of the first one stands for versions and machine of all."""
    config, encoder = scope.config, encoder_label(scope.settings.run.pretrain.text_encoder)
    with_texts = {TEXT, TEXT_AND_COUNTS, SASREC_TEXT} & set(config.baselines)
    sizes = (
        f"{name}: {len(one.clients.users):,} clients, {len(one.public.users):,} public, {len(one.item_keys):,} items"
        for name, one in scope.domains.items()
    )
    records = [run_folder.read_run(cell.folder) for row in table.rows for cell in row.cells]
    versions = ", ".join(f"{name} {number}" for name, number in records[0]["versions"].items())
    machine = records[0]["machine"]
    threads = records[0]["config"]["run"]["num_threads"]
    return [
        f"Data: {'; '.join(sizes)}",
        f"A tuned row is the best of at most {config.tune} settings on validation at seed 0",
        *([f"Rows with text: {encoder} embeddings of item texts"] if with_texts else []),
        f"Commits of the runs: {', '.join(sorted({str(record['commit']) for record in records}))}",
        f"Versions: Python {records[0]['python']}, {versions}",
        f"Machine: {machine['system']} {machine['processor']}, {threads or 'all'} thread(s) a run",
    ]


def words_of(scope: Scope) -> compare.Words:
    """What pages say of a table of this track."""
    config, run = scope.config, scope.settings.run
    protocol = get_protocol(run.protocol)
    chance = {
        name: chance_hit(domain.clients.sequences, len(domain.item_keys), "test", protocol)
        for name, domain in scope.domains.items()
    }
    guests = [name for name in config.baselines if name not in (*BASELINES, *own_baselines())]
    return compare.Words(
        partial(_heading, scope),
        {run.protocol: chance},
        True,
        (*UNTRAINED, *own_baselines()),
        ("federated", "local"),
        {
            ENSEMBLE_ROW: "all companies' counts and texts",
            **{name: f"{name.upper()} of one domain" for name in FACTORS},
            SASREC: "SASRec of one domain",
            SASREC_TEXT: "SASRec that starts from texts",
            **{name: f"{name}, federated without a language model" for name in guests},
        },
        before=(STUDENT,),
        planted=not run.data,
        sections=partial(_examples, scope.config),
        seconds="local training, s per client and round",
    )


TABLE = compare.TrackRows((CompareConfig,), plan)
"""The track's part in tables."""
