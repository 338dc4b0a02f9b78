"""Files and folders are written aside, under one prefix, and get their names when they are whole.

What a killed process left goes when the next one writes beside it, or opens the output directory.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".scratch-"
MACHINE = f"{zlib.crc32(platform.node().encode()):08x}"
ABANDONED_S = 86_400.0
"""After so long without a change what another machine wrote aside is nobody's: its processes are not seen from here."""


@contextmanager
def aside(path: Path, put: Callable[[Path, Path], None] = os.replace) -> Iterator[Path]:
    """A free name beside ``path``; what stands there when the block ends gets the name ``path``, by ``put``, and what
    has none after the block is removed."""
    remove_left(path.parent)
    scratch = scratch_name(path)
    try:
        yield scratch
        put(scratch, path)
    finally:
        remove(scratch)


def scratch_name(path: Path) -> Path:
    """A free name beside ``path``, of this process."""
    return path.with_name(f"{PREFIX}{MACHINE}-{os.getpid()}-{uuid.uuid4().hex[:8]}-{path.name}")


def remove_left(folder: Path, alone: bool = False) -> None:
    """Remove what dead processes left in ``folder``; with ``alone``, where nobody else writes, also below it."""
    for path in list((folder.rglob if alone else folder.glob)(f"{PREFIX}*")):
        with suppress(OSError, ValueError):  # what another process removes meanwhile, or named by hand
            machine, process = path.name.removeprefix(PREFIX).split("-")[:2]
            if machine == MACHINE:
                left = alone if int(process) == os.getpid() else not _is_alive(int(process))
            else:
                left = time.time() - path.lstat().st_mtime > ABANDONED_S
            if left:
                remove(path)


def remove(path: Path) -> None:
    """A file or a folder; none is there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    import psutil  # only where something was left: it takes a while

    return bool(psutil.pid_exists(process))
