"""Versions of a run: what updates made of it, which one is in force, and the way back.

Version 1 is the run as it was trained; version N, an output directory of its own with ``version.json``, lies in
``versions/N`` of the run. A version is written aside and gets its name when it is whole, and is in force when the
manifest of the run, which is replaced at once, says so: a kill at any moment leaves the old one or the new one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.federation.record import read_object, write_json
from fedecider.running.manifest import (
    MANIFEST_FILE,
    NOT_LISTED,
    VERSIONS,
    note_changed,
    put_manifest,
    read_manifest,
    verify,
)
from fedecider.running.run_folder import RunFolder, locked
from fedecider.scratch import PREFIX, aside, remove, remove_left, scratch_name

RECORD = "version.json"
NOT_COPIED = (".lock", *NOT_LISTED, f"{PREFIX}*")
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
    return root.parent.parent if root.parent.name == VERSIONS and (root / RECORD).is_file() else root


def read_versions(home: Path) -> Versions:
    """The versions of a run; the run alone where it was never updated.

    Raises:
        ValueError: the manifest is missing or damaged, or a version that it knows is not there.
    """
    folders, (_, _, in_force, versions) = _folders(home), read_manifest(home)
    if lost := [number for number in {*versions, in_force} - {1} if number not in folders]:
        raise ValueError(
            f"{folder_of(home, lost[0])} is missing, expected the version {lost[0]} of the run as it was written. "
            "Restore it from a copy"
        )
    known = _usable(home, in_force)
    return Versions(in_force, known, not any(one.forgets for one in known.values()))


def _usable(home: Path, in_force: int) -> dict[int, Version]:
    """The versions but 1 that one may go back to from that in force."""
    known = {number: _read_version(folder) for number, folder in _folders(home).items()}
    first = max((number for number, one in known.items() if one.forgets and number <= in_force), default=1)
    unfinished = {number for number, one in known.items() if one.forgets and number > in_force}
    return {number: one for number, one in known.items() if number >= first and number not in unfinished}


def _folders(home: Path) -> dict[int, Path]:
    """Number -> folder of every version that is whole, usable or not, in order."""
    return dict(sorted((int(path.name), path) for path in (home / VERSIONS).glob("*") if path.name.isdecimal()))


def _read_version(folder: Path) -> Version:
    verify(folder, [folder / RECORD])
    content = read_object(folder / RECORD, {"made_from": int, "about": str, "forgets": bool})
    return Version(content["made_from"], content["about"], content["forgets"])


def folder_of(home: Path, number: int) -> Path:
    """The output directory of a version."""
    return home if number == 1 else home / VERSIONS / str(number)


def in_force(root: Path) -> Path:
    """The output directory of the version in force. A version named by its folder is itself."""
    return folder_of(root, read_versions(root).in_force)


@contextmanager
def changing(home: Path) -> Iterator[None]:
    """Nobody else changes the versions of a run meanwhile; what a kill left half-written or half-removed goes.

    Raises:
        ValueError: another process writes there.
    """
    busy = f"{home} is being written by another process, expected a run that nobody writes. Wait until it ends"
    with locked(RunFolder(home).lock, busy):
        remove_left(home, alone=True)
        remove_unusable(home)
        yield


def add_version(
    home: Path, made_from: Path, about: str, change: Callable[[RunFolder], Any], forgets: bool = False
) -> int:
    """A new version, in force from now on; ``change`` makes it of a copy of the output directory ``made_from``.

    ``forgets``: nobody can go back any more, and what all others keep of customers is removed; after a kill by the next
    `changing`.
    """
    number = max([1, *_folders(home)]) + 1
    parent = 1 if made_from == home else int(made_from.name)

    def changed(folder: RunFolder) -> None:
        change(folder)
        write_json(folder.root / RECORD, Version(parent, about, forgets)._asdict())
        note_changed(folder.root, [folder.root / RECORD])

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
    put_manifest(home, read_manifest(home)._replace(in_force=number, versions=tuple(_usable(home, number))))


def drop_versions(home: Path) -> None:
    """What a training anew leaves of updates: nothing; the run as it is trained is in force."""
    for path in (home / MANIFEST_FILE, home / VERSIONS):
        remove(path)


def remove_unusable(home: Path) -> None:
    """Remove versions that nobody can go back to: the whole folder; of the run as it was trained what holds customers'
    data, or, where the oldest version left has a file of that name outside ``private/``, all that this one lacks.

    Raises:
        ValueError: what a customer was promised to be removed from cannot be.
    """
    versions = read_versions(home)
    unusable = [folder for number, folder in _folders(home).items() if number not in versions.known]
    customers = [] if versions.has_first else read_manifest(home).customers
    if customers:
        oldest, private = folder_of(home, min(versions.known)), RunFolder(home).private
        left = [name for name in customers if not (home / name).is_relative_to(private) and (oldest / name).is_file()]
        for name in left:
            with aside(home / name) as scratch:
                shutil.copyfile(oldest / name, scratch)
        unusable += [private, *(home / name for name in customers if name not in left)]
    for path in unusable:
        hidden = scratch_name(path)  # no reader meets half a version
        try:
            os.replace(path, hidden)
            shutil.rmtree(hidden) if hidden.is_dir() else hidden.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ValueError(
                f"got {hidden}, which nobody may go back to and which cannot be removed ({error}), expected it to go. "
                "Remove it"
            ) from error
    note_changed(home, [home / name for name in customers])


def write_copy(run: Path, target: Path, change: Callable[[RunFolder], Any]) -> None:
    """A copy of an output directory, changed; it gets its name when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with aside(target) as scratch:
        shutil.copytree(run, scratch, ignore=_left_out(run))
        put_manifest(scratch, read_manifest(run)._replace(in_force=1, versions=()))
        change(RunFolder(scratch))


def _left_out(run: Path) -> Callable[[str, list[str]], set[str]]:
    of_run, below = shutil.ignore_patterns(*NOT_COPIED), shutil.ignore_patterns(f"{PREFIX}*")
    return lambda folder, names: (of_run if Path(folder) == run else below)(folder, names)
