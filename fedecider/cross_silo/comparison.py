"""Tables of the cross-silo track: runs in processes of their own, rows of every run, SASRec, the page's words.

Every run is one call of ``fedecider federate``, in a folder named after the content of its settings and data: a
finished one is not run again, one that was killed goes on after its last round. SASRec is trained here, once a domain,
setting and seed, and kept. Methods of other tracks over prepared domains stand beside (`TrackRows.guest`).

Shape legend: S seeds, U users, I items, D dims of the item table.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedecider.baselines.counts import TEXT, TEXT_AND_COUNTS, UNTRAINED
from fedecider.baselines.fitting import validation_ndcg
from fedecider.baselines.own import own_baselines, own_positions
from fedecider.baselines.sasrec import GRID, SPACE, SasrecConfig, scores, train
from fedecider.bounds import Int, OneOrMore, ZeroOrMore, dataclass
from fedecider.comparison.compare import (
    Cell,
    Course,
    Entry,
    Plan,
    Positions,
    Shared,
    Table,
    TrackRows,
    Words,
    course_of,
    guest_of,
)
from fedecider.comparison.search import ONE_SETTING, search_of, setting_text
from fedecider.cross_silo.analyses import run_analysis
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.entries import (
    HYBRID_ROW,
    OWN_HYBRID_ROW,
    STUDENT,
    TEACHER,
    with_hybrid,
)
from fedecider.cross_silo.federate import beside_data
from fedecider.cross_silo.page import example_sections
from fedecider.cross_silo.prepare import Settings, load_data
from fedecider.data.domain import Domain, clients_of
from fedecider.data.encoders import encoder_label, load_encoder
from fedecider.data.sellers import once_each
from fedecider.engine.result import EXAMPLES_FILE, RunResult
from fedecider.engine.track import track_of
from fedecider.evaluation.metrics import MACRO, mean_metrics
from fedecider.evaluation.per_user import read_per_user
from fedecider.evaluation.protocols import chance_hit, get_protocol, rank_held_out
from fedecider.federation.record import read_json, read_records, write_json
from fedecider.methods import METHODS
from fedecider.methods.entries import RATES, TRAINING_SPACE
from fedecider.models.item_texts import encoded_texts, encoder_digest
from fedecider.report.analysis_sections import fusion_section, sections_of
from fedecider.report.figures import colours_of
from fedecider.report.page import Section
from fedecider.report.tables import CANARY, variant_of
from fedecider.running.progress import log_line
from fedecider.running.run_folder import (
    RunFolder,
    as_plain,
    cached_stage,
    check_output,
    content_key,
    damage_names,
    fingerprint,
    locked,
    read_object,
    read_run,
)
from fedecider.running.settings_files import PACKAGE
from fedecider.search_space import Setting
from idgen.ranking_config import RankingConfig
from idgen.text_vectors import item_vectors

# What is compared with what.

LOCAL = "local"
SASREC, SASREC_TEXT = "sasrec", "sasrec + text start"
WITHOUT_ROUNDS = (TEACHER, STUDENT, *UNTRAINED, HYBRID_ROW, SASREC, SASREC_TEXT, CANARY)
"""All but the two of SASRec stand in ``per_user.parquet`` of every run; a hybrid in that of every run that has one."""
BASELINES = (*WITHOUT_ROUNDS, OWN_HYBRID_ROW)
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
        baselines: Rows without a language model of their own: counts, SASRec, methods of other tracks over prepared
            domains (fedsasrec); they see the public pool and the clients' train parts of a domain.
        against: Rows that every other row is tested against; ``fedecider + hybrid`` is that row with its hybrid,
            ``fedecider + own hybrid`` with a hybrid without the counts of other clients.
        analysed: Row whose run with seed 0 is analysed in the page (distances, groups of users and items, weights),
            and the row beside it; empty for no analyses.
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
        encoder: The encoder of the texts whose distances the page of the table shows; the pages of the runs, whose
            distances are the same, take tfidf.
    """

    runs: str = ""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    baselines: tuple[str, ...] = field(default_factory=lambda: (*WITHOUT_ROUNDS, *own_baselines()))
    against: tuple[str, ...] = ()
    analysed: tuple[str, ...] = ()
    data: str = ""
    domains: str = ""
    cache: str = ".cache"
    output: str = "runs/compare"
    seeds: OneOrMore = 3
    tune: OneOrMore = 1
    jobs: ZeroOrMore = 0
    num_threads: Annotated[Int, Field(ge=1, le=1024)] = 1
    encoder: str = "auto"

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
        if len(self.analysed) not in (0, 2):
            raise ValueError(f"got analysed {list(self.analysed)}, expected two rows, or none")
        if self.encoder not in ("auto", "tfidf") and self.analysed:
            load_encoder(self.encoder)  # a name that is not known should not come out after the last run
        rows = (*self.rows, *map(with_hybrid, self.rows), *(with_hybrid(row, OWN_HYBRID_ROW) for row in self.rows))
        for name, known in (("baselines", (*BASELINES, *own_baselines())), ("against", rows), ("analysed", self.rows)):
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
        return guest_of(track_of(name)) is not None
    except ValueError:
        return False


# Runs of the methods.


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


class Asked(NamedTuple):
    """What the words of a table know: its settings and data."""

    config: CompareConfig
    settings: Settings
    """Of the first row."""
    domains: Mapping[str, Domain]
    """Clients."""


def plan(config: CompareConfig) -> Plan:
    """The table; every option is checked before anything runs.

    Raises:
        ValueError: a setting that cannot be; the message names the row.
    """
    check_output(Path(config.output))
    parsed = {label: _parsed(config, label, _start(config, label)) for label in config.rows}
    first = next(iter(parsed.values()))
    data = load_data(first.run)
    hashes = {name: domain.content_hash() for name, domain in data.items()}
    ahead: list[Run] = []
    entries = []
    for label, settings in parsed.items():
        if TEACHER in config.baselines and not settings.run.teacher_row:
            raise ValueError(f"got the baseline {TEACHER!r} with teacher_row false, expected one without the other")
        asked = [one for row in (HYBRID_ROW, OWN_HYBRID_ROW) if (one := with_hybrid(label, row)) in config.against]
        if asked and settings.run.hybrid.kind == "none":
            raise ValueError(f"got {asked[0]!r} in against, but {label} is run with hybrid.kind none")
        run_of = partial(_run_of, config, label, hashes)
        search, budget = ONE_SETTING, 1
        if set(config.rows[label]) <= {"method"}:
            method = METHODS[settings.run.method]
            space, grid = {**TRAINING_SPACE, **method.space}, (*method.grid, *RATES)
            search, budget = search_of(settings, space, grid, 0), config.tune
        ahead += [run_of(setting, seed) for setting in search.candidates[:budget] for seed in range(config.seeds)]
        name = settings.run.method
        kind = "central" if METHODS[name].pooled else LOCAL if name == LOCAL else "federated"
        said = partial(_said, config, label)
        run = partial(_played, config, run_of)
        entries.append(Entry(label, name, kind, [first.run.protocol], run, search, budget, said))
    asked_for = Asked(config, first, clients_of(data))
    return Plan(
        "compare",
        Path(config.output),
        entries,
        [first.run.protocol],
        {name: domain.clients.users for name, domain in asked_for.domains.items()},
        config.seeds,
        beside=_beside(asked_for),
        baselines=config.baselines,
        against=config.against,
        jobs=config.num_jobs,
        prepare=partial(_build_stages, config, ahead),
        words=words_of(asked_for),
    )


def _start(config: CompareConfig, label: str) -> dict[str, Any]:
    options = config.rows[label]
    return {"local_row": "off", **options, "method": options.get("method", label)}  # local is a row of its own


def _said(config: CompareConfig, label: str, setting: Setting) -> str:
    return setting_text(
        {name: value for name, value in {**_start(config, label), **setting}.items() if name != "method"}
    )


def _run_of(config: CompareConfig, label: str, hashes: Mapping[str, str], setting: Setting, seed: int) -> Run:
    options = {**_start(config, label), **setting}
    parsed = _parsed(config, label, options)
    settings = parsed._replace(run=dataclasses.replace(parsed.run, seed=seed))
    key = fingerprint({"config": settings.as_record(), "data": {**hashes, **beside_data(settings.run)}})
    folder = RunFolder(Path(config.output) / "runs" / f"{label}-{seed}-{key}")
    return Run(label, seed, options, settings, folder)


def _build_stages(config: CompareConfig, runs: Sequence[Run]) -> None:
    """Pre-training and distillation that runs share, before several of them would build the same.

    Raises:
        ValueError: none could be built, such as where the folder of a pretrained model is missing.
    """
    stages = {content_key([run.seed, run.settings.run.pretrain, run.settings.run.distill]): run for run in runs}
    with ThreadPoolExecutor(config.num_jobs) as pool:
        problems = list(pool.map(partial(_call, config, "distill"), stages.values()))
    for run, problem in zip(stages.values(), problems, strict=True):
        log_line(f"shared stages, seed {run.seed}: {f'failed: {problem}' if problem else 'done'}")
    if problems and all(problems):
        raise ValueError(f"got no shared stages, expected those of a seed at least: {problems[0]}")


def _played(config: CompareConfig, run_of: Callable[[Setting, int], Run], setting: Setting, seed: int) -> Cell:
    run = run_of(setting, seed)
    if not run.finished:
        if problem := _call(config, "federate", run):
            raise ValueError(problem)
        log_line(f"{', '.join([run.label, *_texts(run.options)])}, seed {run.seed}: done")
    return cell_of(run.label, run.settings.run.method, run.folder)


def cell_of(label: str, method: str, folder: RunFolder) -> Cell:
    """A finished run of ``method`` as a cell of the row ``label``.

    Validation ndcg@10 is that of the reported model, with the share of its update that it has been given.

    Raises:
        ValueError: a file is damaged.
    """
    content = read_object(folder.metrics)
    with damage_names(folder.metrics):
        result = RunResult.read(folder.root)
        shown, means = shown_as(label, method, content), result.valid_means("ndcg@10")
        # runs of before know the validation of their rounds alone
        valid = {label: float(means.get(content["reported"], content["best_valid_ndcg@10"]))}
        valid |= {one: means[name] for name, one in shown.items() if name in means}
        protocol, best_round = content["protocol"], content["best_round"]

    def positions() -> dict[str, dict[str, Positions]]:
        found: dict[str, Positions] = {}
        beside = (*BASELINES, *content.get("baselines", ()))
        for one in read_per_user(folder.per_user):
            name = shown.get(one.variant) or (
                one.variant if one.variant in beside else f"{label}: {variant_of(one.variant)}"
            )
            found.setdefault(name, {})[one.domain] = one.position_U
        return {protocol: found}

    def course() -> Course:
        return course_of(read_records(folder.rounds), best_round)

    hits = {shown.get(name, name): value for name, value in result.valid_means("hit@10").items()}
    counted = (
        with_hybrid(label) if with_hybrid(label, OWN_HYBRID_ROW) in valid else ""
    )  # counts of other clients are sent
    return Cell(valid, positions, course, folder.root, hits=hits, kinds={counted: "federated"} if counted else {})


def shown_as(label: str, method: str, content: Mapping[str, Any]) -> dict[str, str]:
    """What ``metrics.json`` calls the models of a run, alone and with hybrids -> the rows of the table."""
    variants = next(iter(content["domains"].values()))["test"]
    hybrids = {with_hybrid(method, one): with_hybrid(label, one) for one in (HYBRID_ROW, OWN_HYBRID_ROW)}
    return {content["reported"]: label, **{name: one for name, one in hybrids.items() if name in variants}}


def _parsed(config: CompareConfig, label: str, options: Mapping[str, Any]) -> Settings:
    try:
        return parse_settings([*_shared_words(config), *_words(options)])
    except (ValueError, SystemExit) as error:  # an option called help ends the parser
        raise ValueError(f"the row {label} cannot be run: {error}") from error


def _call(config: CompareConfig, stage: str, run: Run) -> str:
    """Run ``stage`` in a process of its own; returns what went wrong, or nothing."""
    # the format that auto chose here: a process would measure again, while others run, and could choose another one
    given = {**run.options, "seed": run.seed, "precision": run.settings.training.precision}
    words = [*_shared_words(config), *_words(given)]
    place = run.folder.root if stage == "federate" else run.folder.root.with_name(f"stages-{run.seed}")
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.with_name(f"{place.name}.lock")) as lock, place.with_name(f"{place.name}.log").open("a") as log:
        if stage == "federate":
            if run.finished:  # by another process that held the lock
                return ""
            words += ["--output", str(place), "--resume", str(run.folder.record.exists()).lower()]
        command = [sys.executable, "-m", "fedecider.cli.main", stage, *words]
        # The same code, wherever the table is made: neither another installed copy nor the present folder.
        paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        kept = [] if os.name == "nt" else [lock]  # where it can, the process keeps the lock when this one is killed
        own = {"OMP_NUM_THREADS": str(config.num_threads), "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        code = subprocess.run(
            command, stdout=log, stderr=log, env={**os.environ, **own}, pass_fds=kept, check=False
        ).returncode
    if code == 0:
        return ""
    last = [line for line in Path(log.name).read_text().splitlines() if line.strip()][-1:]
    return f"exit code {code}, {last[0] if last else 'no output'} (see {log.name})"


def _shared_words(config: CompareConfig) -> list[str]:
    words = ["--config", config.runs] if config.runs else []
    words += ["--data", config.data] if config.data else []
    words += ["--domains", config.domains] if config.domains else []
    own = {"cache": config.cache, "num_threads": config.num_threads}
    return [*words, *_words(own)]


def _words(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", _plain(value))]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _texts(options: Mapping[str, Any]) -> list[str]:
    return [f"{name} {_plain(value)}" for name, value in options.items() if name != "method"]


# Baselines with cells of their own.


def _beside(asked: Asked) -> list[Entry]:
    config, run = asked.config, asked.settings.run
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shared = Shared(asked.domains, run.protocol, config.tune, Path(config.cache), device)
    found = []
    for name in config.baselines:
        if name in (SASREC, SASREC_TEXT):
            found.append(sasrec(shared, None if name == SASREC else run.pretrain.text_encoder))
        elif name in own_baselines():
            found.append(own_baseline(shared, name))
        elif name not in BASELINES and (guest := guest_of(track_of(name))):
            found.append(guest(name, shared))
    return found


def own_baseline(shared: Shared, label: str) -> Entry:
    """A baseline that an installed package brings; it is ranked anew for every table."""

    @cache
    def ranked() -> dict[str, Positions]:
        found: dict[str, Positions] = {"valid": {}, "test": {}}
        for name, domain in shared.domains.items():
            for split, of_label in own_positions(domain, list(found), get_protocol(shared.protocol), [label]).items():
                found[split][name] = of_label[label]
        return found

    def run(setting: Setting, seed: int) -> Cell:
        scores = [mean_metrics(one, (10,))["ndcg@10"] for one in ranked()["valid"].values()]
        return Cell({label: sum(scores) / len(scores)}, lambda: {shared.protocol: {label: ranked()["test"]}})

    return Entry(label, label, "baseline", [shared.protocol], run)


class TextStart(NamedTuple):
    """What an item table starts from."""

    vector_ID: Tensor
    """Rows of length 1."""
    source: list[str]
    """What decides them: the encoder and all catalogues."""


def sasrec(shared: Shared, text_encoder: str | None = None) -> Entry:
    """SASRec of every domain. With a ``text_encoder`` the item tables start from the vectors of its item texts, cut
    down to their width as those of a backbone are (`idgen.text_vectors`), and are trained on."""
    label = SASREC if text_encoder is None else SASREC_TEXT

    @cache
    def starts(width: int) -> dict[str, TextStart]:
        return {} if text_encoder is None else _text_starts(shared, text_encoder, width)

    def run(setting: Setting, seed: int) -> Cell:
        config = SasrecConfig(**setting)
        found = starts(config.embedding_size)
        folders = {
            name: _trained(shared, domain, config, seed, found.get(name)) for name, domain in shared.domains.items()
        }
        valid = [read_json(folder / "info.json")["valid"] for folder in folders.values()]

        def positions() -> dict[str, dict[str, Positions]]:
            read = {name: load_file(folder / "positions.safetensors")["test"] for name, folder in folders.items()}
            return {shared.protocol: {label: read}}

        return Cell({label: sum(valid) / len(valid)}, positions)

    search = search_of([SasrecConfig()], SPACE, GRID, 0)
    return Entry(label, SASREC, "baseline", [shared.protocol], run, search, shared.tune)


def _text_starts(shared: Shared, encoder: str, width: int) -> dict[str, TextStart]:
    """By domain; the texts of a small catalogue may span fewer dimensions than the table has."""
    domains = shared.domains
    encoded = encoded_texts(domains, encoder, str(shared.cache))
    once = {catalogue: encoded[domain.name] for catalogue, domain in once_each(domains).items()}
    vectors = item_vectors(once, width, zero_fill=True)
    source = [encoder_digest(encoder), *(domain.content_hash() for domain in domains.values())]
    return {name: TextStart(vectors[domain.items.name], source) for name, domain in domains.items()}


def _trained(shared: Shared, domain: Domain, config: SasrecConfig, seed: int, start: TextStart | None) -> Path:
    sequences, num_items = domain.clients.sequences, len(domain.item_keys)
    protocol, device = shared.protocol, shared.device

    def build(folder: Path) -> None:
        ranking, public = get_protocol(protocol), domain.public.sequences
        valid = validation_ndcg(sequences, num_items, ranking)
        start_ID = None if start is None else start.vector_ID
        model = train(
            sequences, num_items, config, seed=seed, device=device, valid=valid, extra=public, start_ID=start_ID
        )
        ranked = {
            split: rank_held_out(scores(model, sequences, split), sequences, num_items, split, ranking)
            for split in ("valid", "test")
        }
        save_file(ranked, folder / "positions.safetensors")
        write_json(folder / "info.json", {"valid": mean_metrics(ranked["valid"], (10,))["ndcg@10"]})

    inputs = {
        "config": as_plain(config),
        "seed": seed,
        "protocol of epochs and ranks": protocol,
        "data": domain.content_hash(),
        "device": device,
        **({} if start is None else {"start": start.source}),
    }
    stage = cached_stage(shared.cache, f"sasrec-{domain.name}", inputs, build)
    if not stage.reused:
        label = SASREC if start is None else SASREC_TEXT
        valid_ndcg = read_json(stage.folder / "info.json")["valid"]
        log_line(f"{label}, {domain.name}, seed {seed}: validation ndcg@10 {valid_ndcg:.4f}")
    return stage.folder


# What the page says beside the tables.


def _sections(asked: Asked, table: Table, chosen: str | None) -> tuple[list[Section], list[Section]]:
    first, more = _examples(asked.config, table, chosen)
    return first, [*_analyses(asked, table), *more]


def _examples(config: CompareConfig, table: Table, best: str | None) -> tuple[list[Section], list[Section]]:
    """Of the chosen row and another one, from ``against`` if it can be, seed 0; the files may have been deleted."""
    files = {row.entry.label: row.cells[0].folder / EXAMPLES_FILE for row in table.rows}
    # examples are those of a model, whatever hybrid stands beside it
    chosen = next((row.entry.label for row in table.rows if best in row.labels), next(iter(files)))
    other = [label for label in (*config.against, *files) if label != chosen and label in files][:1]
    return example_sections({label: read_object(files[label]) for label in (chosen, *other) if files[label].is_file()})


def _analyses(asked: Asked, table: Table) -> list[Section]:
    """Analyses of one row's run with seed 0 beside another row's; none when one of the two is missing."""
    config = asked.config
    folders = {row.entry.label: RunFolder(row.cells[0].folder) for row in table.rows}
    if len(config.analysed) != 2 or not set(config.analysed) <= set(folders):
        return []
    own, other = (folders[label] for label in config.analysed)
    analysis = run_analysis(own.root, asked.domains, config.encoder, compare=other.root)
    first, second = config.analysed
    said = Section("Analyses", [f"What follows is about {first} with seed 0, beside {second} with seed 0."])
    of_table = colours_of(list(folders))
    colours = {label: of_table[row] for label, row in zip(analysis["lines"], config.analysed, strict=True)}
    return [said, *fusion_section(analysis["alpha"], analysis["best_round"]), *sections_of(analysis, colours)]


def _heading(asked: Asked, table: Table) -> list[str]:
    """Data, and where the runs come from; the record of the first one stands for versions and machine of all."""
    config, encoder = asked.config, encoder_label(asked.settings.run.pretrain.text_encoder)
    with_texts = {TEXT, TEXT_AND_COUNTS, SASREC_TEXT} & set(config.baselines)
    sizes = (
        f"{name}: {len(one.clients.users):,} clients, {len(one.public.users):,} public, {len(one.item_keys):,} items"
        for name, one in asked.domains.items()
    )
    records = [read_run(cell.folder) for row in table.rows for cell in row.cells]
    versions = ", ".join(f"{name} {number}" for name, number in records[0]["versions"].items())
    machine = records[0]["machine"]
    threads = records[0]["config"]["run"]["num_threads"]
    return [
        f"Data: {'; '.join(sizes)}",
        f"A tuned row is the best of at most {config.tune} settings on validation at seed 0",
        *([f"Rows with text: item texts as vectors of {encoder}"] if with_texts else []),
        f"Commits of the runs: {', '.join(sorted({str(record['commit']) for record in records}))}",
        f"Versions: Python {records[0]['python']}, {versions}",
        f"Machine: {machine['system']} {machine['processor']}, {threads or 'all'} thread(s) a run",
    ]


def words_of(asked: Asked) -> Words:
    """What pages say of a table of this track."""
    config, run = asked.config, asked.settings.run
    protocol = get_protocol(run.protocol)
    chance = {
        name: chance_hit(domain.clients.sequences, len(domain.item_keys), "test", protocol)
        for name, domain in asked.domains.items()
    }
    guests = [name for name in config.baselines if name not in (*BASELINES, *own_baselines())]
    return Words(
        partial(_heading, asked),
        {run.protocol: chance},
        len(asked.domains),
        (*UNTRAINED, *own_baselines()),
        ("federated", "local"),
        {
            HYBRID_ROW: "the hybrid without a model",
            SASREC: "SASRec of one domain",
            SASREC_TEXT: "SASRec that starts from texts",
            **{name: f"{name}, federated without a language model" for name in guests},
        },
        before=(STUDENT,),
        planted=not run.data,
        sections=partial(_sections, asked),
        seconds="local training, s per client and round",
    )


TABLE = TrackRows((CompareConfig,), plan)
"""The track's part in tables."""
