"""The leaderboard as Markdown, CSV, JSON and a convergence plot: one row per method and protocol.

Shape legend: S seeds, U users.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedding_fr.leaderboard import LeaderboardConfig, Line, settings_text
from fedecider.data.interactions import Interactions
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.protocols import Protocol, chance_hit, get_protocol, stamp
from fedecider.evaluation.statistics import Comparison, compare_table, distinguishable_winners, metric_intervals
from fedecider.federation.record import write_json, write_text
from fedecider.federation.streams import stream
from fedecider.report.figures import convergence_curves, save_figure

METRICS = ("hit@10", "ndcg@10", "hit@5", "ndcg@5", "hit@20")
COMPARED = ("hit@10", "ndcg@10")
CANARY = "memoriser"


def write_leaderboard(
    config: LeaderboardConfig, interactions: Interactions, lines: Sequence[Line], root: Path, heading: Sequence[str]
) -> Path:
    """Write ``leaderboard.md``, ``.csv``, ``.json``, ``per_user.parquet`` and ``convergence.html``; -> the Markdown."""
    per_protocol = {name: [line for line in lines if line.protocol == name] for name in config.protocol_names}
    sections, rows, pairs = [], [], {}
    for name, own in per_protocol.items():
        protocol = get_protocol(name)
        table = [_row(line, interactions) for line in own]
        comparisons = compare(interactions, own)
        pairs[name] = [{**c._asdict(), "difference": c.difference._asdict()} for c in comparisons]
        best = _best(table)
        for row in table:
            row["against_best"] = _against(row["method"], best, comparisons)
        table.sort(key=lambda row: -row["ndcg@10"]["mean"])
        winners = distinguishable_winners(comparisons)
        sections.append(_markdown(protocol, table, winners, interactions, config))
        rows += table
    _write_csv(rows, root / "leaderboard.csv")
    content = {"dataset": interactions.name, "card": interactions.card, "rows": rows, "comparisons": pairs}
    write_json(root / "leaderboard.json", content)
    write_per_user(root / "per_user.parquet", _records(interactions, lines))
    _write_curves(lines, root)
    path = root / "leaderboard.md"
    card = _card(interactions, config)
    write_text(path, "\n".join([f"# Leaderboard: {interactions.name}", "", *heading, *card, "", *sections]))
    return path


def compare(interactions: Interactions, lines: Sequence[Line]) -> list[Comparison]:
    """All paired comparisons of one protocol, Holm-corrected together; the canary is left out."""
    positions = {line.method: {interactions.name: line.positions()} for line in lines if line.method != CANARY}
    if len(positions) < 2:
        return []
    return compare_table(positions, stream(0, "comparisons"), COMPARED, num_permutations=20_000, num_resamples=200)


def _row(line: Line, interactions: Interactions) -> dict[str, Any]:
    intervals = metric_intervals({interactions.name: line.positions()}, stream(0, "bootstrap"))[interactions.name]
    infos = [cell.info for cell in line.cells]
    row: dict[str, Any] = {
        "method": line.method,
        "kind": line.kind,
        "protocol": line.protocol,
        "setting": settings_text(line),
        "seeds": len(line.cells),
        "valid_ndcg@10": sum(info["valid"] for info in infos) / len(infos),
    }
    row |= {name: intervals[name]._asdict() for name in METRICS}
    if "seconds" in infos[0]:
        row["round"] = [info["best_round"] for info in infos]
        row["rounds_run"] = [info["last_round"] for info in infos]
        row["seconds_per_round"] = sum(info["seconds"]["wall_s"] for info in infos) / len(infos)
        if all("participations" in info for info in infos):
            sent = sum(info["bytes"]["up"] for info in infos)
            row["bytes_up_per_client_and_round"] = sent / sum(info["participations"] for info in infos)
    if "best_round_test" in infos[0]:
        for name in COMPARED:
            row[f"{name}, best round"] = sum(info["best_round_test"][name] for info in infos) / len(infos)
    return row


def _best(table: Sequence[Mapping[str, Any]]) -> str:
    compared = [row for row in table if row["method"] != CANARY]
    return max(compared, key=lambda row: row["ndcg@10"]["mean"])["method"] if compared else CANARY


def _against(method: str, best: str, comparisons: Sequence[Comparison]) -> str:
    """The verdict on ndcg@10 against the best line of the table."""
    if method == CANARY:
        return "canary"
    if method == best:
        return "best"
    for c in comparisons:
        if c.metric == "ndcg@10" and {c.first, c.second} == {method, best}:
            return "below" if c.distinguishable() else "not distinguishable"
    raise AssertionError(f"{method} was not compared with {best}")


def _markdown(
    protocol: Protocol,
    table: Sequence[Mapping[str, Any]],
    winners: set[tuple[str, str, str]],
    interactions: Interactions,
    config: LeaderboardConfig,
) -> str:
    canary = next((row["hit@10"]["mean"] for row in table if row["method"] == CANARY), None)
    chance = chance_hit(interactions.sequences, interactions.num_items, "test", protocol)
    last = protocol.selection == "last"
    columns = [
        "method",
        "kind",
        "hit@10",
        "ndcg@10",
        "hit@5",
        "hit@20",
        "against best",
        "setting",
        "round",
        "s / round",
    ]
    columns += ["hit@10 / ndcg@10, best validation round"] if last else []
    lines = [f"## Protocol `{protocol.name}`", "", stamp(protocol, canary) + f"; chance hit@10 {chance:.3f}", ""]
    lines += ["| " + " | ".join(columns) + " |", "|---|---|" + "---:|" * 4 + "---|---|---|---:|" + "---:|" * last]
    for row in table:
        cells = [row["method"], row["kind"]]
        cells += [_interval(row[name], (interactions.name, name, row["method"]) in winners) for name in METRICS[:2]]
        cells += [f"{row[name]['mean']:.3f}" for name in ("hit@5", "hit@20")]
        cells += [row["against_best"], row["setting"]]
        rounds = row["rounds_run" if last else "round"] if "round" in row else []
        cells += [", ".join(map(str, rounds)) or "-"]
        cells += [f"{row['seconds_per_round']:.3f}" if "seconds_per_round" in row else "-"]
        if last:
            names = [f"{name}, best round" for name in COMPARED]
            cells += [" / ".join(f"{row[name]:.3f}" for name in names) if names[0] in row else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _interval(value: Mapping[str, float], bold: bool) -> str:
    mean = f"**{value['mean']:.3f}**" if bold else f"{value['mean']:.3f}"
    return f"{mean} [{value['low']:.3f}, {value['high']:.3f}]"


def _card(interactions: Interactions, config: LeaderboardConfig) -> list[str]:
    tuned = f"the best of at most {config.tune} settings by validation ndcg@10 (whole catalogue, seed 0)"
    return [
        f"- Data: {interactions.num_users:,} users, {interactions.num_items:,} items, "
        f"{interactions.num_events:,} events",
        f"- {config.seeds} seed(s); settings: {tuned}, under `paper` those of the papers; federated runs of at most "
        f"{config.num_rounds} rounds, stopped after {config.patience} without a better validation score (not under "
        "`paper`)",
        "- Defaults of the centralised lines and of our own methods were found on validation items of ML-100K; the "
        "papers' methods begin with their papers' settings. Seconds were measured while other runs were going on",
        "- Brackets: 95 % cluster bootstrap over users and seeds. Against best: paired permutation test over users on "
        "ndcg@10, Holm-corrected over all pairs of the table; bold: distinguishably above every other line",
    ]


def _write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    names = ["method", "kind", "protocol", "setting", "seeds", "valid_ndcg@10", "against_best", "seconds_per_round"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *(f"{name}{part}" for name in METRICS for part in ("", "_low", "_high"))])
    for row in rows:
        values = [row[name][part] for name in METRICS for part in ("mean", "low", "high")]
        writer.writerow([*(row.get(name, "") for name in names), *values])
    write_text(path, text.getvalue())


def _records(interactions: Interactions, lines: Sequence[Line]) -> list[UserPositions]:
    return [
        UserPositions(
            interactions.name,
            interactions.users,
            "test",
            f"{line.method}, {line.protocol}, seed {seed}",
            cell.info.get("last_round" if get_protocol(line.protocol).selection == "last" else "best_round", 0),
            cell.positions(line.protocol),
        )
        for line in lines
        for seed, cell in enumerate(line.cells)
    ]


def _write_curves(lines: Sequence[Line], root: Path) -> None:
    curves: dict[str, dict[str, list]] = {}
    for line in lines:
        if "curve" in line.cells[0].info and len(line.cells[0].info["curve"]) > 1:
            panel = "paper" if get_protocol(line.protocol).leaks else "strict"
            curves.setdefault(panel, {})[line.method] = line.cells[0].info["curve"]
    if curves:
        save_figure(convergence_curves(curves), root / "convergence")
