"""Lines of raw files as records: csv rows, JSON objects, checked fields; a line that cannot be read is counted."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fedecider.data.readers.files import RawFile

Record = TypeVar("Record")
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


def read_records(file: RawFile, parse: Callable[[bytes], Record]) -> Iterator[Record]:
    """``parse`` of each line; a line on which it raises is counted as bad and skipped."""
    for number, line in file.lines():
        try:
            record = parse(line)
        except _BAD_LINE as error:
            file.add_bad_line(number, _short(error))
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
    file: RawFile,
    columns: Iterable[str],
    parse: Callable[[dict[str, str]], Record],
    delimiter: str = ",",
    quoting: bool = True,
    expected: str = "the original file",
) -> Iterator[Record]:
    """``parse`` of each row as {column: text}; the header must hold ``columns``; UTF-8 text, else Latin-1.

    Every line is a row: no format read here has line breaks in its fields, and so a stray quote costs one line, which
    is counted as bad, and not all rows up to the next quote. Without ``quoting``, quotes are ordinary characters.
    """
    header: list[str] | None = None
    for number, line in file.lines():
        try:
            row = _split(decode(line), delimiter, quoting)
        except csv.Error as error:
            file.add_bad_line(number, f"quotes: {_short(error)}")
            continue
        if header is None:
            header = row
            _check_header(file.path, header, columns, expected)
            continue
        if len(row) != len(header):
            file.add_bad_line(number, f"{len(row)} columns, expected {len(header)}")
            continue
        try:
            record = parse(dict(zip(header, row, strict=True)))
        except _BAD_LINE as error:
            file.add_bad_line(number, _short(error))
            continue
        yield record


def _check_header(path: Path, header: list[str], columns: Iterable[str], expected: str) -> None:
    """``ValueError`` when a column is missing, or a name stands twice: it could not be told which one is meant."""
    missing = [name for name in columns if name not in header]
    if missing:
        raise ValueError(f"{path}: header {header} has no column {missing}; expected {expected}.")
    twice = sorted(name for name, count in Counter(header).items() if name and count > 1)
    if twice:
        raise ValueError(
            f"{path}: header {header} has more than one column {twice}; expected each name once. "
            "Rename or remove the columns that are not meant."
        )


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
