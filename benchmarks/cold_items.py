"""New items that no training event has: IFedRec by their attributes, beside the nearest by attributes.

    python benchmarks/cold_items.py --dataset ml-100k
    python benchmarks/cold_items.py --citeulike FOLDER --rounds 60

With a data set of ours a tenth of the items is taken out for validation and a fifth for test, with all their events;
clients train on what is left. With ``--citeulike`` the split is the one of IFedRec's public code: ``train.csv``,
``vali.csv`` and ``test.csv`` of https://github.com/Zhangcx19/IFedRec (data/CiteULike), and beside them ``item-tag.dat``
and ``citations.dat`` of https://github.com/js05212/citeulike-a, whose tags and citations are the attributes here: the
paper's are words of abstracts. Every user with new items ranks all new items of the split. Means over these users of
recall, precision and ndcg; the first two are the public code's, whose ndcg places the hits of a list by their item
numbers and not by rank. Of every fifth round the one with the best recall on validation items is reported.

Shape legend: U users, C clients of a block, I trained items, J new items of a split, F attributes, D dims.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from provenance import heading
from torch import Tensor

from embedding_fr.attributes import item_attributes
from embedding_fr.blocks import CPU_BLOCK_BYTES, Federation, Population, block_packer
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS
from embedding_fr.methods.ifedrec import new_item_scores
from fedecider.data.encoders import tfidf_vectors
from fedecider.data.interactions import InteractionsConfig, load_interactions
from fedecider.evaluation.protocols import STRICT
from fedecider.federation.method import Block, FederatedMethod, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.running.command import run

CPU = torch.device("cpu")
K = 20
USERS = 256
"""Scored at a time."""
EVERY = 5
"""Rounds between two looks at new items, which take as long as a round."""
SPLITS = ("valid", "test")
SHARES = {"valid": 0.1, "test": 0.2}
SVD_SIZE = 300
"""Of the attributes of CiteULike, as many as the paper's have."""
PUBLIC_RUN = "public code (IFedNCF), another's run, words of abstracts"
"""https://github.com/040520xh/IFedRec, sh_result/CiteULike.txt: the public code's settings, round 54 of 100."""
PUBLIC_FIGURES = (0.4225, 0.0963, 0.3377)
ROWS: dict[str, dict[str, Any]] = {
    "IFedRec on PFedRec": {},
    "IFedRec on FedNCF": {"backbone": "fedncf", "learning_rate": 0.5, "alignment_weight": 1.0},
}
"""With the public code's settings of each."""


class Cold(NamedTuple):
    """Items in three parts; each is numbered from 0 in its own part."""

    train: list[list[int]]
    """Trained items of each user."""
    new: dict[str, list[list[int]]]
    """Split -> new items of each user, who may have none."""
    attributes: dict[str, Tensor]
    """"train" and split -> (items, F)."""


def parted(events: Mapping[str, Sequence[Sequence[int]]], attribute_XF: Tensor) -> Cold:
    """From part -> items of each user, numbered together; users without trained items are left out."""
    kept = [user for user, items in enumerate(events["train"]) if items]
    numbers = {part: sorted({item for items in events[part] for item in items}) for part in ("train", *SPLITS)}
    found: dict[str, list[list[int]]] = {}
    for part, items in numbers.items():
        place = {item: number for number, item in enumerate(items)}
        found[part] = [[place[item] for item in events[part][user]] for user in kept]
    attributes = {part: attribute_XF[items].float() for part, items in numbers.items()}
    return Cold(found.pop("train"), found, attributes)


def withheld(config: InteractionsConfig, seed: int) -> Cold:
    """A data set with shares of its items taken out."""
    data = load_interactions(config)
    order = torch.randperm(data.num_items, generator=stream(seed, "cold items")).tolist()
    part_of, first = ["train"] * data.num_items, 0
    for split, share in SHARES.items():
        last = first + round(share * data.num_items)
        for item in order[first:last]:
            part_of[item] = split
        first = last
    events = {
        part: [[item for item in items if part_of[item] == part] for items in data.sequences]
        for part in ("train", *SPLITS)
    }
    return parted(events, item_attributes(data, METHODS["ifedrec"].config()))


def citeulike(folder: Path, num_users: int) -> Cold:
    """The public code's split, of all users or of some at random, and tags and citations as attributes."""
    files = {"train": "train.csv", "valid": "vali.csv", "test": "test.csv"}
    missing = [name for name in (*files.values(), "item-tag.dat", "citations.dat") if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"got no {missing[0]} in {folder}, expected the files that the head of this script names")
    pairs = {part: np.loadtxt(folder / name, int, delimiter=",", skiprows=1) for part, name in files.items()}
    if num_users:
        some = np.random.default_rng(0).choice(np.unique(pairs["train"][:, 0]), num_users, replace=False)
        pairs = {part: pair[np.isin(pair[:, 0], some)] for part, pair in pairs.items()}
    last = max(int(pair[:, 0].max()) for pair in pairs.values())
    events: dict[str, list[list[int]]] = {part: [[] for _ in range(last + 1)] for part in files}
    for part, pair in pairs.items():
        for user, item in pair.tolist():
            events[part][user].append(item)
    lines = [
        [f"{kind}{number}" for number in line.split()[1:]]
        for kind, name in (("tag", "item-tag.dat"), ("article", "citations.dat"))
        for line in (folder / name).read_text().splitlines()
    ]
    half = len(lines) // 2
    texts = [" ".join(tags + cited) for tags, cited in zip(lines[:half], lines[half:], strict=True)]
    return parted(events, tfidf_vectors(texts, SVD_SIZE))


def blocks_of(cold: Cold, training: EmbeddingTraining) -> list[Block]:
    """All clients; nothing is held out of their trained items."""
    length_U = torch.tensor([0, *map(len, cold.train)])
    item_E, avoid_E = (torch.tensor([item for items in cold.train for item in part(items)]) for part in (list, sorted))
    none_U = torch.zeros(len(cold.train), dtype=torch.int64)
    start_U, num_items = length_U.cumsum(0), len(cold.attributes["train"])
    population = Population(num_items, STRICT, item_E, start_U, avoid_E, start_U, none_U, none_U, {})

    def client_bytes(num_train: int) -> int:
        return 4 * num_train * (1 + training.num_negatives) * 4 * training.embedding_size

    return block_packer(population, client_bytes, CPU_BLOCK_BYTES)(range(len(cold.train)))


def rounds(method: FederatedMethod, blocks: Sequence[Block], num_rounds: int) -> Iterator[tuple[Tree, Tree]]:
    """Server and local tree after each round, all clients in it, nothing counted or noised."""
    server, local = method.init()
    local = {name: tensor.clone() for name, tensor in local.items()}
    for number in range(1, num_rounds + 1):

        def uploads(number: int = number, server: Tree = server) -> Iterator[Upload]:
            for block in blocks:
                own = {name: tensor[block.clients] for name, tensor in local.items()}
                download = method.broadcast(number, server, block.clients)
                upload, new, _ = method.client_update(number, download, own, block)
                for name, value in new.items():
                    assert isinstance(value, Tensor), "its clients keep no table"
                    local[name][block.clients] = value
                yield upload

        server = method.server_aggregate(number, server, uploads())
        yield server, local


def figures(score_UJ: Tensor, new: Sequence[Sequence[int]]) -> tuple[float, float, float]:
    """recall, precision, ndcg at K over the users with new items; the ideal dcg has at most K items."""
    asked = [user for user, items in enumerate(new) if items]
    hit_UJ = torch.zeros(len(asked), score_UJ.shape[1])
    for row, user in enumerate(asked):
        hit_UJ[row, list(new[user])] = 1.0
    num_U = hit_UJ.sum(1)
    hit_UK = hit_UJ.gather(1, score_UJ[asked].topk(min(K, score_UJ.shape[1]), 1).indices)
    gain_K = 1.0 / torch.arange(2, 2 + hit_UK.shape[1]).log2()
    ideal_U = gain_K.cumsum(0)[num_U.clamp(max=len(gain_K)).long() - 1]
    found = hit_UK.sum(1) / num_U, hit_UK.sum(1) / K, (hit_UK * gain_K).sum(1) / ideal_U
    return tuple(float(one.double().mean()) for one in found)  # type: ignore[return-value]


def all_scores(server: Tree, local: Tree, attribute_JF: Tensor) -> Tensor:
    """(U, J) of all users, some at a time."""
    users = torch.arange(len(next(iter(local.values())))).split(USERS)
    return torch.cat(
        [new_item_scores(server, {n: t[user_C] for n, t in local.items()}, attribute_JF) for user_C in users]
    )


def nearest(cold: Cold, split: str) -> Tensor:
    """(U, J) cosine of each new item's attributes and the mean of a user's."""
    unit = {part: torch.nn.functional.normalize(one, dim=1) for part, one in cold.attributes.items()}
    mean_UF = torch.stack([unit["train"][items].mean(0) for items in cold.train])
    return mean_UF @ unit[split].T


def learned(cold: Cold, changes: Mapping[str, Any], args: argparse.Namespace) -> tuple[int, tuple[float, float, float]]:
    """The best round by recall on validation items, and its figures on test items."""
    entry = METHODS["ifedrec"]
    values = {**entry.defaults, **({"embedding_size": args.embedding_size} if args.embedding_size else {}), **changes}
    training = EmbeddingTraining(
        **{name: values.pop(name) for name in list(values) if name in EmbeddingTraining.__annotations__}
    )
    num_items = len(cold.attributes["train"])
    federation = Federation(len(cold.train), num_items, args.seed, STRICT, CPU, attribute_IA=cold.attributes["train"])
    method = entry.build(federation, training, entry.config(**values))
    best, reported = -1.0, (0, (0.0, 0.0, 0.0))
    for number, (server, own) in enumerate(rounds(method, blocks_of(cold, training), args.rounds), 1):
        if number % EVERY and number < args.rounds:
            continue
        valid, test = (figures(all_scores(server, own, cold.attributes[part]), cold.new[part]) for part in SPLITS)
        print(f"  round {number}: recall@{K} {valid[0]:.4f}, {test[0]:.4f} of test items", file=sys.stderr, flush=True)
        if valid[0] > best:
            best, reported = valid[0], (number, test)
    return reported


def lines(cold: Cold, args: argparse.Namespace) -> Iterator[str]:
    sizes = {part: len(one) for part, one in cold.attributes.items()}
    yield f"{len(cold.train):,} users; items: {sizes['train']:,} trained, {sizes['valid']:,} validation, "
    yield f"{sizes['test']:,} test; {cold.attributes['train'].shape[1]} attributes; {args.rounds} rounds.\n"
    yield f"| row | recall@{K} | precision@{K} | ndcg@{K} | best round | CPU s |"
    yield "|---|---:|---:|---:|---:|---:|"

    def row(label: str, found: Sequence[float], end: str = "- | -") -> str:
        return f"| {label} | " + " | ".join(f"{one:.4f}" for one in found) + f" | {end} |"

    shuffled = torch.rand(len(cold.train), sizes["test"], generator=stream(args.seed, "chance"))
    yield row("chance", figures(shuffled, cold.new["test"]))
    yield row("nearest by attributes", figures(nearest(cold, "test"), cold.new["test"]))
    if args.citeulike:
        yield row(PUBLIC_RUN, PUBLIC_FIGURES, "54 | -")
    for label, changes in ROWS.items():
        started = time.process_time()
        number, found = learned(cold, changes, args)
        yield row(label, found, f"{number} | {time.process_time() - started:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", default="ml-100k", help="a data set whose items have texts")
    parser.add_argument("--source", default="", help="the reader of files of your own")
    parser.add_argument("--raw", default="", help="the folder of the files")
    parser.add_argument("--citeulike", type=Path, help="the folder of CiteULike, in the place of a data set")
    parser.add_argument("--users", type=int, default=0, help="of CiteULike, at random; 0: all")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--embedding_size", type=int, default=0, help="0: the public code's 200")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = InteractionsConfig(args.dataset, args.source, args.raw)
    cold = citeulike(args.citeulike, args.users) if args.citeulike else withheld(config, args.seed)
    for line in (*heading("cold_items.py", 1), "", *lines(cold, args)):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
