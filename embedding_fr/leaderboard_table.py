"""The leaderboard as Markdown, CSV, JSON and a page: one row per method and protocol.

Shape legend: S seeds, U users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedding_fr.leaderboard import BoardRow, LeaderboardConfig, settings_text
from embedding_fr.leaderboard_page import left_out, write_leaderboard_page
from fedecider.data.interactions import Interactions
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.protocols import Protocol, chance_hit, get_protocol, stamp
from fedecider.evaluation.statistics import Comparison, compare_table, distinguishable_winners
from fedecider.federation.record import write_json, write_text
from fedecider.federation.streams import stream
from fedecider.report.rows import CANARY, COMPARED, ResultRow, comparisons_data, result_rows
from fedecider.report.tables import csv_text, interval_text, markdown_grid, number_text

METRICS = (*COMPARED, "hit@5", "ndcg@5", "hit@20")
BEST_ROUND = "hit@10 / ndcg@10, best validation round"


def write_leaderboard(
    config: LeaderboardConfig, interactions: Interactions, board: Sequence[BoardRow], root: Path, heading: Sequence[str]
) -> Path:
    """Write ``leaderboard.md``, ``.csv``, ``.json``, ``.html`` and ``per_user.parquet``; -> the Markdown."""
    per_protocol = {name: [row for row in board if row.protocol == name] for name in config.protocol_names}
    sections, rows, pairs, missing = [], [], {}, {}
    for name, own in per_protocol.items():
        protocol = get_protocol(name)
        measured = result_rows({row.method: {interactions.name: row.positions()} for row in own}) if own else []
        table = [_row_data(row, found, interactions) for row, found in zip(own, measured, strict=True)]
        comparisons = compare(interactions, own)
        pairs[name] = comparisons_data(comparisons)
        best = _best(table)
        for row in table:
            row["against_best"] = _against(row["method"], best, comparisons)
        table.sort(key=lambda row: -row["ndcg@10"]["mean"])
        winners = set() if protocol.leaks else distinguishable_winners(comparisons)
        missing[name] = [method for method in config.method_names if method not in {row.method for row in own}]
        sections.append(_markdown(protocol, table, winners, interactions, missing[name]))
        rows += table
    csv = _csv(rows)
    write_text(root / "leaderboard.csv", csv)
    sequences, num_items = interactions.sequences, interactions.num_items
    content = {
        "dataset": interactions.name,
        "card": interactions.card,
        "num_users": interactions.num_users,
        "chance_hit@10": {name: chance_hit(sequences, num_items, "test", get_protocol(name)) for name in per_protocol},
        "rows": rows,
        "comparisons": pairs,
        "missing": missing,
    }
    write_json(root / "leaderboard.json", content)
    write_per_user(root / "per_user.parquet", _records(interactions, board))
    path = root / "leaderboard.md"
    card = _card(interactions, config)
    notes = [line.removeprefix("- ").replace("`", "") for line in [*heading, *card]]
    write_leaderboard_page(config, content, notes, _curves(board), csv, root / "leaderboard.html")
    write_text(path, "\n".join([f"# Leaderboard: {interactions.name}", "", *heading, *card, "", *sections]))
    return path


def compare(interactions: Interactions, board: Sequence[BoardRow]) -> list[Comparison]:
    """All paired comparisons of one protocol, Holm-corrected together; the canary is left out."""
    positions = {row.method: {interactions.name: row.positions()} for row in board if row.method != CANARY}
    if len(positions) < 2:
        return []
    return compare_table(positions, stream(0, "comparisons"), COMPARED, num_permutations=20_000)


def _row_data(board: BoardRow, measured: ResultRow, interactions: Interactions) -> dict[str, Any]:
    intervals = measured.values[interactions.name]
    infos = [cell.info for cell in board.cells]
    row: dict[str, Any] = {
        "method": board.method,
        "kind": board.kind,
        "protocol": board.protocol,
        "setting": settings_text(board),
        "seeds": len(board.cells),
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
    """The verdict on ndcg@10 against the best row of the table."""
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
    missing: Sequence[str],
) -> str:
    canary = next((row["hit@10"]["mean"] for row in table if row["method"] == CANARY), None)
    chance = chance_hit(interactions.sequences, interactions.num_items, "test", protocol)
    last = protocol.selection == "last"
    columns = ["method", "kind", *COMPARED, "hit@5", "hit@20", "against best", "setting", "round", "s / round"]
    extra = [BEST_ROUND] if last else []
    right = {*COMPARED, "hit@5", "hit@20", "s / round", BEST_ROUND}
    grid = markdown_grid([*columns, *extra], [_cells(row, interactions.name, winners, last) for row in table], right)
    said = f"{stamp(protocol, canary)}; chance hit@10 {chance:.3f}"
    return "\n".join([f"## Protocol `{protocol.name}`", "", said, "", *grid, "", *left_out(missing)])


def _cells(row: Mapping[str, Any], dataset: str, winners: set[tuple[str, str, str]], last: bool) -> list[str]:
    bold = [(dataset, name, row["method"]) in winners for name in COMPARED]
    cells = [row["method"], row["kind"]]
    cells += [interval_text(row[name], 3, strong) for name, strong in zip(COMPARED, bold, strict=True)]
    cells += [number_text(row[name]["mean"], 3) for name in ("hit@5", "hit@20")]
    cells += [row["against_best"], row["setting"]]
    rounds = row["rounds_run" if last else "round"] if "round" in row else []
    cells += [", ".join(map(str, rounds)) or "-", number_text(row.get("seconds_per_round"), 3)]
    if last:
        names = [f"{name}, best round" for name in COMPARED]
        cells += [" / ".join(number_text(row[name], 3) for name in names) if names[0] in row else "-"]
    return cells


def _card(interactions: Interactions, config: LeaderboardConfig) -> list[str]:
    stopped = f"stopped after {config.patience} without a better validation score (not under `paper`)"
    tuned = f"the best of at most {config.tune} settings by validation ndcg@10 (whole catalogue, seed 0)"
    return [
        f"- Data: {interactions.num_users:,} users, {interactions.num_items:,} items, "
        f"{interactions.num_events:,} events",
        f"- {config.seeds} seed(s); settings: {tuned}, under `paper` those of the papers; federated runs of at most "
        f"{config.num_rounds} rounds" + (f", {stopped}" if config.patience else ""),
        "- Defaults of the centralised baselines and of our own methods were found on validation items of ML-100K; the "
        "papers' methods begin with their papers' settings. Seconds were measured while other runs were going on",
        "- Brackets: 95 % cluster bootstrap over users and seeds. Against best: paired permutation test over users on "
        "ndcg@10, Holm-corrected over all pairs of the table but those with the canary; bold: distinguishably above "
        "every other row but the canary, never under a protocol that leaks",
    ]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ["method", "kind", "protocol", "setting", "seeds", "valid_ndcg@10", "against_best", "seconds_per_round"]
    header = [*names, *(f"{name}{part}" for name in METRICS for part in ("", "_low", "_high"))]
    cells = (
        [
            *(row.get(name, "") for name in names),
            *(row[name][part] for name in METRICS for part in ("mean", "low", "high")),
        ]
        for row in rows
    )
    return csv_text(header, cells)


def _records(interactions: Interactions, board: Sequence[BoardRow]) -> list[UserPositions]:
    return [
        UserPositions(
            interactions.name,
            interactions.users,
            "test",
            f"{row.method}, {row.protocol}, seed {seed}",
            cell.info.get("last_round" if get_protocol(row.protocol).selection == "last" else "best_round", 0),
            cell.positions(row.protocol),
        )
        for row in board
        for seed, cell in enumerate(row.cells)
    ]


def _curves(board: Sequence[BoardRow]) -> dict[str, dict[str, list]]:
    curves: dict[str, dict[str, list]] = {}
    for row in board:
        if "curve" in row.cells[0].info and len(row.cells[0].info["curve"]) > 1:
            panel = "paper" if get_protocol(row.protocol).leaks else "strict"
            curves.setdefault(panel, {})[row.method] = row.cells[0].info["curve"]
    return curves
