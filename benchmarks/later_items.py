"""Items that come after a federation: what its models, with and without an ensemble, make of their texts.

    python benchmarks/later_items.py --data <prepared> [--config FILE] [--seeds 0,1,2] [--output FILE] [--set ...]

As `cold_start.py`, but with what a company has in its hands: a share of each catalogue's items and their events are
taken out of prepared data, `federate.py` runs on the rest, the hidden items are added to each domain's recommender
(`Recommender.add_items`), and every client user is asked for the test item among all items: those whose test item was
hidden, and the others. Lists of ten are looked at; at the end the last row is compared with the others, users paired,
macro over the domains of all seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from cold_start import GROUPS, Split, all_texts, baseline_positions, hide
from paired_rows import table
from provenance import heading, write_lines
from torch import Tensor

from fedecider.cli import federate
from fedecider.data.store import load_domains, save_domains
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.evaluation.statistics import PerDomain
from fedecider.models.recommender import Recommender
from fedecider.running.command import run

NUM_BEST = 10
MODEL, MIXTURE = "model", "model + ensemble"


def places(split: Split, folder: Path, name: str, ensemble: bool) -> dict[str, Tensor]:
    """Group of users -> places of their test items in lists of ten, `NOT_RANKED` behind them."""
    recommender = Recommender.from_pretrained(folder, name, ensemble=ensemble, new_items=split.hidden)
    keys, found = list(recommender.items.keys), {}
    for group in GROUPS:
        asked = split.asked[group]
        answers = recommender.recommend([[keys[item] for item in sequence[:-1]] for sequence in asked], NUM_BEST)
        listed = [[item.key for item in answer] for answer in answers]
        wanted = [keys[sequence[-1]] for sequence in asked]
        found[group] = torch.tensor(
            [
                float(best.index(key)) if key in best else float(NOT_RANKED)
                for best, key in zip(listed, wanted, strict=True)
            ]
        )
    return found


def rows_of_seed(args: argparse.Namespace, splits: Mapping[str, Split], seed: int) -> dict[str, dict[str, PerDomain]]:
    """Row -> group of users -> domain -> places."""
    data, folder = args.work / f"data-{seed}", args.work / f"run-{seed}"
    if not (folder / "metrics.json").is_file():
        save_domains({name: split.trained for name, split in splits.items()}, data)
        words = ["--config", args.config, "--data", str(data), "--domains", ",".join(splits), "--seed", str(seed)]
        words += ["--output", str(folder), "--cache", args.cache, "--pretrain.text_encoder", args.encoder, *args.set]
        if code := federate.main(words):
            raise SystemExit(code)
    encoded = all_texts(splits, args.encoder, args.cache)
    rows: dict[str, dict[str, PerDomain]] = {}
    for group in GROUPS:
        for row, of_domain in baseline_positions(encoded, splits, group).items():
            rows.setdefault(row, {})[group] = of_domain
    for row, ensemble in ((MODEL, False), (MIXTURE, True)):
        of_domain = {name: places(split, folder, name, ensemble) for name, split in splits.items()}
        rows[row] = {group: {name: found[group] for name, found in of_domain.items()} for group in GROUPS}
    return rows


def lines(args: argparse.Namespace) -> Iterator[str]:
    domains = load_domains(args.data, args.domains.split(",") if args.domains else None)
    joined: dict[str, dict[str, dict[str, Tensor]]] = {group: {} for group in GROUPS}
    persons: dict[str, dict[str, list[str]]] = {group: {} for group in GROUPS}
    for seed in args.seeds:
        splits = {name: hide(domain, args.share, seed) for name, domain in domains.items()}
        for row, of_group in rows_of_seed(args, splits, seed).items():
            for group, of_domain in of_group.items():
                of_seeds = joined[group].setdefault(row, {})
                of_seeds |= {f"{name}, seed {seed}": position for name, position in of_domain.items()}
        for group in GROUPS:
            persons[group] |= {f"{name}, seed {seed}": split.users[group] for name, split in splits.items()}
    for group in GROUPS:
        number = sum(map(len, persons[group].values()))
        yield f"\n## Users whose test item is {group}: asked {number} times\n"
        yield from table(joined[group], persons[group], [MIXTURE])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--domains", default="", help="all of the data without it")
    parser.add_argument("--config", default=str(Path(__file__).resolve().parent / "configs" / "amazon_decoder.yaml"))
    parser.add_argument("--share", type=float, default=0.1, help="of the items of each catalogue that are hidden")
    parser.add_argument("--encoder", default="auto")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0])
    parser.add_argument("--cache", default=".cache")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/later-items"), help="runs that are there are asked again"
    )
    parser.add_argument("--output", type=Path, help="Markdown file")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further settings of federate.py")
    args = parser.parse_args()
    write_lines(chain(["# Items that come later", "", *heading("later_items.py", 1)], lines(args)), args.output)


if __name__ == "__main__":
    sys.exit(run(main))
