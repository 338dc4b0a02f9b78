"""CPU seconds of a validation on a large catalogue: whole, and its parts against the plain way, in turns; and of all
variants of a method at once against one variant after the other.

    python benchmarks/evaluation_speed.py --users 50547 --items 16860 --output FILE.md

Drawn users and models that were not trained: a shape, not data. The parts are the ranking (compiled, against PyTorch's
operations on whole blocks) and the scores of networks (the first layer's product with the items once for all clients,
against once for each). Both ways of a pair go over the same blocks in one process, and take turns in being the first
one; a turn before the first is run and not counted. First the places of both ways are compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from embedding import paper_settings, synthetic
from provenance import heading
from torch import Tensor

from embedding_fr.averaged import Model, score_all
from embedding_fr.blocks import positions_stacked, rank_users
from embedding_fr.methods.fedmf import mf_model
from embedding_fr.methods.fedncf import ncf_model
from embedding_fr.methods.fedrecgel import neumf_model
from embedding_fr.setup import Setup, set_up
from fedecider.data.interactions import Interactions
from fedecider.federation.method import Block, Download, Tree
from fedecider.federation.rounds import evaluate, evaluate_variants
from fedecider.federation.state import Parameters
from fedecider.running.command import run

Way = Callable[[Block], Tensor]
"""Block -> (C,) places of the validation items."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--users", type=int, default=50_547)
    parser.add_argument("--items", type=int, default=16_860)
    parser.add_argument("--events", type=int, default=50, help="mean events of a user")
    parser.add_argument("--timed_users", type=int, default=2_000, help="users that the ways of a pair go over")
    parser.add_argument("--eval_users", type=int, default=10_000, help="for the row with num_eval_users")
    parser.add_argument("--views_users", type=int, default=943, help="users of the methods with several variants")
    parser.add_argument("--views_items", type=int, default=1_682)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    interactions = synthetic(args.users, args.items, args.events)
    lines = ["# Speed of validation", "", *heading("evaluation_speed.py", 1), ""]
    lines += [
        f"{args.users:,} drawn users, {args.items:,} items, {interactions.num_events:,} events, models of 16 dims as",
        f"they start, protocol strict. CPU seconds, median (least to greatest) of {args.turns} turns.",
        "",
        "| whole validation of FedMF | users | CPU s |",
        "|---|---:|---:|",
    ]
    for text, count in (("every user", 0), (f"`--num_eval_users {args.eval_users}`", args.eval_users)):
        lines.append(f"| {text} | {count or args.users:,} | {whole_seconds(interactions, count, args.turns)} |")
    lines += [
        "",
        f"The parts, on {args.timed_users:,} users; scores and ranking of both ways are in their milliseconds.",
        "",
        "| method | part | plain way, ms a user | as it is, ms a user | ratio | users with another place |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [pair_row(name, interactions, args.timed_users, args.turns) for name in ("fedmf", "fedncf", "fedrecgel")]
    lines += [
        "",
        f"All variants of a method in a round, on {args.views_users:,} users and {args.views_items:,} items.",
        "",
        "| method | variants | one after the other, CPU s | together, CPU s | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    smaller = synthetic(args.views_users, args.views_items, args.events)
    lines += [variants_row(name, smaller, args.turns) for name in ("perfedrec", "cofedrec", "pfedrec")]
    text = "\n".join(lines)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")


def whole_seconds(interactions: Interactions, num_users: int, turns: int) -> str:
    """A validation of FedMF as the loop does it."""
    setup = drawn_setup("fedmf", interactions, num_users)
    server, local = setup.method.init()
    seconds = []
    for _ in range(turns + 1):
        started = time.process_time()
        evaluate(setup.method, Parameters(1, server, local), setup.method.variants[0], "valid", setup.validated)
        seconds.append(time.process_time() - started)
    return spread(seconds[1:])


def pair_row(name: str, interactions: Interactions, num_users: int, turns: int) -> str:
    """One line of the table of parts."""
    setup = drawn_setup(name, interactions, num_users)
    part, *ways = pair(name, setup)
    places = [torch.cat([way(block) for block in setup.validated]) for way in ways]
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for number in (0, 1) if turn % 2 else (1, 0):
            started = time.process_time()
            for block in setup.validated:
                ways[number](block)
            if turn:
                seconds[number].append(time.process_time() - started)
    ratios = [plain / now for plain, now in zip(*seconds, strict=True)]
    milli = [spread([1e3 * one / len(places[0]) for one in times]) for times in seconds]
    changed = int((places[0] != places[1]).sum())
    assert name != "fedmf" or not changed, "the same scores have the same places"
    assert changed <= 0.05 * len(places[0]), f"{name}: {changed} users have another place, more than rounding explains"
    return f"| {name} | {part} | {milli[0]} | {milli[1]} | {spread(ratios)} | {changed} of {len(places[0]):,} |"


def variants_row(name: str, interactions: Interactions, turns: int) -> str:
    """One line of the table of variants: what is sent to the clients of a block is made once, or once a variant."""
    setup = drawn_setup(name, interactions, 0)
    method = setup.method
    parameters, blocks = Parameters(1, *method.init()), setup.validated
    ways: tuple[Callable[[], dict[str, list[Tensor]]], ...] = (
        lambda: {variant: evaluate(method, parameters, variant, "valid", blocks) for variant in method.variants},
        lambda: evaluate_variants(method, parameters, method.variants, "valid", blocks),
    )
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        places = []
        for number in (0, 1) if turn % 2 else (1, 0):
            started = time.process_time()
            places.append(ways[number]())
            if turn:
                seconds[number].append(time.process_time() - started)
        assert all(
            torch.equal(torch.cat(places[0][variant]), torch.cat(places[1][variant])) for variant in method.variants
        )
    ratios = [alone / together for alone, together in zip(*seconds, strict=True)]
    return f"| {name} | {', '.join(method.variants)} | {spread(seconds[0])} | {spread(seconds[1])} | {spread(ratios)} |"


def pair(name: str, setup: Setup) -> tuple[str, Way, Way]:
    """What differs, the plain way and the present one."""
    settings = paper_settings(name, 1, init_std=0.3)
    model: Model
    if name == "fedmf":
        model = mf_model(setup.federation, settings.training)
    elif name == "fedncf":
        model = ncf_model(setup.federation, settings.training, settings.method.hidden_sizes)
    else:
        model = neumf_model(setup.federation, settings.training)

    def scores(of: Model, block: Block) -> Tensor:
        own: Tree = {key: tensor[block.clients] for key, tensor in of.private.items()}
        return score_all(of, Download(of.shared), own)

    def ranked(of: Model) -> Way:
        protocol = setup.federation.protocol
        return lambda block: torch.cat(rank_users(scores(of, block), block.data, "valid", protocol))

    def stacked(block: Block) -> Tensor:
        return positions_stacked(scores(model, block), block.data.valid_C, block.data.train_CT)

    if name == "fedmf":
        return "ranking", stacked, ranked(model)
    return "first layer", ranked(model._replace(scores=None)), ranked(model)


def drawn_setup(name: str, interactions: Interactions, num_users: int) -> Setup:
    """Everything but the rounds, with ``num_users`` of the users in the validation."""
    return set_up(paper_settings(name, 1, num_eval_users=num_users), interactions, torch.device("cpu"))


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    sys.exit(run(main))
