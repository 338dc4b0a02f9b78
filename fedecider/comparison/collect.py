"""The table of a comparison: Markdown, CSV, JSON, LaTeX, with intervals, paired tests and what each line costs.

Shape legend: S seeds, U users.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.comparison.plan import CompareConfig, Line, Run
from fedecider.comparison.references import REFERENCES, sasrec
from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.per_user import read_per_user
from fedecider.evaluation.protocols import get_protocol
from fedecider.evaluation.statistics import Comparison, Persons, compare_table, distinguishable_winners, verdict
from fedecider.federation.record import read_json, read_records, write_json, write_text
from fedecider.federation.streams import stream
from fedecider.report.tables import (
    METRICS,
    ResultRow,
    ResultTable,
    markdown_table,
    result_row,
    shown_domains,
    table_data,
)
from fedecider.running.run_folder import read_run

COMPARED = ("hit@10", "ndcg@10")
CANARY = "memoriser"
Positions = dict[str, Tensor]
"""domain -> (S, U) positions of the test items."""


class Cost(NamedTuple):
    """What one line costs and how fast it is there, means over its runs."""

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
    """Reported models of all lines, then the references."""
    views: list[ResultRow]
    """The other models of the lines: global where the local one is reported, and so on."""
    comparisons: list[Comparison]
    costs: dict[str, Cost]
    curves: dict[str, list[list[float]]]
    """label -> [[round, mean validation ndcg@10 over domains and seeds], ...]."""
    positions: dict[str, Positions]
    notes: list[str]


def collect(config: CompareConfig, lines: Sequence[Line], domains: Mapping[str, Domain]) -> Collected:
    """Read the finished runs of ``lines``, add the references and test every line against those of ``against``."""
    reported, others = {}, {}
    for line in lines:
        of_views = _positions(line.runs)
        name = read_json(line.runs[0].folder.metrics)["reported"]
        reported[line.label] = of_views.pop(name)
        others.update({f"{line.label}: {_view(view)}": v for view, v in of_views.items() if view not in REFERENCES})
    references = _references(config, lines, domains)
    pairs = list(
        dict.fromkeys(
            (anchor, label)
            for anchor in config.against
            if anchor in reported
            for label in [*reported, *(name for name in references if name != CANARY)]
            if label != anchor and not (label in config.against and _before(config, label, anchor))
        )
    )
    persons = _persons(domains)
    everything = {**reported, **references}
    comparisons = compare_table(everything, stream(0, "comparisons"), COMPARED, pairs, persons=persons) if pairs else []

    def row(label: str, kind: str = "method") -> ResultRow:
        given = {**everything, **others}[label]
        return result_row(label, given, stream(0, "bootstrap"), kind, persons=persons)

    rows = [row(label) for label in reported]
    rows += [row(label, "canary" if label == CANARY else "baseline") for label in references]
    views = [row(label) for label in others]
    costs = {line.label: _cost(line.runs) for line in lines}
    curves = {line.label: _curve(line.runs) for line in lines}
    return Collected(rows, views, comparisons, costs, curves, everything, _notes(config, lines, persons))


def write_table(
    config: CompareConfig, lines: Sequence[Line], collected: Collected, heading: Sequence[str]
) -> list[Path]:
    """Write ``compare.md``, ``.csv``, ``.json`` and ``.tex``; -> their paths."""
    root = Path(config.output)
    protocol = get_protocol(lines[0].runs[0].settings.run.protocol)
    bold = distinguishable_winners(collected.comparisons) if _all_pairs(collected) else set()
    table = ResultTable(collected.rows, protocol, collected.notes, bold)
    parts = [
        "# Comparison",
        "",
        *heading,
        *_provenance(lines),
        "",
        _setting_table(lines),
        markdown_table(table, title="Test"),
    ]
    if collected.comparisons:
        parts += ["### Differences (paired permutation test over users, Holm over the table)", ""]
        parts += [*(f"- {verdict(one)}" for one in collected.comparisons if one.domain == MACRO or _single(lines)), ""]
        num = sum(one.distinguishable() for one in collected.comparisons)
        parts += [
            f"{num} of {len(collected.comparisons)} comparisons (domains and macro mean) are distinguishable.",
            "",
        ]
    if collected.views:
        parts += [markdown_table(ResultTable(collected.views, protocol), title="Models that are not reported")]
    parts += [_cost_table(collected.costs)]
    json_table = {**table_data(table), "lines": [_line_data(line) for line in lines]}
    json_table["comparisons"] = [one._asdict() for one in collected.comparisons]
    json_table["costs"] = {label: cost._asdict() for label, cost in collected.costs.items()}
    json_table["curves"] = collected.curves
    write_json(root / "compare.json", json_table)
    texts = {"md": "\n".join(parts), "csv": _csv(collected.rows), "tex": latex_table(collected.rows)}
    for suffix, text in texts.items():
        write_text(root / f"compare.{suffix}", text)
    return [root / f"compare.{suffix}" for suffix in (*texts, "json")]


def latex_table(rows: Sequence[ResultRow], metrics: Sequence[str] = METRICS) -> str:
    """A booktabs table of the means with interval half-widths; one block per domain."""
    out = ["% needs \\usepackage{booktabs}", f"\\begin{{tabular}}{{l{'r' * len(metrics)}}}", "\\toprule"]
    out += [" & ".join(["", *(name.replace("@", "@\\,") for name in metrics)]) + " \\\\"]
    for domain in shown_domains(rows):
        out += ["\\midrule", f"\\multicolumn{{{1 + len(metrics)}}}{{l}}{{\\textit{{{_tex(domain)}}}}} \\\\"]
        for row in rows:
            cells = [row.values[domain][name] for name in metrics]
            texts = [f"{cell.mean:.3f} {{\\scriptsize [{cell.low:.3f}, {cell.high:.3f}]}}" for cell in cells]
            out.append(" & ".join([_tex(row.label), *texts]) + " \\\\")
    return "\n".join([*out, "\\bottomrule", "\\end{tabular}", ""])


def _positions(runs: Sequence[Run]) -> dict[str, Positions]:
    """view -> domain -> (S, U), seeds in order."""
    per_seed = [{(one.view, one.domain): one.position_U for one in read_per_user(run.folder.per_user)} for run in runs]
    found: dict[str, Positions] = {}
    for view, domain in per_seed[0]:
        found.setdefault(view, {})[domain] = torch.stack([one[view, domain] for one in per_seed])
    return found


def _references(config: CompareConfig, lines: Sequence[Line], domains: Mapping[str, Domain]) -> dict[str, Positions]:
    """The chosen references; counting lines and zero-shot models are read from the first line's runs."""
    of_runs = _positions(lines[0].runs)
    found = {}
    for name in config.references:
        if name != "sasrec":
            found[name] = of_runs[name]
            continue
        protocol = lines[0].runs[0].settings.run.protocol
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found[name] = sasrec(domains, protocol, config.seeds, config.tune, Path(config.cache), device)
    return found


def _cost(runs: Sequence[Run]) -> Cost:
    records = [read_records(run.folder.rounds) for run in runs]
    every = [record for of_run in records for record in of_run]
    sizes = {way: [_bytes(record, way) for record in every] for way in ("up", "down")}
    best = [read_json(run.folder.metrics)["best_round"] for run in runs]
    near = [
        next(r["round"] for r in of_run if r["score"] >= 0.99 * max(x["score"] for x in of_run)) for of_run in records
    ]
    train_s = statistics.mean(record["train_s"] / len(record["clients"]) for record in every)
    return Cost(train_s, statistics.mean(sizes["up"]), statistics.mean(sizes["down"]), best, near)


def _bytes(record: Mapping[str, Any], way: str) -> float:
    """Mean over clients of the bytes of one round, headers included."""
    groups = [(len(g["clients"]), sum(g[way].values()) + g[f"header_{way}"]) for g in record["traffic"]]
    return sum(count * size for count, size in groups) / sum(count for count, _ in groups)


def _curve(runs: Sequence[Run]) -> list[list[float]]:
    per_run = [{r["round"]: r["score"] for r in read_records(run.folder.rounds)} for run in runs]
    rounds = sorted(set.intersection(*(set(one) for one in per_run)))
    return [[number, statistics.mean(one[number] for one in per_run)] for number in rounds]


def _provenance(lines: Sequence[Line]) -> list[str]:
    """Where the runs come from; the record of the first run stands for versions and machine of all."""
    records = [read_run(run.folder.root) for line in lines for run in line.runs]
    versions = ", ".join(f"{name} {number}" for name, number in records[0]["versions"].items())
    machine = records[0]["machine"]
    threads = records[0]["config"]["run"]["num_threads"]
    return [
        f"- Commits of the runs: {', '.join(sorted({str(record['commit']) for record in records}))}",
        f"- Versions: Python {records[0]['python']}, {versions}",
        f"- Machine: {machine['system']} {machine['processor']}, {threads or 'all'} thread(s) a run",
    ]


def _setting_table(lines: Sequence[Line]) -> str:
    out = ["| line | method | options | tried on validation (ndcg@10, seed 0) |", "|---|---|---|---|"]
    for line in lines:
        tried = "; ".join(f"{_options(one['options'])}: {one['valid']:.4f}" for one in line.tried)
        out.append(f"| {line.label} | {line.method} | {_options(line.chosen)} | {tried} |")
    return "\n".join([*out, ""])


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if name != "method") or "default"


def _cost_table(costs: Mapping[str, Cost]) -> str:
    out = [
        "### What it costs",
        "",
        "| line | local training, s per client and round | up, KB | down, KB | best round | ",
    ]
    out[-1] += "first within 1 % of the best |"
    out += ["|---|---:|---:|---:|---|---|"]
    for label, cost in costs.items():
        rounds = [", ".join(map(str, numbers)) for numbers in (cost.best_rounds, cost.near_rounds)]
        out.append(
            f"| {label} | {cost.train_s:.2f} | {cost.up / 1e3:.1f} | {cost.down / 1e3:.1f} | {' | '.join(rounds)} |"
        )
    note = "Bytes: mean over clients and rounds of the serialised messages. Seconds: other runs were going on beside; "
    note += "FDLoRA's search of its fusion is not among them."
    return "\n".join([*out, "", note, ""])


def _line_data(line: Line) -> dict[str, Any]:
    runs = [{"seed": run.seed, "folder": run.folder.root.name} for run in line.runs]
    return {"label": line.label, "method": line.method, "options": line.chosen, "tried": line.tried, "runs": runs}


def _csv(rows: Sequence[ResultRow]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["domain", "line", "kind", "metric", "mean", "low", "high"])
    for row in rows:
        for domain in shown_domains(rows):
            for name, value in row.values[domain].items():
                writer.writerow([domain, row.label, row.kind, name, *value])
    return text.getvalue()


def _persons(domains: Mapping[str, Domain]) -> Persons | None:
    """User keys per domain where some person is a client of several domains; None where nobody is."""
    users = {name: domain.clients.users for name, domain in domains.items()}
    return users if len(set().union(*users.values())) < sum(map(len, users.values())) else None


def _notes(config: CompareConfig, lines: Sequence[Line], persons: Persons | None) -> list[str]:
    missing = [label for label in config.lines if label not in {line.label for line in lines}]
    notes = [
        f"{config.seeds} seeds; a tuned line is the best of at most {config.tune} settings on validation at seed 0"
    ]
    if persons is not None:
        notes.append(
            "some users are clients of several domains: tests and intervals of the mean over domains take a "
            "person as one unit"
        )
    return [*notes, *([f"left out, since a run failed: {', '.join(missing)}"] if missing else [])]


def _view(label: str) -> str:
    """``global`` of ``fedavg (global)``."""
    return label.rpartition("(")[2].rstrip(")")


def _before(config: CompareConfig, label: str, anchor: str) -> bool:
    return config.against.index(label) < config.against.index(anchor)


def _all_pairs(collected: Collected) -> bool:
    """Bold needs every pair to have been tested."""
    methods = {name for one in collected.comparisons for name in (one.first, one.second)}
    return len({(one.first, one.second) for one in collected.comparisons}) == len(methods) * (len(methods) - 1) // 2


def _single(lines: Sequence[Line]) -> bool:
    return len(lines[0].runs[0].settings.run.domain_names) == 1


def _tex(text: str) -> str:
    for mark in ("&", "%", "$", "#", "_"):
        text = text.replace(mark, f"\\{mark}")
    return text
