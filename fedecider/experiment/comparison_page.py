"""The table and the page of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.evaluation.statistics import distinguishable_winners, verdict
from fedecider.experiment.comparison import SASREC, SASREC_TEXT, Collected, CompareConfig, Cost, RowRuns, shown_as
from fedecider.experiment.rows import (
    EXAMPLES_FILE,
    MEMORY_ROW,
    OWN_MEMORY_ROW,
    STUDENT,
    UNTRAINED,
    valid_means,
    with_memory,
)
from fedecider.experiment.run_page import cached_user_texts, canary_alarms, example_sections, run_analysis
from fedecider.federation.record import write_json, write_text
from fedecider.id_based.methods import METHODS as ID_METHODS
from fedecider.methods import METHODS
from fedecider.report.analysis_sections import fusion_section, sections_of
from fedecider.report.figures import colours_of, convergence_curves
from fedecider.report.page import Download, Opening, PageTable, Section, write_page
from fedecider.report.tables import (
    METRICS,
    ResultRow,
    ResultTable,
    comparisons_csv,
    comparisons_data,
    csv_text,
    interval_text,
    markdown_grid,
    markdown_table,
    rows_data,
    shown_domains,
    table_data,
    values_csv,
)
from fedecider.report.verdict import BEFORE_ROUNDS, WITHOUT_EXCHANGE, Evidence, opening
from fedecider.running.run_folder import read_object, read_run

# The words with which the page of a comparison begins.

LOCAL = "local"


def chosen_row(methods: Sequence[RowRuns], collected: Collected) -> str | None:
    """The row that one would take: the best one on validation items, whatever the test says.

    Methods that pool all data are no choice for clients that keep theirs; None where there are only such.
    """
    return max(_choices(methods), key=lambda label: collected.valid[label], default=None)


def comparison_opening(config: CompareConfig, methods: Sequence[RowRuns], collected: Collected) -> Opening | None:
    """About the row that is best on validation, beside simple rules, local training and models of one client.

    None where there is no row that one could switch on.
    """
    chosen = chosen_row(methods, collected)
    if chosen is None:
        return None
    about = (
        f"What was compared: {len(methods)} method{'s' if len(methods) > 1 else ''} with {config.seeds} "
        f"seed{'s' if config.seeds > 1 else ''} each. {chosen} is the one with the best validation ndcg@10"
        f"{', methods that pool all data left out' if any(METHODS[row.method].pooled for row in methods) else ''}."
    )
    return opening(comparison_evidence(config, methods, collected, chosen), [about])


def comparison_evidence(
    config: CompareConfig, methods: Sequence[RowRuns], collected: Collected, chosen: str
) -> Evidence:
    """What the runs say about the row ``chosen``."""
    of_chosen = next(row for row in methods if chosen in shown_as(row).values())
    runs = of_chosen.runs
    metrics = [read_object(run.folder.metrics) for run in runs]
    *domains, scope = shown_domains(collected.rows)
    rows = rows_data(collected.rows, scope)
    beside = {MEMORY_ROW: "the memory without a model"}
    if chosen != of_chosen.label:
        beside = {of_chosen.label: "the model without its memory", **beside}
    beside |= {label: "all data in one place" for label in _labels(methods) if label not in _choices(methods)}
    beside |= {name: f"{name}, federated without a language model" for name in ID_METHODS}
    beside |= {SASREC: "SASRec of one domain", SASREC_TEXT: "SASRec that starts from texts"}
    settings = runs[0].settings.run
    return Evidence(
        subject=chosen,
        rows=rows,
        simple=UNTRAINED,
        protocol=settings.protocol,
        tests=[one for one in comparisons_data(collected.comparisons) if one["domain"] == scope],
        beside=beside,
        without_exchange={label: WITHOUT_EXCHANGE for row in methods if row.method == LOCAL for label in _alone(row)},
        before_rounds={STUDENT: BEFORE_ROUNDS},
        domains={name: rows_data(collected.rows, name) for name in domains},
        valid=_valid([valid_means(one) for one in metrics], shown_as(of_chosen)),
        num_seeds=config.seeds,
        num_clients=len(metrics[0]["domains"]),
        chance=fmean(domain["chance_hit@10"] for domain in metrics[0]["domains"].values()),
        planted=not settings.data,
        alarms=[*canary_alarms(metrics[0]), *_better_on_test(chosen, methods, collected, scope)],
    )


def _labels(methods: Sequence[RowRuns]) -> list[str]:
    return [label for row in methods for label in shown_as(row).values()]


def _alone(row: RowRuns) -> list[str]:
    """Labels of ``row`` whose memory, if any, counts nothing of siblings."""
    labels = list(shown_as(row).values())
    counted = with_memory(row.label) if with_memory(row.label, OWN_MEMORY_ROW) in labels else ""
    return [label for label in labels if label != counted]


def _choices(methods: Sequence[RowRuns]) -> list[str]:
    """Rows that one could take."""
    return _labels([row for row in methods if not METHODS[row.method].pooled])


def _valid(per_seed: Sequence[dict[str, float]], names: Mapping[str, str]) -> dict[str, float]:
    """Means over the seeds; the models of the runs go by the names of their rows."""
    common = set.intersection(*(set(one) for one in per_seed))
    return {names.get(label, label): fmean(one[label] for one in per_seed) for label in common}


def _better_on_test(chosen: str, methods: Sequence[RowRuns], collected: Collected, scope: str) -> list[str]:
    labels = _choices(methods)
    means = {row.label: row.values[scope]["hit@10"].mean for row in collected.rows if row.label in labels}
    best = max(means, key=lambda label: means[label])
    if best == chosen:
        return []
    where = "mean over domains" if scope == MACRO else scope
    return [
        f"{chosen} was chosen on validation items; on test items {best} has more: {100 * means[best]:.1f} against "
        f"{100 * means[chosen]:.1f} of 100 users ({where})."
    ]


# The files of a comparison: Markdown, CSV, JSON, LaTeX, and the rows that its page shows as well.

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


# ``compare.html``: the table of a comparison as one self-contained page.

DIFFERENCE_HEADER = ("row", "beside", "metric", "row minus beside", "Holm p", "effect size")


def write_page_of(
    config: CompareConfig, methods: Sequence[RowRuns], collected: Collected, domains: Mapping[str, Domain]
) -> Path:
    """Write ``compare.html`` below the output folder; -> its path."""
    protocol = get_protocol(methods[0].runs[0].settings.run.protocol)
    first, more = _examples(config, methods, collected)
    results = [_results(collected.rows, domain) for domain in _scopes(collected)]
    sections = [
        *first,
        Section(
            "Test results", [_intervals()], results, downloads=[Download("results.csv", values_csv(collected.rows))]
        ),
        _differences(collected),
        _convergence(collected),
        _costs(collected),
        Section("What was compared", collected.notes, [PageTable(SETTING_HEADER, setting_cells(methods))]),
    ]
    if collected.views:
        tables = [_results(collected.views, domain) for domain in _scopes(collected)[:1]]
        sections.append(Section("Models that are not reported", [], tables))
    sections += [*_analyses(config, methods, domains), *more]
    title = f"Comparison: {', '.join(domains)}"
    opening = comparison_opening(config, methods, collected)
    return write_page(Path(config.output) / "compare.html", title, stamp(protocol), sections, opening=opening)


def _examples(
    config: CompareConfig, methods: Sequence[RowRuns], collected: Collected
) -> tuple[list[Section], list[Section]]:
    """Of the chosen row and another one, from ``against`` if it can be, seed 0; the files may have been deleted."""
    best = chosen_row(methods, collected)  # examples are those of a model, whatever memory stands beside it
    files = {row.label: row.runs[0].folder.root / EXAMPLES_FILE for row in methods}
    chosen = next((row.label for row in methods if best in shown_as(row).values()), methods[0].label)
    other = [label for label in (*config.against, *files) if label != chosen and label in files][:1]
    shown = (label for label in (chosen, *other) if files[label].is_file())
    return example_sections({label: read_object(files[label]) for label in shown})


def _convergence(collected: Collected) -> Section:
    points = ([label, *point] for label, curve in collected.curves.items() for point in curve)
    file = Download("validation.csv", csv_text(["row", "round", "ndcg@10"], points))
    figure = convergence_curves({"mean over domains": collected.curves})
    return Section("Convergence", figures=[figure], downloads=[file])


def _costs(collected: Collected) -> Section:
    names = ("train_s", "up", "down", "best_rounds", "near_rounds")
    cells = ([label, *(getattr(cost, name) for name in names)] for label, cost in collected.costs.items())
    file = Download("costs.csv", csv_text(["row", *names], cells))
    return Section(
        "What it costs", [COST_NOTE], [PageTable(COST_HEADER, cost_cells(collected.costs))], downloads=[file]
    )


def _analyses(config: CompareConfig, methods: Sequence[RowRuns], domains: Mapping[str, Domain]) -> list[Section]:
    """Analyses of one row's run with seed 0 beside another row's; none when one of the two is missing."""
    folders = {row.label: row.runs[0].folder for row in methods}
    if len(config.analysed) != 2 or not set(config.analysed) <= set(folders):
        return []
    own, other = (folders[label] for label in config.analysed)
    texts = cached_user_texts(read_run(own.root))
    analysis = run_analysis(own, domains, texts, config.encoder, compare=other)
    write_json(Path(config.output) / "analysis.json", analysis)
    first, second = config.analysed
    said = Section("Analyses", [f"What follows is about {first} with seed 0, beside {second} with seed 0."])
    of_table = colours_of([row.label for row in methods])
    colours = {label: of_table[row] for label, row in zip(analysis["lines"], config.analysed, strict=True)}
    return [said, *fusion_section(analysis["alpha"], analysis["best_round"]), *sections_of(analysis, colours)]


def _scopes(collected: Collected) -> list[str]:
    """The mean over domains first: it is what most readers came for."""
    *domains, whole = shown_domains(collected.rows)
    return [whole, *domains]


def _intervals() -> str:
    return "Brackets: 95 % cluster bootstrap over users and seeds."


def _results(rows: Sequence[ResultRow], domain: str) -> PageTable:
    ordered = sorted(rows, key=lambda row: -row.values[domain]["ndcg@10"].mean)
    cells = []
    for row in ordered:
        cells.append([row.label, *(interval_text(row.values[domain][name]) for name in METRICS)])
    return PageTable(["row", *METRICS], cells, "mean over domains" if domain == MACRO else domain)


def _differences(collected: Collected) -> Section:
    scopes = {one.domain for one in collected.comparisons}
    shown = [one for one in collected.comparisons if one.domain == MACRO or len(scopes) == 1]
    tables = []
    for real, caption in ((True, "More than chance"), (False, "Not distinguishable from chance")):
        rows = [
            [
                one.first,
                one.second,
                one.metric,
                interval_text(one.difference),
                f"{one.p_holm:.3g}",
                f"{one.effect_size:+.2f}",
            ]
            for one in shown
            if one.distinguishable() == real
        ]
        tables += [PageTable(DIFFERENCE_HEADER, rows, caption)] if rows else []
    num = sum(one.distinguishable() for one in shown)
    paragraphs = [
        "Paired permutation tests over users, Holm-corrected over all comparisons of the table. Effect size: mean over "
        "standard deviation of the users' differences.",
        f"{num} of {len(shown)} comparisons are distinguishable.",
    ]
    file = Download("tests.csv", comparisons_csv(comparisons_data(collected.comparisons)))
    return Section("Differences", paragraphs, tables, downloads=[file] if collected.comparisons else [])
