"""Seconds per round, peak memory and bytes of the cross-device track, against a run's per-user reference loop.

    python benchmarks/embedding.py [--output FILE.md]

Each case runs in a process of its own, one after the other, so that peak memory is its own. A method is first held to
its reference (24 clients, 2 rounds, largest difference printed), then both are timed in turns: whole rounds of ours
against the clients of the reference loop, a sample of them, scaled by the number of local steps; its server, which
costs it little or (graphs, similarities) does not scale with a sample, is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from provenance import heading

from embedding_fr.blocks import Federation
from embedding_fr.leaderboard import LeaderboardConfig, run_settings
from embedding_fr.methods import METHODS
from embedding_fr.setup import EmbeddingRunConfig, EmbeddingSettings, Setup, set_up, train
from embedding_fr.testing.loop import make_user, reference_clients, run_reference
from fedecider.data.interactions import Interactions, InteractionsConfig, load_interactions
from fedecider.evaluation.protocols import STRICT
from fedecider.federation.callbacks import collecting
from fedecider.federation.method import RowUpdate, Tree, Upload
from fedecider.federation.rows import write_rows
from fedecider.report.costs import total_bytes
from fedecider.running.command import run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "embedding_fr"))
from references import REFERENCES

PUBLIC_CODE_S = {"fedem": 37.0, "fedrap": 45.0, "pfedrec": 9.0, "fedrecgel": 2.1}
"""Seconds per round of the papers' public code on ML-100K at the papers' settings, one thread of a similar machine."""
SAMPLE, CHECKED = 24, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", default=",".join(name for name in METHODS if name in REFERENCES))
    parser.add_argument("--shapes", default="ml-1m,24516-clients", help="these, or such as fedmf-60000x2000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", default="")
    parser.add_argument("--case", default="", help="one case in this process, printed as JSON")
    args = parser.parse_args()
    if args.case:
        torch.set_num_threads(args.threads)
        print("RESULT " + json.dumps(run_case(args.case, args.rounds, torch.device(args.device))))
        return
    cases = [f"method:{name}" for name in args.methods.split(",") if name]
    cases += [f"shape:{name}" for name in args.shapes.split(",") if name]
    results = {case: _in_process(case, args) for case in cases}
    text = "\n".join(_report(results, args))
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")


def run_case(case: str, rounds: int, device: torch.device) -> dict:
    """The measurements of one case; methods are compared with their loop on the CPU, shapes run on ``device``."""
    kind, name = case.split(":")
    if kind == "method":
        return method_case(name, load_interactions(InteractionsConfig()), rounds)
    if name == "ml-1m":
        return shape_case("fedmf", load_interactions(InteractionsConfig(dataset="ml-1m")), rounds, device)
    if name == "toy":
        return shape_case("fedrecgel", synthetic(60, 80), rounds, device, embedding_size=8)
    if sized := re.fullmatch(r"(\w+)-(\d+)x(\d+)", name):
        return shape_case(sized[1], synthetic(int(sized[2]), int(sized[3])), rounds, device)
    return shape_case("fedrecgel", synthetic(24_516, 7_355), rounds, device, embedding_size=32)


def method_case(name: str, interactions: Interactions, rounds: int) -> dict:
    """Equality on a few clients, then seconds per round of both loops, taken in turns."""
    settings = paper_settings(name, rounds)
    worst = largest_difference(name, interactions)
    setup = set_up(settings, interactions, torch.device("cpu"))
    federation, reference = reference_of(name, settings, interactions)
    users = partial(make_user, federation, settings.training, setup.population)
    population, participation = setup.population, settings.run.participation
    sample = list(range(0, interactions.num_users, max(1, interactions.num_users // SAMPLE)))
    server, local = setup.method.init()
    local = {name: tensor.clone() for name, tensor in local.items()}
    num_steps_N = -(-population.num_train_N * (1 + settings.training.num_negatives) // settings.training.batch_size)
    scale = float(num_steps_N.sum() / num_steps_N[sample].sum()) * participation
    ours, theirs, records = [], [], []
    for turn in range(-1, rounds):  # the round before the first one compiles, and is not counted
        one = settings._replace(run=EmbeddingRunConfig(**{**vars(settings.run), "num_rounds": 1, "seed": max(0, turn)}))
        if turn < 0:
            train(one, setup)
            continue
        train(one, setup, [collecting(records)])
        ours.append(records[-1]["wall_s"])
        started = time.perf_counter()
        reference_clients(reference, users, 1, sample, server, local)
        theirs.append((time.perf_counter() - started) * scale)
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    return {
        "difference": worst,
        "ours_s": median(ours),
        "reference_s": median(theirs),
        "ratio": median(ratios),
        "ratios": [ratios[0], ratios[-1]],
        "evaluate_s": median(record["evaluate_s"] for record in records),
        "bytes_up": total_bytes(records[:1])["up"] // _cohort(records[0]),
        "bytes_down": total_bytes(records[:1])["down"] // _cohort(records[0]),
        "peak_gb": peak_gb(),
        "blocks": len(setup.blocks),
    }


def shape_case(name: str, interactions: Interactions, rounds: int, device: torch.device, **training) -> dict:
    """Seconds per round and peak memory at a larger shape."""
    settings = paper_settings(name, rounds, **training)
    setup = set_up(settings, interactions, device)
    records: list[dict] = []
    train(settings, setup, [collecting(records)])
    return {
        "users": interactions.num_users,
        "items": interactions.num_items,
        "events": interactions.num_events,
        "cohort": _cohort(records[0]),
        "ours_s": median(record["wall_s"] for record in records),
        "evaluate_s": median(record["evaluate_s"] for record in records),
        "bytes_up": total_bytes(records[:1])["up"] // _cohort(records[0]),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else peak_gb(),
    }


def paper_settings(name: str, rounds: int, **changes) -> EmbeddingSettings:
    """The settings of the method's paper."""
    return run_settings(LeaderboardConfig(num_rounds=rounds), InteractionsConfig(), name, "strict", changes, 0, 0)


def largest_difference(name: str, interactions: Interactions) -> float:
    """Largest difference between the batched runtime and the per-user loop, over every tensor, in float64."""
    torch.set_default_dtype(torch.float64)
    chosen = Interactions(
        interactions.name,
        interactions.users[:CHECKED],
        interactions.item_keys,
        interactions.titles,
        interactions.sequences[:CHECKED],
        None,
        {},
    )
    settings = paper_settings(name, 2, local_epochs=2)
    settings = settings._replace(run=EmbeddingRunConfig(**{**vars(settings.run), "participation": 1.0}))
    setup = set_up(settings, chosen, torch.device("cpu"))
    state = train(settings, setup)
    federation, reference = reference_of(name, settings, chosen)
    server, local = run_reference(setup.method, reference, federation, settings.training, setup.population, 2)
    pairs = [(state.server[key], value) for key, value in server.items()]
    # The best round's copy is not needed: both loops end after round 2.
    pairs += [(state.local[key], value) for key, value in local.items()]
    torch.set_default_dtype(torch.float32)
    worst = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    assert worst < 1e-5, f"{name}: the batched runtime differs from the reference by {worst}"
    return worst


def reference_of(name: str, settings: EmbeddingSettings, interactions: Interactions):
    federation = Federation(
        interactions.num_users, interactions.num_items, settings.run.seed, STRICT, torch.device("cpu")
    )
    return federation, REFERENCES[name](federation, settings.training, settings.method)


def synthetic(num_users: int, num_items: int, mean_events: int = 20, seed: int = 0) -> Interactions:
    """Users of geometric activity over items of Zipf popularity: a shape, not a data set."""
    generator = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, num_items + 1) ** 0.8
    popularity /= popularity.sum()
    sequences = []
    for _ in range(num_users):
        count = min(5 + int(generator.geometric(1.0 / (mean_events - 4))), num_items // 4)
        drawn = generator.choice(num_items, size=2 * count, p=popularity)
        sequences.append(list(dict.fromkeys(drawn.tolist()))[:count])
    width = len(str(num_items))
    keys = [f"{item:0{width}d}" for item in range(num_items)]
    users = [str(user) for user in range(num_users)]
    return Interactions("synthetic", users, keys, [""] * num_items, sequences, None, {})


class Run:
    """A run round by round, with its CPU seconds."""

    def __init__(self, method: str, interactions: Interactions):
        settings = run_settings(LeaderboardConfig(num_rounds=2), InteractionsConfig(), method, "strict", {}, 0, 0)
        self.setup: Setup = set_up(settings, interactions, torch.device("cpu"))
        self.local: Tree
        self.start()

    def start(self) -> None:
        """Back to where a run begins."""
        self.local = {}  # not beside the new ones
        server, local = self.setup.method.init()
        self.server: Tree = server
        self.local = {name: tensor.clone() for name, tensor in local.items()}

    def round(self, number: int) -> tuple[float, float]:
        """CPU seconds of local training, with what clients keep written back, and of aggregation.

        As in a run, uploads are taken one block after the other.
        """
        method, seconds = self.setup.method, 0.0

        def uploads() -> Iterator[Upload]:
            nonlocal seconds
            for block in self.setup.blocks:
                own = {name: tensor[block.clients] for name, tensor in self.local.items()}
                download = method.broadcast(number, self.server, block.clients)
                started = time.process_time()
                upload, new, _ = method.client_update(number, download, own, block)
                for name, rows in new.items():
                    if isinstance(rows, RowUpdate):
                        write_rows(self.local[name], block.clients, rows)
                    else:
                        self.local[name][block.clients] = rows
                seconds += time.process_time() - started
                yield upload

        started = time.process_time()
        self.server = method.server_aggregate(number, self.server, uploads())
        return seconds, time.process_time() - started - seconds


def peak_gb() -> float:
    """Peak resident memory of this process in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _cohort(record: dict) -> int:
    return sum(len(group["clients"]) for group in record["traffic"])


def _in_process(case: str, args: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--case", case, "--rounds", str(args.rounds), "--threads", str(args.threads)]
    command += ["--device", args.device]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{case} failed:\n{done.stdout}\n{done.stderr}")
    print(case, lines[0], file=sys.stderr, flush=True)
    return json.loads(lines[0].removeprefix("RESULT "))


def _report(results: dict[str, dict], args: argparse.Namespace) -> list[str]:
    lines = ["# The cross-device track: seconds, memory, bytes", "", *heading("embedding.py", args.threads), ""]
    lines += [
        "ML-100K (943 clients, 1,682 items) at each paper's settings. `ours` and `per-user loop` are a round's seconds",
        "without validation, medians over the rounds; the ratio is the median of the rounds' own ratios (least to",
        "greatest). A first round of ours, in which functions are compiled, is not counted. Of the loop, in PyTorch,",
        f"about {SAMPLE} clients were timed, scaled by local steps, without its server; ours has the server in it.",
        "`difference`: the largest one between the two over all tensors after 2 rounds of",
        f"{CHECKED} clients, in float64. `public code`: the papers' code, one thread of a similar machine, measured",
        "earlier and not in this run.",
        "",
        "| method | ours s | per-user loop s | ratio | public code s | validation s | bytes up | bytes down | peak GB "
        "| difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case, r in results.items():
        kind, name = case.split(":")
        if kind == "method":
            ratio = f"{r['ratio']:.1f} ({r['ratios'][0]:.1f} to {r['ratios'][1]:.1f})"
            public = PUBLIC_CODE_S.get(name)
            lines.append(
                f"| {name} | {r['ours_s']:.2f} | {r['reference_s']:.1f} | {ratio} | {public or '-'} | "
                f"{r['evaluate_s']:.2f} | {r['bytes_up']:,} | {r['bytes_down']:,} | {r['peak_gb']:.2f} | "
                f"{r['difference']:.1e} |"
            )
    lines += ["", f"Larger shapes on {args.device} (bytes per client and round; memory of that device):", ""]
    lines += ["| shape | clients | items | events | cohort | s per round | validation s | bytes up | peak GB |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for case, r in results.items():
        kind, name = case.split(":")
        if kind == "shape":
            lines.append(
                f"| {name} | {r['users']:,} | {r['items']:,} | {r['events']:,} | {r['cohort']:,} | {r['ours_s']:.2f} | "
                f"{r['evaluate_s']:.2f} | {r['bytes_up']:,} | {r['peak_gb']:.2f} |"
            )
    return lines


if __name__ == "__main__":
    sys.exit(run(main))
