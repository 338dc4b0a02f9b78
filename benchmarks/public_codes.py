"""Seconds of a round of a paper's public code and of ours, in turns, on the same clients and events.

    git clone https://github.com/Zhangcx19/IJCAI-23-PFedRec codes/pfedrec      # and so on: CODES below
    python benchmarks/public_codes.py --codes codes --methods pfedrec,gpfedrec --rounds 5

ML-100K, every client in every round, the settings of the public code on both sides (rows `/code`). Each side runs in a
process of its own with one thread and waits while the other one works. What is timed: local training of all clients,
with what they keep read and written, and the server's step, in CPU seconds, which other work on the machine lengthens
less than wall time; ours draws its training negatives within that time, the public code before it (`sampling`, left
out), but for FedRecGEL, which draws within it too. A round before the first is run and not counted. The public code is
run as it is, but for the patches of `patched`. They need pandas (2.2); FedEM's needs matplotlib and cvxpy as well, with
which its server solves a quadratic programme a client. Its clients end early when their loss stalls, ours never do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from provenance import git_commit, heading
from speed import PAGE, put_section

from fedecider.evaluation.protocols import train_part
from fedecider.running.command import run

Round = Callable[[int], tuple[float, float]]
"""number from 0 -> CPU seconds of training with the server's step, and of drawing negatives where that is apart."""


class Code(NamedTuple):
    """A public implementation."""

    repository: str
    prepare: Callable[[np.ndarray, int], Round]
    """(events, 2) of users and items in time order, number of items -> its round. Runs in the clone."""


def pfedrec(events: np.ndarray, num_items: int) -> Round:
    settings = {"clients_sample_ratio": 1.0, "local_epoch": 1, "lr_eta": 80, "batch_size": 256, "optimizer": "sgd"}
    settings |= {"lr": 0.1, "latent_dim": 32, "num_negative": 4, "l2_regularization": 0.0}
    return _mlp_engine(settings, events, num_items)


def gpfedrec(events: np.ndarray, num_items: int) -> Round:
    settings = {"clients_sample_ratio": 1.0, "local_epoch": 1, "lr_eta": 80, "batch_size": 256, "optimizer": "sgd"}
    settings |= {"lr": 0.1, "latent_dim": 32, "num_negative": 4, "l2_regularization": 0.0, "layers": [64, 32, 16, 8]}
    settings |= {"neighborhood_size": 0, "neighborhood_threshold": 1.0, "mp_layers": 1, "similarity_metric": "cosine"}
    return _mlp_engine({**settings, "reg": 1.0, "dp": 0.0}, events, num_items)


def _mlp_engine(settings: dict[str, Any], events: np.ndarray, num_items: int) -> Round:
    data, mlp = (__import__(name) for name in ("data", "mlp"))
    num_users = int(events[:, 0].max()) + 1
    engine = mlp.MLPEngine({**settings, "num_users": num_users, "num_items": num_items, "use_cuda": False})
    drawn = data.SampleGenerator(ratings=_frame(events))

    def run(number: int) -> tuple[float, float]:
        started = time.process_time()
        examples = drawn.store_all_train_data(settings["num_negative"])
        ready = time.process_time()
        engine.fed_train_a_round(examples, round_id=number)
        return time.process_time() - ready, ready - started

    return run


def fedrap(events: np.ndarray, num_items: int) -> Round:
    engines, data = __import__("model.model").model, __import__("utils.data").data
    settings = {"clients_sample_ratio": 1.0, "top_k": 10, "decay_rate": 0.97, "local_epoch": 10, "tol": 1e-4}
    settings |= {"batch_size": 2048, "lr_network": 0.5, "lr_args": 200.0, "latent_dim": 32, "l2_regularization": 1e-4}
    settings |= {"num_negative": 4, "lambda": 0.1, "mu": 0.1, "regular": "l1", "use_cuda": False, "vary_param": "tanh"}
    settings |= {"num_users": int(events[:, 0].max()) + 1, "num_items": num_items}
    engine = engines.FedRAPEngine(settings)
    drawn = data.SampleGenerator(ratings=_frame(events))
    common = torch.nn.Embedding(num_items, 32)

    def run(number: int) -> tuple[float, float]:
        started = time.process_time()
        examples = drawn.store_all_train_data(settings["num_negative"])
        ready = time.process_time()
        engine.federatedTrainOneRound(examples, common, number)
        return time.process_time() - ready, ready - started

    return run


def fedem(events: np.ndarray, num_items: int) -> Round:
    engines, data = __import__("model.model").model, __import__("utils.data").data
    settings = {"backbone": "FCF", "clients_sample_ratio": 1.0, "top_k": 10, "local_epoch": 10, "threshold": 1e-4}
    settings |= {"batch_size": 256, "lr_embedding": 0.1, "lr_adapter": 0.1, "weight_decay": 1e-3, "latent_dim": 16}
    settings |= {"num_negative": 4, "use_cuda": False, "agg_clients_ratio": 0.1, "agg_mode": "both", "sim_mode": "l2"}
    settings |= {"alpha": 0.9, "adapter": [32, 16, 8, 1], "train_frac": 1.0, "num_items": num_items}
    settings["num_users"] = int(events[:, 0].max()) + 1
    engine = engines.ModelEngine(settings)
    drawn = data.SampleGenerator(ratings=_frame(events), config=settings)
    common = torch.nn.Embedding(num_items, 16)

    def run(number: int) -> tuple[float, float]:
        started = time.process_time()
        examples = drawn.store_all_train_data(settings["num_negative"])
        ready = time.process_time()
        engine.federatedTrainOneRound(examples, common, None, number)
        return time.process_time() - ready, ready - started

    return run


def fedrecgel(events: np.ndarray, num_items: int) -> Round:
    missing = types.ModuleType("models.fedrap")  # imported by its evaluation, and not in its repository
    missing.RAPBase = None  # type: ignore[attr-defined]
    sys.modules["models.fedrap"] = missing
    models = __import__("models.fedrecgel").fedrecgel
    clusters, servers = __import__("modules.ClientCluster").ClientCluster, __import__("modules.Server").Server
    attributes = {"method": "fedrecgel", "rho_sh": 0.02, "rho_ns": 0.02, "ablate_sh_sam": False, "ablate_ns_sam": False}
    num_users = int(events[:, 0].max()) + 1
    train = torch.zeros(num_users, num_items)
    for user in range(num_users):
        train[user, torch.from_numpy(train_part(events[events[:, 0] == user, 1]))] = 1.0
    clients = [models.FedRecGELClient(train[user : user + 1], 1, 0.1, attr=attributes) for user in range(num_users)]
    server = servers.Server(models.FedRecGELServer(num_items), clusters.ClientCluster(clients), fraction=1.0)

    def run(number: int) -> tuple[float, float]:
        started = time.process_time()
        server.train_model(torch.device("cpu"), {})
        return time.process_time() - started, 0.0

    return run


CODES = {
    "pfedrec": Code("Zhangcx19/IJCAI-23-PFedRec", pfedrec),
    "gpfedrec": Code("Zhangcx19/GPFedRec", gpfedrec),
    "fedrap": Code("mtics/FedRAP", fedrap),
    "fedem": Code("jundongchen13/FedEM", fedem),
    "fedrecgel": Code("anonymifish/FedRecGEL", fedrecgel),
}


def patched() -> None:
    """What public codes need on a machine without a GPU and with a Python of today.

    ``.cuda()`` leaves everything where it is; ``random.sample`` takes a set again, as before Python 3.11; tensorboardX,
    which is imported and not used, is an empty module; arguments of distributions are not checked, as GPFedRec draws
    from one of width 0. (`fedrecgel` leaves out one import more.)
    """
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    sample = random.sample
    random.sample = lambda pool, k: sample(tuple(pool) if isinstance(pool, set) else pool, k)  # type: ignore[assignment]
    torch.distributions.Distribution.set_default_validate_args(False)
    unused = types.ModuleType("tensorboardX")
    unused.SummaryWriter = None  # type: ignore[attr-defined]
    sys.modules["tensorboardX"] = unused


def _frame(events: np.ndarray) -> Any:
    import pandas

    return pandas.DataFrame(
        {"userId": events[:, 0], "itemId": events[:, 1], "rating": 1.0, "timestamp": np.arange(len(events))}
    )


def ours(method: str) -> Round:
    from embedding import Run

    from embedding_fr.methods import METHODS
    from fedecider.data.interactions import InteractionsConfig, load_interactions

    name = f"{method}/code" if METHODS[method].code else method
    side = Run(name, load_interactions(InteractionsConfig()))

    def run(number: int) -> tuple[float, float]:
        started = time.process_time()
        side.round(number + 1)
        return time.process_time() - started, 0.0

    return run


def serve(run: Round) -> None:
    """A round for every line that comes in; the first one comes before the first answer."""
    run(0)
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin, 1):
        print(json.dumps(run(number)), flush=True)


def child(method: str, clone: str, events: str) -> None:
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # public codes print their models
        if clone:
            patched()
            sys.path.insert(0, clone)
            found = np.load(events)
            run = CODES[method].prepare(found["events"], int(found["num_items"]))
        else:
            run = ours(method)
    serve(run)


class Process:
    """A side in a process of its own."""

    def __init__(self, method: str, clone: Path | None, events: Path):
        words = [sys.executable, __file__, "--child", method, "--events", str(events)]
        words += ["--clone", str(clone.resolve())] if clone else []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        here = Path(__file__).resolve().parent
        paths = [str(here.parent), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(words, env=environment, **pipes)  # type: ignore[call-overload]
        self.answer()

    def answer(self) -> str:
        line: str = self.process.stdout.readline()
        if not line:
            raise ValueError(f"{self.process.args} ended without an answer; what it wrote is above")
        return line

    def round(self) -> list[float]:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return list(json.loads(self.answer()))


def row(method: str, clone: Path, events: Path, rounds: int) -> str:
    """One line of the table."""
    public, own = Process(method, clone, events), Process(method, None, events)
    found: dict[Process, list[list[float]]] = {public: [], own: []}
    for number in range(rounds):
        for side in (public, own) if number % 2 else (own, public):
            found[side].append(side.round())
    for side in (public, own):
        side.process.stdin.close()
        side.process.wait()
    theirs, mine = ([seconds for seconds, _ in found[side]] for side in (public, own))
    ratios = sorted(a / b for a, b in zip(theirs, mine, strict=True))
    sampling = median(sampling for _, sampling in found[public])
    last = subprocess.run(["git", "-C", str(clone), "log", "-1", "--format=%h"], capture_output=True, text=True)
    return (
        f"| {method} | {CODES[method].repository} {last.stdout.strip()} | {_range(theirs)} | {_range(mine)} "
        f"| {median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}) | {sampling:.1f} |"
    )


def _range(seconds: list[float]) -> str:
    return f"{median(seconds):.3g} ({min(seconds):.3g} to {max(seconds):.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codes", default="codes", help="folder with a clone for each method, named as the method")
    parser.add_argument("--methods", default=",".join(CODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=PAGE, help="its section is put there")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--clone", default="", help=argparse.SUPPRESS)
    parser.add_argument("--events", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.clone, args.events)
        return
    from fedecider.data.interactions import InteractionsConfig, load_interactions

    interactions = load_interactions(InteractionsConfig())
    pairs = [(user, item) for user, items in enumerate(interactions.sequences) for item in items]
    lines = [*heading("public_codes.py", 1, git_commit()), ""]
    lines += [
        f"ML-100K, {interactions.num_users} clients, all in every round, {interactions.num_items:,} items. CPU seconds",
        f"of a round: median of {args.rounds} (least to greatest), both sides in turns, one thread.",
        "",
        "| method | public code | its s | ours, s | ratio | its sampling, s, left out |",
        "|---|---|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.npz"
        np.savez(events, events=np.array(pairs), num_items=interactions.num_items)
        for method in args.methods.split(","):
            lines.append(row(method, Path(args.codes) / method, events, args.rounds))
            print(lines[-1], flush=True)
    put_section(args.output, "Public codes and ours, side by side", "\n".join(lines))


if __name__ == "__main__":
    sys.exit(run(main))
