"""What a run costs: each part asserts equal results first, then times. One page, one section a part.

    python benchmarks/speed.py --parts tests --base FOLDER [--suites fast,test] [--output benchmarks/results/speed.md]

``tests``: the suites of tests here and in ``--base``, all of which must pass; each twice, since the first run compiles
what the next one finds. ``ci`` as a suite is the whole of ``.ci/run``, once.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from provenance import heading

from fedecider.running.options import run

PAGE = Path(__file__).with_name("results") / "speed.md"
TITLE = "# Speed"
REPOSITORY = Path(__file__).resolve().parents[1]
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


class Cost(NamedTuple):
    """Of a command and all that it started."""

    cpu_s: float
    wall_s: float
    output: str


def cost_of(command: Sequence[str], tree: Path, **environment: str) -> Cost:
    """Run a command on the code in ``tree``, one thread a process.

    Raises:
        RuntimeError: it failed.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    settings = {**os.environ, **QUIET, "PYTHONPATH": str(tree), **environment}
    done = subprocess.run(command, cwd=tree, env=settings, capture_output=True, text=True)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    return Cost(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s, done.stdout)


def base_of(args: argparse.Namespace) -> Path:
    """``ValueError`` without a checkout to compare with."""
    if not (args.base and (Path(args.base) / "fedecider").is_dir()):
        raise ValueError(f"got base {args.base!r}, expected a checkout of the commit that is compared with")
    return Path(args.base).resolve()


# Tests: what whoever changes something waits for.

ALL = "not slow and not gpu"
SUITES = {"fast": f"{ALL} and not whole", "test": ALL}
LONGEST = 10


def part_tests(args: argparse.Namespace) -> str:
    """CPU and wall seconds of suites in two processes, from empty caches and again, and the longest tests."""
    trees = {"before": base_of(args), "now": REPOSITORY}
    pytest = [sys.executable, "-m", "pytest", "-q"]
    names = {
        side: set(re.findall(r"^tests/.*::.*", cost_of([*pytest, "--collect-only", "-m", ALL], tree).output, re.M))
        for side, tree in trees.items()
    }
    rows, longest = [], ""
    for suite in args.suites.split(","):
        for side, tree in trees.items():
            if suite == "ci":
                rows.append((".ci/run", side, "once", cost_of(["bash", ".ci/run"], tree)))
                continue
            with tempfile.TemporaryDirectory() as folder:
                kept = {"NUMBA_CACHE_DIR": f"{folder}/numba", "HF_HUB_OFFLINE": "1"}
                if side == "now":  # as the Makefile has it
                    kept["PYTHONDONTWRITEBYTECODE"] = ""
                words = [*pytest, "-n", "2", "--dist", "loadfile", "-m", SUITES[suite], f"--durations={LONGEST}"]
                for turn in ("empty caches", "again"):
                    cost = cost_of(words, tree, **kept)
                    rows.append((f"make {suite}", side, turn, cost))
                    longest = cost.output
    lines = ["| suite | side | caches | passed | wall, s | CPU, s |", "| --- | --- | --- | ---: | ---: | ---: |"]
    for suite, side, turn, cost in rows:
        passed = re.findall(r"(\d+) passed", cost.output)[-1]
        lines.append(f"| {suite} | {side} | {turn} | {passed} | {cost.wall_s:.0f} | {cost.cpu_s:.0f} |")
    gone = len(names["before"] - names["now"])
    lines += [
        "",
        f"`make test` has {len(names['now'])} cases; {gone} of {len(names['before'])} of before are not here.",
    ]
    slowest = re.findall(r"^([\d.]+)s (?:call|setup) +(\S+)", longest, re.M)
    if slowest:
        lines += ["", "Longest of the last run:", "", *(f"- {seconds} s `{name}`" for seconds, name in slowest)]
    return "\n".join(lines)


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {"tests": part_tests}
HEADINGS = {"tests": "Tests"}


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
    parser.add_argument("--suites", default="fast", help="tests: some of fast, test and ci, by commas")
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    for part in args.parts.split(","):
        body = PARTS[part](args)
        put_section(args.output, HEADINGS[part], "\n".join([*heading("speed.py", 1), "", body]))


if __name__ == "__main__":
    sys.exit(run(main))
