"""Rows of finished runs against each other, user by user: macro difference, interval and permutation test with Holm.

    python benchmarks/paired_rows.py --runs runs/a[,runs/b,...] --rows "fedecider + memory" [--output FILE]

Every row named by --rows is compared with all other rows of all runs, on hit@10 and ndcg@10 of the test items (macro
over the domains; a user of several domains is one person). Runs must have ranked the same users: of the further runs
rows keep their names with the run's folder before them, but for baselines, which are alike in all of them and are read
from the first. What is printed is Markdown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from provenance import heading

from fedecider.evaluation.metrics import MACRO, macro_mean, mean_metrics
from fedecider.evaluation.per_user import read_per_user
from fedecider.evaluation.statistics import compare_table
from fedecider.federation.streams import stream

METRICS = ("hit@10", "ndcg@10")
Positions = dict[str, dict[str, torch.Tensor]]
"""row -> domain -> (U,) places."""


def rows_of(runs: list[Path]) -> tuple[Positions, dict[str, list[str]]]:
    """Test rows of all runs, and the users of every domain.

    Raises:
        ValueError: the runs ranked other domains or users.
    """
    rows: Positions = {}
    persons: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        found: Positions = {}
        for record in read_per_user(run / "per_user.parquet"):
            if record.split != "test":
                continue
            if persons.setdefault(record.domain, list(record.users)) != list(record.users):
                raise ValueError(f"got other users of {record.domain} in {run}, expected those of {runs[0]}")
            found.setdefault(record.view, {})[record.domain] = record.position_U
        for row, positions in found.items():
            baseline = number > 0 and row in rows and all(torch.equal(rows[row][d], positions[d]) for d in positions)
            if not baseline:
                rows[row if number == 0 else f"{run.name}: {row}"] = positions
    return rows, persons


def table(rows: Positions, persons: dict[str, list[str]], chosen: list[str]) -> list[str]:
    missing = sorted(set(chosen) - set(rows))
    if missing:
        raise ValueError(f"got rows {missing}, expected some of {list(rows)}")
    pairs = [(row, other) for row in chosen for other in rows if other not in chosen]
    found = compare_table(rows, stream(0, "paired rows"), METRICS, pairs, persons=persons)
    macro = {(c.first, c.second, c.metric): c for c in found if c.domain == MACRO}
    lines = ["| row | hit@10 | ndcg@10 |", "|---|---:|---:|"]
    for row, positions in rows.items():
        means = macro_mean({domain: mean_metrics(position_U, (10,)) for domain, position_U in positions.items()})
        lines.append(f"| {row} | {means['hit@10']:.4f} | {means['ndcg@10']:.4f} |")
    lines += ["", "| row | against | metric | difference | 95 % interval | Holm p |", "|---|---|---|---:|---|---:|"]
    for c in macro.values():
        gap = c.difference
        interval = f"[{gap.low:+.4f}, {gap.high:+.4f}]"
        lines.append(f"| {c.first} | {c.second} | {c.metric} | {gap.mean:+.4f} | {interval} | {c.p_holm:.2g} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    lines = table(*rows_of([Path(run) for run in args.runs.split(",")]), args.rows.split(","))
    text = "\n".join(["# Rows against each other", "", *heading("paired_rows.py", 1), "", *lines]) + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    main()
