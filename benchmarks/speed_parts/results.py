"""A whole run, by stage, against that of a checkout of before: CPU seconds, equal results asserted first."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# A whole run against that of a checkout of before.

TIMED = """
import json, resource, sys, time
from importlib import import_module
def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
found = {}
def timed(place, function, stage):
    module = import_module(place)
    plain = getattr(module, function)
    def wrapped(*args, **kwargs):
        start, wall = cpu(), time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            found[stage] = cpu() - start
            found[stage + "_wall"] = time.perf_counter() - wall
    setattr(module, function, wrapped)
output, results, command = sys.argv[1:4]
timed("fedecider.federation.rounds", "run_rounds", "rounds")
timed(results, "write_results", "results")
main = import_module(command).main
sys.argv = ["federate.py", *sys.argv[4:]]
code = main()
found["whole"] = cpu()
json.dump(found, open(output, "w"))
sys.exit(code)
"""
"""Runs ``federate`` with a clock around the rounds and the results."""
HERE = (
    "fedecider.cross_silo.results",
    "fedecider.cli.federate",
    "benchmarks/configs/amazon_decoder.yaml",
    "hyperparameter_candidates",
)
BASE = (
    "fedecider.llm.results",
    "fedecider.commands.federate",
    "fedecider/configs/amazon_decoder_cpu.yaml",
    "alternatives",
)
EXACT = ("popularity", "last-item co-occurrence", "decayed co-occurrence", "memoriser (canary)")
"""Rows that may not differ in the last bit."""
MOST_LOST = 0.005
"""Of ndcg@10 of rows that read item texts, whose far neighbours have one common value; some gain by it."""
RENAMED = {"local + memory": "local + ensemble", "memory": "ensemble without a model"}


def federate(
    tree: Path, modules: tuple[str, str, str, str], data: str, work: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Seconds by stage of a run in ``tree`` (kept in ``work``), and its test metrics: row -> metric -> mean."""
    times, output = work / "seconds.json", work / "run"
    results, command, config, candidates = modules
    words = ["--config", config, "--domains", args.domain, "--data", data, "--method", "local", "--num_rounds", "3"]
    words += ["--local_epochs", "1", f"--{candidates}", "[]", "--seed", "0"]
    words += ["--output", str(output), "--cache", str(work / "cache"), "--num_threads", "1"]
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    if not times.is_file():
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-c", TIMED, str(times), results, command, *words],
            cwd=tree,
            env={**os.environ, **threads, "PYTHONPATH": str(tree)},
            check=True,
        )
    metrics = json.loads((output / "metrics.json").read_text())["domains"][args.domain]["test"]
    rows = {RENAMED.get(row, row): {name: value["mean"] for name, value in of.items()} for row, of in metrics.items()}
    return {"seconds": json.loads(times.read_text()), "rows": rows}


def check_rows(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Lines of a table of ndcg@10; what may not differ, does not."""
    lines = ["| row | ndcg@10 before | now |", "|---|---:|---:|"]
    for row in sorted(before.keys() & after.keys()):
        if row in EXACT:
            assert before[row] == after[row], (row, before[row], after[row])
        one, other = before[row]["ndcg@10"], after[row]["ndcg@10"]
        assert other >= one * (1 - MOST_LOST), (row, one, other)
        lines.append(f"| {row} | {one:.5f} | {other:.5f} |")
    return lines


def part_results(args: argparse.Namespace) -> str:
    """The results stage and the whole run against those of ``--base``."""
    work, here = Path(args.work).resolve(), Path(__file__).resolve().parents[2]
    found: dict[str, list[dict[str, Any]]] = {"before": [], "now": []}
    for turn in range(args.turns):  # in turns: the machine is not the same at all times
        for side, tree, modules, data in (
            ("before", Path(args.base).resolve(), BASE, args.base_data),
            ("now", here, HERE, args.data),
        ):
            folder = work / f"{side}-{turn}"
            found[side].append(federate(tree, modules, str(Path(data).resolve()), folder, args))
    rows = check_rows(found["before"][0]["rows"], found["now"][0]["rows"])
    least = {
        side: {stage: min(one["seconds"][stage] for one in turns) for stage in ("rounds", "results", "whole")}
        for side, turns in found.items()
    }
    lines = ["| stage | CPU s before | now | share |", "|---|---:|---:|---:|"]
    for stage, before in least["before"].items():
        now = least["now"][stage]
        lines.append(f"| {stage} | {before:.1f} | {now:.1f} | {now / before:.0%} |")
    said = (
        f"Full {args.domain}, local, 3 rounds of one epoch, one thread; least of {args.turns} turns; before: 29f5bd6."
    )
    return "\n".join([said, "", *lines, "", *rows])
