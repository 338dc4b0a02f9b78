"""FedEASE and FedNear on large catalogues: memory, seconds and accuracy of the forms of their server's step.

    python benchmarks/item_scale.py --items 50000 --users 1000000 --forms float32/200 --output FILE
    python benchmarks/item_scale.py --dataset ml-1m --methods fedease,fednear --forms float64,float32,float32/200

A form is the number format of the server and, behind a stroke, `top_k`; `cut/200` is the whole model of the form before
it, cut to 200 entries a column. The first form of a method is what the others are compared with. Without --dataset
users are drawn. The method's own functions are called, block by block as in a run; the round loop, which keeps a record
of every client, is left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from provenance import heading
from torch import Tensor

from embedding_fr import gram
from embedding_fr.blocks import CPU_BLOCK_BYTES, Federation, Population, build_population, make_block, rank_users
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS
from embedding_fr.server_memory import check_server_memory
from fedecider.baselines import ease
from fedecider.baselines.ease import BLOCK, invert
from fedecider.data.interactions import InteractionsConfig, load_interactions
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import STRICT
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.running.command import run
from fedecider.running.options import from_plain

CPU = torch.device("cpu")
ITEMS_A_TOPIC = 100
IN_TOPIC = 0.7
ZIPF = 0.8
MEDIAN_EVENTS, SPREAD, MOST_EVENTS = 18.0, 0.75, 300
CHUNK = 100_000
WHOLE = 10_000
"""Up to so many items the weights of two forms are kept and compared."""


class Form(NamedTuple):
    """One way to make the model, and what it took."""

    name: str
    sum_s: float
    solve_s: float
    peak: int
    residual: float
    user_ms: float
    position_U: Tensor
    model: Tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", default="", help="a data set instead of drawn users")
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--methods", default="fedease")
    parser.add_argument("--forms", default="float32/200")
    parser.add_argument("--eval_users", type=int, default=10_000, help="0 scores all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = ["# FedEASE and FedNear on large catalogues", "", *heading("item_scale.py", args.threads), ""]
    started = time.process_time()
    population = real(args.dataset, args.seed) if args.dataset else drawn(args.items, args.users, args.seed)
    events = len(population.train_E) + 2 * population.num_clients
    lines += [
        f"{args.dataset or 'Drawn'}, seed {args.seed}: {population.num_clients:,} users, "
        f"{population.num_items:,} items, "
        f"{events:,} events, {events / population.num_clients:.1f} a user, the longest history "
        f"{int(population.num_train_N.max())} train events. Popularity: {popularity(population, args):.4f} hit@10.",
        f"Ready after {time.process_time() - started:.0f} CPU s, {status('VmRSS') / 1e9:.2f} GB.",
        "",
        "| method | form | sum, CPU s | solution, CPU s | peak, GB | residual | scores, CPU ms a user | hit@10 | "
        "ndcg@10 | other hits than the first form | largest difference of a weight |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    print("\n".join(lines), flush=True)
    for method in args.methods.split(","):
        first, last = None, None
        for name in args.forms.split(","):
            last = cut(population, method, name, last, args) if last and name.startswith("cut") else None
            last = last or run_form(population, method, name, args)
            first = first or (last if population.num_items <= WHOLE else last._replace(model={}))
            lines.append(row(method, last, first))
            print(lines[-1], flush=True)
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")


def run_form(population: Population, method: str, name: str, args: argparse.Namespace) -> Form:
    """One sum over all users, the solution, and the places of held-out items of some users."""
    precision, _, top_k = name.partition("/")
    entry, num_items = METHODS[method], population.num_items
    config = from_plain(entry.config, {"precision": precision, "top_k": int(top_k or 0)})
    check_server_memory(method, config, num_items, print)
    federation = Federation(population.num_clients, num_items, args.seed, STRICT, CPU)
    built = entry.build(federation, EmbeddingTraining(), config)
    order = np.lexsort((np.arange(population.num_clients), -population.num_train_N.numpy()))
    residuals: list[float] = []

    def watched(square_II: Tensor, regularisation: float) -> float:
        residuals.append(invert(square_II, regularisation))
        return residuals[-1]

    gram.invert = ease.invert = watched
    summed: list[float] = []

    def uploads() -> Iterator[Upload]:
        for block in blocks(population, order):
            yield built.client_update(1, Download({}), {}, block)[0]
        summed.append(time.process_time())

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    started = time.process_time()
    server = built.server_aggregate(1, {}, uploads())
    solved = time.process_time()
    position_U = ranked(built, server, population, order, args)
    user_ms = (time.process_time() - solved) / len(position_U) * 1e3
    return Form(
        name, summed[0] - started, solved - summed[0], status("VmHWM"), residuals[0], user_ms, position_U, server
    )


def cut(population: Population, method: str, name: str, whole: Form, args: argparse.Namespace) -> Form:
    """The largest entries of each column of ``whole``, whose model is kept for the next cut."""
    top_k, weight_II = int(name.partition("/")[2]), whole.model["weights"]
    started = time.process_time()
    parts = [gram.largest_entries(part_IJ.T, top_k) for part_IJ in weight_II.split(BLOCK, 1)]
    index, value = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    entry = METHODS[method]
    federation = Federation(population.num_clients, population.num_items, args.seed, STRICT, CPU)
    built = entry.build(federation, EmbeddingTraining(), from_plain(entry.config, {"top_k": top_k}))
    order = np.lexsort((np.arange(population.num_clients), -population.num_train_N.numpy()))
    solved = time.process_time()
    position_U = ranked(built, {"index": index, "value": value}, population, order, args)
    user_ms = (time.process_time() - solved) / len(position_U) * 1e3
    return whole._replace(
        name=name, sum_s=0.0, solve_s=solved - started, peak=status("VmHWM"), user_ms=user_ms, position_U=position_U
    )


def ranked(
    method: FederatedMethod, server: Tree, population: Population, order: np.ndarray, args: argparse.Namespace
) -> Tensor:
    """(U,) places of the test items of the users that are scored, in whatever order is the same for every form."""
    download = method.broadcast(2, server, torch.arange(1))
    found = [
        position
        for block in blocks(population, chosen(order, args))
        for position in method.positions("global", download, {}, block, "test")
    ]
    return torch.cat(found)


def chosen(order: np.ndarray, args: argparse.Namespace) -> np.ndarray:
    """Users that are scored, the ones with longer histories first."""
    if not 0 < args.eval_users < len(order):
        return order
    drawn_U = torch.randperm(len(order), generator=stream(args.seed, "eval_users"))[: args.eval_users]
    return order[np.isin(order, drawn_U.numpy())]


def blocks(population: Population, order: np.ndarray) -> Iterator[Block]:
    """As a run would make them, one at a time."""
    size = max(1, CPU_BLOCK_BYTES // (8 * population.num_items))
    for start in range(0, len(order), size):
        yield make_block(population, order[start : start + size].tolist())


def popularity(population: Population, args: argparse.Namespace) -> float:
    order = np.lexsort((np.arange(population.num_clients), -population.num_train_N.numpy()))
    count_I = torch.bincount(population.train_E, minlength=population.num_items).float()
    found = [
        position
        for block in blocks(population, chosen(order, args))
        for position in rank_users(count_I.repeat(len(block.clients), 1), block.data, "test", STRICT)
    ]
    return mean_metrics(torch.cat(found), (10,))["hit@10"]


def row(method: str, found: Form, first: Form) -> str:
    metrics = mean_metrics(found.position_U, (10,))
    other = int(((found.position_U < 10) != (first.position_U < 10)).sum())
    size = "-"
    if "weights" in found.model and "weights" in first.model and not found.name.startswith("cut"):
        weights, others = first.model["weights"], found.model["weights"]
        size = f"{float((others - weights).abs().max() / weights.abs().max()):.1e}"
    cells = [
        method,
        found.name,
        f"{found.sum_s:.1f}",
        f"{found.solve_s:.1f}",
        f"{found.peak / 1e9:.2f}",
        f"{found.residual:.1e}",
        f"{found.user_ms:.2f}",
        f"{metrics['hit@10']:.4f}",
        f"{metrics['ndcg@10']:.4f}",
        f"{other:,} of {len(found.position_U):,}",
        size,
    ]
    return "| " + " | ".join(cells) + " |"


def status(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the peak was last set back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def real(name: str, seed: int) -> Population:
    interactions = load_interactions(InteractionsConfig(dataset=name))
    return build_population(interactions.sequences, interactions.num_items, STRICT, seed)


def drawn(num_items: int, num_users: int, seed: int) -> Population:
    """Users with log-normal numbers of events. Popularity falls as rank^-0.8; items lie in topics of 100.

    A user likes two topics: 70 % of the events of the first half of a history are of one, of the second half of the
    other, and all others of the whole catalogue, each time in proportion to popularity. No item comes twice.
    """
    rng = np.random.default_rng(seed)
    popular_I = rng.permutation((np.arange(num_items) + 1.0) ** -ZIPF)
    sum_I = np.concatenate([[0.0], popular_I.cumsum()])
    topics = np.append(np.arange(0, num_items, ITEMS_A_TOPIC), num_items)
    parts, counts = [], []
    for start in range(0, num_users, CHUNK):
        users = min(CHUNK, num_users - start)
        wanted_U = np.clip(rng.lognormal(np.log(MEDIAN_EVENTS), SPREAD, users), 5, MOST_EVENTS).astype(np.int64)
        user_E = np.repeat(np.arange(users), wanted_U)
        place_E = np.arange(len(user_E)) - np.repeat(wanted_U.cumsum() - wanted_U, wanted_U)
        topic_U2 = rng.integers(len(topics) - 1, size=(users, 2))
        topic_E = topic_U2[user_E, (2 * place_E >= wanted_U[user_E]).astype(np.int64)]
        inside_E = rng.random(len(user_E)) < IN_TOPIC
        low_E = np.where(inside_E, sum_I[topics[topic_E]], 0.0)
        high_E = np.where(inside_E, sum_I[topics[topic_E + 1]], sum_I[-1])
        item_E = np.searchsorted(sum_I, low_E + rng.random(len(user_E)) * (high_E - low_E), side="right") - 1
        _, first_E = np.unique(user_E * num_items + item_E, return_index=True)
        first_E.sort()
        user_E, item_E = user_E[first_E], item_E[first_E]
        counts_U = np.bincount(user_E, minlength=users)
        enough_U = counts_U >= 3
        parts.append(item_E[enough_U[user_E]])
        counts.append(counts_U[enough_U])
    item_E, count_N = np.concatenate(parts), np.concatenate(counts)
    end_N = count_N.cumsum()
    held = np.zeros(len(item_E), dtype=bool)
    held[end_N - 1] = held[end_N - 2] = True
    train_E = torch.from_numpy(item_E[~held])
    start_N = torch.from_numpy(np.concatenate([[0], (count_N - 2).cumsum()]))
    valid_N, test_N = torch.from_numpy(item_E[end_N - 2]), torch.from_numpy(item_E[end_N - 1])
    return Population(num_items, STRICT, train_E, start_N, train_E, start_N, valid_N, test_N, {})


if __name__ == "__main__":
    sys.exit(run(main))
