"""What companies with different backbones gain from each other's lists for public histories (fedecider fedmd).

    python benchmarks/fedmd.py --data data --work runs/fedmd [--seeds 3]

Data and companies are those of benchmarks/joining.py: video_games, four companies of 500 customers, dealt anew with
every seed, 300 public users. The first and third company have a decoder 64 wide of one layer, the others one 128 wide
of two; each is pre-trained on the public users with seed 0. All train alone first, for six rounds. Public histories are
every item of the catalogue by itself. In a round each company sends the 50 best items of its model for each of them,
digests the mean and trains on its own events, for two epochs each, and keeps the result where it ranks validation items
better, as the command does. K, epochs and the public histories were chosen on validation items of seed 0.

Rows: alone; fedmd, two rounds; own lists, where a company digests its own scores alone, in as many rounds; and fedavg,
whose companies all have the wider backbone. Models by themselves, no ensembles. One JSON a row and seed in --work: what
is there is not run again. The section of benchmarks/results/joining.md is written at the end, of the rows that are
there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import joining
import provenance
import torch

from distill.soft_targets import TopScores, consensus
from fedecider.cross_silo.ended import Ended
from fedecider.cross_silo.reported import chosen_scale
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.record import read_json, write_json
from fedecider.federation.streams import derive_seed
from fedecider.lifecycle.fedmd import digest
from fedecider.methods.client_models import ClientModels
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import Adapters
from fedecider.models.client_model import ClientModel
from fedecider.running.command import run

DATA = "video_games"
K, ROUNDS, EPOCHS = 50, 2, 2
BACKBONES: tuple[dict[str, Any], ...] = (
    {"pretrain.backbone.d_model": 64, "pretrain.backbone.num_layers": 2, "lora_rank": 64},
    {"pretrain.backbone.d_model": 128, "pretrain.backbone.num_layers": 4, "lora_rank": 128},
)
"""Distillation halves the layers."""
ALONE, OWN, FEDMD, FEDAVG = "alone", "own lists", "fedmd", "fedavg, one backbone"
ROWS = (ALONE, FEDMD, OWN, FEDAVG)
NO_ENSEMBLE = {"ensemble.kind": "none"}


class Company(NamedTuple):
    """One company with its own backbone, after it was trained alone."""

    name: str
    ended: Ended
    models: ClientModels
    """At the learning rates of the last round."""
    alone: Adapters

    def ndcg(self, adapters: Adapters) -> float:
        return mean_metrics(self.models.model(0, adapters).positions("valid"))["ndcg@10"]


def companies_of(seed: int, data: Path, work: Path) -> list[Company]:
    load = partial(joining.whole_domain, data=data)
    found = []
    for number, (name, domain) in enumerate(joining.four(load(DATA), seed, load).items()):
        options = {**BACKBONES[number % len(BACKBONES)], **NO_ENSEMBLE}
        cell = joining.Cell("fedmd", ALONE, DATA, seed, joining.four, "local", options)
        shared = joining.shared_of(cell._replace(options=options), load, work / "cache")
        ended = joining.trained(cell, shared, {name: domain}, work)
        training = ended.models.training
        rate = training.learning_rate * training.lr_decay_per_round ** (ended.settings.run.num_rounds - 1)
        models = ended.models._replace(training=replace(training, learning_rate=rate, local_epochs=EPOCHS))
        adapters = ended.joined(name).adapters
        assert adapters is not None
        found.append(Company(name, ended, models, adapters))
    return found


def lists_of(model: ClientModel, num_items: int) -> TopScores:
    """The best items behind every item by itself."""
    score_II = model.scores().log_probs(SequenceArray.of([[item] for item in range(num_items)]), None)
    log_prob_IK, item_IK = score_II.double().log_softmax(1).topk(K, 1)
    return TopScores(item_IK, log_prob_IK)


def after_rounds(row: str, companies: list[Company], seed: int, curve: list[float]) -> dict[str, Adapters]:
    """What companies keep after the rounds of a row; ``curve`` gets the mean validation ndcg@10 of each round."""
    kept = {one.name: one.alone for one in companies}
    score = {one.name: one.ndcg(one.alone) for one in companies}
    num_items = len(companies[0].models.clients[0].task.trie)
    for round in range(1, ROUNDS + 1):
        sent = {one.name: lists_of(one.models.model(0, kept[one.name]), num_items) for one in companies}
        for one in companies:
            lists = [sent[one.name]] if row == OWN else list(sent.values())
            target = partial(consensus, lists, num_items=num_items)
            models = one.models._replace(seed=derive_seed(seed, "fedmd", round))
            start = digest(models, kept[one.name].pair, [[item] for item in range(num_items)], target)
            trained = train_locally(models, 0, 1, start)
            if trained.finite and (new := one.ndcg(trained.adapters)) > score[one.name]:
                kept[one.name], score[one.name] = trained.adapters, new
        curve.append(sum(score.values()) / len(score))
    return kept


def measured(row: str, companies: list[Company], seed: int) -> dict[str, Any]:
    """A row of a seed as `joining.measured` keeps it."""
    started, curve = time.process_time(), list[float]()
    kept = {one.name: one.alone for one in companies}
    if row != ALONE:
        kept = after_rounds(row, companies, seed, curve)
    places, users = dict[str, Any](), dict[str, list[str]]()
    for one in companies:
        model = one.models.model(0, kept[one.name])
        position_U = model.scaled(chosen_scale(one.ended.settings, model)).positions("test")
        places[one.name] = joining.capped(position_U)
        users[one.name] = list(one.ended.artifacts.domains[one.name].clients.users)
    minutes = (time.process_time() - started) / 60
    return {"places": {row: places}, "users": users, "honest": list(users), "curve": curve, "minutes": minutes}


def joined(seed: int, data: Path, work: Path) -> dict[str, Any]:
    """The row of FedAvg, by benchmarks/joining.py."""
    load = partial(joining.whole_domain, data=data)
    options = {**BACKBONES[1], **NO_ENSEMBLE, "local_row": "off"}
    cell = joining.Cell("fedmd", FEDAVG, DATA, seed, joining.four, "fedavg", options)
    found = joining.measured(cell, joining.shared_of(cell, load, work / "cache"), load, work)
    places = {FEDAVG: found["places"][joining.JOINED]}
    return {"places": places, **{name: found[name] for name in ("users", "honest", "curve", "minutes")}}


def section(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    """Lines of the page."""
    lines = [joining.OTHERS, "", *__doc__.split("\n\n")[2].splitlines(), "", *__doc__.split("\n\n")[3].splitlines(), ""]
    lines += [
        "| row | hit@10 | ndcg@10 | minus alone: of 100 customers | ndcg@10 | p | seeds |",
        "|---|---:|---:|---:|---|---:|---:|",
    ]
    for row in ROWS:
        seeds = sorted(found[row])
        cells, alone = ([found[name][seed] for seed in seeds] for name in (row, ALONE))
        less = " | | " if row == ALONE or not seeds else joining.in_words(cells, row, ALONE, alone)
        lines += [f"| {row} | {joining.figures(cells, row)} | {less} | {len(seeds)} |"] if seeds else []
    curves = [
        f"seed {seed}: {', '.join(joining.shown(one) for one in of['curve'])}" for seed, of in found[FEDMD].items()
    ]
    lines += ["", f"Validation ndcg@10 after each round of fedmd, what is kept: {'; '.join(curves)}.", "", *TRIED, ""]
    minutes = sum(of["minutes"] for row in found.values() for of in row.values())
    return [*lines, f"- {minutes:.0f} CPU minutes", *provenance.heading("fedmd.py", torch.get_num_threads()), ""]


TRIED = (
    "Trials, validation ndcg@10 of seed 0 at the end of rounds 1 and 2, whatever is better (alone .0629, the starting "
    "model .0530). One epoch over the public histories .0640, .0650; two .0662, .0670; one, and one over the own "
    "events, .0654 in round 2. Why it gains: with the own lists alone .0598, with none .0609 in round 1, so what helps "
    "is what the others know, not the further training. Histories of the 300 public users, cut at every place, in the "
    "place of items .0606, .0624. In round 1, one epoch (.0640): 20 items a list .0640, 200 .0647; an item drawn "
    "from the consensus in the place of all .0620. Consensus sharpened by a temperature of .5 .0644, .0636.",
)
"""Validation figures of trials that no row keeps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--work", type=Path, default=Path("runs/fedmd"), help="rows and cache")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument("--rows", default=";".join(ROWS), help="rows to run, separated by ';'")
    args = parser.parse_args()
    found: dict[str, dict[int, Any]] = {row: {} for row in ROWS}
    of_seed = cache(partial(companies_of, data=args.data, work=args.work))
    args.work.mkdir(parents=True, exist_ok=True)
    for row in ROWS:
        for seed in range(args.seeds):
            path = args.work / f"{row.replace(' ', '_').replace(',', '')}-{seed}.json"
            if not path.is_file() and row in args.rows.split(";"):
                print(row, seed, flush=True)
                of_row = joined(seed, args.data, args.work) if row == FEDAVG else measured(row, of_seed(seed), seed)
                write_json(path, of_row)
            if path.is_file():
                found[row][seed] = read_json(path)
    before, _, rest = joining.PAGE.read_text(encoding="utf-8").partition(joining.OTHERS)
    older = joining.OLDER + (rest or before).partition(joining.OLDER)[2]
    before = before.partition(joining.OLDER)[0]
    joining.PAGE.write_text(before + "\n".join(section(found)) + "\n" + older, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run(main))
