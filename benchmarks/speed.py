<<<<<<< HEAD
"""What a run costs: each part asserts equal results first, then tells what both sides took. One page, a section a part.

    python benchmarks/speed.py --parts results --base CHECKOUT --data data/toys --base_data data/old_toys

``results``: full Toys, local, three rounds of one epoch, here and in a checkout of 29f5bd6, in turns, one thread. CPU
seconds by stage. Data are prepared by the tree that reads them (``scripts/prepare_data.py``), 300 public users.
=======
"""What a run costs: each part asserts equal results first, then times. One page, one section a part.

    python benchmarks/speed.py --parts tests --base FOLDER [--suites fast,test] [--output benchmarks/results/speed.md]

``tests``: the suites of tests here and in ``--base``, all of which must pass; each twice, since the first run compiles
what the next one finds. ``ci`` as a suite is the whole of ``.ci/run``, once.
>>>>>>> suite
"""

from __future__ import annotations

import argparse
<<<<<<< HEAD
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
=======
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
>>>>>>> suite

from provenance import heading

from fedecider.running.options import run

PAGE = Path(__file__).with_name("results") / "speed.md"
TITLE = "# Speed"
<<<<<<< HEAD

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
    "fedecider.experiment.results",
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
WITH_TEXTS = 0.005
"""Relative difference of ndcg@10 of rows that read item texts, whose far neighbours are left out."""
RENAMED = {"local + memory": "local + hybrid", "memory": "hybrid without a model"}


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
        assert math.isclose(one, other, rel_tol=WITH_TEXTS), (row, one, other)
        lines.append(f"| {row} | {one:.5f} | {other:.5f} |")
    return lines


def part_results(args: argparse.Namespace) -> str:
    """The results stage and the whole run against those of ``--base``."""
    work, here = Path(args.work).resolve(), Path(__file__).resolve().parents[1]
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


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {"results": part_results}


def put(page: str, part: str, text: str) -> str:
    """The page with the section of ``part`` replaced, or at its end."""
    section = f"## {part}\n\n{text.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(part)}\n.*?(?=^## |\Z)", re.S | re.M)
    if pattern.search(page):
        return pattern.sub(lambda _: section + "\n", page).rstrip() + "\n"
    return f"{(page or TITLE).rstrip()}\n\n{section}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help=f"separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--base", default="", help="a checkout of what is compared with")
    parser.add_argument("--data", default="", help="prepared data")
    parser.add_argument("--base_data", default="", help="the same data, prepared by the checkout")
    parser.add_argument("--domain", default="toys")
    parser.add_argument("--work", default="runs/speed", help="where runs are kept; one that is there is not run again")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--output", default=str(PAGE))
    args = parser.parse_args()
    parts = [part for part in args.parts.split(",") if part]
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise ValueError(f"got parts {args.parts!r}, expected some of {', '.join(PARTS)}")
    page = Path(args.output)
    for part in parts:
        text = "\n".join([*heading("speed.py", 1), "", PARTS[part](args)])
        page.write_text(put(page.read_text() if page.is_file() else "", part, text))
        print(text)
=======
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
>>>>>>> suite


if __name__ == "__main__":
    sys.exit(run(main))
