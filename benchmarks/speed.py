"""What a run costs: each part asserts equal results first, then times. One page, one section a part.

    python benchmarks/speed.py --parts start,processes --base FOLDER [--output benchmarks/results/speed.md]

``start``: imports and help against ``--base``, and the stages of the demo. ``processes``: the demo's rounds in one
process and in two, of one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from provenance import heading

from fedecider.running.options import run

PAGE = Path(__file__).with_name("results") / "speed.md"
TITLE = "# Speed"
REPOSITORY = Path(__file__).resolve().parents[1]
REPEATS = 3
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


class Cost(NamedTuple):
    """Of a command and all that it started."""

    cpu_s: float
    wall_s: float
    output: str


def cost_of(command: Sequence[str], tree: Path) -> Cost:
    """Run a command on the code in ``tree``, one thread a process.

    Raises:
        RuntimeError: it failed.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, **QUIET, "PYTHONPATH": str(tree)}, capture_output=True, text=True
    )
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return Cost(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s, done.stdout)


def base_of(args: argparse.Namespace) -> Path:
    """``ValueError`` without a checkout to compare with."""
    if not (args.base and (Path(args.base) / "fedecider").is_dir()):
        raise ValueError(f"got base {args.base!r}, expected a checkout of the commit that is compared with")
    return Path(args.base).resolve()


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


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {"start": part_start, "processes": part_processes}
HEADINGS = {"start": "Start, and the stages of the demo", "processes": "Several processes"}


def put_section(page: Path, heading_: str, body: str) -> None:
    """Replace the section of this heading, or add it behind the others."""
    text = page.read_text() if page.is_file() else f"{TITLE}\n"
    section = f"## {heading_}\n\n{body}\n"
    pattern = re.compile(rf"^## {re.escape(heading_)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    found = pattern.search(text)
    text = text[: found.start()] + section + "\n" + text[found.end() :] if found else f"{text.rstrip()}\n\n{section}"
    page.write_text(text.rstrip() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--base", default="", help="a checkout of the commit that is compared with")
    parser.add_argument("--local_epochs", type=int, default=10, help="processes: of every round")
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    for part in args.parts.split(","):
        body = PARTS[part](args)
        put_section(args.output, HEADINGS[part], "\n".join([*heading("speed.py", 1), "", body]))


if __name__ == "__main__":
    sys.exit(run(main))
