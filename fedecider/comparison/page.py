"""The files of a table: Markdown, CSV, JSON, every user's results, and one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from fedecider.comparison.compare import Cost, Positions, Results, Table, Words, positions_of
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.evaluation.statistics import Comparison, compare_table, distinguishable_winners, shared_persons
from fedecider.federation.record import write_json, write_text
from fedecider.report.answer import Evidence, canary_alarm, sings
from fedecider.report.conclusion import conclusion
from fedecider.report.figures import convergence_curves
from fedecider.report.page import Conclusion, Download, PageTable, Section, write_page
from fedecider.report.tables import (
    CANARY,
    ResultRow,
    compared,
    comparisons_csv,
    comparisons_data,
    csv_text,
    interval_text,
    markdown_grid,
    number_text,
    rows_data,
    seed_gains,
    shown_domains,
)
from fedecider.running.plain import as_plain

SETTING_HEADER = ("row", "method", "kind", "protocols", "setting", "tried on validation (ndcg@10, seed 0)")
COST_HEADER = ("up, KB", "down, KB", "best round", "last round", "first within 1 % of the best")
DIFFERENCE_HEADER = ("row", "beside", "metric", "row minus beside", "Holm p", "effect size")
COST_NOTE = (
    "Bytes: means over clients and rounds of the serialised messages. Seconds: other runs may have been going on beside"
)
NOT_IN_SECONDS = {"fdlora": "FDLoRA's search of its fusion is not among them"}
TEST_NOTE = (
    "Paired t tests over users and seeds, Holm-corrected over all comparisons of the table. Effect size: mean over "
    "standard deviation of the users' differences."
)
MEAN = "mean over domains"
ENDS = ("", "_low", "_high")


def write_table(table: Table, heading: Sequence[str] = ()) -> list[Path]:
    """Write all files of a table into its folder; -> their paths. ``heading``: lines on where it comes from."""
    plan, words = table.plan, _words(table)
    chosen = chosen_row(table)
    first = words.sections(table, None if chosen is None else chosen[1])
    heading = [*heading, *words.heading(table)]
    title = f"{plan.name.capitalize()}: {', '.join(plan.users)}"
    paths = {suffix: plan.root / f"{plan.name}.{suffix}" for suffix in ("md", "csv", "json", "html")}
    write_text(paths["md"], _markdown(title, _sections(table, heading, marks=True)))
    write_text(paths["csv"], _csv(table))
    write_json(paths["json"], _data(table))
    if searched := {row.entry.label: as_plain(row.setting) for row in table.rows if row.entry.budget > 1}:
        paths["yaml"] = plan.root / "settings.yaml"
        write_text(paths["yaml"], yaml.safe_dump(searched, sort_keys=False, width=120))
    write_per_user(plan.root / "per_user.parquet", _records(table))
    subtitle = f"{', '.join(table.results)}; {plan.seeds} seed{'s' if plan.seeds > 1 else ''}"
    sections = [*first, *_sections(table, heading)]
    write_page(paths["html"], title, subtitle, sections, conclusion=comparison_conclusion(table))
    return list(paths.values())


def _words(table: Table) -> Words:
    assert table.plan.words is not None, "a table without words has no files"
    return table.plan.words


def _markdown(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {title}", ""]
    for section in sections:
        parts += [f"## {section.title}", "", *(f"{text}\n" for text in section.paragraphs)] if section.tables else []
        for table in section.tables:
            parts += [f"### {table.caption}", ""] if table.caption else []
            right = [name for name in table.header if "@" in name and "(" not in name]
            parts += [*markdown_grid(table.header, table.rows, right), ""]
    return "\n".join(parts)


def chosen_row(table: Table) -> tuple[str, str] | None:
    """Protocol and row that one would take: of the strictest protocol the best one on validation items, whatever the
    test says. None where there is no row that one could use."""
    for protocol in sorted(table.results, key=_strictness):
        results = table.results[protocol]
        if choices := [label for label, kind in results.kinds.items() if kind in _words(table).choices]:
            return protocol, max(choices, key=lambda label: results.valid[label])
    return None


def _strictness(name: str) -> tuple[bool, bool, bool]:
    protocol = get_protocol(name)
    return protocol.leaks, protocol.num_sampled is not None, not protocol.drop_seen


def comparison_conclusion(table: Table) -> Conclusion | None:
    """About the row that is best on validation, beside training alone, baselines and all data in one place."""
    choice = chosen_row(table)
    if choice is None:
        return None
    results, seeds = table.results[choice[0]], table.plan.seeds
    num = len({row.entry.label for row in results.entries.values()})
    pooled = ", methods that pool all data left out" if "central" in results.kinds.values() else ""
    about = (
        f"What was compared: {num} row{'s' if num > 1 else ''} with {seeds} seed{'s' if seeds > 1 else ''} each, under "
        f"{choice[0]}. {choice[1]} is the one with the best validation ndcg@10{pooled}."
    )
    return conclusion(evidence(table, *choice), [about])


def evidence(table: Table, protocol: str, chosen: str) -> Evidence:
    """What the rows under a protocol say about ``chosen``."""
    words, results = _words(table), table.results[protocol]
    *domains, scope = shown_domains(results.rows)
    own, kinds = results.entries[chosen], results.kinds
    beside = dict(words.beside)
    if chosen != own.entry.label:
        beside = {own.entry.label: "the model without its private part", **beside}
    if central := [label for label, kind in kinds.items() if kind == "central" and label not in words.simple]:
        best = max(set(central) - {CANARY}, key=lambda label: results.valid[label], default=None)
        beside |= {best: f"{best} with all data in one place"} if best else {}
    alone = [label for label, kind in kinds.items() if kind == "local" and label != chosen]
    alone = sorted(alone, key=lambda label: results.valid[label])[-1:] if kinds[chosen] == "federated" else []
    others = [label for label in (*alone, *words.simple, *words.before) if label in kinds]
    positions = {label: of_row for label, of_row in _positions(table, protocol).items() if label in (chosen, *others)}
    pairs = [(chosen, label) for label in others if label in positions]
    tests = compare_table(positions, compared(results.rows[0].metrics), pairs, persons=shared_persons(table.plan.users))
    gains, share = [0.0] * table.plan.seeds, 0.0
    if alone:
        gains, share = seed_gains(positions, chosen, alone[0], table.plan.users)
    return Evidence(
        subject=chosen,
        rows=rows_data(results.rows, scope),
        simple=words.simple,
        protocol=protocol,
        scope=scope,
        tests=comparisons_data(tests),
        alone=alone[0] if alone else "",
        beside=beside,
        before_rounds=dict.fromkeys(words.before, "the shared model before the rounds"),
        domains={name: rows_data(results.rows, name) for name in domains},
        customers={client: len(users) for client, users in table.plan.users.items()} if words.companies else {},
        seed_gains=gains,
        seed_share=share,
        chance=fmean(words.chance[protocol].values()),
        planted=words.planted,
        alarms=_canary_alarms(table, protocol),
    )


def _positions(table: Table, protocol: str) -> dict[str, Positions]:
    """Row -> client -> (S, U), clients in the order of the plan."""
    return {
        label: {client: of_label[client] for client in table.plan.users}
        for row in table.results[protocol].entries.values()
        for label, of_label in positions_of(row, protocol).items()
    }


def _canary_alarms(table: Table, name: str) -> list[str]:
    protocol, rows = get_protocol(name), {row.label: row for row in table.results[name].rows}
    if protocol.leaks or not protocol.drop_seen or CANARY not in rows:
        return []  # it leaks anyway; or the memoriser knows what the user had before, which is then a candidate
    hits = {client: rows[CANARY].values[client]["hit@10"]._asdict() for client in table.plan.users}
    chance = _words(table).chance[name]
    return [canary_alarm(client, hit, chance[client]) for client, hit in hits.items() if sings(hit, chance[client])]


def _sections(table: Table, heading: Sequence[str], marks: bool = False) -> list[Section]:
    """``marks``: winners are bold, as Markdown has it."""
    sections = [_result_section(table, protocol, marks) for protocol, results in table.results.items() if results.rows]
    several = len(sections) > 1
    if curves := {name: of_row for name, of_row in _distinct(table, "curves").items() if of_row}:
        points = ([panel, label, *point] for panel, of in curves.items() for label, c in of.items() for point in c)
        download = Download("validation.csv", csv_text(["protocol", "row", "round", "ndcg@10"], points))
        sections.append(Section("Convergence", figures=[convergence_curves(curves)], downloads=[download]))
    if costs := _distinct(table, "costs"):
        header = ["row", _words(table).seconds, *COST_HEADER]
        tables = [PageTable(header, _cost_cells(of), name if several else "") for name, of in costs.items()]
        lines = ([name, label, *cost] for name, of in costs.items() for label, cost in of.items())
        download = Download("costs.csv", csv_text(["protocol", "row", *Cost._fields], lines))
        left = [text for name, text in NOT_IN_SECONDS.items() if any(row.entry.method == name for row in table.rows)]
        sections.append(Section("What it costs", [f"{'; '.join([COST_NOTE, *left])}."], tables, downloads=[download]))
    cells = []
    for row in table.rows:
        entry = row.entry
        scores = ((entry.said(one.setting), one.valid) for one in row.tried)
        tried = "; ".join(f"{said}: {'failed' if valid is None else f'{valid:.4f}'}" for said, valid in scores)
        protocols = ", ".join(entry.protocols)
        cells.append([entry.label, entry.method, entry.kind, protocols, entry.said(row.setting), tried])
    return [*sections, Section("What was compared", heading, [PageTable(SETTING_HEADER, cells)])]


def _result_section(table: Table, protocol: str, marks: bool) -> Section:
    results, ranked = table.results[protocol], table.plan.against is None
    bold, digits = (_winners(table, protocol), 4) if marks else (set(), 3)  # Markdown goes into papers
    further = list(dict.fromkeys(name for columns in results.further.values() for name in columns))
    metrics = results.rows[0].metrics
    header = ["row", "kind", *metrics, *(["against the best"] if ranked else []), *further]
    tables = []
    *domains, whole = shown_domains(results.rows)
    for scope in (whole, *domains):  # the mean first: it is what most readers came for
        cells = []
        for row in results.rows:
            shown = [
                interval_text(row.values[scope][name], digits, (scope, name, row.label) in bold) for name in metrics
            ]
            verdicts = [_against_best(results, row.label, scope)] if ranked else []
            others = [number_text(results.further.get(row.label, {}).get(name), digits) for name in further]
            cells.append([row.label, results.kinds[row.label], *shown, *verdicts, *others])
        tables.append(PageTable(header, cells, MEAN if scope == MACRO else scope))
    if results.variants:
        cells = [
            [row.label, *(interval_text(row.values[whole][name], digits) for name in metrics)]
            for row in results.variants
        ]
        tables.append(PageTable(["row", *metrics], cells, "Models that are not reported"))
    tested = [one for one in results.tests if one.domain == whole]
    for real, caption in ((True, "Significant"), (False, "Not significant")):
        cells = [_difference_cells(one) for one in tested if one.distinguishable() == real]
        tables += [PageTable(DIFFERENCE_HEADER, cells, caption)] if cells and not ranked else []
    num = sum(one.distinguishable() for one in tested)
    said = [_said(table, protocol), *_notes(table, protocol)]
    said += [f"{TEST_NOTE} {num} of {len(tested)} comparisons are distinguishable."] if tested else []
    name = protocol.replace("/", "-")
    downloads = [Download(f"results-{name}.csv", _csv(table, protocol))]
    tests = comparisons_data(results.tests)
    downloads += [Download(f"tests-{name}.csv", comparisons_csv(tests))] if tests else []
    return Section(f"Protocol {protocol}", said, tables, downloads=downloads)


def _said(table: Table, protocol: str) -> str:
    canary = [row.values[MACRO]["hit@10"].mean for row in table.results[protocol].rows if row.label == CANARY]
    chance, lead = fmean(_words(table).chance[protocol].values()), compared(table.results[protocol].rows[0].metrics)[0]
    return f"{stamp(get_protocol(protocol), canary[0] if canary else None)}; chance {lead} {chance:.3f}"


def _notes(table: Table, protocol: str) -> list[str]:
    plan, results = table.plan, table.results[protocol]
    absent = [label for label in plan.against or () if label not in results.entries]
    notes = {
        "Brackets: 95 % t intervals over users, and seeds where there are several.": True,
        "Bold: distinguishably above every row that was tested.": bool(_winners(table, protocol)),
        "Some users are clients of several domains: tests and intervals of the mean over domains take a person as one "
        "unit.": shared_persons(plan.users) is not None,
        f"Not tested against, since no run has such a row: {', '.join(absent)}.": bool(absent),
        f"Left out, since a run failed: {', '.join(results.missing)}.": bool(results.missing),
    }
    return [text for text, is_so in notes.items() if is_so]


def _winners(table: Table, protocol: str) -> set[tuple[str, str, str]]:
    """(domain, metric, row) of what may be bold: every pair was tested, and the protocol does not leak."""
    tests = table.results[protocol].tests
    pairs = {(one.first, one.second) for one in tests}
    num = len({label for pair in pairs for label in pair})
    whole = len(pairs) == num * (num - 1) // 2 and not get_protocol(protocol).leaks
    return distinguishable_winners(tests) if whole else set()


def _against_best(results: Results, label: str, scope: str) -> str:
    """The verdict on ndcg@10 against the best row of a ranking."""
    best = next((row.label for row in results.rows if row.label != CANARY), CANARY)
    if label in (CANARY, best):
        return "canary" if label == CANARY else "best"
    for one in results.tests:
        if (one.domain, one.metric) == (scope, "ndcg@10") and {one.first, one.second} == {label, best}:
            return "below" if one.distinguishable() else "not distinguishable"
    raise AssertionError(f"{label} was not compared with {best}")


def _difference_cells(one: Comparison) -> list[str]:
    return [
        one.first,
        one.second,
        one.metric,
        interval_text(one.difference),
        f"{one.p_holm:.3g}",
        f"{one.effect_size:+.2f}",
    ]


def _cost_cells(costs: Mapping[str, Cost]) -> list[list[str]]:
    return [
        [
            label,
            f"{cost.seconds:.3f}",
            f"{cost.up / 1e3:.1f}",
            f"{cost.down / 1e3:.1f}",
            *(", ".join(map(str, numbers)) for numbers in (cost.best_rounds, cost.last_rounds, cost.near_rounds)),
        ]
        for label, cost in costs.items()
    ]


def _distinct(table: Table, name: str) -> dict[str, Any]:
    """protocol -> what it has, without what one before has too, since it shares its cells."""
    distinct: dict[str, Any] = {}
    for protocol, results in table.results.items():
        if (value := getattr(results, name)) and value not in distinct.values():
            distinct[protocol] = value
    return distinct


def _facts(table: Table, protocol: str, row: ResultRow) -> dict[str, Any]:
    """What is no number of a domain."""
    results = table.results[protocol]
    own = results.entries.get(row.label)
    scope, ranked = shown_domains([row])[-1], table.plan.against is None
    return {
        "row": row.label,
        "protocol": protocol,
        "kind": results.kinds[row.label],
        "setting": own.entry.said(own.setting) if own else "",
        "seeds": table.plan.seeds,
        "valid_ndcg@10": results.valid.get(row.label),
        "against_best": _against_best(results, row.label, scope) if ranked else "",
    }


def _csv(table: Table, only: str = "") -> str:
    """A line for each row, protocol and domain, unrounded."""
    lines: list[dict[str, Any]] = []
    shown = {protocol: one for protocol, one in table.results.items() if only in ("", protocol)}
    further = dict.fromkeys(name for one in shown.values() for columns in one.further.values() for name in columns)
    for protocol, results in shown.items():
        for row in results.rows:
            others = {name: results.further.get(row.label, {}).get(name) for name in further}
            for domain in shown_domains([row]):
                intervals = row.values[domain].items()
                values = {f"{name}{end}": part for name, one in intervals for end, part in zip(ENDS, one, strict=True)}
                lines.append({**_facts(table, protocol, row), "domain": domain, **values, **others})
    return csv_text(list(lines[0]), (line.values() for line in lines))  # type: ignore[misc]


def _data(table: Table) -> dict[str, Any]:
    """The table as plain data; lists of rows and tests name their protocol."""
    rows, tests, protocols = [], [], {}
    for protocol, results in table.results.items():
        for row in results.rows:
            further = results.further.get(row.label, {})
            rows.append({**_facts(table, protocol, row), **further, "values": _values(row)})
        tests += [{"protocol": protocol, **one} for one in comparisons_data(results.tests)]
        protocols[protocol] = {
            "stamp": _said(table, protocol),
            "notes": _notes(table, protocol),
            "bold": sorted(list(key) for key in _winners(table, protocol)),
            "missing": results.missing,
            "not_reported": {row.label: _values(row) for row in results.variants},
            "costs": {label: cost._asdict() for label, cost in results.costs.items()},
            "curves": results.curves,
        }
    settings = [
        {
            "row": row.entry.label,
            "method": row.entry.method,
            "protocols": list(row.entry.protocols),
            "setting": row.entry.said(row.setting),
            "options": as_plain(row.setting),
            "tried": [{"options": as_plain(one.setting), "valid": one.valid} for one in row.tried],
            "runs": [{"seed": seed, "folder": cell.folder.name} for seed, cell in enumerate(row.cells)],
        }
        for row in table.rows
    ]
    return {"protocols": protocols, "rows": rows, "comparisons": tests, "settings": settings}


def _values(row: ResultRow) -> dict[str, dict[str, dict[str, float]]]:
    return {domain: rows_data([row], domain)[row.label] for domain in row.values}


def _records(table: Table) -> Iterator[UserPositions]:
    """Test positions of every row with cells of its own, by seed."""
    for protocol, results in table.results.items():
        which = "last_rounds" if get_protocol(protocol).selection == "last" else "best_rounds"
        for row in {id(row): row for row in results.entries.values()}.values():
            cost = results.costs.get(row.entry.label)
            rounds = getattr(cost, which) if cost else [0] * table.plan.seeds
            for label, of_label in positions_of(row, protocol).items():
                for name, position_SU in of_label.items() if label in row.labels else ():
                    for seed, position_U in enumerate(position_SU):
                        variant, users = f"{label}, {protocol}, seed {seed}", table.plan.users[name]
                        yield UserPositions(name, users, "test", variant, rounds[seed], position_U)
