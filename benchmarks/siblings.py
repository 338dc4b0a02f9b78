"""Whether fusion weights find the siblings of a silo: weights of peers with the same catalogue against all others.

    python benchmarks/siblings.py --runs runs/a[,runs/b,...] [--output FILE]

Of each finished run with fusion weights (`fusion_weights.json`), the weights at the selected round: every row over its
mean over peers, so that clients with larger weights do not count for more; then the mean over siblings minus that over
others. The permutation test gives the clients to catalogues in every other way with the same group sizes (12 clients in
three groups of four: 5,775 ways) and asks how often the difference is as large: exact, one-sided.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import torch
from provenance import heading
from torch import Tensor

from fedecider.federation.record import read_json


def groupings(clients: Sequence[int], sizes: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """All ways to share ``clients`` out over unnamed groups of ``sizes``, each way once."""
    if not clients:
        yield []
        return
    first, rest = clients[0], clients[1:]
    for size in sorted(set(sizes)):
        left = list(sizes)
        left.remove(size)
        for others in combinations(rest, size - 1):
            group = (first, *others)
            remaining = [client for client in rest if client not in others]
            yield from ([group, *more] for more in groupings(remaining, left))


def gap(weight_KK: Tensor, groups: Sequence[Sequence[int]]) -> float:
    """Mean weight of peers in the same group minus that of peers in others; rows over their mean over peers."""
    num_clients = len(weight_KK)
    off_KK = ~torch.eye(num_clients, dtype=torch.bool)
    row_mean_K1 = (weight_KK * off_KK).sum(1, keepdim=True) / (num_clients - 1)
    relative_KK = weight_KK / row_mean_K1
    same_KK = torch.zeros_like(off_KK)
    for group in groups:
        same_KK[torch.tensor(group)[:, None], torch.tensor(group)] = True
    return float(relative_KK[same_KK & off_KK].mean() - relative_KK[~same_KK].mean())


def row_of(run: Path) -> str:
    metrics, content = read_json(run / "metrics.json"), read_json(run / "fusion_weights.json")
    weight_KK = torch.tensor(content["alpha"][content["rounds"].index(metrics["best_round"])], dtype=torch.float64)
    catalogues: dict[str, list[int]] = {}
    for client, name in enumerate(content["domains"]):
        catalogues.setdefault(name.rpartition(".")[0] or name, []).append(client)
    groups = list(catalogues.values())
    found = gap(weight_KK, groups)
    ways = [gap(weight_KK, way) for way in groupings(range(len(weight_KK)), [len(group) for group in groups])]
    p_value = sum(value >= found - 1e-12 for value in ways) / len(ways)
    return (
        f"| {metrics['method']} | {run.name} | {metrics['best_round']} | {found:+.5f} | {len(ways):,} | {p_value:.2g} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", required=True)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    lines = [
        "| method | run | round | siblings - others, of a row's mean | ways | p |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [row_of(Path(run)) for run in args.runs.split(",")]
    text = "\n".join(["# Siblings", "", *heading("siblings.py", 1), "", *lines]) + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    main()
