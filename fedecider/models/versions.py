"""Versions of a run: what updates made of it, which one is in force, and the way back.

Version 1 is the run as it was trained; version N, a run folder of its own with ``version.json``, lies in ``versions/N``
of the run. A version is written aside and gets its name when it is whole, and is in force when ``versions/current``,
which is replaced at once, holds its number: a kill at any moment leaves the old one or the new one.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.federation.record import read_object, write_json, write_text
from fedecider.running.damage import damage_names
from fedecider.running.run_folder import RunFolder, locked

FOLDER, CURRENT, RECORD = "versions", "current", "version.json"
SCRATCH = ".*.tmp"
NOT_COPIED = (".lock", "checkpoints", FOLDER, SCRATCH)
"""Of the run itself: a company may be called ``versions`` or ``checkpoints``."""


class Version(NamedTuple):
    """What ``version.json`` says."""

    made_from: int
    about: str
    """What it is, in a sentence."""
    forgets: bool = False
    """Whether all versions before it hold what was to be forgotten: nobody goes back to them."""


class Versions(NamedTuple):
    """The versions of a run that can be put in force, beside the run as it was trained."""

    in_force: int
    known: Mapping[int, Version]
    has_first: bool = True
    """Whether one may go back to the run as it was trained."""

    @property
    def numbers(self) -> list[int]:
        return [1, *sorted(self.known)] if self.has_first else sorted(self.known)

    def in_words(self) -> list[str]:
        lines = []
        for number in self.numbers:
            version = self.known.get(number, Version(0, "the run as it was trained"))
            origin = f" (made from {version.made_from})" if version.made_from in self.numbers else ""
            lines.append(f"version {number}: {version.about}{origin}{', in force' * (number == self.in_force)}")
        return lines


def home_of(root: Path) -> Path:
    """The run that ``root``, itself or one of its versions, belongs to."""
    return root.parent.parent if root.parent.name == FOLDER and (root / RECORD).is_file() else root


def read_versions(home: Path) -> Versions:
    """The versions of a run; the run alone where it was never updated.

    Raises:
        ValueError: a file is damaged or missing, or the version in force is not there.
    """
    folders = _folders(home)
    if not folders and not _current(home).is_file():
        return Versions(1, {})
    path = _current(home)
    if not path.is_file():
        raise ValueError(
            f"got {home / FOLDER} without the file {CURRENT}, expected the number of the version in force in it. Write "
            f"one of {', '.join(map(str, [1, *folders]))} there"
        )
    with damage_names(path):
        in_force = int(path.read_text(encoding="utf-8"))
        if in_force not in (1, *folders):
            raise ValueError(f"version {in_force} is in force, which is not there")
    known = {number: _read_version(folder) for number, folder in folders.items()}
    first = max((number for number, one in known.items() if one.forgets and number <= in_force), default=1)
    unfinished = {number for number, one in known.items() if one.forgets and number > in_force}
    known = {number: one for number, one in known.items() if number >= first and number not in unfinished}
    return Versions(in_force, known, first == 1)


def _current(home: Path) -> Path:
    return home / FOLDER / CURRENT


def _folders(home: Path) -> dict[int, Path]:
    """Number -> folder of every version that is whole, usable or not, in order."""
    return dict(sorted((int(path.name), path) for path in (home / FOLDER).glob("*") if path.name.isdecimal()))


def _read_version(folder: Path) -> Version:
    content = read_object(folder / RECORD, {"made_from": int, "about": str, "forgets": bool})
    return Version(content["made_from"], content["about"], content["forgets"])


def folder_of(home: Path, number: int) -> Path:
    """The run folder of a version."""
    return home if number == 1 else home / FOLDER / str(number)


def in_force(root: Path) -> Path:
    """The run folder that a run stands for: that of the version in force. A version named by its folder is itself."""
    return folder_of(root, read_versions(root).in_force)


@contextmanager
def changing(home: Path) -> Iterator[None]:
    """Nobody else changes the versions of a run meanwhile; what a kill left half-written or half-removed goes.

    Raises:
        ValueError: another process writes there.
    """
    busy = f"{home} is being written by another process, expected a run that nobody writes. Wait until it ends"
    with locked(RunFolder(home).lock, busy):
        for path in [*(home / FOLDER).glob(SCRATCH), *home.glob(SCRATCH)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        remove_unusable(home)
        yield


def add_version(
    home: Path, made_from: Path, about: str, change: Callable[[RunFolder], Any], forgets: bool = False
) -> int:
    """A new version, in force from now on; ``change`` makes it of a copy of the run folder ``made_from``.

    ``forgets``: nobody can go back any more, and what all others keep of customers is removed; after a kill by the next
    `changing`.
    """
    number = max([1, *_folders(home)]) + 1
    parent = 1 if made_from == home else int(made_from.name)

    def changed(folder: RunFolder) -> None:
        change(folder)
        write_json(folder.root / RECORD, Version(parent, about, forgets)._asdict())

    if not _current(home).is_file():
        _current(home).parent.mkdir(exist_ok=True)
        _put_in_force(home, 1)
    write_copy(made_from, folder_of(home, number), changed)
    _put_in_force(home, number)
    remove_unusable(home)
    return number


def go_back(home: Path, number: int) -> None:
    """Put another version in force.

    Raises:
        ValueError: there is no such version, or it holds customers who were forgotten.
    """
    versions = read_versions(home)
    if number not in versions.numbers:
        forgotten = f": before {versions.numbers[0]} customers were forgotten" if not versions.has_first else ""
        raise ValueError(
            f"got the version {number} of {home}, expected one of {', '.join(map(str, versions.numbers))}{forgotten}"
        )
    if number != versions.in_force:
        _put_in_force(home, number)


def _put_in_force(home: Path, number: int) -> None:
    write_text(_current(home), f"{number}\n")


def drop_versions(home: Path) -> None:
    """What a training anew leaves of updates: nothing; the run as it is trained is in force."""
    shutil.rmtree(home / FOLDER, ignore_errors=True)


def remove_unusable(home: Path) -> None:
    """Remove versions that nobody can go back to: the whole folder, of the run as it was trained the private part.

    Raises:
        ValueError: what a customer was promised to be removed from cannot be.
    """
    versions = read_versions(home)
    unusable = [folder for number, folder in _folders(home).items() if number not in versions.known]
    for folder in [*unusable, *([] if versions.has_first else [RunFolder(home).private])]:
        path = folder.with_name(f".{folder.name}.tmp")  # no reader meets half a version
        try:
            os.replace(folder, path)
            shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ValueError(
                f"got {path}, which nobody may go back to and which cannot be removed ({error}), expected it to go. "
                "Remove it"
            ) from error


def write_copy(run: Path, target: Path, change: Callable[[RunFolder], Any]) -> None:
    """A copy of a run folder, changed; it gets its name when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        shutil.copytree(run, scratch, ignore=_left_out(run))
        change(RunFolder(scratch))
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _left_out(run: Path) -> Callable[[str, list[str]], set[str]]:
    of_run, below = shutil.ignore_patterns(*NOT_COPIED), shutil.ignore_patterns(SCRATCH)
    return lambda folder, names: (of_run if Path(folder) == run else below)(folder, names)
