"""The folder of one run: its name, what is written into it, and everything needed to repeat it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedecider.federation.record import write_json
from fedecider.running.damage import damage_names, read_object
from fedecider.running.stages import as_plain, content_key

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "numba")


PLACES = ("output", "resume", "cache", "data", "tracker", "encoder", "backbone_name")
"""Settings of where and how, which may differ when a run is resumed; ``data`` is compared by content."""


class RunFolder(NamedTuple):
    """Paths inside ``runs/<name>/``."""

    root: Path

    @property
    def record(self) -> Path:
        return self.root / "run.json"

    @property
    def alternatives(self) -> Path:
        """Which of several settings the run took; only where it had the choice."""
        return self.root / "alternatives.json"

    @property
    def rounds(self) -> Path:
        return self.root / "rounds.jsonl"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    @property
    def results(self) -> Path:
        """The table in Markdown; written after all else that a table over several runs needs."""
        return self.root / "results.md"

    @property
    def per_user(self) -> Path:
        return self.root / "per_user.parquet"

    @property
    def fusion_weights(self) -> Path:
        return self.root / "fusion_weights.json"

    @property
    def communication(self) -> Path:
        return self.root / "communication.json"

    @property
    def adapters(self) -> Path:
        return self.root / "adapters"

    @property
    def backbone(self) -> Path:
        return self.root / "backbone"

    @property
    def private(self) -> Path:
        """What stays with the clients: a folder for each, never to be shared."""
        return self.root / "private"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def audit(self) -> Path:
        """What an attack found; only where scripts/audit.py was run."""
        return self.root / "audit.json"

    @property
    def lock(self) -> Path:
        """Locked by the process that writes the run, for as long as it lives."""
        return self.root / ".lock"


def default_name(method: str, domains: list[str]) -> str:
    return f"{method}-{'-'.join(domains)}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_run(root: Path, record: dict[str, Any], resume: bool) -> None:
    """See, before any work, that ``root`` can hold this run; nothing is written.

    Raises:
        ValueError: another process writes there; the folder holds a run already and ``resume`` is false; it holds none
            and ``resume`` is true; or it holds a run of another configuration.
    """
    folder = RunFolder(root)
    check_output(root)
    if is_locked(folder.lock):
        raise ValueError(_busy(root))
    _check_content(folder, record, resume)


@contextmanager
def opened_run(root: Path, record: dict[str, Any], resume: bool, writes: bool = True) -> Iterator[RunFolder]:
    """``root`` with its ``run.json``, for this process alone until the block ends; a kill ends it too.

    With several processes one of them ``writes``, and holds the lock for all.

    Raises:
        ValueError: as :func:`check_run`, whose answer may have changed while the stages were built.
    """
    folder = RunFolder(root)
    if not writes:
        yield folder
        return
    with locked(folder.lock, _busy(root)):
        _check_content(folder, record, resume)
        if not folder.record.exists():
            write_json(folder.record, recorded(record))
        yield folder


@contextmanager
def locked(path: Path, refusal: str = "") -> Iterator[IO]:
    """A lock of the operating system, held until the block or the process ends, however it ends.

    Waits for it; with a ``refusal`` that is raised instead. A child process that is given the file keeps the lock when
    this process is killed.

    Raises:
        ValueError: another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if refusal:
            _lock_or_refuse(file, refusal)
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock ``path`` now; nothing is written."""
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock_or_refuse(file: IO, refusal: str) -> None:
    for last in (False, False, False, True):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if last:
                raise ValueError(refusal) from error
            time.sleep(0.1)  # a process that only looks (is_locked) is away in an instant
        else:
            return


def _busy(root: Path) -> str:
    return (
        f"{root} is being written by another process, expected a run folder that nobody writes. Wait until that run "
        "ends, or choose another --output"
    )


def _check_content(folder: RunFolder, record: dict[str, Any], resume: bool) -> None:
    root = folder.root
    if not resume:
        if folder.record.exists():
            raise ValueError(f"{root} holds a run already. Choose another --output, or go on with it: --resume true")
        return
    previous = read_run(root)
    with damage_names(folder.record):
        changed = changed_settings(identity(previous["config"]), identity(recorded(record["config"])))
    if changed or previous.get("data") != record["data"]:
        raise ValueError(
            f"{root} holds a run of another configuration: {changed[0] if changed else 'the data'}. Resume with the "
            f"settings in {folder.record}, or choose another --output"
        )


def check_output(folder: Path) -> None:
    """See, before any work, that ``folder`` is one, or can be made.

    Raises:
        ValueError: a file has that name or that of a parent, or nothing may be written there.
    """
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise ValueError(f"got the folder {folder}, but {nearest} is no folder. Choose another one, or remove the file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"got the folder {folder}, but nothing may be written in {nearest}. Choose another one")


def forget_unstarted(folder: RunFolder) -> None:
    """Remove a run that has no round yet: nothing of it can be gone on with, and its folder can be used again."""
    if not folder.rounds.exists():
        folder.record.unlink(missing_ok=True)
        folder.lock.unlink(missing_ok=True)
        with suppress(OSError):  # a folder that holds something else stays
            folder.root.rmdir()


def read_run(root: Path) -> dict[str, Any]:
    """``run.json`` of a run folder.

    Raises:
        FileNotFoundError: ``root`` is not a run folder.
        ValueError: the file is damaged.
    """
    path = RunFolder(root).record
    if not path.is_file():
        raise FileNotFoundError(
            f"no run in {root} (expected {path}). Give the folder that scripts/federate.py printed at its end"
        )
    record = read_object(path, {"config": dict, "data": dict})
    wrong = [name for name, part in {"run": None, **record["config"]}.items() if not isinstance(part, dict)]
    if wrong:
        raise ValueError(
            f"got a damaged {path} (no settings in config.{wrong[0]}), expected them. Restore it from a copy"
        )
    return record


def recorded(value: Any) -> Any:
    """``value`` as a file keeps it from which settings are read again: `as_plain`, with infinity as YAML writes it."""
    return _with_infinity(as_plain(value))


def _with_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_infinity(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_infinity(entry) for entry in value]
    return ("-.inf" if value < 0 else ".inf") if isinstance(value, float) and math.isinf(value) else value


def identity(config: dict) -> dict:
    """The settings that decide what a run computes: not where things lie, nor how it is watched or resumed."""
    run = {name: value for name, value in config["run"].items() if name not in PLACES}
    return {**config, "run": run}


def changed_settings(old: dict, new: dict, prefix: str = "") -> list[str]:
    """Differences as ``name: got X, expected Y``."""
    changed = []
    for name in sorted(set(old) | set(new)):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            changed += changed_settings(before, after, f"{prefix}{name}.")
        elif before != after:
            changed.append(f"{prefix}{name}: got {after!r}, expected {before!r}")
    return changed


def fingerprint(record: dict[str, Any]) -> str:
    """Key of the configuration and data of a run; checkpoints carry it."""
    return content_key({"config": identity(recorded(record["config"])), "data": record["data"]})


def provenance() -> dict[str, Any]:
    """Versions, commit and kind of machine, and the command as it was given, paths included; nothing else names a
    person, a host or a path."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "python": platform.python_version(),
        "versions": versions,
        "machine": {"system": platform.system(), "processor": platform.machine()},
        "commit": git_commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def git_commit() -> str | None:
    """The commit of the source tree, with ``-dirty`` when tracked files differ from it; None outside a checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-dirty" if changed else "")


def _git(*words: str) -> str:
    folder = Path(__file__).resolve().parent
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
