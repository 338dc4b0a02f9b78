"""What the machine has: memory and devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

# The device that somebody names.


def checked_device(name: str | torch.device) -> torch.device:
    """The device called ``name``.

    Raises:
        ValueError: there is no such kind of device, or this machine has none.
    """
    found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"got device {str(name)!r}, expected one of {', '.join(found)}") from error
    wanted = f"cuda:{device.index or 0}" if device.type == "cuda" else device.type
    if wanted not in found:
        raise ValueError(
            f"got device {str(name)!r}, which this machine does not have, expected one of {', '.join(found)}"
        )
    return device


# Memory that is there before work begins: what a computation needs is compared with it, and both are said.

SAID_FROM = 10**9
"""Smaller needs are checked without a word."""
CGROUPS = Path("/sys/fs/cgroup")
OF_PROCESS = Path("/proc/self/cgroup")
_FILES = ("memory.max", "memory.current", "inactive_file")
_OLD_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes() -> int:
    """What this process can still take without pushing others out: of the machine, and of the control groups that it is
    in (containers, batch systems; versions 1 and 2)."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_groups()]))


def has_room(needed: int) -> bool:
    """Whether ``needed`` bytes are available in every process that a launcher has started on this machine."""
    return needed * _processes() <= available_bytes()


def check_memory(needed: int, what: str, advice: Callable[[], str], log: Callable[[str], None]) -> None:
    """Compare what ``what`` needs with what there is, for each process of a launcher; ``log`` hears both from 1 GB on.

    Raises:
        ValueError: it is not there; ``advice`` says what would take less.
    """
    available, count = available_bytes(), _processes()
    each = f" in each of {count} processes" if count > 1 else ""
    if not has_room(needed):
        raise ValueError(
            f"got {what}, which takes {needed / 1e9:,.1f} GB{each}, expected at most the {available / 1e9:,.1f} GB of "
            f"memory that are available: {advice()}"
        )
    if needed >= SAID_FROM:
        log(f"{what} takes {needed / 1e9:,.1f} GB{each} of the {available / 1e9:,.1f} GB of memory that are available")


def _processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _left_in_groups() -> Iterator[int]:
    """Limit minus use, page cache that can go left out, of every control group around this process that has a limit."""
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
    except (OSError, ValueError):  # no such group in this variant of the file system, or not ours to read
        return
