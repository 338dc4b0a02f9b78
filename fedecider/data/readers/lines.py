"""Raw files as streams of lines: gzip or plain, bad lines counted and named, clear errors for damaged files."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Record = TypeVar("Record")
LOG_EVERY = 2_000_000
NUM_EXAMPLES = 20
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character outside the basic plane: JSON can spell it alone, UTF-8 cannot."""
_BAD_LINE = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    MemoryError,
)
"""What parsing a broken or hostile line may raise."""


class BadLines:
    """The lines of one file that could not be read: counted, named in the log, an error beyond ``limit``."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.count = 0
        self.examples: list[str] = []

    def add(self, line_number: int, why: str) -> None:
        """Count one bad line; ``ValueError`` when there are more than the limit."""
        place = f"{self.path.name}:{line_number}: {why}"
        self.count += 1
        if len(self.examples) < NUM_EXAMPLES:
            self.examples.append(place)
        if self.count > self.limit:
            raise ValueError(
                f"{self.path}: more than {self.limit} bad lines, the last one at {place}; expected a file in its "
                "original format. Check the file, or raise max_bad_lines."
            )
        logger.warning("skipped a bad line, %s", place)


def find_file(folder: Path, names: Iterable[str], what: str) -> Path:
    """The first of ``names`` (each also with ``.gz``, any letter case) in ``folder``; ``ValueError`` without any."""
    if not folder.is_dir():
        raise ValueError(f"raw folder {folder} does not exist; expected the folder with the {what}. Check --raw.")
    names = list(names)
    path = find_optional(folder, names)
    if path is not None:
        return path
    found = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
    listing = ", ".join(found[:12]) + (", ..." if len(found) > 12 else "") if found else "no file"
    raise ValueError(f"no {what} in {folder}: expected {' or '.join(names)} (or .gz), found {listing}. Check --raw.")


def find_optional(folder: Path, names: Iterable[str]) -> Path | None:
    """As ``find_file``, but None where there is no such file."""
    present = (
        {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_file()} if folder.is_dir() else {}
    )
    spellings = [name.lower() + ending for name in names for ending in ("", ".gz")]
    return next((present[spelling] for spelling in spellings if spelling in present), None)


def describe_bad_lines(counters: Iterable[BadLines]) -> dict[str, Any]:
    """The bad lines of all files of a source together: count, and the first examples as file:line: why."""
    counters = list(counters)
    return {
        "count": sum(bad.count for bad in counters),
        "examples": [example for bad in counters for example in bad.examples],
    }


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of a plain or gzip file, blank lines skipped, in constant memory.

    Errors: ``ValueError`` for an empty file, a truncated or damaged gzip.
    """
    number = 0
    some = False
    try:
        # Told by the first bytes, not by the name: browsers and copies often drop or keep ".gz" wrongly.
        with open(path, "rb") as probe:
            is_gzip = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if is_gzip else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith(b"\xef\xbb\xbf"):
                    line = line[3:]
                if not line.isspace():
                    some = True
                    yield number, line
                if number % LOG_EVERY == 0:
                    logger.info("%s: %s lines read", path.name, f"{number:,}")
    except EOFError as error:
        raise ValueError(
            f"{path} is a truncated gzip file (it ends after line {number}); expected a whole one. Download it again."
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is a damaged gzip file (after line {number}: {error}); expected a readable one. Download it again."
        ) from error
    if not some:
        raise ValueError(f"{path} is empty; expected one record a line. Download it again.")


def read_records(path: Path, parse: Callable[[bytes], Record], bad: BadLines) -> Iterator[Record]:
    """``parse`` of each line; a line on which it raises is counted in ``bad`` and skipped."""
    for number, line in read_lines(path):
        try:
            record = parse(line)
        except _BAD_LINE as error:
            bad.add(number, _short(error))
            continue
        yield record


def json_object(line: bytes) -> dict[str, Any]:
    """The JSON object of one line; ``ValueError`` for anything else."""
    value = json.loads(line)
    if type(value) is not dict:
        raise ValueError(f"got a JSON {type(value).__name__}, expected an object")
    return value


def text_field(record: dict[str, Any], name: str) -> str:
    """A non-empty text of ``record``; an integer is taken as its digits. ``KeyError`` / ``ValueError`` otherwise."""
    value = record[name]
    if type(value) is int:
        return str(value)
    if type(value) is not str or not value:
        raise ValueError(f"field {name!r} is {value!r}, expected a text")
    # A key that cannot be written as UTF-8 would fail only at the end, when the tables are saved.
    if not value.isascii() and SURROGATE.search(value):
        raise ValueError(f"field {name!r} is {value!r}, expected a text without halves of a character")
    return value


def whole_number(value: Any, name: str) -> int:
    """``value`` (number or digits) as a whole number of 64 bits; ``ValueError`` otherwise."""
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        number = None
    if number is None or not -(1 << 63) <= number < 1 << 63 or (type(value) is float and number != value):
        raise ValueError(f"{name} is {value!r}, expected a whole number of at most 64 bits")
    return number


def finite_number(value: Any, name: str) -> float:
    """``value`` (number or text) as a finite float; ``ValueError`` otherwise."""
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!r}, expected a finite number")
    return number


def read_csv(
    path: Path,
    columns: Iterable[str],
    parse: Callable[[dict[str, str]], Record],
    bad: BadLines,
    delimiter: str = ",",
    quoting: bool = True,
    expected: str = "the original file",
) -> Iterator[Record]:
    """``parse`` of each row as {column: text}; the header must hold ``columns``; UTF-8 text, else Latin-1.

    Every line is a row: no format read here has line breaks in its fields, and so a stray quote costs one line, which
    is counted in ``bad``, and not all rows up to the next quote. Without ``quoting``, quotes are ordinary characters.
    """
    header: list[str] | None = None
    for number, line in read_lines(path):
        try:
            row = _split(decode(line), delimiter, quoting)
        except csv.Error as error:
            bad.add(number, f"quotes: {_short(error)}")
            continue
        if header is None:
            header = row
            missing = [name for name in columns if name not in header]
            if missing:
                raise ValueError(f"{path}: header {header} has no column {missing}; expected {expected}.")
            continue
        if len(row) != len(header):
            bad.add(number, f"{len(row)} columns, expected {len(header)}")
            continue
        try:
            record = parse(dict(zip(header, row, strict=True)))
        except _BAD_LINE as error:
            bad.add(number, _short(error))
            continue
        yield record


def decode(line: bytes) -> str:
    """UTF-8 where it is valid, else Latin-1 (MovieLens wrote Latin-1 up to ml-1m and UTF-8 after it)."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return line.decode("latin-1")


def _split(line: str, delimiter: str, quoting: bool) -> list[str]:
    line = line.rstrip("\r\n")
    if not quoting or '"' not in line:
        return line.split(delimiter)
    return next(csv.reader((line,), delimiter=delimiter, strict=True))  # strict: an open quote is an error


def _short(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"no field {error}"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
