"""Memory that is there before work begins: what a computation needs is compared with it, and both are said."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

SAID_FROM = 10**9
"""Smaller needs are checked without a word."""
CGROUPS = Path("/sys/fs/cgroup")
OF_PROCESS = Path("/proc/self/cgroup")
_FILES = ("memory.max", "memory.current", "inactive_file")
_OLD_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(device: torch.device | None = None) -> int:
    """What this process can still take without pushing others out: of the machine, of the control groups that it is
    in (containers, batch systems; versions 1 and 2), or of a GPU."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return max(0, min(psutil.virtual_memory().available, *_left_in_groups()))


def check_memory(
    needed: int, what: str, advice: str, device: torch.device | None = None, tell: Callable[[str], None] = print
) -> None:
    """Say what ``what`` needs and what there is.

    Processes of one launcher on this machine need it each.

    Raises:
        ValueError: it is not there; ``advice`` says what would take less.
    """
    available, count = available_bytes(device), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    each = f" in each of {count} processes" if count > 1 else ""
    if needed * count > available:
        raise ValueError(
            f"got {what}, which takes {needed / 1e9:,.1f} GB{each}, expected at most the {available / 1e9:,.1f} GB of "
            f"memory that are available: {advice}"
        )
    if needed >= SAID_FROM:
        tell(f"{what} takes {needed / 1e9:,.1f} GB{each} of the {available / 1e9:,.1f} GB of memory that are available")


def _left_in_groups() -> Iterator[int]:
    """Limit minus use, page cache that can go left out, of every control group around this process; 2^62 at least
    once."""
    yield 1 << 62
    lines = OF_PROCESS.read_text().splitlines() if OF_PROCESS.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (CGROUPS / "memory", _OLD_FILES) if controllers else (CGROUPS, _FILES)
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield from _left(folder, *names)


def _left(folder: Path, limit: str, use: str, cache: str) -> Iterator[int]:
    try:
        most = (folder / limit).read_text().strip()
        if most != "max":
            fields = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            inactive = next((int(value) for name, value in fields if name == cache), 0)
            yield int(most) - int((folder / use).read_text()) + inactive
    except (OSError, ValueError):  # no such group in this view of the file system, or not ours to read
        return
