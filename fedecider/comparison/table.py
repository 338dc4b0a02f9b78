"""The files of a comparison: Markdown, CSV, JSON, LaTeX, and the rows that its page shows as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedecider.comparison.collect import Collected, Cost
from fedecider.comparison.plan import CompareConfig, RowRuns
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import get_protocol
from fedecider.evaluation.statistics import distinguishable_winners, verdict
from fedecider.federation.record import write_json, write_text
from fedecider.report.rows import METRICS, ResultRow, comparisons_data
from fedecider.report.tables import ResultTable, markdown_grid, markdown_table, shown_domains, table_data, values_csv
from fedecider.running.run_folder import read_run

SETTING_HEADER = ("row", "method", "options", "tried on validation (ndcg@10, seed 0)")
COST_HEADER = (
    "row",
    "local training, s per client and round",
    "up, KB",
    "down, KB",
    "best round",
    "first within 1 % of the best",
)
COST_NOTE = (
    "Bytes: mean over clients and rounds of the serialised messages. Seconds: other runs were going on beside; "
    "FDLoRA's search of its fusion is not among them."
)


def write_table(
    config: CompareConfig, methods: Sequence[RowRuns], collected: Collected, heading: Sequence[str]
) -> list[Path]:
    """Write ``compare.md``, ``.csv``, ``.json`` and ``.tex``; -> their paths."""
    root = Path(config.output)
    protocol = get_protocol(methods[0].runs[0].settings.run.protocol)
    bold = distinguishable_winners(collected.comparisons) if _all_pairs(collected) else set()
    table = ResultTable(collected.rows, protocol, collected.notes, bold)
    parts = [
        "# Comparison",
        "",
        *heading,
        *_provenance(methods),
        "",
        "\n".join([*markdown_grid(SETTING_HEADER, setting_cells(methods)), ""]),
        markdown_table(table, title="Test"),
    ]
    if collected.comparisons:
        parts += ["### Differences (paired permutation test over users, Holm over the table)", ""]
        parts += [
            *(f"- {verdict(one)}" for one in collected.comparisons if one.domain == MACRO or _single(collected)),
            "",
        ]
        num = sum(one.distinguishable() for one in collected.comparisons)
        parts += [
            f"{num} of {len(collected.comparisons)} comparisons (domains and macro mean) are distinguishable.",
            "",
        ]
    if collected.views:
        parts += [markdown_table(ResultTable(collected.views, protocol), title="Models that are not reported")]
    grid = markdown_grid(COST_HEADER, cost_cells(collected.costs), COST_HEADER[1:4])
    parts += ["\n".join(["### What it costs", "", *grid, "", COST_NOTE, ""])]
    json_table = {**table_data(table), "settings": [_setting_data(row) for row in methods]}
    json_table["comparisons"] = comparisons_data(collected.comparisons)
    json_table["costs"] = {label: cost._asdict() for label, cost in collected.costs.items()}
    json_table["curves"] = collected.curves
    write_json(root / "compare.json", json_table)
    texts = {"md": "\n".join(parts), "csv": values_csv(collected.rows), "tex": latex_table(collected.rows)}
    for suffix, text in texts.items():
        write_text(root / f"compare.{suffix}", text)
    return [root / f"compare.{suffix}" for suffix in (*texts, "json")]


def setting_cells(methods: Sequence[RowRuns]) -> list[list[str]]:
    """Cells below ``SETTING_HEADER``."""
    return [
        [
            row.label,
            row.method,
            _options(row.chosen),
            "; ".join(f"{_options(one['options'])}: {one['valid']:.4f}" for one in row.tried),
        ]
        for row in methods
    ]


def cost_cells(costs: Mapping[str, Cost]) -> list[list[str]]:
    """Cells below ``COST_HEADER``."""
    return [
        [
            label,
            f"{cost.train_s:.2f}",
            f"{cost.up / 1e3:.1f}",
            f"{cost.down / 1e3:.1f}",
            *(", ".join(map(str, numbers)) for numbers in (cost.best_rounds, cost.near_rounds)),
        ]
        for label, cost in costs.items()
    ]


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


def _provenance(methods: Sequence[RowRuns]) -> list[str]:
    """Where the runs come from; the record of the first run stands for versions and machine of all."""
    records = [read_run(run.folder.root) for row in methods for run in row.runs]
    versions = ", ".join(f"{name} {number}" for name, number in records[0]["versions"].items())
    machine = records[0]["machine"]
    threads = records[0]["config"]["run"]["num_threads"]
    return [
        f"- Commits of the runs: {', '.join(sorted({str(record['commit']) for record in records}))}",
        f"- Versions: Python {records[0]['python']}, {versions}",
        f"- Machine: {machine['system']} {machine['processor']}, {threads or 'all'} thread(s) a run",
    ]


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if name != "method") or "default"


def _setting_data(row: RowRuns) -> dict[str, Any]:
    runs = [{"seed": run.seed, "folder": run.folder.root.name} for run in row.runs]
    return {"label": row.label, "method": row.method, "options": row.chosen, "tried": row.tried, "runs": runs}


def _all_pairs(collected: Collected) -> bool:
    """Bold needs every pair to have been tested."""
    methods = {name for one in collected.comparisons for name in (one.first, one.second)}
    return len({(one.first, one.second) for one in collected.comparisons}) == len(methods) * (len(methods) - 1) // 2


def _single(collected: Collected) -> bool:
    return len({one.domain for one in collected.comparisons}) == 1


def _tex(text: str) -> str:
    for mark in ("&", "%", "$", "#", "_"):
        text = text.replace(mark, f"\\{mark}")
    return text
