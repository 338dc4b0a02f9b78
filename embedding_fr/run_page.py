"""``report.html`` of a run of the embedding track: read from its JSON files alone, so that it can be made again.

Shape legend: R rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedecider.evaluation.protocols import get_protocol
from fedecider.federation.record import read_records
from fedecider.report.analyses import BUCKET_METRICS
from fedecider.report.analysis_sections import INTERVALS, group_rows, span
from fedecider.report.figures import validation_curves
from fedecider.report.page import Download, PageTable, Section, write_page
from fedecider.report.rows import CANARY, METRICS
from fedecider.report.tables import ENDS, comparisons_csv, csv_text, interval_text
from fedecider.report.verdict import Evidence, opening
from fedecider.running.damage import damage_names, read_object
from fedecider.running.run_folder import PLACES, RunFolder, read_run

SIMPLE = ("popularity",)
"""Rows of a run that need no training."""


def embedding_run_page(folder: RunFolder) -> Path:
    """Write ``report.html`` into a finished run folder of the embedding track and return its path.

    Raises:
        FileNotFoundError: ``folder`` holds no run.
        ValueError: the run is not finished, or one of its files is damaged.
    """
    record = read_run(folder.root)
    if not folder.metrics.is_file():
        raise ValueError(
            f"no metrics.json in {folder.root}: the run did not finish. Go on with it: scripts/federate.py --resume "
            f"true --output {folder.root} and the settings of the run"
        )
    metrics = read_object(folder.metrics)
    with damage_names(folder.rounds):
        records = read_records(folder.rounds)
    with damage_names(folder.metrics):
        sections = [
            _results(metrics),
            _convergence(metrics, records),
            _groups(metrics),
            _costs(metrics, records),
            _settings(record),
        ]
        first = opening(run_evidence(record, metrics), [_about(metrics)])
        subtitle = f"{metrics['method']} on {metrics['dataset']}; {metrics['stamp']}"
    title = f"Run {folder.root.resolve().name}"
    return write_page(folder.root / "report.html", title, subtitle, sections, opening=first)


def run_evidence(record: Mapping[str, Any], metrics: Mapping[str, Any]) -> Evidence:
    """What the files of a run say about its reported row beside popularity."""
    test, protocol, chance = metrics["test"], get_protocol(metrics["protocol"]), metrics["chance_hit@10"]
    alarms = []
    if protocol.drop_seen and not protocol.leaks and CANARY in test and test[CANARY]["hit@10"]["low"] > chance:
        alarms.append("The memoriser, which knows nothing about items, is above chance: by luck, or there is a leak.")
    if not record["config"]["run"]["federation"]:
        alarms.append("Federation was off: every client trained alone.")
    alarms.append(
        "Of the simple rules popularity alone stands beside it; co-occurrence, item-kNN, EASE and others stand in a "
        "leaderboard, and are often better."
    )
    return Evidence(
        subject=metrics["reported"],
        rows=test,
        simple=SIMPLE,
        protocol=protocol.name,
        tests=metrics.get("comparisons", ()),  # runs of before have none
        valid={label: row["hit@10"]["mean"] for label, row in metrics["valid"].items()},
        num_clients=metrics["num_users"],
        chance=chance,
        alarms=alarms,
    )


def _about(metrics: Mapping[str, Any]) -> str:
    return (
        f"What was run: the method {metrics['method']} on {metrics['dataset']}, {metrics['num_users']:,} users, each a "
        f"client, over {metrics['num_items']:,} items, in {metrics['last_round']} rounds; round "
        f"{metrics['best_round']} is the best one on validation items."
    )


def _results(metrics: Mapping[str, Any]) -> Section:
    rows = [[label, *(interval_text(row[name]) for name in METRICS)] for label, row in metrics["test"].items()]
    cells = (
        [split, label, name, *(value[end] for end in ENDS)]
        for split in ("test", "valid")
        for label, row in metrics[split].items()
        for name, value in row.items()
    )
    files = [Download("results.csv", csv_text(["split", "row", "metric", *ENDS], cells))]
    if metrics.get("comparisons"):
        files.append(Download("tests.csv", comparisons_csv(metrics["comparisons"])))
    paragraphs = [
        f"Test items. Reported: {metrics['reported']}. Brackets: 95 % cluster bootstrap over users. The memoriser is "
        f"the canary; expected hit@10 of random scores: {metrics['chance_hit@10']:.4f}.",
        f"Privacy: {metrics['privacy']}.",
    ]
    return Section("Results", paragraphs, [PageTable(("row", *METRICS), rows)], downloads=files)


def _convergence(metrics: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Section:
    records, name = [record for record in records if record["valid"]], metrics["dataset"]
    rounds = [record["round"] for record in records]
    scores = {view: {name: [record["valid"][view][0]["ndcg@10"] for record in records]} for view in records[0]["valid"]}
    points = (
        [view, number, value]
        for view, of_view in scores.items()
        for number, value in zip(rounds, of_view[name], strict=True)
    )
    file = Download("validation.csv", csv_text(["view", "round", "ndcg@10"], points))
    figure = validation_curves(scores, rounds, selected_round=metrics["best_round"])
    return Section("Convergence", ["The vertical line marks the best round."], figures=[figure], downloads=[file])


def _groups(metrics: Mapping[str, Any]) -> Section:
    users, items = [], []
    for number, group in enumerate(metrics["activity"], 1):
        users += group_rows([str(number), span(group["train_events"])], group["num_users"], group)
    for name, group in metrics["popularity"].items():
        items += group_rows([name, span(group["train_count"])], group["num_cases"], group)
    tables = [
        PageTable(["group", "train events", "users", "row", *BUCKET_METRICS], users, "Users, 1: fewest train events"),
        PageTable(
            ["group", "train count of the item", "test cases", "row", *BUCKET_METRICS],
            items,
            "Test cases by their item",
        ),
    ]
    return Section("Groups of users and items", [INTERVALS], tables)


def _costs(metrics: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Section:
    names = ("train_s", "wall_s", "evaluate_s")
    seconds = [[name, f"{metrics['seconds'][name]:.3f}"] for name in names]
    size = [[way, f"{metrics['bytes'][way]:,}"] for way in ("down", "up")]
    cells = ([record["round"], *(record[name] for name in names)] for record in records)
    file = Download("seconds.csv", csv_text(["round", *names], cells))
    tables = [
        PageTable(("part of a round", "median s"), seconds, "Seconds"),
        PageTable(("way", "bytes"), size, "All clients, all rounds"),
    ]
    return Section("What it costs", tables=tables, downloads=[file])


def _settings(record: Mapping[str, Any]) -> Section:
    tables = []
    for room, values in record["config"].items():
        rows = [[name, str(value)] for name, value in values.items() if name not in (*PLACES, "raw", "faults")]
        tables += [PageTable(("setting", "value"), rows, room)] if rows else []
    origin = [["commit", str(record["commit"])], ["python", record["python"]], *map(list, record["versions"].items())]
    return Section("All settings", tables=[*tables, PageTable(("what", "value"), origin, "Where it comes from")])
