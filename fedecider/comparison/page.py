"""``compare.html``: the table of a comparison as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedecider.comparison.collect import Collected
from fedecider.comparison.opening import chosen_row, comparison_opening
from fedecider.comparison.plan import CompareConfig, RowRuns, shown_as
from fedecider.comparison.table import COST_HEADER, COST_NOTE, SETTING_HEADER, cost_cells, setting_cells
from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.federation.record import write_json
from fedecider.llm.example_section import example_sections
from fedecider.llm.examples import EXAMPLES_FILE
from fedecider.llm.run_analysis import run_analysis
from fedecider.llm.run_report import cached_user_texts
from fedecider.report.analysis_sections import fusion_section, sections_of
from fedecider.report.figures import colours_of, convergence_curves
from fedecider.report.page import Download, PageTable, Section, write_page
from fedecider.report.rows import METRICS, ResultRow, comparisons_data
from fedecider.report.tables import comparisons_csv, csv_text, interval_text, shown_domains, values_csv
from fedecider.running.damage import read_object
from fedecider.running.run_folder import read_run

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
