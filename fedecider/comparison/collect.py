"""What a comparison shows, from its finished runs: rows with intervals, paired tests, costs, curves.

Shape legend: S seeds, U users.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.comparison.baselines import BASELINES, SASREC, SASREC_TEXT, sasrec
from fedecider.comparison.id_rows import IdRow, id_row
from fedecider.comparison.plan import CompareConfig, RowRuns, Run, shown_as
from fedecider.data.domain import Domain
from fedecider.data.encoders import encoder_label
from fedecider.evaluation.per_user import read_per_user
from fedecider.evaluation.persons import Persons, shared_persons
from fedecider.evaluation.statistics import Comparison, compare_table
from fedecider.federation.record import read_json, read_records
from fedecider.federation.streams import stream
from fedecider.id_based import METHODS as ID_METHODS
from fedecider.llm.baselines import TEXT, TEXT_AND_COUNTS
from fedecider.llm.memories import MEMORY_ROW, OWN_MEMORY_ROW
from fedecider.llm.run_words import valid_means
from fedecider.report.costs import mean_bytes, near_round
from fedecider.report.rows import CANARY, COMPARED, ResultRow, result_rows, view_of

Positions = dict[str, Tensor]
"""domain -> (S, U) positions of the test items."""


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
    comparisons: list[Comparison]
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
