"""``leaderboard.html``: the leaderboard as one self-contained page, with the same verdict as the page of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedding_fr.leaderboard import LOCAL, LeaderboardConfig
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.report.figures import convergence_curves
from fedecider.report.page import Download, Opening, PageTable, Section, write_page
from fedecider.report.rows import CANARY, COMPARED
from fedecider.report.tables import comparisons_csv, csv_text, interval_text
from fedecider.report.verdict import WITHOUT_EXCHANGE, Evidence, opening

SIMPLE = ("popularity", "last_item_cooccurrence", "decayed_cooccurrence")
"""Rows that need no training."""
Curves = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""Panel -> method -> [[round, validation ndcg@10], ...]."""


def write_leaderboard_page(
    config: LeaderboardConfig, content: Mapping[str, Any], notes: Sequence[str], curves: Curves, csv: str, path: Path
) -> Path:
    """Write the page of ``content``, which ``leaderboard.json`` holds; ``csv`` is the text of ``leaderboard.csv``."""
    rows = {
        name: [row for row in content["rows"] if row["protocol"] == name]
        for name in dict.fromkeys(content["comparisons"])
    }
    missing = content["missing"]
    sections = [_section(name, own, content["comparisons"][name], missing[name]) for name, own in rows.items() if own]
    if curves:
        points = ([*place, *point] for place, points in _named(curves) for point in points)
        file = Download("validation.csv", csv_text(["panel", "method", "round", "ndcg@10"], points))
        sections.append(Section("Convergence", figures=[convergence_curves(curves)], downloads=[file]))
    sections.append(Section("How it was made", notes, downloads=[Download("leaderboard.csv", csv)]))
    title = f"Leaderboard: {content['dataset']}"
    subtitle = f"{', '.join(rows)}; {config.seeds} seed{'s' if config.seeds > 1 else ''}"
    return write_page(path, title, subtitle, sections, opening=_opening(content, rows))


def _named(curves: Curves) -> list[tuple[tuple[str, str], Sequence[Sequence[float]]]]:
    return [((panel, method), points) for panel, of_panel in curves.items() for method, points in of_panel.items()]


def _opening(content: Mapping[str, Any], rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Opening | None:
    """About the federated row that is best on validation, under the strictest protocol; None where there is none."""
    found = [name for name in sorted(rows, key=_strictness) if any(row["kind"] == "federated" for row in rows[name])]
    if not found:
        return None
    name = found[0]
    chosen = max((row for row in rows[name] if row["kind"] == "federated"), key=lambda row: row["valid_ndcg@10"])
    about = (
        f"What was compared: {len(rows[name])} rows under the protocol {name}. {chosen['method']} is the federated one "
        "with the best validation ndcg@10."
    )
    return opening(board_evidence(content, rows[name], chosen), [about])


def _strictness(name: str) -> tuple[bool, bool, bool]:
    protocol = get_protocol(name)
    return protocol.leaks, protocol.num_sampled is not None, not protocol.drop_seen


def board_evidence(
    content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]
) -> Evidence:
    """What the rows of one protocol say about ``chosen``."""
    name, subject = chosen["protocol"], chosen["method"]
    central = [row for row in rows if row["kind"] == "central" and row["method"] not in (*SIMPLE, CANARY)]
    beside = {}
    if central:
        best = max(central, key=lambda row: row["valid_ndcg@10"])["method"]
        beside[best] = f"{best} with all data in one place"
    alone = {row["method"]: row["method"].removesuffix(LOCAL) for row in rows if row["kind"] == "local"}
    protocol, chance = get_protocol(name), content["chance_hit@10"][name]
    canary = [row["hit@10"]["low"] for row in rows if row["method"] == CANARY]
    alarms = [
        "The memoriser, which knows nothing about items, is above chance: by luck, or there is a leak."
        for low in canary
        if low > chance and protocol.drop_seen and not protocol.leaks
    ]
    federated = [row for row in rows if row["kind"] == "federated"]
    top = max(federated, key=lambda row: row["hit@10"]["mean"])
    if top is not chosen:
        alarms.append(
            f"{subject} was chosen on validation items; on test items {top['method']} has more: "
            f"{100 * top['hit@10']['mean']:.1f} against {100 * chosen['hit@10']['mean']:.1f} of 100 users."
        )
    return Evidence(
        subject=subject,
        rows={row["method"]: {metric: row[metric] for metric in COMPARED} for row in rows},
        simple=SIMPLE,
        protocol=name,
        tests=content["comparisons"][name],
        beside=beside,
        without_exchange={
            label: WITHOUT_EXCHANGE if method == subject else f"{method} without any exchange"
            for label, method in alone.items()
        },
        num_seeds=chosen["seeds"],
        num_clients=content["num_users"],
        chance=chance,
        alarms=alarms,
    )


def left_out(missing: Sequence[str]) -> list[str]:
    """Which rows a table lacks, as paragraphs: of what was asked for."""
    return [f"Left out, since a run failed: {', '.join(missing)}."] if missing else []


def _section(
    name: str, rows: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]], missing: Sequence[str]
) -> Section:
    canary = next((row["hit@10"]["mean"] for row in rows if row["method"] == CANARY), None)
    cells = [
        [
            row["method"],
            row["kind"],
            *(interval_text(row[metric], 3) for metric in COMPARED),
            row["against_best"],
            row["setting"],
        ]
        for row in rows
    ]
    header = ("row", "kind", *COMPARED, "against the best", "setting")
    files = [Download(f"tests-{name.replace('/', '-')}.csv", comparisons_csv(tests))] if tests else []
    said = [stamp(get_protocol(name), canary), *left_out(missing)]
    return Section(f"Protocol {name}", said, [PageTable(header, cells)], downloads=files)
