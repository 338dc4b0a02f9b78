"""``report.html`` of a run folder: read from its JSON files alone, so that it can be made again anywhere.

Shape legend: R rounds, K clients (domains).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import plotly.graph_objects as go

from fedecider.audit.outcome import audit_section
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.federation.record import read_records
from fedecider.llm.example_section import example_sections
from fedecider.llm.examples import EXAMPLES_FILE
from fedecider.llm.item_texts import TEXT_ENCODER
from fedecider.llm.memory_section import memory_section
from fedecider.llm.run_record import read_llm_run
from fedecider.llm.run_warnings import canary_alarms, canary_score, run_warnings
from fedecider.llm.run_words import run_opening, told_choice
from fedecider.report.analysis_sections import fusion_section
from fedecider.report.figures import DOMAIN_COLOURS, PlotFigure, colours_of, validation_curves
from fedecider.report.page import Download, PageTable, Section, write_page
from fedecider.report.rows import CANARY, METRICS, view_labels
from fedecider.report.tables import ENDS, comparisons_csv, csv_text, interval_text, number_text
from fedecider.running.damage import damage_names, read_object
from fedecider.running.run_folder import PLACES, RunFolder

PAGE_FILE, CARDS_FILE = "report.html", "data_cards.json"


class RunFiles(NamedTuple):
    """What a run folder holds, as read; ``weights`` and what follows them are empty where there are none."""

    record: dict[str, Any]
    metrics: dict[str, Any]
    rounds: list[dict[str, Any]]
    communication: dict[str, Any]
    weights: dict[str, Any]
    cards: dict[str, Any]
    examples: dict[str, Any]
    audit: dict[str, Any]
    alternatives: dict[str, Any]


def run_page(folder: RunFolder, extra: Sequence[Section] = (), warnings: Sequence[str] = ()) -> Path:
    """Write ``report.html`` into a finished run folder of the LLM track and return its path.

    ``extra`` sections stand after examples, results, convergence and fusion weights, ``warnings`` after those of the
    run itself.
    Paths and the command are left out, so that the page can be shown; they are in ``run.json``.

    Raises:
        FileNotFoundError: ``folder`` holds no run.
        ValueError: the run is not finished, is one of the embedding track, or one of its files is damaged.
    """
    files = read_files(folder)
    with damage_is_bad_input(folder):
        first_examples, more_examples = example_sections({files.metrics["reported"]: files.examples})
        sections = [
            *first_examples,
            *_results(files),
            *_convergence(files),
            *fusion_section(files.weights, files.metrics["best_round"]),
            *memory_section(files.metrics, files.communication),
            *audit_section(files.audit),
            *extra,
            *_costs(files),
            *more_examples,
            *(section for make in (_data, _run, _origin, _settings) for section in make(files)),
        ]
        first = run_opening(files.record, files.metrics, len(files.rounds), canary_alarms(files.metrics))
        found = run_warnings(files.record, files.metrics, files.rounds, files.cards)
    method, domains = files.metrics["method"], ", ".join(files.metrics["domains"])
    subtitle = (
        f"{method} on {domains}; round {files.metrics['best_round']} of {len(files.rounds)}, chosen on validation"
    )
    title = f"Run {folder.root.resolve().name}"
    return write_page(folder.root / PAGE_FILE, title, subtitle, sections, [*found, *warnings], first)


def page_colours(files: RunFiles) -> dict[str, str]:
    """The colour of every row of the results, and of the method's views, which are the first rows."""
    rows = next(iter(files.metrics["domains"].values()))["test"]
    colours = colours_of(list(rows))
    labels = view_labels(files.metrics["method"], list(files.rounds[0]["valid"]))
    return {**colours, **{view: colours[label] for view, label in labels.items() if label in colours}}


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
    """The JSON files of a run folder; errors as :func:`run_page`."""
    record = read_llm_run(folder.root)
    if not folder.metrics.is_file():
        raise ValueError(
            f"no metrics.json in {folder.root}: the run did not finish. Go on with it: scripts/federate.py --resume "
            f"true --output {folder.root} and the settings of the run"
        )
    return RunFiles(
        record,
        _read(folder.metrics),
        _read(folder.rounds),
        _read(folder.communication),
        *(
            _read(path) if path.is_file() else {}
            for path in (
                folder.fusion_weights,
                folder.root / CARDS_FILE,
                folder.root / EXAMPLES_FILE,
                folder.audit,
                folder.alternatives,
            )
        ),
    )


def _read(path: Path) -> Any:
    if path.suffix != ".jsonl":
        return read_object(path)
    with damage_names(path):
        return read_records(path)


def _run(files: RunFiles) -> list[Section]:
    config, run, choice = files.record["config"], files.record["config"]["run"], files.alternatives
    taken = {**run, **config["training"], **choice.get("taken", {})}
    rows = [
        ("method", files.metrics["method"]),
        ("domains (clients)", ", ".join(files.metrics["domains"])),
        ("rounds", f"{len(files.rounds)}, reported is round {files.metrics['best_round']}"),
        ("participation", f"{run['participation']:.0%} of the clients in a round"),
        ("local epochs", f"{taken['local_epochs']} in a round"),
        ("learning rate", f"{taken['learning_rate']:g}"),
        ("adapted layers", taken["lora_targets"]),
        *([("tried before the rounds", told_choice(**choice))] if choice else []),
        ("LoRA rank", str(run["lora_rank"])),
        ("seed", str(run["seed"])),
        ("decoding", _decoding(files.metrics)),
        ("protocol", files.metrics["protocol"]),
    ]
    return [Section("What was run", tables=[PageTable(("setting", "value"), rows)])]


def _decoding(metrics: Mapping[str, Any]) -> str:
    if metrics["num_beams"] is None:
        return "every item is scored, as its ID is one token"
    return f"{metrics['num_beams']} beams, length penalty {metrics['length_penalty']:g}"


def _results(files: RunFiles) -> list[Section]:
    metrics = files.metrics
    blocks = {f"{MACRO} (mean over domains)": metrics[MACRO]["test"]} if MACRO in metrics else {}
    blocks |= {name: domain["test"] for name, domain in metrics["domains"].items()}
    tables = [PageTable(("row", *METRICS), [_result_row(*row) for row in b.items()], n) for n, b in blocks.items()]
    paragraphs = [
        stamp(get_protocol(metrics["protocol"]), canary_score(metrics)),
        f"Test items, read once, for the round that is best on validation. Reported model: {metrics['reported']}. "
        "Brackets: 95 % cluster bootstrap over users. The memoriser is the canary: it knows nothing about items, so "
        "it must stay near chance. Files to download have the numbers unrounded.",
        "Expected hit@10 of random scores: "
        + ", ".join(f"{name} {domain['chance_hit@10']:.4f}" for name, domain in metrics["domains"].items())
        + ".",
        *(f"Text neighbours: item texts as vectors of {one}." for one in [metrics.get("text_encoder")] if one),
    ]
    files_ = [Download("results.csv", results_csv(metrics))]
    if metrics.get("comparisons"):
        files_.append(Download("tests.csv", comparisons_csv(metrics["comparisons"])))
    return [Section("Results", paragraphs, tables, [interval_bars(metrics)], files_)]


def results_csv(metrics: Mapping[str, Any]) -> str:
    """Every number of the result tables as ``metrics.json`` has it, test and validation."""
    scopes = [(name, domain) for name, domain in metrics["domains"].items()]
    scopes += [(MACRO, metrics[MACRO])] if MACRO in metrics else []
    cells = (
        [split, name, label, metric, *(value[end] for end in ENDS)]
        for split in ("test", "valid")
        for name, scope in scopes
        for label, values in scope.get(split, {}).items()
        for metric, value in values.items()
    )
    return csv_text(["split", "domain", "row", "metric", *ENDS], cells)


def _result_row(label: str, values: Mapping[str, Mapping[str, float]]) -> list[str]:
    name = f"{label} (canary)" if label == CANARY else label
    return [name, *(interval_text(values[metric]) for metric in METRICS)]


def interval_bars(metrics: Mapping[str, Any], metric: str = "ndcg@10") -> PlotFigure:
    """Test ``metric`` of every row of ``metrics.json``, one bar per domain, with its interval."""
    figure, data = go.Figure(), {}
    for number, (name, domain) in enumerate(metrics["domains"].items()):
        values = {label: row[metric] for label, row in domain["test"].items()}
        means = [value["mean"] for value in values.values()]
        error = {
            "type": "data",
            "symmetric": False,
            "array": [value["high"] - value["mean"] for value in values.values()],
            "arrayminus": [value["mean"] - value["low"] for value in values.values()],
            "thickness": 1,
        }
        colour = DOMAIN_COLOURS[number % len(DOMAIN_COLOURS)]
        figure.add_bar(x=means, y=list(values), orientation="h", name=name, marker_color=colour, error_x=error)
        data[name] = {label: [value["mean"], value["low"], value["high"]] for label, value in values.items()}
    num_bars = sum(map(len, data.values()))
    figure.update_layout(template="plotly_white", title={"text": f"Test {metric} with 95 % intervals"})
    figure.update_layout(height=160 + 16 * num_bars, margin={"l": 10, "r": 20, "t": 60, "b": 60})
    figure.update_xaxes(title_text=metric, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", type="category")
    return PlotFigure(figure, {"metric": metric, "domains": data})


def _convergence(files: RunFiles) -> list[Section]:
    rounds, names = [record["round"] for record in files.rounds], list(files.metrics["domains"])
    scores = {
        view: {name: [r["valid"][view][client]["ndcg@10"] for r in files.rounds] for client, name in enumerate(names)}
        for view in files.rounds[0]["valid"]
    }
    best = files.metrics["best_round"]
    paragraph = (
        f"Round {best} has the best validation ndcg@10 ({number_text(files.metrics['best_valid_ndcg@10'])}, mean over "
        f"domains) of {next(iter(scores))}. The vertical line marks it."
    )
    figure = validation_curves(scores, rounds, selected_round=best, colours=page_colours(files))
    points = (
        [view, name, number, value]
        for view, of_view in scores.items()
        for name, values in of_view.items()
        for number, value in zip(rounds, values, strict=True)
    )
    file = Download("validation.csv", csv_text(["view", "domain", "round", "ndcg@10"], points))
    return [Section("Convergence", [paragraph], figures=[figure], downloads=[file])]


def _costs(files: RunFiles) -> list[Section]:
    per_round = files.communication["rounds"]
    ways = ("down", "up")
    rows = []
    for name in files.metrics["domains"]:
        mine = [entry["clients"][name] for entry in per_round if name in entry["clients"]]
        if mine:
            sizes = [mine[0], mine[-1], {way: sum(entry[way] for entry in mine) for way in ways}]
            rows.append([name, str(len(mine)), *(f"{size[way]:,}" for size in sizes for way in ways)])
    header = ("domain", "rounds", "first down", "first up", "last down", "last up", "sum down", "sum up")
    traffic = PageTable(header, rows, "Bytes per client")
    parts = (
        ("train_s", "local training, all clients"),
        ("wall_s", "round without validation"),
        ("evaluate_s", "validation"),
    )
    rows = [
        [label, *(f"{reduce(r[key] for r in files.rounds):.2f}" for reduce in (median, sum))] for key, label in parts
    ]
    seconds = PageTable(("part of a round", "median s", "sum s"), rows, "Seconds")
    paragraph = (
        f"Counted: {files.communication['unit']}. One client's adapters have "
        f"{files.communication['adapter_scalars']:,} numbers. The broadcast after the last round is not counted."
    )
    sent = (
        [entry["round"], name, size["down"], size["up"]]
        for entry in per_round
        for name, size in entry["clients"].items()
    )
    spent = ([record["round"], *(record[key] for key, _ in parts)] for record in files.rounds)
    saved = [
        Download("bytes.csv", csv_text(["round", "client", "down", "up"], sent)),
        Download("seconds.csv", csv_text(["round", *(key for key, _ in parts)], spent)),
    ]
    return [Section("Cost of the whole run", [paragraph], [traffic, seconds], downloads=saved)]


def _data(files: RunFiles) -> list[Section]:
    if not files.cards:
        return []
    header = (
        "domain",
        "items",
        "users",
        "events",
        "mean length",
        "last two tied",
        "test item had before",
        "public users",
    )
    rows = []
    for name, card in files.cards.items():
        clients = card["clients"]
        counts = (f"{value:,}" for value in (card["items"]["count"], clients["users"], clients["events"]))
        mean = number_text(clients["length"]["mean"] if "length" in clients else None, 1)
        shares = (_share(clients.get(key)) for key in ("tied_last_two_share", "repeated_test_item_share"))
        rows.append([name, *counts, mean, *shares, f"{card['public']['users']:,}"])
    paragraph = (
        "Users are the private users of the client; the last event of each is the test item, the last but one the "
        "validation item. Public users are those of the shared pre-training; none of them is a client."
    )
    return [Section("Data", [paragraph], [PageTable(header, rows)])]


def _origin(files: RunFiles) -> list[Section]:
    record = files.record
    rows = [("commit", record["commit"] or "not known"), ("python", record["python"])]
    rows += list(record["versions"].items()) + [(name, str(value)) for name, value in record["machine"].items()]
    hashes = PageTable(("domain", "SHA-256"), [one for one in record["data"].items() if one[0] != TEXT_ENCODER], "Data")
    return [Section("Where it comes from", tables=[PageTable(("what", "value"), rows), hashes])]


def _settings(files: RunFiles) -> list[Section]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value in _flat(files.record["config"]):
        room, _, field = name.partition(".")
        if room == "run" and field in PLACES:
            continue
        if room == "run" and "." in field:  # a stage of its own: pre-training, distillation
            room, _, field = field.partition(".")
        groups.setdefault(room, []).append((field, "-" if value == "" else str(value)))
    return [
        Section("All settings", tables=[PageTable(("setting", "value"), rows, room) for room, rows in groups.items()])
    ]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        return [(prefix, value)]
    return [pair for name, entry in value.items() for pair in _flat(entry, f"{prefix}.{name}" if prefix else name)]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
