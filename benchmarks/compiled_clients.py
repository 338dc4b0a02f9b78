"""A client's milliseconds with the compiled and with the stacked code of a method, in turns in one process.

    python benchmarks/compiled_clients.py --methods fedrap,fedrap/code --rounds 5 --output FILE.md

ML-100K at the settings of the paper, or with `/code` of the public code. Both sides go through the same rounds of the
same run, each from its own state, and take turns in being the first one; a round before the first is run and not
counted. Seconds are CPU seconds of this process, which other work on the machine lengthens less than wall time. First,
24 clients are trained for 2 rounds in float64 and the largest difference of any tensor is noted.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import heading

from embedding_fr.leaderboard import LeaderboardConfig, run_settings
from embedding_fr.setup import EmbeddingSettings, Setup, set_up, train
from fedecider.data.interactions import Interactions, InteractionsConfig, load_interactions
from fedecider.federation.method import RowUpdate, Tree, Upload
from fedecider.federation.rows import write_rows
from fedecider.running.options import run

CHECKED = 24


class Side:
    """One way of training, and where its run has come to."""

    def __init__(self, method: str, interactions: Interactions, compiled: bool, **changes: Any):
        self.setup: Setup = set_up(settings_of(method, compiled, **changes), interactions, torch.device("cpu"))
        self.local: Tree
        self.start()

    def start(self) -> None:
        """Back to where a run begins."""
        self.local = {}  # not beside the new ones
        server, local = self.setup.method.init()
        self.server: Tree = server
        self.local = {name: tensor.clone() for name, tensor in local.items()}

    def round(self, number: int) -> tuple[float, float]:
        """CPU seconds of local training, with what clients keep written back, and of aggregation.

        As in a run, uploads are taken one block after the other.
        """
        method, seconds = self.setup.method, 0.0

        def uploads() -> Iterator[Upload]:
            nonlocal seconds
            for block in self.setup.blocks:
                own = {name: tensor[block.clients] for name, tensor in self.local.items()}
                download = method.broadcast(number, self.server, block.clients)
                started = time.process_time()
                upload, new, _ = method.client_update(number, download, own, block)
                for name, rows in new.items():
                    if isinstance(rows, RowUpdate):
                        write_rows(self.local[name], block.clients, rows)
                    else:
                        self.local[name][block.clients] = rows
                seconds += time.process_time() - started
                yield upload

        started = time.process_time()
        self.server = method.server_aggregate(number, self.server, uploads())
        return seconds, time.process_time() - started - seconds

    def evaluation(self, number: int) -> float:
        """CPU seconds of ranking every user's validation item in the method's first variant."""
        method, seconds = self.setup.method, 0.0
        for block in self.setup.validated:
            own = {name: tensor[block.clients] for name, tensor in self.local.items()}
            download = method.broadcast(number, self.server, block.clients)
            started = time.process_time()
            method.positions(method.variants[0], download, own, block, "valid")
            seconds += time.process_time() - started
        return seconds


def settings_of(method: str, compiled: bool, **changes: Any) -> EmbeddingSettings:
    config = LeaderboardConfig(num_rounds=2)
    return run_settings(config, InteractionsConfig(), method, "strict", {"compiled": compiled, **changes}, 0, 0)


def largest_difference(method: str, interactions: Interactions) -> float:
    """Over all tensors after two rounds of a few clients, in float64."""
    torch.set_default_dtype(torch.float64)
    users, sequences = interactions.users[:CHECKED], interactions.sequences[:CHECKED]
    few = dataclasses.replace(interactions, users=users, sequences=sequences, timestamps=None)
    states = []
    for compiled in (True, False):
        settings = settings_of(method, compiled)
        states.append(train(settings, set_up(settings, few, torch.device("cpu"))))
    torch.set_default_dtype(torch.float32)
    pairs = [(states[0].server, states[1].server), (states[0].local, states[1].local)]
    return max(float((a[name].double() - b[name].double()).abs().max()) for a, b in pairs for name in a)


def row(method: str, interactions: Interactions, rounds: int) -> str:
    """One line of the table."""
    difference = largest_difference(method, interactions)
    stacked, compiled = (Side(method, interactions, compiled) for compiled in (False, True))
    found: dict[Side, list[tuple[float, float, float]]] = {stacked: [], compiled: []}
    for number in range(rounds + 1):
        for side in (stacked, compiled) if number % 2 else (compiled, stacked):
            taken = *side.round(number + 1), side.evaluation(number + 1)
            if number:
                found[side].append(taken)
    milli = {side: [1e3 * one[0] / interactions.num_users for one in times] for side, times in found.items()}
    ratios = sorted(a / b for a, b in zip(milli[stacked], milli[compiled], strict=True))
    before, after = (f"{median(one):.3f} ({min(one):.3f} to {max(one):.3f})" for one in milli.values())
    server = median(one[1] for times in found.values() for one in times)
    scored = " to ".join(f"{median(one[2] for one in times):.3f}" for times in found.values())
    return (
        f"| {method} | {before} | {after} | {median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}) | {server:.3f} "
        f"| {scored} | {difference:.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", default="fedrap,fedrap/code")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    interactions = load_interactions(InteractionsConfig())
    lines = ["# Compiled and stacked clients", "", *heading("compiled_clients.py", 1), ""]
    lines += [
        f"ML-100K, {interactions.num_users} clients, {interactions.num_items:,} items, seed 0. CPU milliseconds a",
        f"client and round of local training, its checks included: median of {args.rounds} rounds",
        "(least to greatest), both ways in turns.",
        "`server`: CPU seconds of one aggregation, which is the same code. `validation`: CPU seconds of ranking every",
        "user's item once, stacked to compiled. `difference`: the largest of any tensor",
        f"after 2 rounds of {CHECKED} clients in float64.",
        "",
        "| method | stacked ms | compiled ms | ratio | server s | validation s | difference |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [row(method, interactions, args.rounds) for method in args.methods.split(",")]
    text = "\n".join(lines)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
