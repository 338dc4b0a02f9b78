"""Imports, help, the stages of the demo, and its rounds in one process and in two."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from speed_parts.cost import REPOSITORY, Cost, base_of, cost_of

REPEATS = 3


# Start: what is paid before any work.

STARTS = {
    "`import fedecider`": ["-c", "import fedecider"],
    "`federate --help`": ["scripts/federate.py", "--help"],
    "`federate --method fedmf --help`": ["scripts/federate.py", "--method", "fedmf", "--help"],
}
SAME = ("--domains", "--data", "--num_rounds", "--seed", "--output")
"""Options that help shows on both sides."""


def part_start(args: argparse.Namespace) -> str:
    """CPU seconds of imports and help against ``--base``, Python's own start among them, and the stages of the demo."""
    trees = {"base": base_of(args), "here": REPOSITORY}
    python = {name: cost_of([sys.executable, "-c", "pass"], tree).cpu_s for name, tree in trees.items()}
    lines = ["| what | before, CPU s | now, CPU s |", "| --- | ---: | ---: |"]
    for what, words in STARTS.items():
        found: dict[str, list[Cost]] = {name: [] for name in trees}
        for _ in range(REPEATS):
            for name, tree in trees.items():  # one after the other, so that both meet the same neighbours
                found[name].append(cost_of([sys.executable, *words], tree))
        shown = [costs[0].output for costs in found.values()]
        if "--help" in words:
            options = [option for option in SAME if "fedmf" not in words or option in shown[0]]
            assert all(option in text for text in shown for option in options), what
        spent = [median(cost.cpu_s for cost in found[name]) for name in trees]
        lines.append(f"| {what} | {spent[0]:.2f} | {spent[1]:.2f} |")
    lines += ["", f"Medians of {REPEATS}. Python alone takes {python['here']:.2f} s of each.", ""]
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "fedecider.cli.main", "federate", "--cache", f"{folder}/cache", "--seed", "0"]
        whole = cost_of([sys.executable, *words, "--output", f"{folder}/first"], REPOSITORY)
        again = cost_of([sys.executable, *words, "--output", f"{folder}/again"], REPOSITORY)
        first, second = (_metrics(Path(folder) / name) for name in ("first", "again"))
    stages, reused = first.pop("seconds"), second.pop("seconds")
    assert first == second, "stages that are reused must change nothing"
    lines += ["| stage of the demo | CPU s | CPU s, stages reused |", "| --- | ---: | ---: |"]
    for name, spent in stages.items():
        lines.append(f"| {name} | {spent['cpu_s']:.1f} | {reused.get(name, {'cpu_s': 0.0})['cpu_s']:.1f} |")
    sums = [sum(spent["cpu_s"] for spent in of_run.values()) for of_run in (stages, reused)]
    lines.append(f"| imports and options | {whole.cpu_s - sums[0]:.1f} | {again.cpu_s - sums[1]:.1f} |")
    lines.append(f"| all | {whole.cpu_s:.1f} | {again.cpu_s:.1f} |")
    return "\n".join(lines)


def _metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


# Several processes: the same bits, sooner.

ROUNDS = 5
TURNS = 2


def part_processes(args: argparse.Namespace) -> str:
    """Wall and CPU seconds of a run in one process and in two, with the stages of before reused."""
    found: dict[int, list[tuple[Cost, dict[str, Any]]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        words = ["scripts/federate.py", "--cache", f"{folder}/cache", "--seed", "0", "--num_rounds", str(ROUNDS)]
        words += ["--local_epochs", str(args.local_epochs), "--num_threads", "1", "--teacher_row", "false"]
        cost_of([sys.executable, *words, "--output", f"{folder}/stages"], REPOSITORY)
        for turn in range(TURNS):
            for count in found:
                launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
                cost = cost_of([*launch, *words, "--output", f"{folder}/{count}-{turn}"], REPOSITORY)
                found[count].append((cost, _metrics(Path(folder) / f"{count}-{turn}")))
    seconds = {count: [metrics.pop("seconds") for _, metrics in runs] for count, runs in found.items()}
    every = [metrics for runs in found.values() for _, metrics in runs]
    assert all(metrics == every[0] for metrics in every), "two processes must give the bits of one"
    lines = ["| | 1 process | 2 processes | ratio |", "| --- | ---: | ---: | ---: |"]

    def line(what: str, one: float, two: float) -> str:
        return f"| {what} | {one:.1f} | {two:.1f} | {two / one:.2f} |"

    for name in ("rounds", "results"):
        for what, key in (("CPU s of the first process", "cpu_s"), ("wall s", "wall_s")):
            lines.append(line(f"{name}, {what}", *(min(one[name][key] for one in seconds[count]) for count in found)))
    lines.append(line("whole command, wall s", *(min(cost.wall_s for cost, _ in runs) for runs in found.values())))
    lines.append(line("whole command, CPU s", *(min(cost.cpu_s for cost, _ in runs) for runs in found.values())))
    return "\n".join(
        [
            f"The demo (3 clients), {ROUNDS} rounds of {args.local_epochs} local epochs, one thread a process, stages "
            f"reused; the better of {TURNS} turns each. With three clients and two processes, one trains two of them: "
            "the rounds can take two thirds at best. CPU seconds of the first process, which has those two, "
            "are what its rounds take where every process has a core of its own.",
            "",
            *lines,
        ]
    )
