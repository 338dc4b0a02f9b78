"""What the test suites cost."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile

from speed_parts.cost import REPOSITORY, base_of, cost_of

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
