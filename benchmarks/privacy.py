"""What bounds and noise cost the cross-silo track: test figures against epsilon, for hidden users and noised uploads.

    python benchmarks/privacy.py --data <prepared> --cache .cache --folder privacy --seeds 0,1,2 \
      [--rows "student;trained"] [--output FILE.md] --set <options>

Every row is a whole run of --method (FedAvg; all rounds, the last one is reported: nothing is chosen on validation
items) with the same settings but for the options below. Test positions of a row and a seed are a file below --folder
that a later call takes up, so that a long table can be made in pieces.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from provenance import heading
from torch import Tensor

from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.prepare import BaseArtifacts, Settings, build_base_artifacts, make_recommender
from fedecider.cross_silo.privacy import check_privacy, privacy_data
from fedecider.evaluation.metrics import MACRO, metrics_per_client
from fedecider.evaluation.statistics import compare_table, table_intervals
from fedecider.federation.callbacks import RoundCallback
from fedecider.federation.channel import Channel
from fedecider.federation.method import Block
from fedecider.federation.privacy import protector
from fedecider.federation.record import read_json, write_json
from fedecider.federation.rounds import Clients, RoundSettings, evaluate, run_rounds
from fedecider.methods import METHODS
from fedecider.running.command import run
from fedecider.running.launch import Launch, start

CONFIG = Path(__file__).resolve().parent / "configs" / "amazon_small_pool.yaml"
USERS, UPLOADS = ("--user_privacy.clip", "0.1", "--privacy.delta", "1e-4"), ("--privacy.delta", "1e-4")
ROWS: dict[str, Sequence[str]] = {
    "student": (),
    "trained": (),
    "users, bound": USERS,
    **{f"users, noise {z}": (*USERS, "--user_privacy.noise_scale", z) for z in ("0.3", "0.5", "1", "3")},
    "uploads, bound": (*UPLOADS, "--privacy.clip", "10"),
    **{
        f"uploads, noise {z}": (*UPLOADS, "--privacy.clip", "10", "--privacy.noise_scale", z)
        for z in ("0.001", "0.01", "1")
    },
}
METRICS = ("hit@10", "ndcg@10")
Positions = dict[str, Tensor]


def settings_of(row: str, seed: int, args: argparse.Namespace) -> Settings:
    words = ["--config", args.config, "--data", args.data, "--cache", args.cache, "--method", args.method]
    words += ["--ensemble.kind", "none", "--num_rounds", "4", "--hyperparameter_candidates", "[]", "--seed", str(seed)]
    words += [*args.set, *ROWS[row]]
    settings = parse_settings(words)
    check_privacy(settings)
    return settings


def positions(settings: Settings, artifacts: BaseArtifacts, launch: Launch, student: bool) -> list[Tensor]:
    """Test positions of every client after the last round, or of the student without adapters."""
    recommender = make_recommender(settings, artifacts, launch.device)
    if student:
        return [recommender.student(name).positions("test") for name in recommender.names]
    few = make_recommender(_glance(settings), artifacts, launch.device)
    few = few._replace(base=few.base._replace(model=recommender.base.model))
    method, last = (METHODS[settings.run.method].build(one, settings.method) for one in (few, recommender))
    blocks = [Block(torch.tensor([client]), None) for client in range(recommender.num_clients)]
    run = settings.run
    state = run_rounds(
        method,
        Clients(blocks, metrics_per_client),
        RoundSettings(run.num_rounds, run.seed),
        Channel(protector(method, run.privacy, run.seed)),
        [RoundCallback(lambda round: print(round.number, [c["loss"] for c in round.record["clients"]], flush=True))],
    )
    return evaluate(last, state.last, last.variants[0], "test", blocks)


def _glance(settings: Settings) -> Settings:
    """With few users in the validation of the rounds, from which nothing is chosen."""
    return settings._replace(ranking=replace(settings.ranking, num_eval_users=10))


def measured(row: str, seed: int, args: argparse.Namespace, artifacts: BaseArtifacts, launch: Launch) -> dict[str, Any]:
    """Positions by domain, what is promised, seconds; measured or read."""
    path = Path(args.folder) / f"{row.replace(', ', '-').replace(' ', '-')}-{seed}.json"
    if not path.is_file():
        settings, started = settings_of(row, seed, args), time.process_time()
        found = positions(settings, artifacts, launch, row == "student")
        by_domain = {name: one.tolist() for name, one in zip(artifacts.domains, found, strict=True)}
        seconds = time.process_time() - started
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"positions": by_domain, "privacy": privacy_data(settings), "cpu_s": seconds})
    return read_json(path)


def table(found: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Macro means over the domains, with 95 % intervals over users and seeds, and the difference to the student."""
    rows = {label: _stacked(runs) for label, runs in found.items()}
    pairs = [(label, "student") for label in rows if label != "student"]
    compared = {(one.first, one.metric): one for one in compare_table(rows, METRICS, pairs) if one.domain == MACRO}
    intervals = table_intervals(rows, (10,))
    lines = [
        "| row | epsilon | hit@10 | ndcg@10 | ndcg@10 minus student | Holm p | CPU s a run |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for label, runs in found.items():
        scores = intervals[label][MACRO]
        shown = [f"{one.mean:.4f} [{one.low:.4f}, {one.high:.4f}]" for one in (scores[name] for name in METRICS)]
        promised = [entry["epsilon"] for entry in runs[0]["privacy"].values()]
        epsilon = "0" if label == "student" else f"{promised[0]:.3g}" if promised and promised[0] else "none"
        seconds = sum(run["cpu_s"] for run in runs) / len(runs)
        difference = ["", ""]
        if label != "student":
            one = compared[label, "ndcg@10"]
            mean, low, high = one.difference
            difference = [f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]", f"{one.p_holm:.2g}"]
        lines.append(f"| {label} | {epsilon} | {shown[0]} | {shown[1]} | {' | '.join(difference)} | {seconds:.0f} |")
    return lines


def _stacked(runs: Sequence[dict[str, Any]]) -> Positions:
    return {name: torch.tensor([run["positions"][name] for run in runs]) for name in runs[0]["positions"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--cache", default=".cache")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rows", default=";".join(ROWS), help="rows of the table, parted by ;")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further settings of every row")
    args = parser.parse_args()
    lines = ["# Privacy of the cross-silo track", "", *heading("privacy.py", args.threads), ""]
    labels, seeds = args.rows.split(";"), [int(seed) for seed in args.seeds.split(",")]
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    with start(args.threads) as launch:
        for seed in seeds:
            artifacts = build_base_artifacts(settings_of("student", seed, args).run, launch)
            for label in labels:
                found[label].append(measured(label, seed, args, artifacts, launch))
                print(label, seed, flush=True)
    text = "\n".join([*lines, *table(found)]) + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    sys.exit(run(main))
