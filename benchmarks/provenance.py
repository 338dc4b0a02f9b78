"""The first lines of every result file: when, which code, which libraries, which kind of machine, which command; and
how lines get there."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def heading(script: str, threads: int, commit: str = "") -> list[str]:
    """Markdown list items; no host name and no path but the script's."""
    libraries = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "peft", "numba")
    )
    return [
        f"- Date: {datetime.date.today().isoformat()}",
        f"- Commit: {commit or git_commit()}",
        f"- Versions: Python {platform.python_version()}, {libraries}",
        f"- Hardware: {processor()}, {os.cpu_count()} cores, {threads} threads a process, "
        f"load average {os.getloadavg()[0]:.1f} at the start",
        f"- Command: `python {shlex.join([f'benchmarks/{script}', *sys.argv[1:]])}`",
    ]


def write_lines(lines: Iterable[str], output: Path | None) -> None:
    """Print lines as they come, and append each to ``output``, so that a killed command leaves what it found."""
    for line in lines:
        print(line, flush=True)
        if output:
            with output.open("a") as file:
                file.write(line + "\n")


def git_commit() -> str:
    """Short commit of the checkout, and whether tracked files differ from it."""

    def git(*words: str) -> str:
        folder = Path(__file__).resolve().parent
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True).stdout.strip()

    changed = " with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{git('rev-parse', '--short', 'HEAD') or 'unknown'}{changed}"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
