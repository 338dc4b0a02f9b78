"""SHA-256 sums of the files of a folder: written beside them, compared before they are believed.

``SHA256SUMS`` has the form that ``sha256sum --check SHA256SUMS`` reads. Hidden files do not count. Both directions read
every byte once: one to three seconds per gigabyte.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SUMS_FILE = "SHA256SUMS"


def file_sha256(path: Path) -> str:
    """64 hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def write_sums(folder: Path) -> None:
    """Write the sums of all files that are in ``folder`` now."""
    sums = {name: file_sha256(folder / name) for name in _names(folder)}
    (folder / SUMS_FILE).write_text("".join(f"{value}  {name}\n" for name, value in sums.items()), encoding="utf-8")


def check_sums(folder: Path) -> None:
    """See that the files of ``folder`` are those whose sums were written, all of them and no other.

    Raises:
        ValueError: they are not; the message names a file and ends without advice, which is the caller's.
    """
    path = folder / SUMS_FILE
    if not path.is_file():
        raise ValueError(f"got {folder} without {SUMS_FILE}, expected the checksums that are written beside its files")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"got a damaged {path}, expected lines of a SHA-256 sum and a file name") from error
    sums = {name: value for value, _, name in (line.partition("  ") for line in lines)}
    names = _names(folder)
    for name in sorted({*sums, *names}):
        if name not in sums:
            raise ValueError(f"got {folder / name}, expected no file that {path} does not name")
        if name not in names:
            raise ValueError(f"got {folder} without {name!r}, expected every file that {path} names")
        if file_sha256(folder / name) != sums[name]:
            raise ValueError(f"got a damaged {folder / name}, expected the SHA-256 sum that {path} gives for it")


def _names(folder: Path) -> list[str]:
    """Files below ``folder``, the sums themselves and hidden ones left out."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        path.as_posix()
        for path in found
        if path.as_posix() != SUMS_FILE and not any(part.startswith(".") for part in path.parts)
    )
