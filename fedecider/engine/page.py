"""The page of a finished run of any track, from its result: what every run has, and what its track adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from fedecider.bounds import dataclass
from fedecider.data.store import flat
from fedecider.engine.result import RunResult, damage_is_bad_input
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.federation.record import capped_clients, left_out, read_records, sum_notes, upload_notes, write_json
from fedecider.models.item_texts import TEXT_ENCODER
from fedecider.report.answer import sings
from fedecider.report.conclusion import DRAWN
from fedecider.report.figures import colours_of, validation_curves
from fedecider.report.page import Conclusion, Download, PageTable, Section, write_page
from fedecider.report.tables import (
    CANARY,
    compared,
    comparisons_csv,
    csv_text,
    percent_text,
    shown_metrics,
    variant_labels,
)
from fedecider.running.manifest import note_changed
from fedecider.running.run_folder import PLACES, RunFolder

PAGE_FILE = "report.html"
HIDDEN = (*PLACES, "raw")
"""Settings that name places of a machine."""
SECONDS = (
    ("train_s", "local training, all clients"),
    ("wall_s", "whole round, without validation"),
    ("evaluate_s", "validation"),
)


@dataclass(frozen=True)
class ReportConfig:
    """Report: on which run.

    Args:
        run: The output directory that scripts/federate.py printed.
        analyses: If true, add groups of users by activity and of items by popularity. They need the data.
        data: For analyses, the folder of prepared domains, when it is not where the run found it.
    """

    run: str
    analyses: bool = False
    data: str = ""


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
    words: Mapping[str, str] = {}
    """Entries whose names do not say what they are -> what they are."""


def write_run_page(root: Path, result: RunResult, parts_of: Callable[[RunResult], Parts]) -> Path:
    """Write ``report.html`` into the output directory ``root`` and return its path.

    Paths and the command are left out, so that the page can be shown; they are in ``run.json``.

    Raises:
        ValueError: parts of the result do not fit together: one of the run's files is damaged.
    """
    with damage_is_bad_input(root):
        parts = parts_of(result)
        sections = [
            *parts.first,
            _results(result, parts.notes, parts.words),
            *_convergence(result),
            *parts.middle,
            _costs(result),
            *parts.last,
            *_settings(result),
        ]
        chosen = f"round {result.best_round} of {len(result.logs)}, the best on validation"
        subtitle = f"{result.method} on {', '.join(result.clients)}; {chosen}"
        subtitle += ". Private: it shows purchases of some customers" if result.examples else ""
        run, privacy = result.settings["run"], result.settings.get("privacy", {})
        clip = {**privacy, **run.get("privacy", {})}.get("clip")
        warnings = [
            *parts.warnings,
            *upload_notes(result.rounds, list(result.metrics.get("domains", {}))),
            *sum_notes(run.get("secure_sum", False), clip is not None and clip < math.inf),
        ]
    title = f"Run {root.resolve().name}"
    page = write_page(root / PAGE_FILE, title, subtitle, sections, warnings, parts.conclusion)
    note_changed(root, [page])
    return page


def write_diverged(folder: RunFolder, method: str, text: str, names: Sequence[str]) -> None:
    """Metrics and page of a run that ended in `fedecider.bounds.Diverged`: what happened, and no figures.

    ``names`` of the clients, if they have."""
    records = read_records(folder.rounds)
    found = {"left_out": left_out(records), "capped_clients": capped_clients(records)}
    write_json(folder.metrics, {"method": method, "diverged": text, "last_round": len(records), **found})
    section = Section("No result", [text, *upload_notes(records, names)])
    subtitle = f"{method}; diverged in round {len(records)}"
    write_page(folder.root / PAGE_FILE, f"Run {folder.root.resolve().name}", subtitle, [section], [f"diverged: {text}"])


def page_colours(result: RunResult) -> dict[str, str]:
    """The colour of every entry of the results, and of the method's model variants, which are the first entries."""
    colours = colours_of(list(next(iter(result.figures.values()))["test"]))
    if not result.rounds:
        return colours
    labels = variant_labels(result.method, list(_validated(result)[0]["valid"]))
    return {**colours, **{variant: colours[label] for variant, label in labels.items() if label in colours}}


def canary_score(result: RunResult) -> float | None:
    """Test hit@10 of the memoriser, mean over clients; None when it was not run."""
    tests = [result.figures[client]["test"] for client in result.clients]
    scores = [test[CANARY]["hit@10"]["mean"] for test in tests if CANARY in test]
    return sum(scores) / len(scores) if scores else None


def _results(result: RunResult, notes: Sequence[str], words: Mapping[str, str]) -> Section:
    metrics, figures = result.metrics, result.figures
    first = next(iter(result.test.values()))
    shown, lead = shown_metrics(first), compared(first)[0]
    names = [name for name in figures if name != MACRO]
    whole, title = (MACRO, "Mean over companies") if MACRO in figures else (names[0], names[0])
    rows = [
        [_entry(entry), words.get(entry, ""), *(percent_text(values[metric]) for metric in shown)]
        for entry, values in figures[whole]["test"].items()
    ]
    tables = [PageTable(("", "what it is", *shown), rows, title)]
    if 1 < len(names) <= DRAWN:
        rows = [
            [_entry(entry), *(_mean(figures[name]["test"].get(entry), lead) for name in names)]
            for entry in dict.fromkeys(entry for name in names for entry in figures[name]["test"])
        ]
        tables.append(PageTable(("", *names), rows, f"{lead} of each company; results.csv has the intervals"))
    chances = [of_client["chance_hit@10"] for of_client in metrics.get("domains", {}).values()]
    chances += [metrics["chance_hit@10"]] if "chance_hit@10" in metrics else []
    paragraphs = [
        stamp(get_protocol(result.protocol), canary_score(result)),
        f"Each test item is scored once, with the model of the best validation round. {result.reported} is the model "
        "by itself. Scores are of 100; bars are 95 % t intervals over users, without the spread of training runs.",
        *(
            _leak_check(result)
            or [f"Random scores would have {lead} {percent_text(fmean(chances))}." for _ in chances[:1]]
        ),
        *notes,
    ]
    saved = [Download("results.csv", result.frame.to_csv(index=False))]
    if metrics.get("comparisons"):
        saved.append(Download("tests.csv", comparisons_csv(metrics["comparisons"])))
    return Section("Results", paragraphs, tables, downloads=saved)


def _leak_check(result: RunResult) -> list[str]:
    """What the canary says of the evaluation, where it says anything."""
    chances = {name: of["chance_hit@10"] for name, of in result.metrics.get("domains", {}).items()}
    tests = {name: result.figures[name]["test"] for name in chances}
    hits = {name: test[CANARY]["hit@10"] for name, test in tests.items() if CANARY in test}
    protocol = get_protocol(result.protocol)
    if protocol.leaks or not protocol.drop_seen or not hits:
        return []
    if leaking := [name for name, hit in hits.items() if sings(hit, chances[name])]:
        return [
            f"Leak check failed: the memoriser, a probe that learns nothing, is above chance in {', '.join(leaking)}."
        ]
    mean, chance = fmean(hit["mean"] for hit in hits.values()), fmean(chances[name] for name in hits)
    words = f"is at chance: its hit@10 is {percent_text(mean)}, that of random scores {percent_text(chance)}"
    return [f"Leak check passed: the memoriser, a probe that scores only where the evaluation leaks, {words}."]


def _mean(values: Mapping[str, Mapping[str, float]] | None, metric: str) -> str:
    return "-" if values is None else percent_text(values[metric]["mean"])


def _entry(label: str) -> str:
    return f"{label} (leakage probe)" if label == CANARY else label


def _validated(result: RunResult) -> list[Mapping[str, Any]]:
    return [record for record in result.rounds if record["valid"]]


def _convergence(result: RunResult) -> list[Section]:
    if not result.rounds:
        return []
    records = _validated(result)
    rounds = [record["round"] for record in records]
    scores = {
        variant: {
            name: [record["valid"][variant][client]["ndcg@10"] for record in records]
            for client, name in enumerate(result.clients)
        }
        for variant in records[0]["valid"]
    }
    best, score = result.best_round, percent_text(result.metrics["best_valid_ndcg@10"])
    paragraph = (
        f"The vertical line marks round {best}, in which {result.reported} had the best ndcg@10 on validation items "
        f"({score})."
    )
    of_100 = {
        variant: {name: [100 * value for value in values] for name, values in of_variant.items()}
        for variant, of_variant in scores.items()
    }
    figure = validation_curves(of_100, rounds, selected_round=best, colours=page_colours(result))
    points = (
        [variant, name, number, value]
        for variant, of_variant in scores.items()
        for name, values in of_variant.items()
        for number, value in zip(rounds, values, strict=True)
    )
    file = Download("validation.csv", csv_text(["variant", "domain", "round", "ndcg@10"], points))
    return [Section("Convergence", [paragraph], figures=[figure], downloads=[file])]


def _costs(result: RunResult) -> Section:
    title, rounds, communication = "Costs", result.rounds, result.communication
    if not rounds:
        return Section(title, ["The rounds' seconds and bytes are in the folder of the server."])
    rows = [
        [label, *(f"{reduce(record[key] for record in rounds):.2f}" for reduce in (median, sum))]
        for key, label in SECONDS
    ]
    stages = [
        (name, *(f"{spent[key]:.1f}" for key in ("wall_s", "cpu_s")))
        for name, spent in result.metrics.get("seconds", {}).items()
        if name != "report"  # it is the page itself
    ]
    tables = [PageTable(("part of a round", "median s", "sum s"), rows, "Wall-clock seconds of all companies together")]
    tables += [PageTable(("stage of the run", "s", "CPU s"), stages, "Seconds by stage")] if stages else []
    seconds = ([record["round"], *(record[key] for key, _ in SECONDS)] for record in rounds)
    saved = [Download("seconds.csv", csv_text(["round", *(key for key, _ in SECONDS)], seconds))]
    if not communication:
        sizes = [(way, f"{size:,}") for way, size in result.metrics["bytes"].items()]
        tables.append(PageTable(("way", "bytes"), sizes, "All clients, all rounds"))
        return Section(title, [], tables, downloads=saved)
    paragraph = (
        f"Counted: {communication['unit']}. One client's adapters have {communication['adapter_scalars']:,} numbers. "
        "The broadcast after the last round is not counted."
    )
    sent = (
        [entry["round"], name, size["down"], size["up"]]
        for entry in communication["rounds"]
        for name, size in entry["clients"].items()
    )
    saved.insert(0, Download("bytes.csv", csv_text(["round", "client", "down", "up"], sent)))
    return Section(title, [paragraph], [_traffic(result), *tables], downloads=saved)


def _traffic(result: RunResult) -> PageTable:
    ways, rows = ("down", "up"), []
    seen = "only the sum" if result.settings["run"].get("secure_sum") else "each"
    for name in result.clients:
        mine = [entry["clients"][name] for entry in result.communication["rounds"] if name in entry["clients"]]
        rows.append([name, str(len(mine)), *(f"{sum(entry[way] for entry in mine):,}" for way in ways)])
    return PageTable(
        ("company", "rounds", "received", "sent"), rows, f"Bytes of the model updates, of which the server sees {seen}"
    )


def _settings(result: RunResult) -> list[Section]:
    record = result.record
    blocks: dict[str, list[tuple[str, str]]] = {}
    for name, value in flat(record["config"]):
        block, _, field = name.partition(".")
        if field in HIDDEN:
            continue
        if block == "run" and "." in field:  # a stage of its own: pre-training, distillation
            block, _, field = field.partition(".")
        blocks.setdefault(block, []).append((field, "-" if value == "" else str(value)))
    origin = [("commit", record["commit"] or "not known"), ("python", record["python"])]
    origin += list(record["versions"].items()) + [(name, str(value)) for name, value in record["machine"].items()]
    hashes = [(name, digest) for name, digest in record["data"].items() if name != TEXT_ENCODER]
    tables = [PageTable(("setting", "value"), rows, block) for block, rows in blocks.items()]
    return [
        Section(
            "Where it comes from",
            tables=[PageTable(("what", "value"), origin), PageTable(("data", "SHA-256"), hashes)],
        ),
        Section("All settings", tables=tables),
    ]
