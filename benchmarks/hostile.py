"""What kills, damaged files, bad inputs, attacks and changed lines do: counts, as a page.

    python benchmarks/hostile.py [--groups "flipped bits,mutants"]

The tries are tests (``-m "slow or not slow"``) and `tests/mutants.py`; this script runs them and counts. Bad is a test
that fails or a mutant that survives. A group that was not asked for keeps its line of the page,
benchmarks/results/hostile.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import provenance

from fedecider.running.command import run

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "benchmarks" / "results" / "hostile.md"
MUTANTS = "mutants"


class Group(NamedTuple):
    """Tests of one kind."""

    what: str
    tests: tuple[str, ...]
    """Words for pytest."""
    each: int = 1
    """Tries of a test."""


GROUPS = {
    "kills": Group(
        "SIGKILL at a random moment of `update`, `forget`, `recommend`, `import`, `federate`; then the next command",
        ("tests/test_kills.py", "-k", "12 or same_end"),
        each=12,
    ),
    "damaged files": Group(
        "a file of a run with a bit flipped, cut off, emptied or gone, read from Python",
        ("tests/fuzz/test_fuzz_runs.py", "-k", "says_the_same and 400"),
        each=400,
    ),
    "damaged files and commands": Group(
        "the same, read by `recommend`", ("tests/fuzz/test_fuzz_runs.py", "-k", "one_line and 40"), each=40
    ),
    "flipped bits": Group(
        "one bit of the purchases that a company keeps", ("tests/fuzz/test_fuzz_runs.py", "-k", "flipped_bit"), each=400
    ),
    "random bad inputs": Group(
        "random words of `recommend`, `import`, `update`, `forget`, `compare`, and HTTP requests",
        ("tests/fuzz/test_fuzz_requests.py", "-k", "hundred"),
        each=100,
    ),
    "chosen bad inputs": Group(
        "tables, settings, commands and messages that are wrong in one way each",
        (
            *("tests/test_bad_commands.py", "tests/fuzz/test_fuzz_data.py", "tests/fuzz/test_fuzz_settings.py"),
            *("tests/fuzz/test_fuzz_messages.py", "tests/fuzz/test_fuzz_checkpoints.py"),
        ),
    ),
    "attacks": Group(
        "uploads, messages, scores and dropouts of hostile companies, and a server that compares sums",
        (
            *("tests/federation/test_faults.py", "tests/deployment/test_deployed_faults.py"),
            *("tests/deployment/test_deployed.py", "-k", "hostile or no_figures or test_faults or deployed_faults"),
        ),
    ),
    "attacks on secure aggregation": Group(
        "the same under secure aggregation: shares, late companies, catalogues that overlap in part",
        (
            *("tests/federation/test_secure_sum.py", "tests/federation/test_secure_rounds.py"),
            *("tests/methods/test_parts_of_tables.py", "tests/deployment/test_secure_deployed.py"),
        ),
    ),
    MUTANTS: Group("one changed line of code that protects somebody, against its tests", ()),
}


def counts(group: Group) -> tuple[int, int]:
    """Tries, and bad ones."""
    if not group.tests:
        done = subprocess.run(
            [sys.executable, "tests/mutants.py"], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        print(done.stdout, flush=True)
        last = re.search(r"(\d+) mutants, (\d+) survive", done.stdout)
        assert last is not None, done.stderr[-2000:]
        return int(last[1]), int(last[2])
    command = [sys.executable, "-m", "pytest", "-m", "slow or not slow", "-o", "addopts=", "-q", *group.tests]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], flush=True)
    summary = done.stdout.strip().splitlines()[-1]
    passed, failed, errors = (
        int(one[1]) if (one := re.search(rf"(\d+) {word}", summary)) else 0 for word in ("passed", "failed", "error")
    )
    assert passed + failed + errors, done.stdout[-2000:]
    return group.each * (passed + failed + errors), failed + errors


def kept() -> dict[str, str]:
    """Group -> its line of the page."""
    if not PAGE.exists():
        return {}
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip(): line for line in rows if line.split("|")[1].strip() in GROUPS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", default=",".join(GROUPS), help="separated by commas")
    args = parser.parse_args()
    names = [name.strip() for name in args.groups.split(",")]
    lines, about = kept(), provenance.heading("hostile.py", 1)
    for name in names:
        num, bad = counts(GROUPS[name])
        lines[name] = f"| {name} | {GROUPS[name].what} | {num:,} | {bad} | {provenance.git_commit()[:8]} |"
        text = [
            "# Kills, damaged files, bad inputs, attacks",
            "",
            "Good is: a folder as before or as after, and the next command works; a damaged file refused by its name, "
            "or the same answer; a bad input refused in one sentence with exit code 2; an attack refused or without "
            "effect on the others, as its test states; a changed line that a test notices.",
            "",
            "| group | what is tried | tries | bad | commit |",
            "|---|---|---:|---:|---|",
            *(lines[group] for group in GROUPS if group in lines),
            "",
            *about,
        ]
        PAGE.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run(main))
