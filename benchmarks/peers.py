"""A round of FedMF with Flower's and FLARE's simulation engines, a plain loop over the same clients, and ours.

    python -m venv flower && flower/bin/pip install 'flwr[simulation]' psutil torch      # an environment of its own
    python benchmarks/peers.py --flower flower/bin/python --flare python --clients 10,100,943 --output FILE.md

ML-100K, the first so many users, each one client: an item table of 16 numbers an item is averaged, the user's own
vector stays. Clients of `loop`, `flower` and `flare` run the same function (`train_user`), written as one writes a
client in PyTorch; `ours` is `fedmf` of this package at the same settings: one epoch, Adam, batches of 256, four
negatives an event. Each case runs once with 1 and once with more rounds (`ROUNDS`, the more the shorter they are) in a
process of its own; the difference gives seconds a round, without start and end. CPU seconds and memory are those of all
processes it starts, sampled four times a second: memory is what they would free (PSS), at its peak; of processes that
live shorter, as FLARE's do, seconds are a lower bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.running.command import run

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

DIMS, BATCH, RATE, NEGATIVES, CORES = 16, 256, 0.001, 4, 2
ROUNDS = {"ours": 101, "loop": 11, "flower": 4, "flare": 2}


class Case(NamedTuple):
    """One run."""

    engine: str
    clients: int
    rounds: int
    folder: str
    """Holds ``user-<n>.npz`` with items and labels, and takes the users' own vectors."""
    num_items: int


def train_user(case: Case, user: int, table_ID: np.ndarray) -> tuple[np.ndarray, int]:
    """One epoch of a client -> its item table and its examples; its own vector is kept in the folder."""
    data = np.load(f"{case.folder}/user-{user}.npz")
    item_B, label_B = torch.from_numpy(data["items"]), torch.from_numpy(data["labels"])
    kept = Path(case.folder) / f"vector-{user}.npy"
    vector = np.load(kept) if kept.exists() else np.full(DIMS, 0.1, np.float32)
    table = torch.nn.Parameter(torch.from_numpy(table_ID.copy()))
    own = torch.nn.Parameter(torch.from_numpy(vector))
    optimiser = torch.optim.Adam([table, own], lr=RATE)
    for rows in torch.randperm(len(item_B)).split(BATCH):
        optimiser.zero_grad()
        logit = table[item_B[rows]] @ own
        torch.nn.functional.binary_cross_entropy_with_logits(logit, label_B[rows]).backward()
        optimiser.step()
    np.save(kept, own.detach().numpy())
    return table.detach().numpy(), len(item_B)


def start_table(num_items: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0.0, 0.1, (num_items, DIMS)).astype(np.float32)


def loop(case: Case) -> None:
    table_ID = start_table(case.num_items)
    for _ in range(case.rounds):
        total, weight = np.zeros_like(table_ID), 0
        for user in range(case.clients):
            trained, count = train_user(case, user, table_ID)
            total += count * trained
            weight += count
        table_ID = total / weight


def flower(case: Case) -> None:
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    class Client(NumPyClient):
        def __init__(self, user: int):
            self.user = user

        def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict]:
            torch.set_num_threads(1)
            trained, count = train_user(case, self.user, parameters[0])
            return [trained], count, {}

    def server_of(context: Any) -> ServerAppComponents:
        strategy = FedAvg(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=case.clients,
            min_available_clients=case.clients,
            initial_parameters=ndarrays_to_parameters([start_table(case.num_items)]),
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=case.rounds))

    client = ClientApp(client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client())
    resources: Any = {"init_args": {"num_cpus": CORES}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(ServerApp(server_fn=server_of), client, num_supernodes=case.clients, backend_config=resources)


def flare(case: Case) -> None:
    from nvflare.app_common.np.np_model_persistor import NPModelPersistor
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.job_config.api import FedJob
    from peers_flare import FedmfExecutor

    job = FedJob(name="fedmf", min_clients=case.clients)
    job.to_server(FedAvg(num_clients=case.clients, num_rounds=case.rounds))
    job.to_server(NPModelPersistor(model=start_table(case.num_items).tolist()), id="persistor")
    sites = [f"site-{user + 1}" for user in range(case.clients)]
    for site in sites:
        job.to(FedmfExecutor(list(case)), site, tasks=["train"])
    job.simulator_run(f"{case.folder}/flare", clients=sites, threads=CORES)


def ours(case: Case) -> None:
    from embedding import paper_settings

    from embedding_fr.setup import set_up, train
    from fedecider.data.interactions import Interactions

    torch.set_num_threads(CORES)
    items = [np.load(f"{case.folder}/user-{user}.npz") for user in range(case.clients)]
    sequences = [[int(item) for item in found["sequence"]] for found in items]
    keys = [f"{number:05d}" for number in range(case.num_items)]
    users = [f"{user:05d}" for user in range(case.clients)]
    interactions = Interactions("ml-100k", users, keys, [""] * case.num_items, sequences, None, {})
    changes = {"embedding_size": DIMS, "batch_size": BATCH, "learning_rate": RATE, "num_negatives": NEGATIVES}
    settings = paper_settings("fedmf", case.rounds, local_epochs=1, num_eval_users=1, **changes)
    train(settings, set_up(settings, interactions, torch.device("cpu")))


ENGINES = {"ours": ours, "loop": loop, "flower": flower, "flare": flare}


class Cost(NamedTuple):
    wall_s: float
    cpu_s: float
    peak_gb: float


def watched(words: list[str], limit_s: float) -> Cost | None:
    """What a command and all that it starts take; None when it fails or takes longer than ``limit_s``."""
    import psutil

    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_DEDUP_LOGS": "0"}
    started, seconds, peak = time.perf_counter(), {}, 0
    with tempfile.TemporaryFile() as log:
        process = psutil.Popen(words, env=environment, stdout=log, stderr=log)
        family: dict[int, Any] = {process.pid: process}
        while process.poll() is None and time.perf_counter() - started < limit_s:
            with contextlib.suppress(psutil.Error):
                family |= {child.pid: child for child in process.children(recursive=True)}
            held = 0
            for pid, one in list(family.items()):
                with contextlib.suppress(psutil.Error):
                    spent = one.cpu_times()
                    seconds[pid] = spent.user + spent.system
                    held += one.memory_full_info().pss
            peak = max(peak, held)
            time.sleep(0.25)
        taken = time.perf_counter() - started
        for one in family.values():
            with contextlib.suppress(psutil.Error):
                one.kill()
        if process.wait() != 0:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-3000:])
            return None
    return Cost(taken, sum(seconds.values()), peak / 1e9)


def row(python: str, engine: str, clients: int, folder: str, num_items: int, limit_s: float) -> str:
    """One line of the table."""
    rounds = ROUNDS[engine]
    costs = []
    for count in (1, rounds):
        for kept in Path(folder).glob("vector-*"):
            kept.unlink()
        case = json.dumps(Case(engine, clients, count, folder, num_items))
        cost = watched([*shlex.split(python), __file__, "--case", case], limit_s)
        if cost is None:
            return f"| {engine} | {clients} | {count} of 1 and {rounds} rounds not finished in {limit_s:.0f} s | | | |"
        costs.append(cost)
    first, last = costs
    wall, cpu = ((b - a) / (rounds - 1) for a, b in zip(first[:2], last[:2], strict=True))
    return f"| {engine} | {clients} | {wall:.3g} | {cpu:.3g} | {first.wall_s - wall:.3g} | {last.peak_gb:.2f} |"


def write_users(folder: Path, clients: int) -> int:
    """The examples of each user -> the number of items."""
    from fedecider.data.interactions import InteractionsConfig, load_interactions
    from fedecider.evaluation.protocols import train_part

    interactions = load_interactions(InteractionsConfig())
    draw = np.random.default_rng(0)
    for user, sequence in enumerate(interactions.sequences[:clients]):
        train = np.array(train_part(sequence))
        others = np.setdiff1d(np.arange(interactions.num_items), train)
        items = np.concatenate([train, draw.choice(others, NEGATIVES * len(train))])
        labels = (np.arange(len(items)) < len(train)).astype(np.float32)
        np.savez(folder / f"user-{user}.npz", items=items, labels=labels, sequence=np.array(sequence))
    return interactions.num_items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="10,100,943", help="separated by commas")
    parser.add_argument("--engines", default="ours,loop,flower,flare")
    parser.add_argument("--flower", default=sys.executable, help="the Python that has flwr and torch")
    parser.add_argument("--flare", default=sys.executable, help="the Python that has nvflare and torch")
    parser.add_argument("--limit_s", type=float, default=900.0, help="seconds after which a run is given up")
    parser.add_argument("--output", default="")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        case = Case(*json.loads(args.case))
        torch.set_num_threads(1)
        ENGINES[case.engine](case)
        return
    from provenance import heading

    lines = ["# Simulation engines, one round", "", *heading("peers.py", 1), ""]
    lines += ["| engine | clients | s a round | CPU s a round | s around the rounds | peak GB |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    sizes = [int(size) for size in args.clients.split(",")]
    pythons = {"flower": args.flower, "flare": args.flare}
    with tempfile.TemporaryDirectory() as folder:
        num_items = write_users(Path(folder), max(sizes))
        for clients in sizes:
            for engine in args.engines.split(","):
                python = pythons.get(engine, sys.executable)
                lines.append(row(python, engine, clients, folder, num_items, args.limit_s))
                print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    sys.exit(run(main))
