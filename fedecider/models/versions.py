"""Versions of a run: what updates made of it, which one is in force, and the way back.

Version 1 is the run as it was trained; version N, a run folder of its own, lies in ``versions/N`` of the run. A version
is written aside and gets its name when it is whole, and is in force when ``versions.json``, which is replaced at once,
says so: a kill at any moment leaves the old one or the new one. Files that a version has in common with the one that it
is made from are links to the same bytes: whoever changes one puts a new file in its place.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.federation.record import read_object, write_json
from fedecider.running.run_folder import RunFolder, damage_names, locked

FOLDER, RECORD = "versions", "versions.json"
SCRATCH = ".*.tmp"
NOT_COPIED = (".lock", "checkpoints", FOLDER, RECORD, SCRATCH)
"""Of the run itself: a company may be called ``versions`` or ``checkpoints``."""


class Versions(NamedTuple):
    """What ``versions.json`` of a run says."""

    in_force: int = 1
    made_from: Mapping[int, int] = {}
    told: Mapping[int, str] = {}
    """What each is, in a sentence."""
    gone: tuple[int, ...] = ()
    """Versions that hold what was to be forgotten: nobody goes back to them, and what they hold is removed."""

    @property
    def there(self) -> list[int]:
        return [one for one in (1, *sorted(self.made_from)) if one not in self.gone]

    def in_words(self) -> list[str]:
        return [
            f"version {one}: {self.told.get(one, 'the run as it was trained')}"
            + (f" (made from {self.made_from[one]})" if self.made_from.get(one) in self.there else "")
            + (", in force" if one == self.in_force else "")
            for one in self.there
        ]


def home_of(root: Path) -> Path:
    """The run that ``root``, itself or one of its versions, belongs to."""
    return root.parent.parent if root.parent.name == FOLDER and (root.parent.parent / RECORD).is_file() else root


def read_versions(home: Path) -> Versions:
    """The versions of a run; the run alone where it was never updated.

    Raises:
        ValueError: the file is damaged, or the version in force is not there.
    """
    path = home / RECORD
    if not path.is_file():
        return Versions()
    content = read_object(path, {"in_force": int, "versions": dict, "gone": list})
    with damage_names(path):
        made_from = {int(number): int(one["made_from"]) for number, one in content["versions"].items()}
        told = {int(number): str(one["told"]) for number, one in content["versions"].items()}
        found = Versions(content["in_force"], made_from, told, tuple(map(int, content["gone"])))
        if found.in_force not in found.there or not folder_of(home, found.in_force).is_dir():
            raise ValueError(f"version {found.in_force} is in force, which is not there")
    return found


def _write(home: Path, versions: Versions) -> None:
    told = {
        str(number): {"made_from": one, "told": versions.told[number]} for number, one in versions.made_from.items()
    }
    write_json(home / RECORD, {"in_force": versions.in_force, "versions": told, "gone": list(versions.gone)})


def folder_of(home: Path, number: int) -> Path:
    """The run folder of a version."""
    return home if number == 1 else home / FOLDER / str(number)


def in_force(root: Path) -> Path:
    """The run folder that a run stands for: that of the version in force. A version named by its folder is itself."""
    return folder_of(root, read_versions(root).in_force)


@contextmanager
def changing(home: Path) -> Iterator[None]:
    """Nobody else changes the versions of a run meanwhile; what a kill left half-written, half-removed or without its
    line in the record goes.

    Raises:
        ValueError: another process writes there.
    """
    busy = f"{home} is being written by another process, expected a run that nobody writes. Wait until it ends"
    with locked(RunFolder(home).lock, busy):
        for path in [*(home / FOLDER).glob(".*.tmp"), *home.glob(".*.tmp")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        remove_gone(home)
        yield


def add_version(home: Path, made_from: Path, told: str, change: Callable[[RunFolder], Any], alone: bool = False) -> int:
    """A new version, in force from now on; ``change`` makes it of a copy of the run folder ``made_from``.

    ``alone``: nobody can go back any more, and what all others keep of customers is removed; after a kill by the next
    `changing`.
    """
    versions = read_versions(home)
    number = max([1, *versions.made_from]) + 1
    parent = 1 if made_from == home else int(made_from.name)
    write_copy(made_from, folder_of(home, number), change)
    new = versions._replace(
        in_force=number,
        made_from={**versions.made_from, number: parent},
        told={**versions.told, number: told},
        gone=tuple(sorted({*versions.gone, *(versions.there if alone else ())})),
    )
    _write(home, new)
    remove_gone(home)
    return number


def go_back(home: Path, number: int) -> Versions:
    """Put another version in force.

    Raises:
        ValueError: there is no such version.
    """
    versions = read_versions(home)
    if number not in versions.there:
        said = ", ".join(map(str, versions.there))
        gone = ": the other one held customers who were forgotten" if number in versions.gone else ""
        raise ValueError(f"got the version {number} of {home}, expected one of {said}{gone}")
    if number != versions.in_force:
        _write(home, versions._replace(in_force=number))
    return read_versions(home)


def drop_versions(home: Path) -> None:
    """What a training anew leaves of updates: nothing; the run as it is trained is in force."""
    (home / RECORD).unlink(missing_ok=True)
    shutil.rmtree(home / FOLDER, ignore_errors=True)


def remove_gone(home: Path) -> None:
    """Versions that nobody can go back to: the whole folder, of the run as it was trained the private part.

    Raises:
        ValueError: what a customer was promised to be removed from cannot be.
    """
    there = read_versions(home).there
    numbered = [path for path in (home / FOLDER).glob("*") if path.name.isdecimal()]
    gone = [path for path in numbered if int(path.name) not in there]
    for path in [*gone, *([] if 1 in there else [RunFolder(home).private])]:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ValueError(
                f"got {path}, which nobody may go back to and which cannot be removed ({error}), expected it to go. "
                "Remove it"
            ) from error


def write_copy(run: Path, target: Path, change: Callable[[RunFolder], Any]) -> None:
    """A copy of a run folder, of links to its files, changed; it gets its name when it is whole.

    ``change`` puts new files in the place of old ones, and writes into none that is there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        shutil.copytree(run, scratch, ignore=_left_out(run), copy_function=_linked)
        change(RunFolder(scratch))
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _left_out(run: Path) -> Callable[[str, list[str]], set[str]]:
    of_run, below = shutil.ignore_patterns(*NOT_COPIED), shutil.ignore_patterns(SCRATCH)
    return lambda folder, names: (of_run if Path(folder) == run else below)(folder, names)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one that has no links
        shutil.copy2(source, target)
