"""The folder of one run: its name, what is written into it, and everything needed to repeat it."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedecider.federation.record import write_json
from fedecider.running.damage import damage_names, read_object
from fedecider.running.plain import as_plain, content_key
from fedecider.scratch import remove_left

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "numba")


LOOK_S = 0.4
"""How long a lock is waited for before it is refused: a process that only looks (`is_locked`) is away in an instant."""
PLACES = ("output", "resume", "cache", "data", "tracker")
"""Settings of where and how, which may differ when a run is resumed; ``data`` is compared by content."""


SITE_LOGS, SENT_FILE = "training.jsonl", "sent.safetensors"
"""What a site of a deployment keeps of its training, in its own folder."""
SITE = "site"
"""Entry of ``run.json`` that tells the folder of one company at its site from that of a run."""


@dataclass
class RunFolder:
    """Paths inside ``runs/<name>/``."""

    root: Path

    def __post_init__(self) -> None:
        root = self.root
        self.record = root / "run.json"
        self.selection = root / "hyperparameter_selection.json"
        """Which of several settings the run took; only where it had the choice."""
        self.chosen = root / "chosen.yaml"
        """The configuration that was chosen for the data; only where nobody gave one."""
        self.rounds = root / "rounds.jsonl"
        self.metrics = root / "metrics.json"
        self.results = root / "results.md"
        """The table in Markdown; written after all else that a table over several runs needs."""
        self.per_user = root / "per_user.parquet"
        self.fusion_weights = root / "fusion_weights.json"
        self.communication = root / "communication.json"
        self.adapters = root / "adapters"
        self.backbone = root / "backbone"
        self.private = root / "private"
        """What stays with the clients: a folder for each, never to be shared."""
        self.checkpoints = root / "checkpoints"
        self.audit = root / "audit.json"
        """What an attack found; only where scripts/audit.py was run."""
        self.lock = root / ".lock"
        """Locked by the process that writes the run, for as long as it lives."""


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
        remove_left(root, alone=True)
        if not folder.record.exists():
            write_json(folder.record, recorded(record))
        try:
            yield folder
        except KeyboardInterrupt as error:
            begun = folder.rounds.exists()
            raise KeyboardInterrupt(f"{root} goes on with --resume true" if begun else "") from error


@contextmanager
def locked(path: Path, refusal: str = "") -> Iterator[int]:
    """A lock of the operating system, held until the block or the process ends, however it ends.

    Waits for it; with a ``refusal`` that is raised instead. Gives the file's descriptor: where processes inherit files,
    a child that is given it keeps the lock when this process is killed.

    Raises:
        ValueError: another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=LOOK_S if refusal else -1, poll_interval=0.1)
    except Timeout as error:
        raise ValueError(refusal) from error
    try:
        yield int(lock._context.lock_file_fd or 0)  # the only place where every version has it
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock ``path`` now; nothing is written."""
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    except OSError:  # nothing may be written there, so nobody does
        return False
    lock.release()
    return False


def _busy(root: Path) -> str:
    return (
        f"{root} is being written by another process, expected an output directory that nobody writes. Wait until that "
        "run ends, or choose another --output"
    )


def _check_content(folder: RunFolder, record: dict[str, Any], resume: bool) -> None:
    root = folder.root
    if not resume:
        check_new(root)
        return
    previous = read_run(root)
    with damage_names(folder.record):
        before, now = identity(previous["config"]), identity(recorded(record["config"]))
        if before["run"].get("method") != now["run"].get("method"):
            raise ValueError(
                f"{root} holds a run of the method {before['run'].get('method')}, expected {now['run'].get('method')}. "
                "Resume with its method, or choose another --output"
            )
        changed = changed_settings(before, now)
    if changed or previous.get("data") != record["data"]:
        raise ValueError(
            f"{root} holds a run of another configuration: {changed[0] if changed else 'the data'}. Resume with the "
            f"settings in {folder.record}, or choose another --output"
        )
    for sentence in other_code(previous, record):
        print(f"warning: {root} is gone on with under {sentence}", file=sys.stderr)


def check_new(root: Path) -> None:
    """``ValueError`` where ``root`` holds a run."""
    if RunFolder(root).record.exists():
        raise ValueError(f"{root} holds a run already. Choose another --output, or go on with it: --resume true")


def other_code(previous: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """Under which other libraries or commit a run is gone on with: its figures may differ from those of either."""
    found = []
    old, new = (one.get("versions") or {} for one in (previous, record))
    other = [f"{name} {new[name]}, not {old[name]}" for name in old if name in new and new[name] != old[name]]
    if other:
        found.append(f"other libraries ({', '.join(other)}): its figures need not be those of one run")
    commits = [one.get("commit") for one in (previous, record)]
    if all(commits) and commits[0] != commits[1]:
        found.append(f"another commit ({commits[1]}, not {commits[0]}): its figures need not be those of one run")
    return found


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


def check_file(path: Path, is_own: Callable[[Path], bool]) -> None:
    """See, before any work, that a file can be written: none is there, or one that ``is_own`` knows as an earlier one.

    Raises:
        ValueError: anything else has that name, or nothing may be written there.
    """
    if path.is_dir():
        raise ValueError(f"got the output {path}, which is a folder, expected a file")
    check_output(path.parent)
    try:
        replaced = not path.exists() or not path.stat().st_size or is_own(path)
    except (OSError, ValueError, TypeError):
        replaced = False
    if not replaced:
        raise ValueError(
            f"got the output {path}, which is there already and was not written by this command, expected a new file. "
            "Choose another name, or move it away"
        )


def forget_unstarted(folder: RunFolder) -> None:
    """Remove a run that has no round yet: nothing of it can be gone on with, and its folder can be used again."""
    if not folder.rounds.exists():
        folder.record.unlink(missing_ok=True)
        folder.lock.unlink(missing_ok=True)
        with suppress(OSError):  # a folder that holds something else stays
            folder.root.rmdir()


def read_run(root: Path) -> dict[str, Any]:
    """``run.json`` of an output directory.

    Raises:
        FileNotFoundError: ``root`` is not an output directory.
        ValueError: the file is damaged.
    """
    path = RunFolder(root).record
    if not path.is_file():
        if RunFolder(root).metrics.is_file() and RunFolder(root).adapters.is_dir():
            raise FileNotFoundError(
                f"no run in {root} (expected {path}): an older version wrote it at a site of a deployment, without "
                "its settings. Its figures are in results.md and metrics.json, recommend and serve read it"
            )
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


def refuse_site(root: Path, record: Mapping[str, Any]) -> None:
    """``ValueError`` for the folder of one company at its site, where the rounds of all companies are asked for."""
    if SITE in record:
        raise ValueError(
            f"got {root}, the folder of one company at its site, expected that of a run: the rounds of all companies "
            "are in the folder of their server"
        )


def read_metrics(folder: RunFolder) -> dict[str, Any]:
    """``metrics.json`` of a finished run.

    Raises:
        ValueError: the run diverged, and has no figures; or the file is missing or damaged.
    """
    metrics = read_object(folder.metrics)
    if "diverged" in metrics:
        raise ValueError(
            f"got {folder.root}, a run that diverged ({metrics['diverged']}), expected a finished one. Lower the "
            "learning rate and run again"
        )
    return metrics


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
