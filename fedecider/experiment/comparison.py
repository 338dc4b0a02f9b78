"""Methods x seeds x data: the plan, its runs, what is collected.

SASRec is trained once a domain and seed and kept; rows without training and zero-shot backbones stand in every run.

Every run is one call of ``scripts/federate.py`` in a process of its own, in a folder named after the content of its
settings and data: a finished one is not run again, one that was killed goes on after its last round.

They are trained here, once a setting and seed, and kept; the rounds and the wire are those of the methods beside which
they stand, so their bytes and seconds enter the same table of costs.

Shape legend: S seeds, U users, I items, D dims of the item table.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedecider.baselines.fitting import validation_ndcg
from fedecider.baselines.sasrec import GRID, SPACE, SasrecConfig, scores, train
from fedecider.bounds import OneOrMore, Setting, ZeroOrMore, at_least, check
from fedecider.data.domain import Domain, by_catalogue
from fedecider.data.encoders import encoder_label, load_encoder
from fedecider.evaluation.metrics import MACRO, mean_metrics
from fedecider.evaluation.per_user import read_per_user
from fedecider.evaluation.protocols import get_protocol, rank_held_out
from fedecider.evaluation.statistics import Comparison as PairedTest
from fedecider.evaluation.statistics import Persons, compare_table, shared_persons
from fedecider.experiment import tuning as search
from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.federate import beside_data
from fedecider.experiment.prepare import Settings, load_data
from fedecider.experiment.rows import (
    MEMORY_ROW,
    OWN_MEMORY_ROW,
    STUDENT,
    TEACHER,
    TEXT,
    TEXT_AND_COUNTS,
    UNTRAINED,
    valid_means,
    with_memory,
)
from fedecider.experiment.tuning import Search, Tried, check_budget, proposal, search_of, shortfall
from fedecider.federation.record import Recorder, read_json, read_records, write_json, write_text
from fedecider.federation.streams import stream
from fedecider.id_based.methods import METHODS as ID_METHODS
from fedecider.id_based.run import IdRunConfig, IdSettings, train_rounds
from fedecider.methods import METHODS, RATES, TRAINING_SPACE
from fedecider.models.item_texts import encoded_texts, encoder_digest
from fedecider.report.analyses import mean_bytes, near_round
from fedecider.report.tables import (
    CANARY,
    COMPARED,
    ResultRow,
    ResultTable,
    caption,
    result_rows,
    shown_domains,
    view_of,
)
from fedecider.running.options import PACKAGE
from fedecider.running.progress import say
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
from idgen.ranking import RankingConfig
from idgen.text_vectors import item_vectors

# Finished runs of any track beside each other.

Positions = dict[str, Tensor]
"""client -> positions of the test items, (S, U) or (U,)."""


class Comparison(NamedTuple):
    """Runs of several labels on the same data: means over seeds and users, paired tests against the first label."""

    table: pd.DataFrame
    """One row a label: ``seeds``; hit@10 and ndcg@10 as mean over clients, with ``_low`` and ``_high`` (95 % cluster
    bootstrap over users and seeds) and ``_p_holm`` against the first label, NaN for that one."""
    per_client: pd.DataFrame
    """One row a label and client, with the columns of ``table`` but the tests."""
    tests: pd.DataFrame
    """One row a test: ``metric``, ``first`` and ``second`` label, ``difference`` (second minus first) with bounds,
    ``p_value``, ``p_holm``, ``effect_size``."""
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
    if not labels or not all(labels.values()):
        raise ValueError(f"got {dict(labels)}, expected label -> folders of finished runs, one at least for each label")
    sizes = {label: len(folders) for label, folders in labels.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"got numbers of runs {sizes}, expected the same seeds for every label")
    every = [Path(folder).resolve() for folders in labels.values() for folder in folders]
    if twice := [str(folder) for folder in dict.fromkeys(every) if every.count(folder) > 1]:
        raise ValueError(f"got the run {twice[0]} twice, expected each once: one per label and seed")
    found = {label: [_finished(Path(folder)) for folder in folders] for label, folders in labels.items()}
    first = next(iter(found.values()))[0]
    for label, runs in found.items():
        for folder, run in zip(labels[label], runs, strict=True):
            for what, own, wanted in zip(run._fields[:-1], run, first, strict=False):
                if own != wanted:
                    raise ValueError(
                        f"got other {what} in {folder} ({label}) than in {next(iter(labels.values()))[0]}, expected "
                        "the same for all runs that are compared"
                    )
    positions = {label: _stacked([run.position for run in runs]) for label, runs in found.items()}
    persons = shared_persons(first.users)
    rows = result_rows(positions, persons=persons)
    scope, base = shown_domains(rows)[-1], next(iter(labels))
    tests = compare_table(
        positions,
        stream(0, "comparisons"),
        COMPARED,
        [(label, base) for label in labels if label != base],
        persons=persons,
        each_domain=False,
    )
    corrected = {(one.first, one.metric): one.p_holm for one in tests}
    num_seeds, protocol = sizes[base], get_protocol(first.protocol)
    table = [
        {
            "label": row.label,
            "seeds": num_seeds,
            **_interval_columns(row, scope),
            **{f"{name}_p_holm": corrected.get((row.label, name), float("nan")) for name in COMPARED},
        }
        for row in rows
    ]
    per_client = [
        {"label": row.label, "client": client, "seeds": num_seeds, **_interval_columns(row, client)}
        for row in rows
        for client in first.users
    ]
    tested = [
        {
            "metric": one.metric,
            "first": base,
            "second": one.first,
            **dict(zip(("difference", "low", "high"), one.difference, strict=True)),
            "p_value": one.p_value,
            "p_holm": one.p_holm,
            "effect_size": one.effect_size,
        }
        for one in tests
    ]
    notes = [f"p: paired permutation test over users against {base}, Holm over the table"] if tests else []
    notes += ["who is a user of several clients counts once"] if persons else []
    columns = ["metric", "first", "second", "difference", "low", "high", "p_value", "p_holm", "effect_size"]
    return Comparison(
        pd.DataFrame(table).set_index("label"),
        pd.DataFrame(per_client).set_index(["label", "client"]),
        pd.DataFrame(tested, columns=columns),
        caption(ResultTable(rows, protocol, notes)),
    )


class _Finished(NamedTuple):
    """What is compared of a run; all but the positions are the same in all of them."""

    protocol: str
    data: dict[str, str]
    """Client or data set -> hash."""
    users: dict[str, Sequence[str]]
    """Client or data set -> its users."""
    position: Positions
    """(U,) of the model that the run reports."""


def _finished(root: Path) -> _Finished:
    folder, record = RunFolder(root), read_run(root)
    if not folder.results.is_file():
        raise ValueError(f"got {root}, a run that did not finish, expected finished ones: go on with it (resume)")
    content = read_object(folder.metrics, {"reported": str, "protocol": str})
    reported = [one for one in read_per_user(folder.per_user) if one.view == content["reported"]]
    if not reported:
        raise ValueError(f"got no users of {content['reported']} in {folder.per_user}, expected those of the run")
    return _Finished(
        content["protocol"],
        {one.domain: record["data"].get(one.domain, "") for one in reported},
        {one.domain: one.users for one in reported},
        {one.domain: one.position_U for one in reported},
    )


def _stacked(per_seed: Sequence[Positions]) -> Positions:
    """(S, U) by client, seeds in order."""
    return {client: torch.stack([one[client] for one in per_seed]) for client in per_seed[0]}


def _interval_columns(row: ResultRow, scope: str) -> dict[str, float]:
    parts = ("", "_low", "_high")
    values = {name: zip(parts, row.values[scope][name], strict=True) for name in COMPARED}
    return {f"{name}{part}": value for name, of_name in values.items() for part, value in of_name}


# Rows of a comparison without a language model of their own, on the same events: public pool and train parts.

SASREC, SASREC_TEXT = "sasrec", "sasrec + text start"
WITHOUT_ROUNDS = (TEACHER, STUDENT, *UNTRAINED, MEMORY_ROW, SASREC, SASREC_TEXT, CANARY)
"""All but the two of SASRec are views in ``per_user.parquet`` of every run; a memory of every run that has one."""
BASELINES = (*WITHOUT_ROUNDS, OWN_MEMORY_ROW, *ID_METHODS)
"""Besides, what a company alone has of counts and texts, where there are siblings, and ID-based methods
(`fedecider.experiment.comparison`)."""


class TextStart(NamedTuple):
    """What an item table starts from."""

    vector_ID: Tensor
    """Rows of length 1."""
    source: list[str]
    """What decides them: the encoder and all catalogues."""


def sasrec(
    domains: Mapping[str, Domain],
    protocol: str,
    seeds: int,
    tune: int,
    cache: Path,
    device: str = "cpu",
    text_encoder: str | None = None,
) -> dict[str, Tensor]:
    """domain -> (S, U) test positions of SASRec with seeds 0, 1, ...

    Chosen like a row of the table: of ``tune`` settings of its search the one with the best validation ndcg@10 at seed
    0, mean over domains. With a ``text_encoder`` the item tables start from the vectors of its item texts, cut down to
    their width as those of a backbone are (`idgen.text_vectors`), and are trained on.
    """

    def folders(setting: dict, seed: int) -> dict[str, Path]:
        config = SasrecConfig(**setting)
        starts = {} if text_encoder is None else _text_starts(domains, text_encoder, cache, config.embedding_size)
        return {
            name: _trained(domain, protocol, config, seed, cache, device, starts.get(name))
            for name, domain in domains.items()
        }

    def score(setting: dict) -> float:
        found = [_valid(folder) for folder in folders(setting, 0).values()]
        return sum(found) / len(found)

    tried = search.search_settings(search.search_of([SasrecConfig()], SPACE, GRID, 0), tune, score, SASREC)
    best = search.best_of(tried)
    if best is None:
        raise ValueError(f"no setting of {SASREC} could be trained")
    per_seed = [folders(tried[best].setting, seed) for seed in range(seeds)]
    return {
        name: torch.stack([load_file(one[name] / "positions.safetensors")["test"] for one in per_seed])
        for name in domains
    }


def _valid(folder: Path) -> float:
    return read_json(folder / "info.json")["valid"]


def _text_starts(domains: Mapping[str, Domain], encoder: str, cache: Path, width: int) -> dict[str, TextStart]:
    """By domain; the texts of a small catalogue may span fewer dimensions than the table has."""
    encoded = encoded_texts(domains, encoder, str(cache))
    once = {catalogue: encoded[domain.name] for catalogue, domain in by_catalogue(domains).items()}
    vectors = item_vectors(once, width, zero_fill=True)
    source = [encoder_digest(encoder), *(domain.content_hash() for domain in domains.values())]
    return {name: TextStart(vectors[domain.catalogue], source) for name, domain in domains.items()}


def _trained(
    domain: Domain,
    protocol: str,
    config: SasrecConfig,
    seed: int,
    cache: Path,
    device: str,
    start: TextStart | None,
) -> Path:
    sequences, num_items = domain.clients.sequences, len(domain.item_keys)

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
    stage = cached_stage(cache, f"sasrec-{domain.name}", inputs, build)
    if not stage.reused:
        label = SASREC if start is None else SASREC_TEXT
        say(f"{label}, {domain.name}, seed {seed}: validation ndcg@10 {_valid(stage.folder):.4f}")
    return stage.folder


# A whole table of federated runs: rows x seeds, equal tuning on validation, several runs at once, resumable.

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
        if asked and first.run.hybrid.kind == "none":
            raise ValueError(f"got {asked[0]!r} in against, but {label} is run with hybrid.kind none")
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
        command = [sys.executable, "-m", "fedecider.cli.main", stage, *words]
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
    own = {"cache": config.cache, "num_threads": config.num_threads}
    return [*words, *_words(own)]


def _words(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", _plain(value))]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _texts(options: Mapping[str, Any]) -> list[str]:
    return [f"{name} {_plain(value)}" for name, value in options.items() if name != "method"]


# Rows of a comparison that are federated without a language model: ID-based methods on the same events and
# clients.


class IdRow(NamedTuple):
    """One row, from its runs with all seeds."""

    position_SU: dict[str, Tensor]
    """By domain, of the test items."""
    records: list[list[dict]]
    """Of the rounds of each seed."""
    best_rounds: list[int]


def id_row(
    method: str, domains: Mapping[str, Domain], protocol: str, seeds: int, tune: int, cache: Path, device: str = "cpu"
) -> IdRow:
    """A method with seeds 0, 1, ..., chosen as a row of the table is: of ``tune`` settings of its search the one with
    the best validation ndcg@10 at seed 0.

    Raises:
        ValueError: no setting could be trained.
    """
    entry = ID_METHODS[method]

    def folder(setting: dict, seed: int) -> Path:
        run = IdRunConfig(method=method, protocol=protocol, seed=seed, patience=entry.patience)
        return _trained_id_rows(IdSettings(run, replace(entry.config(), **setting)), domains, cache, device)

    start = search.search_of([entry.config()], entry.space, entry.grid, 0)
    tried = search.search_settings(
        start, tune, lambda setting: read_json(folder(setting, 0) / "info.json")["valid"], method
    )
    best = search.best_of(tried)
    if best is None:
        raise ValueError(f"no setting of {method} could be trained")
    folders = [folder(tried[best].setting, seed) for seed in range(seeds)]
    places = [load_file(one / "positions.safetensors") for one in folders]
    return IdRow(
        {name: torch.stack([of_seed[name] for of_seed in places]) for name in domains},
        [read_records(one / "rounds.jsonl") for one in folders],
        [read_json(one / "info.json")["best_round"] for one in folders],
    )


def _trained_id_rows(settings: IdSettings, domains: Mapping[str, Domain], cache: Path, device: str) -> Path:
    method = settings.run.method

    def build(folder: Path) -> None:
        recorder = Recorder(folder / "rounds.jsonl")
        trained = train_rounds(settings, domains, torch.device(device), recorder=recorder)
        reported = next(iter(trained.positions("test").values()))
        save_file(reported, folder / "positions.safetensors")
        state = trained.state
        write_json(folder / "info.json", {"valid": state.best_score, "best_round": state.best_round})

    inputs = {
        "run": as_plain(settings.run),
        "method": as_plain(settings.method),
        "data": [(name, domain.content_hash()) for name, domain in domains.items()],
        "device": device,
    }
    stage = cached_stage(cache, method, inputs, build)
    if not stage.reused:
        info = read_json(stage.folder / "info.json")
        say(f"{method}, seed {settings.run.seed}: validation ndcg@10 {info['valid']:.4f} in round {info['best_round']}")
    return stage.folder


# What a comparison shows, from its finished runs: rows with intervals, paired tests, costs, curves.


class Cost(NamedTuple):
    """What one row costs and how fast it is there, means over its runs."""

    train_s: float
    """Local training, seconds per client and round."""
    up: float
    """Bytes that a client sends per round."""
    down: float
    """Bytes that a client receives per round."""
    best_rounds: list[int]
    near_rounds: list[int]
    """First round within 1 % of the best validation ndcg@10, per run."""


class Collected(NamedTuple):
    """Everything that a table shows."""

    rows: list[ResultRow]
    """Reported models of all methods, each with its memory behind it where it has one, then the baselines."""
    views: list[ResultRow]
    """The other models of the methods: global where the local one is reported, and so on."""
    comparisons: list[PairedTest]
    costs: dict[str, Cost]
    valid: dict[str, float]
    """Validation ndcg@10 of every row of a method, mean over its runs: of the models whose test figures are shown."""
    curves: dict[str, list[list[float]]]
    """label -> [[round, mean validation ndcg@10 over domains and seeds], ...]."""
    positions: dict[str, Positions]
    notes: list[str]


def collect(config: CompareConfig, methods: Sequence[RowRuns], domains: Mapping[str, Domain]) -> Collected:
    """Read the finished runs of ``methods``, add the baselines and test every row against those of ``against``."""
    reported: dict[str, Positions] = {}
    others: dict[str, Positions] = {}
    valid: dict[str, float] = {}
    for row in methods:
        of_views = _positions(row.runs)
        metrics = [read_json(run.folder.metrics) for run in row.runs]
        for name, label in shown_as(row).items():
            reported[label] = of_views.pop(name)
            valid[label] = statistics.mean(valid_means(one, "ndcg@10")[name] for one in metrics)
        others.update({f"{row.label}: {view_of(view)}": v for view, v in of_views.items() if view not in BASELINES})
    id_rows = _id_rows(config, methods, domains)
    baselines = _baselines(config, methods, domains, id_rows)
    persons = shared_persons({name: domain.clients.users for name, domain in domains.items()})
    everything = {**reported, **baselines}
    pairs = _pairs(config, list(reported), list(baselines))
    comparisons = compare_table(everything, stream(0, "comparisons"), COMPARED, pairs, persons=persons) if pairs else []
    return Collected(
        rows=result_rows(reported, baselines, persons),
        views=result_rows(others, persons=persons),
        comparisons=comparisons,
        costs={
            **{row.label: _cost_of_runs(row.runs) for row in methods},
            **{label: _cost(row.records, row.best_rounds) for label, row in id_rows.items()},
        },
        valid=valid,
        curves={row.label: _curve(row.runs) for row in methods},
        positions=everything,
        notes=_notes(config, methods, reported, persons),
    )


def _pairs(config: CompareConfig, methods: Sequence[str], baselines: Sequence[str]) -> list[tuple[str, str]]:
    """Every row of ``against`` with every other row but the canary, each pair once."""
    anchors = [label for label in config.against if label in methods]  # a row whose run failed is none
    others = [*methods, *(label for label in baselines if label != CANARY)]
    earlier = {anchor: config.against[: config.against.index(anchor)] for anchor in anchors}
    pairs = ((anchor, label) for anchor in anchors for label in others if label not in (anchor, *earlier[anchor]))
    return list(dict.fromkeys(pairs))


def _positions(runs: Sequence[Run]) -> dict[str, Positions]:
    """view -> domain -> (S, U), seeds in order."""
    per_seed = [{(one.view, one.domain): one.position_U for one in read_per_user(run.folder.per_user)} for run in runs]
    found: dict[str, Positions] = {}
    for view, domain in per_seed[0]:
        found.setdefault(view, {})[domain] = torch.stack([one[view, domain] for one in per_seed])
    return found


def _id_rows(config: CompareConfig, methods: Sequence[RowRuns], domains: Mapping[str, Domain]) -> dict[str, IdRow]:
    """The chosen rows that are federated without a language model."""
    protocol = methods[0].runs[0].settings.run.protocol
    asked = (domains, protocol, config.seeds, config.tune, Path(config.cache), _device())
    return {name: id_row(name, *asked) for name in config.baselines if name in ID_METHODS}


def _baselines(
    config: CompareConfig, methods: Sequence[RowRuns], domains: Mapping[str, Domain], id_rows: Mapping[str, IdRow]
) -> dict[str, Positions]:
    """The chosen baselines; ID-based methods and SASRec apart they are read from the first row's runs, a memory from
    those of the first row with one."""
    run = methods[0].runs[0].settings.run
    of_runs = _positions(next((row.runs for row in methods if len(shown_as(row)) > 1), methods[0].runs))
    found = {**of_runs, **{label: row.position_SU for label, row in id_rows.items()}}
    encoders = {SASREC: None, SASREC_TEXT: run.pretrain.text_encoder}
    return {
        name: sasrec(domains, run.protocol, config.seeds, config.tune, Path(config.cache), _device(), encoders[name])
        if name in encoders
        else found[name]
        for name in config.baselines
        if name not in (MEMORY_ROW, OWN_MEMORY_ROW) or name in found
    }


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _cost_of_runs(runs: Sequence[Run]) -> Cost:
    best_rounds = [read_json(run.folder.metrics)["best_round"] for run in runs]
    return _cost([read_records(run.folder.rounds) for run in runs], best_rounds)


def _cost(records: Sequence[list[dict]], best_rounds: list[int]) -> Cost:
    every = [record for of_run in records for record in of_run]
    return Cost(
        train_s=statistics.mean(record["train_s"] / len(record["clients"]) for record in every),
        up=statistics.mean(mean_bytes(record, "up") for record in every),
        down=statistics.mean(mean_bytes(record, "down") for record in every),
        best_rounds=best_rounds,
        near_rounds=[near_round(of_run) for of_run in records],
    )


def _curve(runs: Sequence[Run]) -> list[list[float]]:
    per_run = [{r["round"]: r["score"] for r in read_records(run.folder.rounds)} for run in runs]
    rounds = sorted(set.intersection(*(set(one) for one in per_run)))
    return [[number, statistics.mean(one[number] for one in per_run)] for number in rounds]


def _notes(
    config: CompareConfig, methods: Sequence[RowRuns], reported: Mapping[str, Positions], persons: Persons | None
) -> list[str]:
    absent = [label for label in config.against if label not in reported]
    missing = [label for label in config.rows if label not in {row.label for row in methods}]
    notes = [f"{config.seeds} seeds; a tuned row is the best of at most {config.tune} settings on validation at seed 0"]
    if persons is not None:
        notes.append(
            "some users are clients of several domains: tests and intervals of the mean over domains take a "
            "person as one unit"
        )
    if {TEXT, TEXT_AND_COUNTS, SASREC_TEXT} & set(config.baselines):
        encoder = encoder_label(methods[0].runs[0].settings.run.pretrain.text_encoder)
        notes.append(f"rows with text: item texts as vectors of {encoder}")
    notes += [f"not tested against, since no run has such a row: {', '.join(absent)}"] if absent else []
    return [*notes, *([f"left out, since a run failed: {', '.join(missing)}"] if missing else [])]
