"""How flat the minima of FedRecGEL are beside FedNCF's: mean training loss in squares around the trained model.

    python benchmarks/landscape.py --output benchmarks/results/DATE-landscape.md

The same network, settings and seeds for all rows; only the radii of the sharpness-aware steps differ, and with both at
0 it is FedNCF. Table 4 of FedRecGEL gives such means at magnitudes of 1e-4 to 10 for "two dimensions of the model
parameters" perturbed at random: here two random directions, and the gradient and a random one, all of length 1 over the
shared tensors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from landscape_losses import MAGNITUDES, gradient_direction, mean_losses, random_direction, training_loss
from provenance import heading

from embedding_fr.blocks import Federation
from embedding_fr.leaderboard import LeaderboardConfig, run_settings
from embedding_fr.methods.fedncf import ncf_model
from embedding_fr.setup import set_up, train, user_positions
from fedecider.data.interactions import Interactions, InteractionsConfig, load_interactions
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import STRICT
from fedecider.running.options import run

RADII = {
    "none (FedNCF)": (0.0, 0.0),
    "private": (None, 0.0),
    "shared": (0.0, None),
    "both (FedRecGEL)": (None, None),
}
"""Private and shared radius; None is the method's own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--init_std", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    interactions = load_interactions(InteractionsConfig())
    lines = ["# FedRecGEL: the loss around the trained model", "", *heading("landscape.py", args.threads), ""]
    lines += [
        "ML-100K. Loss: mean cross-entropy over the training examples of all clients, private tensors fixed; mean over",
        "a 5 x 5 grid in the square of that half width. hit@10: test, whole catalogue, last round.",
        "",
        "| radii | seed | directions | hit@10 | at the model | " + " | ".join(f"{m:g}" for m in MAGNITUDES) + " |",
        "|---|---:|---|---:|---:|" + "---:|" * len(MAGNITUDES),
    ]
    for seed in range(args.seeds):
        for name, radii in RADII.items():
            found = rows(interactions, name, radii, args.rounds, args.init_std, seed)
            lines += found
            print("\n".join(found), flush=True)
    text = "\n".join(lines)
    if args.output:
        Path(args.output).write_text(text + "\n")


def rows(
    interactions: Interactions,
    name: str,
    radii: tuple[float | None, float | None],
    rounds: int,
    init_std: float,
    seed: int,
) -> list[str]:
    """The two rows of one trained model."""
    given = {key: one for key, one in zip(("private_radius", "shared_radius"), radii, strict=True) if one is not None}
    board = LeaderboardConfig(num_rounds=rounds, patience=0)
    changes = {"init_std": init_std, **given}
    settings = run_settings(board, InteractionsConfig(), "fedrecgel", "strict", changes, seed, 0)
    setup = set_up(settings, interactions, torch.device("cpu"))
    state = train(settings, setup)
    federation = Federation(interactions.num_users, interactions.num_items, seed, STRICT, torch.device("cpu"))
    model = ncf_model(federation, settings.training, settings.method.hidden_sizes)
    hit = mean_metrics(user_positions(setup, state, "global", "test", last=True))["hit@10"]
    common = (setup.blocks, federation, settings.training, rounds + 1)
    loss = training_loss(model, state.local, *common)
    steepest = gradient_direction(model, state.server, state.local, *common)
    first, second = (random_direction(state.server, seed, purpose) for purpose in ("first", "second"))
    found = []
    for kind, pair in (("random", (first, second)), ("gradient", (steepest, first))):
        means = mean_losses(loss, state.server, pair)
        numbers = " | ".join(f"{mean:.4f}" for mean in means.values())
        found.append(f"| {name} | {seed} | {kind} | {hit:.3f} | {loss(state.server):.4f} | {numbers} |")
    return found


if __name__ == "__main__":
    sys.exit(run(main))
