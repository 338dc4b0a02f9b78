"""Whether fusion weights find the clients with the same catalogue: their weights against those of all others.

    python benchmarks/fusion_by_catalogue.py --runs runs/a[,runs/b,...] [--output FILE]

Of each finished run the weights at the selected round: fusion weights (`fusion_weights.json`), or those by which the
server of LoRA-Sim or FellRec averaged, which its checkpoint holds. Every row is taken over its mean over peers, so
that clients with larger weights do not count for more; then the mean over peers with the same catalogue minus that over
others. The permutation test gives the clients to catalogues in every other way with the same group sizes (12 clients in
three groups of four: 5,775 ways) and asks how often the difference is as large: exact, one-sided.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import torch
from provenance import heading
from safetensors import safe_open
from torch import Tensor

from fedecider.federation.record import read_json
from fedecider.methods.averaged import WEIGHTS
from fedecider.running.options import run
from fedecider.running.run_folder import RunFolder


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


def weights_of(run: Path, best_round: int) -> Tensor:
    """(K, K) float64 weights of every client for all clients, after round ``best_round``.

    Raises:
        ValueError: the run has none, or its checkpoints were removed.
    """
    learned = RunFolder(run).fusion_weights
    if learned.is_file():
        content = read_json(learned)
        return torch.tensor(content["alpha"][content["rounds"].index(best_round)], dtype=torch.float64)
    for checkpoint in sorted(RunFolder(run).checkpoints.glob("round_*"), reverse=True):
        best = checkpoint / "best_server.safetensors"  # absent where the best round is the checkpoint's own
        with safe_open(best if best.is_file() else checkpoint / "server.safetensors", "pt") as server:
            if WEIGHTS in server.keys():  # noqa: SIM118 (a file, not a mapping)
                return server.get_tensor(WEIGHTS)
    raise ValueError(f"got neither fusion weights nor the server's in {run}, expected a run of a method with weights")


def row_of(run: Path) -> str:
    metrics = read_json(RunFolder(run).metrics)
    weight_KK = weights_of(run, metrics["best_round"])
    catalogues: dict[str, list[int]] = {}
    for client, name in enumerate(metrics["domains"]):
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
        "| method | run | round | same catalogue - others, of a row's mean | ways | p |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [row_of(Path(run)) for run in args.runs.split(",")]
    text = "\n".join(["# Fusion weights by catalogue", "", *heading("fusion_by_catalogue.py", 1), "", *lines]) + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    sys.exit(run(main))
