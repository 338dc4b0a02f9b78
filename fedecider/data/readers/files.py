"""Raw files: found by name, opened plain or gzip, read line by line with counts and progress, refused when damaged."""

from __future__ import annotations

import gzip
import logging
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
"""Takes one line of news for who waits: how far a file is read, what was left out."""

TELL_EVERY_S = 5.0
NUM_EXAMPLES = 20
_LOOK_EVERY = 1 << 14
"""Lines between two looks at the clock: about 0.1 s."""
MAX_LINE_BYTES = 16 << 20
"""A few kilobytes of gzip can be a line of gigabytes."""
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"7z\xbc\xaf": "a 7-zip archive",
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "compressed with gzip twice",
}
"""First bytes -> what a file is that should be text."""


def to_stderr(news: str) -> None:
    """The ``Tell`` that is used where none is given."""
    print(news, file=sys.stderr, flush=True)


class RawFile:
    """One raw file while it is read: blank and bad lines counted, bad ones named, an error beyond ``max_bad_lines``."""

    def __init__(self, path: Path, max_bad_lines: int, tell: Tell | None = None) -> None:
        self.path = path
        self.max_bad_lines = max_bad_lines
        self.tell = tell
        self.num_blank = 0
        self.num_bad = 0
        self.bad_lines: list[str] = []
        """The first ones, as file:line: why."""

    def add_bad_line(self, line_number: int, why: str) -> None:
        """Count one bad line; ``ValueError`` when there are more than allowed."""
        place = f"{self.path.name}:{line_number}: {why}"
        self.num_bad += 1
        if len(self.bad_lines) < NUM_EXAMPLES:
            self.bad_lines.append(place)
        if self.num_bad > self.max_bad_lines:
            raise ValueError(
                f"{self.path}: more than {self.max_bad_lines} bad lines, the last one at {place}; expected a file in "
                "its original format. Check the file, or raise max_bad_lines."
            )
        logger.warning("skipped a bad line, %s", place)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(line number from 1, line), blank lines skipped, in constant memory; tells every few seconds how far it is.

        Errors: ``ValueError`` for an empty file, a truncated or damaged gzip, UTF-16, and what is no text at all.
        """
        number = self.num_blank = 0
        try:
            with open(self.path, "rb") as raw, _unpacked(raw) as unpacked:
                told = time.monotonic()
                for number, line in enumerate(iter(lambda: unpacked.readline(MAX_LINE_BYTES + 1), b""), 1):
                    if len(line) > MAX_LINE_BYTES:
                        raise ValueError(
                            f"{self.path}: line {number} has more than {MAX_LINE_BYTES:,} bytes; expected one record a "
                            "line. Check the file."
                        )
                    if number == 1:
                        line = self._first_line(line)
                    if line.isspace() or not line:
                        self.num_blank += 1
                    else:
                        yield number, line
                    if not number % _LOOK_EVERY and self.tell and time.monotonic() - told >= TELL_EVERY_S:
                        told = time.monotonic()
                        self.tell(f"{self.path.name}: {number:,} lines read ({self._share(raw):.0%} of the file)")
        except EOFError as error:
            raise ValueError(
                f"{self.path} is a truncated gzip file (it ends after line {number}); expected a whole one. "
                "Download it again."
            ) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{self.path} is a damaged gzip file (after line {number}: {error}); expected a readable one. "
                "Download it again."
            ) from error
        if number == self.num_blank:
            raise ValueError(f"{self.path} is empty; expected one record a line. Download it again.")

    def _first_line(self, line: bytes) -> bytes:
        """``line`` without a byte order mark; ``ValueError`` for what shows that this is no UTF-8 or Latin-1 text."""
        what = next((what for magic, what in _OTHER_FORMATS.items() if line.startswith(magic)), "")
        if what:
            raise ValueError(f"{self.path} is {what}; expected text, plain or gzip. Unpack it first.")
        if line.startswith(_UTF_16) or b"\0" in line:
            what = "UTF-16 text" if line.startswith(_UTF_16) else "no text, or UTF-16 (its first line holds zero bytes)"
            raise ValueError(
                f"{self.path} is {what}; expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8 {self.path.name}"
            )
        return line.removeprefix(b"\xef\xbb\xbf")

    def _share(self, raw: BinaryIO) -> float:
        return raw.tell() / max(1, self.path.stat().st_size)


def _unpacked(raw: BinaryIO) -> Any:
    """The content of a plain or gzip file: told by the first bytes, for copies often drop or keep ".gz" wrongly."""
    is_gzip = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return gzip.open(raw, "rb") if is_gzip else raw


def find_file(folder: Path, names: Iterable[str], what: str) -> Path:
    """The first of ``names`` (each also with ``.gz``, any letter case) in ``folder``; ``ValueError`` without any."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"raw folder {folder} {problem}; expected the folder with the {what}. Check --raw.")
    names = list(names)
    path = find_optional(folder, names)
    if path is not None:
        return path
    found = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
    listing = ", ".join(found[:12]) + (", ..." if len(found) > 12 else "") if found else "no file"
    raise ValueError(f"no {what} in {folder}: expected {' or '.join(names)} (or .gz), found {listing}. Check --raw.")


def find_optional(folder: Path, names: Iterable[str]) -> Path | None:
    """As ``find_file``, but None where there is no such file; ``ValueError`` where only a folder has the name."""
    present = {path.name.lower(): path for path in sorted(folder.iterdir())} if folder.is_dir() else {}
    spellings = [name.lower() + ending for name in names for ending in ("", ".gz")]
    found = [present[spelling] for spelling in spellings if spelling in present]
    files = [path for path in found if path.is_file()]
    if found and not files:
        raise ValueError(f"{found[0]} is a folder; expected a file of this name. Move the file out of it, or away.")
    return files[0] if files else None


def describe_bad_lines(files: Iterable[RawFile]) -> dict[str, Any]:
    """The bad lines of all files of a source together: count, and the first examples as file:line: why."""
    files = list(files)
    return {
        "count": sum(file.num_bad for file in files),
        "examples": [example for file in files for example in file.bad_lines],
    }
