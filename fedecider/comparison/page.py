"""``compare.html``: the table of a comparison as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedecider.comparison.collect import Collected
from fedecider.comparison.plan import CompareConfig, RowRuns
from fedecider.comparison.table import COST_HEADER, COST_NOTE, SETTING_HEADER, cost_cells, setting_cells
from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.evaluation.statistics import verdict
from fedecider.federation.record import write_json
from fedecider.llm.run_analysis import run_analysis
from fedecider.llm.run_report import cached_user_texts
from fedecider.report.analysis_sections import fusion_section, sections_of
from fedecider.report.figures import colours_of, convergence_curves
from fedecider.report.page import PageTable, Section, write_page
from fedecider.report.rows import METRICS, ResultRow
from fedecider.report.tables import interval_text, shown_domains
from fedecider.running.run_folder import read_run


def write_page_of(
    config: CompareConfig, methods: Sequence[RowRuns], collected: Collected, domains: Mapping[str, Domain]
) -> Path:
    """Write ``compare.html`` below the output folder; -> its path."""
    protocol = get_protocol(methods[0].runs[0].settings.run.protocol)
    sections = [
        Section("What was compared", collected.notes, [PageTable(SETTING_HEADER, setting_cells(methods))]),
        Section("Test results", [_intervals()], [_results(collected.rows, domain) for domain in _scopes(collected)]),
        _differences(collected),
        Section("Convergence", figures=[convergence_curves({"mean over domains": collected.curves})]),
        Section("What it costs", [COST_NOTE], [PageTable(COST_HEADER, cost_cells(collected.costs))]),
    ]
    if collected.views:
        tables = [_results(collected.views, domain) for domain in _scopes(collected)[:1]]
        sections.append(Section("Models that are not reported", [], tables))
    sections += _analyses(config, methods, domains)
    title = f"Comparison: {', '.join(domains)}"
    return write_page(Path(config.output) / "compare.html", title, stamp(protocol), sections)


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
    return shown_domains(collected.rows)[::-1]


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
    real = [verdict(one) for one in shown if one.distinguishable()]
    other = [verdict(one) for one in shown if not one.distinguishable()]
    return Section(
        "Differences",
        [
            "Paired permutation tests over users, Holm-corrected over all comparisons of the table.",
            f"{len(real)} of {len(shown)} comparisons are distinguishable.",
        ],
        [PageTable([title], [[text] for text in texts]) for title, texts in (("real", real), ("not", other)) if texts],
    )
