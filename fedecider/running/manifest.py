"""The manifest of a run, ``manifest.json``: its files with their SHA-256, which of them hold customers' data, and its
versions. It is written when the run ends; every command that reads the run compares what it reads.

Not in it: what has checksums of its own (checkpoints, versions), and what others write (trackers, hidden files).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from fedecider.federation.checksums import file_sha256
from fedecider.federation.record import write_json
from fedecider.running.damage import damage_names, damaged, read_object
from fedecider.running.plain import content_key
from fedecider.running.run_folder import SENT_FILE, RunFolder

MANIFEST_FILE = "manifest.json"
VERSIONS = "versions"
SEEDS = "seeds"
"""Folder of the further training runs of a run, a folder each, named after its seed."""
NOT_LISTED = ("checkpoints", "trackers", VERSIONS)
HOLD_CUSTOMERS = ("private", "per_user.parquet", "examples.json", "report.html", SENT_FILE)
"""Of a run, and of each of its further training runs: customers' keys, what they bought, or what one client alone
learned from it."""
MAY_BE_TAKEN = HOLD_CUSTOMERS[1:]
"""Whoever hands a run on may take these away; what reads them does without."""
ADVICE = "Restore it from a copy, or write it anew: federate --resume true with the settings of the run"
ANEW = "Copy or download the whole folder again, or export it anew"
OF_VERSION = "Restore it from a copy, or put another version in force: update --run {home} --version N"


class Manifest(NamedTuple):
    """What ``manifest.json`` says."""

    files: dict[str, str]
    """Path below the folder -> SHA-256."""
    customers: list[str]
    """Those of the files that hold customers' data."""
    in_force: int = 1
    """The version that the run stands for; 1 is the run as it was trained."""
    versions: tuple[int, ...] = ()
    """All others that there are."""


def read_manifest(root: Path) -> Manifest:
    """The manifest of an output directory.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    path = root / MANIFEST_FILE
    if not path.is_file():
        raise ValueError(
            f"got {root} without {MANIFEST_FILE}, expected that of a finished run, with the checksums of its files and "
            f"its versions. {ADVICE}"
        )
    content = read_object(path, {"files": dict, "customers": list, "in_force": int, "versions": list})
    if content.pop("checksum", "") != content_key(content):
        raise damaged(path, "other content than its checksum is of")
    with damage_names(path):
        files = {str(name): str(digest) for name, digest in content["files"].items()}
        customers, versions = [*map(str, content["customers"])], tuple(map(int, content["versions"]))
        return Manifest(files, customers, content["in_force"], versions)


def write_manifest(root: Path) -> None:
    """List every file of a folder as it is now; versions stay as they are.

    They become readable as other files are that this process writes, as a export is for others: but for files in a
    folder that is its owner's alone.

    Raises:
        ValueError: there are versions, and nothing says which of them is in force.
    """
    mask = os.umask(0)
    os.umask(mask)
    names = [name for name in _names(root, root) if name.partition("/")[0] not in (*NOT_LISTED, MANIFEST_FILE)]
    for name in names:
        if (root / name).parent.stat().st_mode & 0o077:
            (root / name).chmod(0o666 & ~mask)  # safetensors writes for its owner alone, all else as the mask says
    old = read_manifest(root) if (root / VERSIONS).is_dir() else Manifest({}, [])
    put_manifest(root, old._replace(files={name: file_sha256(root / name) for name in names}))


def put_manifest(root: Path, manifest: Manifest) -> None:
    """Replace the file at once; which files hold customers' data follows from their names."""
    customers = [name for name in manifest.files if _holds_customers(name)]
    content = manifest._replace(customers=customers)._asdict()
    write_json(root / MANIFEST_FILE, {**content, "checksum": content_key(content)})


def note_changed(root: Path, parts: Iterable[Path]) -> None:
    """Hash some files, or the files of some folders, anew, where there is a manifest; its other lines stay."""
    if not (root / MANIFEST_FILE).is_file():
        return
    old = read_manifest(root)
    files = dict(old.files)
    for part in parts:
        files = {name: value for name, value in files.items() if not _is_in(name, root, part)}
        files |= {name: file_sha256(root / name) for name in _names(root, part)}
    if files != old.files:
        put_manifest(root, old._replace(files=files))


def verify(root: Path, parts: Iterable[Path]) -> None:
    """See that ``parts``, files or folders below ``root``, are exactly what the manifest lists.

    Raises:
        ValueError: a file was changed, is missing or was added, or there is no manifest; the message names it.
    """
    manifest = read_manifest(root)
    advice = ADVICE if RunFolder(root).record.name in manifest.files else ANEW
    advice = OF_VERSION.format(home=root.parent.parent) if root.parent.name == VERSIONS else advice
    for part in parts:
        wanted = {name for name in manifest.files if _is_in(name, root, part)}
        for name in sorted(wanted | (present := set(_names(root, part)))):
            if name not in present:
                raise ValueError(f"{root / name} is missing, expected it as it was written. {advice}")
            if name not in wanted:
                raise ValueError(f"got {root / name}, which is no file of this run: remove it. {advice}")
            if file_sha256(root / name) != manifest.files[name]:
                raise ValueError(f"{root / name} was changed, expected it as it was written. {advice}")


def refuse_lost(root: Path) -> None:
    """``ValueError`` for a run that has lost ``run.json``: it is not taken for adapters that stand for themselves."""
    has_manifest = (root / MANIFEST_FILE).is_file()
    if (has_manifest and RunFolder(root).record.name in read_manifest(root).files) or (root / VERSIONS).is_dir():
        raise ValueError(
            f"{RunFolder(root).record} is missing, expected it as it was written. Restore it from a copy; to hand "
            "adapters over alone: fedecider.load(run).export(folder)"
        )


def _holds_customers(name: str) -> bool:
    words = name.split("/")
    return bool(own := words[2:] if words[0] == SEEDS else words) and own[0] in HOLD_CUSTOMERS


def _is_in(name: str, root: Path, part: Path) -> bool:
    own = part.relative_to(root).as_posix()
    return name == own or name.startswith(f"{own}/")


def _names(root: Path, part: Path) -> Iterator[str]:
    """A file, or the files below a folder, as paths below ``root``, without hidden ones, which nobody reads."""
    for path in [part] if part.is_file() else sorted(part.rglob("*")):
        name = path.relative_to(root)
        if path.is_file() and not any(word.startswith(".") for word in name.parts):
            yield name.as_posix()
