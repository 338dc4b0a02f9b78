"""The page of a finished run of any track, from its files: what every run has, and what its track adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.federation.record import capped_clients, left_out, read_records, sum_notes, upload_notes, write_json
from fedecider.models.item_texts import TEXT_ENCODER
from fedecider.report.figures import colours_of, validation_curves
from fedecider.report.page import Conclusion, Download, PageTable, Section, write_page
from fedecider.report.tables import (
    CANARY,
    ENDS,
    METRICS,
    comparisons_csv,
    csv_text,
    interval_text,
    number_text,
    variant_labels,
)
from fedecider.running.run_folder import (
    PLACES,
    SITE,
    SITE_LOGS,
    RunFolder,
    damage_names,
    read_metrics,
    read_object,
    read_run,
)

PAGE_FILE, CARDS_FILE, EXAMPLES_FILE = "report.html", "data_cards.json", "examples.json"
HIDDEN = (*PLACES, "raw", "faults")
"""Settings that name places of a machine."""
SECONDS = (
    ("train_s", "local training, all clients"),
    ("wall_s", "round without validation"),
    ("evaluate_s", "validation"),
)


@dataclass(frozen=True)
class ReportConfig:
    """Report: on which run.

    Args:
        run: The run folder that scripts/federate.py printed.
        data: The folder of prepared domains, when it is not where the run found it.
        encoder: The encoder behind the distances between domains: auto, tfidf, minilm, or a sentence-transformers
            folder or hub name.
    """

    run: str
    data: str = ""
    encoder: str = "auto"


class RunFiles(NamedTuple):
    """What a run folder holds, as read; ``communication`` and what follows it are empty where there are none."""

    record: dict[str, Any]
    metrics: dict[str, Any]
    rounds: list[dict[str, Any]]
    """None of a site, whose server has them."""
    logs: list[dict[str, Any]]
    """What clients logged, round by round: of a site its own client, else ``rounds``."""
    communication: dict[str, Any]
    weights: dict[str, Any]
    cards: dict[str, Any]
    examples: dict[str, Any]
    audit: dict[str, Any]
    selection: dict[str, Any]


class Parts(NamedTuple):
    """What a track adds to the page of a run."""

    conclusion: Conclusion | None = None
    notes: Sequence[str] = ()
    """Further paragraphs of the results."""
    first: Sequence[Section] = ()
    """Before the results."""
    middle: Sequence[Section] = ()
    """After results and convergence."""
    last: Sequence[Section] = ()
    """After the costs, before the settings."""
    warnings: Sequence[str] = ()


def write_run_page(folder: RunFolder, parts_of: Callable[[RunFiles], Parts]) -> Path:
    """Write ``report.html`` into a finished run folder and return its path.

    Paths and the command are left out, so that the page can be shown; they are in ``run.json``.

    Raises:
        FileNotFoundError: ``folder`` holds no run.
        ValueError: the run is not finished or diverged, or one of its files is damaged.
    """
    files = read_files(folder)
    with damage_is_bad_input(folder):
        parts = parts_of(files)
        sections = [
            *parts.first,
            _results(files, parts.notes),
            *_convergence(files),
            *parts.middle,
            _costs(files),
            *parts.last,
            *_settings(files),
        ]
        clients = ", ".join(name for name in groups(files.metrics) if name != MACRO)
        chosen = f"round {files.metrics['best_round']} of {len(files.logs)}, chosen on validation"
        subtitle = f"{files.metrics['method']} on {clients}; {chosen}"
    title = f"Run {folder.root.resolve().name}"
    config = files.record["config"]
    clip = {**config.get("privacy", {}), **config["run"].get("privacy", {})}.get("clip")
    warnings = [
        *parts.warnings,
        *upload_notes(files.rounds, list(files.metrics.get("domains", {}))),
        *sum_notes(config["run"].get("secure_sum", False), clip is not None and clip < math.inf),
    ]
    return write_page(folder.root / PAGE_FILE, title, subtitle, sections, warnings, parts.conclusion)


def write_diverged(folder: RunFolder, method: str, text: str, names: Sequence[str]) -> None:
    """Metrics and page of a run that ended in `fedecider.bounds.Diverged`: what happened, and no figures.

    ``names`` of the clients, if they have."""
    records = read_records(folder.rounds)
    found = {"left_out": left_out(records), "capped_clients": capped_clients(records)}
    write_json(folder.metrics, {"method": method, "diverged": text, "last_round": len(records), **found})
    section = Section("No result", [text, *upload_notes(records, names)])
    subtitle = f"{method}; diverged in round {len(records)}"
    write_page(folder.root / PAGE_FILE, f"Run {folder.root.resolve().name}", subtitle, [section], [f"diverged: {text}"])


@contextmanager
def damage_is_bad_input(folder: RunFolder) -> Iterator[None]:
    """Turn what missing or changed fields of a run's files lead to into a ``ValueError`` that says so."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"got a run folder {folder.root} whose files do not fit together ({error!r}), expected those of one "
            "finished run as docs/run_folder.md describes them. Copy the folder again"
        ) from error


def read_files(folder: RunFolder) -> RunFiles:
    """The JSON files of a run folder; errors as `write_run_page`."""
    record = read_run(folder.root)
    if not folder.metrics.is_file():
        raise ValueError(
            f"no metrics.json in {folder.root}: the run did not finish. Go on with it: scripts/federate.py --resume "
            f"true --output {folder.root} and the settings of the run"
        )
    metrics = read_metrics(folder)
    is_site = SITE in record and not folder.rounds.is_file()
    with damage_names(logged := folder.root / SITE_LOGS if is_site else folder.rounds):
        logs = read_records(logged)
    others = (
        folder.communication,
        folder.fusion_weights,
        folder.root / CARDS_FILE,
        folder.root / EXAMPLES_FILE,
        folder.audit,
        folder.selection,
    )
    rounds = [] if is_site else logs
    return RunFiles(record, metrics, rounds, logs, *(read_object(path) if path.is_file() else {} for path in others))


def groups(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Client (``macro`` for the mean over clients) -> split -> entry -> metric -> mean, low, high, of any track.

    In the cross-device track, whose users are scored together, the only client is the data set.
    """
    splits = ("test", "valid")
    if "domains" in metrics:
        found = {
            name: {split: one[split] for split in splits if split in one} for name, one in metrics["domains"].items()
        }
        return {**found, **({MACRO: {"test": metrics[MACRO]["test"]}} if MACRO in metrics else {})}
    if "dataset" in metrics:
        return {metrics["dataset"]: {split: metrics[split] for split in splits if split in metrics}}
    return {name: {split: metrics[split][name] for split in splits} for name in metrics["test"]}


def page_colours(files: RunFiles) -> dict[str, str]:
    """The colour of every entry of the results, and of the method's model variants, which are the first entries."""
    colours = colours_of(list(next(iter(groups(files.metrics).values()))["test"]))
    if not files.rounds:
        return colours
    labels = variant_labels(files.metrics["method"], list(_validated(files)[0]["valid"]))
    return {**colours, **{variant: colours[label] for variant, label in labels.items() if label in colours}}


def results_csv(metrics: Mapping[str, Any]) -> str:
    """Every number of the result tables as ``metrics.json`` has it, test and validation."""
    found = groups(metrics)
    cells = (
        [split, name, label, metric, *(value[end] for end in ENDS)]
        for split in ("test", "valid")
        for name, of_client in found.items()
        for label, values in of_client.get(split, {}).items()
        for metric, value in values.items()
    )
    return csv_text(["split", "domain", "row", "metric", *ENDS], cells)


def canary_score(metrics: Mapping[str, Any]) -> float | None:
    """Test hit@10 of the memoriser, mean over clients; None when it was not run."""
    tests = [one["test"] for name, one in groups(metrics).items() if name != MACRO]
    scores = [test[CANARY]["hit@10"]["mean"] for test in tests if CANARY in test]
    return sum(scores) / len(scores) if scores else None


def _results(files: RunFiles, notes: Sequence[str]) -> Section:
    metrics, found = files.metrics, groups(files.metrics)
    ordered = {name: found[name]["test"] for name in sorted(found, key=lambda name: name != MACRO)}
    titles = {name: f"{MACRO} (mean over domains)" if name == MACRO else name for name in ordered}
    tables = [
        PageTable(("row", *METRICS), [_result_row(*row) for row in of_client.items()], titles[name])
        for name, of_client in ordered.items()
    ]
    chances = {name: one["chance_hit@10"] for name, one in metrics.get("domains", {}).items()}
    if "chance_hit@10" in metrics:
        chances[metrics["dataset"]] = metrics["chance_hit@10"]
    paragraphs = [
        stamp(get_protocol(metrics["protocol"]), canary_score(metrics)),
        f"Test items, read once, for the round that is best on validation. Reported model: {metrics['reported']}. "
        "Bars: 95 % cluster bootstrap over users. The memoriser is the canary: it knows nothing about items, so "
        "it must stay near chance. Files to download have the numbers unrounded.",
        *(
            [f"Expected hit@10 of random scores: {', '.join(f'{name} {one:.3f}' for name, one in chances.items())}."]
            if chances
            else []
        ),
        *notes,
    ]
    saved = [Download("results.csv", results_csv(metrics))]
    if metrics.get("comparisons"):
        saved.append(Download("tests.csv", comparisons_csv(metrics["comparisons"])))
    return Section("Results", paragraphs, tables, downloads=saved)


def _result_row(label: str, values: Mapping[str, Mapping[str, float]]) -> list[str]:
    name = f"{label} (canary)" if label == CANARY else label
    return [name, *(interval_text(values[metric], 3) for metric in METRICS)]


def _validated(files: RunFiles) -> list[dict[str, Any]]:
    return [record for record in files.rounds if record["valid"]]


def _convergence(files: RunFiles) -> list[Section]:
    if not files.rounds:
        return []
    records, names = _validated(files), [name for name in groups(files.metrics) if name != MACRO]
    rounds = [record["round"] for record in records]
    scores = {
        variant: {name: [r["valid"][variant][client]["ndcg@10"] for r in records] for client, name in enumerate(names)}
        for variant in records[0]["valid"]
    }
    best, score = files.metrics["best_round"], number_text(files.metrics["best_valid_ndcg@10"], 3)
    paragraph = (
        f"Round {best} has the best validation ndcg@10 ({score}, mean over domains) of {next(iter(scores))}. The "
        "vertical line marks it."
    )
    figure = validation_curves(scores, rounds, selected_round=best, colours=page_colours(files))
    points = (
        [variant, name, number, value]
        for variant, of_variant in scores.items()
        for name, values in of_variant.items()
        for number, value in zip(rounds, values, strict=True)
    )
    file = Download("validation.csv", csv_text(["variant", "domain", "round", "ndcg@10"], points))
    return [Section("Convergence", [paragraph], figures=[figure], downloads=[file])]


def _costs(files: RunFiles) -> Section:
    if not files.rounds:
        return Section("Cost of the whole run", ["The rounds' seconds and bytes are in the folder of the server."])
    rows = [
        [label, *(f"{reduce(r[key] for r in files.rounds):.2f}" for reduce in (median, sum))] for key, label in SECONDS
    ]
    seconds = PageTable(("part of a round", "median s", "sum s"), rows, "Seconds")
    stages = [
        (name, *(f"{spent[key]:.1f}" for key in ("wall_s", "cpu_s")))
        for name, spent in files.metrics.get("seconds", {}).items()
        if name != "report"  # it is the page itself
    ]
    tables = [seconds, *([PageTable(("stage of the run", "s", "CPU s"), stages, "Seconds by stage")] if stages else [])]
    spent = ([record["round"], *(record[key] for key, _ in SECONDS)] for record in files.rounds)
    saved = [Download("seconds.csv", csv_text(["round", *(key for key, _ in SECONDS)], spent))]
    if not files.communication:
        sizes = [(way, f"{size:,}") for way, size in files.metrics["bytes"].items()]
        tables.append(PageTable(("way", "bytes"), sizes, "All clients, all rounds"))
        return Section("Cost of the whole run", [], tables, downloads=saved)
    paragraph = (
        f"Counted: {files.communication['unit']}. One client's adapters have "
        f"{files.communication['adapter_scalars']:,} numbers. The broadcast after the last round is not counted."
    )
    sent = (
        [entry["round"], name, size["down"], size["up"]]
        for entry in files.communication["rounds"]
        for name, size in entry["clients"].items()
    )
    saved.insert(0, Download("bytes.csv", csv_text(["round", "client", "down", "up"], sent)))
    return Section("Cost of the whole run", [paragraph], [_traffic(files), *tables], downloads=saved)


def _traffic(files: RunFiles) -> PageTable:
    ways, rows = ("down", "up"), []
    for name in files.metrics["domains"]:
        mine = [entry["clients"][name] for entry in files.communication["rounds"] if name in entry["clients"]]
        if mine:
            sizes = [mine[0], mine[-1], {way: sum(entry[way] for entry in mine) for way in ways}]
            rows.append([name, str(len(mine)), *(f"{size[way]:,}" for size in sizes for way in ways)])
    header = ("domain", "rounds", "first down", "first up", "last down", "last up", "sum down", "sum up")
    return PageTable(header, rows, "Bytes per client")


def _settings(files: RunFiles) -> list[Section]:
    record = files.record
    blocks: dict[str, list[tuple[str, str]]] = {}
    for name, value in _flat(record["config"]):
        block, _, field = name.partition(".")
        if field in HIDDEN:
            continue
        if block == "run" and "." in field:  # a stage of its own: pre-training, distillation
            block, _, field = field.partition(".")
        blocks.setdefault(block, []).append((field, "-" if value == "" else str(value)))
    origin = [("commit", record["commit"] or "not known"), ("python", record["python"])]
    origin += list(record["versions"].items()) + [(name, str(value)) for name, value in record["machine"].items()]
    hashes = [one for one in record["data"].items() if one[0] != TEXT_ENCODER]
    tables = [PageTable(("setting", "value"), rows, block) for block, rows in blocks.items()]
    return [
        Section(
            "Where it comes from",
            tables=[PageTable(("what", "value"), origin), PageTable(("domain", "SHA-256"), hashes, "Data")],
        ),
        Section("All settings", tables=tables),
    ]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        return [(prefix, value)]
    return [pair for name, entry in value.items() for pair in _flat(entry, f"{prefix}.{name}" if prefix else name)]
