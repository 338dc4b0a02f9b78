"""What a command costs, and the checkout that it is compared with."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BENCHMARKS = Path(__file__).resolve().parents[1]
REPOSITORY = BENCHMARKS.parent
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
