"""What moves the figures of the `paper` protocol: one setting changed at a time, ML-100K, last round.

    python benchmarks/paper_causes.py --output benchmarks/results/DATE-paper-causes.md

The protocol leaks the held-out item, so no figure here says how well a method recommends. A row that is done is
printed at once; ``--methods`` takes some of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from provenance import heading

from embedding_fr.leaderboard import LeaderboardConfig, run_settings
from embedding_fr.setup import set_up, train, user_positions
from fedecider.data.interactions import Interactions, InteractionsConfig, load_interactions
from fedecider.evaluation.metrics import mean_metrics
from fedecider.running.options import run

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedmf", {}),
    ("fedmf", {"learning_rate": 0.01}),
    ("fedmf", {"local_epochs": 1}),
    ("fedmf", {"weighting": "uniform"}),
    ("fedncf", {}),
    ("fedncf", {"learning_rate": 0.01}),
    ("fedncf", {"local_epochs": 1, "learning_rate": 0.03, "init_std": 0.1}),
    ("pfedrec", {}),
    ("pfedrec/code", {}),
    ("pfedrec/local", {"variant": "code"}),
)
"""Method of the leaderboard, and what differs from its settings there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", default="", help="only these, with commas")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    interactions = load_interactions(InteractionsConfig())
    lines = ["# What moves the figures of the `paper` protocol", "", *heading("paper_causes.py", args.threads), ""]
    lines += [
        f"ML-100K, seed {args.seed}, {args.rounds} rounds; hit@10 / ndcg@10 of each way to score (variant), after the",
        "last round and in the round with the best validation score. The protocol leaks the held-out item.",
        "",
        "| method | changed | variant | last round | best validation round |",
        "|---|---|---|---:|---:|",
    ]
    for method, changes in CASES:
        if not args.methods or method in args.methods.split(","):
            found = rows(interactions, method, changes, args.rounds, args.seed)
            lines += found
            print("\n".join(found), flush=True)
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")


def rows(interactions: Interactions, method: str, changes: dict[str, Any], rounds: int, seed: int) -> list[str]:
    """One row for each variant of the method."""
    data = InteractionsConfig()
    settings = run_settings(LeaderboardConfig(num_rounds=rounds), data, method, "paper", changes, seed, 0)
    setup = set_up(settings, interactions, torch.device("cpu"))
    state = train(settings, setup)
    named = ", ".join(f"{name} {value}" for name, value in changes.items()) or "-"
    found = []
    for variant in setup.method.variants:
        last, best = (mean_metrics(user_positions(setup, state, variant, "test", last=last)) for last in (True, False))
        found.append(
            f"| {method} | {named} | {variant} | {last['hit@10']:.3f} / {last['ndcg@10']:.3f} | "
            f"{best['hit@10']:.3f} / {best['ndcg@10']:.3f} (round {state.best_round}) |"
        )
    return found


if __name__ == "__main__":
    sys.exit(run(main))
