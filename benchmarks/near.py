"""FedNear against FedEASE: both histories, tied and untied users, and ties shuffled within equal times.

    python benchmarks/near.py --output benchmarks/results/DATE-near.md

Settings are chosen by validation ndcg@10 (protocol strict, history train) from each method's own grid; the test items
are ranked once with them. Everything is closed form: there are no seeds but those of the shuffles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import heading
from torch import Tensor

from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS
from embedding_fr.setup import EmbeddingRunConfig, EmbeddingSettings, Setup, set_up, train, user_positions
from fedecider.baselines.counts import decayed_cooccurrence
from fedecider.data.interactions import Interactions, InteractionsConfig, load_interactions
from fedecider.evaluation.metrics import mean_metrics, user_metrics
from fedecider.evaluation.statistics import bootstrap_interval, paired_permutation_test
from fedecider.federation.privacy import PrivacyConfig
from fedecider.federation.state import RunState
from fedecider.federation.streams import stream
from fedecider.running.options import from_plain, run

SETS: dict[str, dict[str, Any]] = {
    "ml-100k": {},
    "ml-latest-small": {"min_item_events": 5},
    "amazon-instant-video": {"min_item_events": 5},
    "lastfm-2k": {"min_item_events": 5},
}
CPU = torch.device("cpu")
SHUFFLES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--datasets", default=",".join(SETS))
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    lines = ["# FedNear and FedEASE", "", *heading("near.py", torch.get_num_threads()), ""]
    lines += [
        "hit@10 / ndcg@10 on test, protocol strict (whole catalogue). `known`: at test time the client scores from its",
        "train items and its validation item. Difference: FedNear minus FedEASE in ndcg@10, 95 % bootstrap over users,",
        "p of the paired permutation test, not corrected. Shuffled: events of equal time in random order, train part",
        "included, three times; the settings stay. Catalogues but ML-100K's hold items with at least 5 events.",
        "",
    ]
    for name in args.datasets.split(","):
        lines += study(load_interactions(InteractionsConfig(dataset=name, **SETS.get(name, {}))))
        print("\n".join(lines), flush=True)
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")


def study(interactions: Interactions) -> list[str]:
    """One data set: the table, and what was chosen."""
    chosen = {method: choose(interactions, method) for method in ("fedease", "fednear")}
    tied_U = torch.tensor([times[-1] == times[-2] for times in interactions.timestamps or []], dtype=torch.bool)
    lines = [f"## {interactions.name}", ""]
    lines += [
        f"{interactions.num_users:,} users, {interactions.num_items:,} items, {interactions.num_events:,} events; the "
        f"last two events tie for {float(tied_U.double().mean()):.0%}. "
        f"Chosen: FedEASE {chosen['fedease'] or 'default'}, FedNear {chosen['fednear'] or 'default'}.",
        "",
        "| users | history | FedEASE | FedNear | co-occurrence of the last ten | difference |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for history in ("train", "known"):
        positions = {method: fit(interactions, method, {**chosen[method], "history": history})[1] for method in chosen}
        other_U = decayed_cooccurrence(interactions.sequences, interactions.num_items, "test")
        for users, mask_U in (("all", torch.ones_like(tied_U)), ("tied", tied_U), ("untied", ~tied_U)):
            own = {method: position_U[mask_U] for method, position_U in positions.items()}
            reference = pair(other_U[mask_U]) if history == "known" else "-"
            lines.append(row(users, history, own, reference))
    for shuffle in range(SHUFFLES):
        mixed = shuffled(interactions, shuffle)
        for history in ("train", "known"):
            own = {method: fit(mixed, method, {**chosen[method], "history": history})[1] for method in chosen}
            other_U = decayed_cooccurrence(mixed.sequences, mixed.num_items, "test")
            lines.append(
                row(f"all, shuffled {shuffle + 1}", history, own, pair(other_U) if history == "known" else "-")
            )
    return [*lines, ""]


def choose(interactions: Interactions, method: str) -> dict[str, Any]:
    """The setting of the method's grid with the best validation ndcg@10."""
    grid = METHODS[method].grid
    scores = [mean_metrics(fit(interactions, method, setting, "valid")[1])["ndcg@10"] for setting in grid]
    return grid[scores.index(max(scores))]


def fit(
    interactions: Interactions, method: str, setting: dict[str, Any], split: str = "test"
) -> tuple[RunState, Tensor]:
    """The sum over all clients, and (U,) positions."""
    entry = METHODS[method]
    settings = EmbeddingSettings(
        EmbeddingRunConfig(method=method, num_rounds=1),
        InteractionsConfig(),
        EmbeddingTraining(),
        PrivacyConfig(),
        from_plain(entry.config, setting),
    )
    setup: Setup = set_up(settings, interactions, CPU)
    state = train(settings, setup)
    return state, user_positions(setup, state, "global", split)


def shuffled(interactions: Interactions, number: int) -> Interactions:
    """The same users with events of equal time in random order."""
    generator, sequences = stream(0, "ties", number), []
    for items, times in zip(interactions.sequences, interactions.timestamps or [], strict=True):
        order = torch.randperm(len(items), generator=generator).tolist()
        sequences.append([items[place] for place in sorted(order, key=lambda place: times[place])])
    return Interactions(
        interactions.name,
        interactions.users,
        interactions.item_keys,
        interactions.titles,
        sequences,
        interactions.timestamps,
        interactions.card,
    )


def row(users: str, history: str, positions: dict[str, Tensor], reference: str) -> str:
    near_U, ease_U = (user_metrics(positions[m], (10,))["ndcg@10"] for m in ("fednear", "fedease"))
    interval = bootstrap_interval(near_U - ease_U, stream(0, "bootstrap"))
    p_value = paired_permutation_test(near_U, ease_U, stream(0, "permutations"))
    difference = f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}], p {p_value:.2g}"
    cells: Sequence[str] = (
        users,
        history,
        pair(positions["fedease"]),
        pair(positions["fednear"]),
        reference,
        difference,
    )
    return "| " + " | ".join(cells) + " |"


def pair(position_U: Tensor) -> str:
    found = mean_metrics(position_U, (10,))
    return f"{found['hit@10']:.3f} / {found['ndcg@10']:.3f}"


if __name__ == "__main__":
    sys.exit(run(main))
