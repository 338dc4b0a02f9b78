"""Files of tables, of whatever form: their columns, their rows in batches, and what was guessed of their form.

Parquet; text with a delimiter; JSON, an object a line (or, as old dumps have it, a Python dict a line); each plain or
gzip, one file or a folder of parts.
"""

from __future__ import annotations

import ast
import codecs
import io
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from fedecider.data.readers.reading import MAX_LINE_BYTES, OTHER_FORMATS, SURROGATE, RawFile, clean, unpacked

PARQUET, TEXT, JSON = "Parquet", "text", "JSON"
ENDINGS = {
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".csv": TEXT,
    ".tsv": TEXT,
    ".txt": TEXT,
    ".dat": TEXT,
    ".jsonl": JSON,
    ".ndjson": JSON,
    ".json": JSON,
}
EXPECTED = "expected .parquet, .csv or .tsv, .txt, .jsonl or .json, plain or .gz, or a folder of such parts"
LOOK_BYTES = 1 << 20
"""Of the beginning of a file, by which its form is guessed."""
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
ROWS_AT_ONCE = 10_000
"""JSON records that become columns together."""
RECORDS_FOR_NAMES = 1000
"""The first JSON records, whose fields are the columns."""
_QUOTE_IN_FIELD = r'\\"(?![{delimiter}\r\n]|$)'


@dataclass(frozen=True)
class FileOptions:
    """What somebody says of the form of a file; None and empty: it is guessed."""

    delimiter: str | None = None
    encoding: str | None = None
    quoting: bool | None = None
    header: tuple[str, ...] = ()
    """Names of the columns of a file without a line of names."""


class Found(NamedTuple):
    """The form of one text file."""

    delimiter: str
    encoding: str
    quoting: bool
    escape: bool
    """Quotes inside a field have a backslash before them."""
    header: tuple[str, ...]
    clicks: bool = False
    """Rows are impressions of MIND, of which every clicked item is an event."""


MIND_EVENTS = ("impression", "user", "time", "history", "item")
MIND_ITEMS = ("item", "category", "subcategory", "title", "abstract", "url", "title_entities", "abstract_entities")
MIND_TIMES = "%m/%d/%Y %I:%M:%S %p"
_IMPRESSIONS = re.compile(r"\d+\t[^\t]+\t[^\t]+\t[^\t]*\t\S+-[01]( \S+-[01])*")
_NEWS = re.compile(r"[^\t]+\t[^\t]*\t[^\t]*\t[^\t]+\t[^\t]*\thttps?:[^\t]*\t\[.*\]\t\[.*\]")

NESTED = (
    "; of one object with a list of orders inside make such lines: "
    "pandas.json_normalize(json.load(open(FILE))['orders'], 'line_items', [['customer', 'id'], 'created_at'])"
    ".to_json('orders.jsonl', orient='records', lines=True)"
)
"""What to do with a dump of a shop's interface."""


@dataclass
class TableFile:
    """One table on disk, opened once: what was found of its form is kept, and read rows are counted."""

    path: Path
    what: str
    """For messages: ``events``, ``items of north``."""
    options: FileOptions = field(default_factory=FileOptions)
    notes: list[str] = field(default_factory=list)
    """What was guessed, in sentences."""
    add_bad_row: Callable[[str], None] | None = None
    """Takes what is wrong with a row that has too many or too few fields; None: an error."""

    def __post_init__(self) -> None:
        self.parts = _parts(self.path, self.what)
        kinds = sorted({_kind(part) for part in self.parts})
        if len(kinds) > 1:
            raise ValueError(f"got {self.path} with parts of the kinds {' and '.join(kinds)}, expected one kind")
        self.kind = kinds[0]
        if len(self.parts) > 1 and any("=" in one.parent.name for one in self.parts):
            self.notes.append(f"{self.what}: names of folders such as {self.parts[0].parent.name} are not read")
        self._found: dict[Path, Found] = {}
        self._is_literal = False
        with self._told(self.parts[0]):
            self.column_names = self._names(self.parts[0])

    def batches(self, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The ``wanted`` columns of all parts; text as it is written (007 stays 007, NA is a text), empty: none."""
        for part in self.parts:
            with self._told(part):
                names = self._names(part)
                missing = [name for name in wanted if name not in names]
                if missing and self.kind != JSON:
                    raise ValueError(
                        f"got the part {part} with the columns {', '.join(names)[:300]}, expected {missing[0]!r} among "
                        f"them, as in {self.parts[0].name}"
                    )
                yield from self._batches(part, list(wanted))

    def _batches(self, part: Path, wanted: list[str]) -> Iterator[pa.RecordBatch]:
        if self.kind == PARQUET:
            yield from pyarrow.parquet.ParquetFile(part).iter_batches(columns=wanted)
        elif self.kind == JSON:
            yield from self._json_batches(part, wanted)
        else:
            yield from self._text_batches(part, wanted)

    def _names(self, part: Path) -> list[str]:
        if self.kind == PARQUET:
            return list(pyarrow.parquet.read_schema(part).names)
        if self.kind == JSON:
            first = islice(self._records(part, lambda _: None), RECORDS_FOR_NAMES)
            names = list(dict.fromkeys(name for record in first for name in _paths(record)))
            names = [one for one in names if not any(name.startswith(f"{one}.") for name in names)]
            if not names:
                next(self._records(part, None), None)  # says what is wrong with its first line
            return names
        found = self._form(part)
        look = _decoded(_beginning(part), found.encoding).encode()
        with _text(pa.BufferReader(look), found._replace(encoding="utf-8")) as reader:
            return list(reader.schema.names)

    @property
    def nested(self) -> str:
        """The column of a file of objects whose values are lists of objects; empty where there is none."""
        first = self._records(self.parts[0], lambda _: None) if self.kind == JSON else iter(())
        found = (name for one in islice(first, RECORDS_FOR_NAMES) for name, value in one.items() if _is_nested(value))
        return next(found, "")

    def _form(self, part: Path) -> Found:
        if part not in self._found:
            self._found[part] = self._guessed(part)
        return self._found[part]

    def _guessed(self, part: Path) -> Found:
        look, given = _beginning(part), self.options
        notes: list[str] = []
        encoding = _encoding(part, self.what, look, given.encoding, notes)
        text = _decoded(look, encoding)
        if not text.strip():
            raise ValueError(f"got the empty file {part} as {self.what}, expected a line of names and one row each")
        lines = text.splitlines()
        header, clicks = given.header, False
        if not header and _IMPRESSIONS.fullmatch(lines[0]):
            header, clicks = MIND_EVENTS, True
            notes.append("impressions as MIND has them, without a line of names; every clicked item is an event")
        elif not header and _NEWS.fullmatch(lines[0]):
            header = MIND_ITEMS
            notes.append("news as MIND has them, without a line of names")
        delimiter = _delimiter(part, given.delimiter, lines, notes)
        quoting = given.quoting
        if quoting is None:
            quoting = delimiter != "\t" or all(
                one[:1] == one[-1:] == '"' and len(one) > 1 for one in lines[0].split("\t")
            )
            if not quoting and '"' in text:
                notes.append("quotes are letters (quoting=True: they hold fields together)")
        pattern = _QUOTE_IN_FIELD.format(delimiter=re.escape(delimiter))
        escape = bool(quoting and re.search(pattern, text, re.MULTILINE))
        if escape:
            notes.append('\\" inside a field is a quote')
        self.notes += [f"{self.what}: {part.name}: {note}" for note in notes if self._is_new(note)]
        return Found(delimiter, encoding, quoting, escape, header, clicks)

    def _is_new(self, note: str) -> bool:
        """Said once for all parts of a folder."""
        return not any(one.startswith(f"{self.what}: ") and one.endswith(f": {note}") for one in self.notes)

    def _text_batches(self, part: Path, wanted: list[str]) -> Iterator[pa.RecordBatch]:
        found, rows, bad = self._form(part), 0, 0
        counted = _Counted(_binary(part))

        def handle(row: pyarrow.csv.InvalidRow) -> str:
            nonlocal bad
            if counted.is_over:
                return "skip"
            bad += 1
            start = " ".join((row.text or "").split())[:80]
            wrong = f"{row.actual_columns} fields, expected {row.expected_columns}: {start!r}"
            if self.add_bad_row is None:
                return "error"
            self.add_bad_row(f"in {part.name}: {wrong}")
            return "skip"

        with _text(pa.PythonFile(counted, mode="r"), found, wanted, handle) as reader:
            try:
                for batch in reader:
                    rows += batch.num_rows
                    yield _clicked(batch, wanted) if found.clicks else batch
            finally:  # pyarrow reads ahead in a thread, which aborts the process if it is still at it when Python ends
                counted.is_over = True
                with suppress(ValueError, OSError, pa.ArrowException):
                    deque(reader, maxlen=0)
        others = counted.num_lines - rows - bad - (not found.header)
        if others > 0:
            self.notes.append(
                f"{self.what}: {part.name}: {others:,} of {counted.num_lines:,} lines are no rows of their own: blank, "
                f"or inside quotes{' (quoting=False takes quotes as letters)' if found.quoting else ''}"
            )

    def _json_batches(self, part: Path, wanted: list[str]) -> Iterator[pa.RecordBatch]:
        records = self._records(part, self.add_bad_row)
        schema = pa.schema([(name, pa.string()) for name in wanted])
        while rows := list(islice(records, ROWS_AT_ONCE)):
            columns = [[_plain(_inside(row, name)) for row in rows] for name in wanted]
            yield pa.RecordBatch.from_arrays([pa.array(one, pa.string()) for one in columns], schema=schema)

    def _records(self, part: Path, add_bad_row: Callable[[str], None] | None) -> Iterator[dict[str, Any]]:
        """The objects of a file, one a line, or all of them in one list."""
        for number, line in RawFile(part, 0).lines():
            if number == 1 and line.lstrip()[:1] == b"[":
                yield from _listed(part)
                return
            try:
                record = self._record(line)
            except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
                wrong = f"line {number} of {part.name} is no JSON object ({' '.join(str(error).split())[:100]})"
                if add_bad_row is None:
                    advice = NESTED if number == 1 and line.lstrip()[:1] == b"{" else ""
                    raise ValueError(f"got {self.what} of which {wrong}, expected one object a line{advice}") from error
                add_bad_row(wrong)
                continue
            yield record

    def _record(self, line: bytes) -> dict[str, Any]:
        if not self._is_literal:
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                found = ast.literal_eval(line.decode("utf-8").strip())  # before the note: this may fail
                self._is_literal = True
                self.notes.append(f"{self.what}: {self.path.name}: lines are Python's dicts, no JSON")
        else:
            found = ast.literal_eval(line.decode("utf-8").strip())
        if type(found) is not dict:
            raise ValueError(f"a {type(found).__name__}")
        return {str(name): value for name, value in found.items()}

    @property
    def time_format(self) -> str:
        """Of a form that is known by name, else nothing."""
        return MIND_TIMES if self.kind == TEXT and self._form(self.parts[0]).clicks else ""

    @contextmanager
    def _told(self, part: Path) -> Iterator[None]:
        """What pyarrow and the system say, in words of ours."""
        try:
            yield
        except FileNotFoundError as error:
            raise ValueError(f"there is no file {part} with the {self.what}, {EXPECTED}") from error
        except UnicodeDecodeError as error:
            raise _not_utf8(part, self.what, error) from error
        except (OSError, EOFError, pa.ArrowException, UnicodeError) as error:
            if "invalid UTF8" in str(error) or "codec can't decode" in str(error):
                raise _not_utf8(part, self.what, error) from error
            told = " ".join(str(error).split())[:300]
            if "straddling" in told:
                told = f"a row of more than {MAX_LINE_BYTES:,} bytes: does a quote never end? quoting=False"
            elif "CSV parse error" in told and "columns" in told.lower():
                told += "; bad_rows='skip' leaves such rows out, quoting=False takes quotes as letters"
            raise ValueError(f"cannot read the {self.what} in {part} ({told}), {EXPECTED}") from error


def _parts(path: Path, what: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    parts = [one for one in sorted(path.rglob("*")) if one.is_file() and one.name[0] not in "._"]
    if not parts:
        raise ValueError(f"got the empty folder {path} with the {what}, {EXPECTED}")
    return parts


def _kind(path: Path) -> str:
    """``ValueError`` for a file of another kind, by its name."""
    kind = ENDINGS.get(Path(path.name.lower().removesuffix(".gz")).suffix)
    if kind is None:
        raise ValueError(
            f"got the file {path}, expected one whose name ends with .parquet, .csv or .tsv, .txt, .jsonl or .json, "
            "plain or .gz"
        )
    return kind


def _binary(path: Path) -> Any:
    return unpacked(open(path, "rb"))  # whoever reads it closes it


def _beginning(path: Path) -> bytes:
    with _binary(path) as file:
        look: bytes = file.read(LOOK_BYTES)
    if other := next((what for magic, what in OTHER_FORMATS.items() if look.startswith(magic)), ""):
        raise ValueError(f"{path} is {other}, {EXPECTED}. Unpack it first, or give it the name of what it is.")
    if len(look) == LOOK_BYTES:  # the last line may be cut
        look = look[: look.rfind(b"\n") + 1] or look
    return look


def _encoding(path: Path, what: str, look: bytes, given: str | None, notes: list[str]) -> str:
    if given:
        try:
            name = codecs.lookup(given).name
        except LookupError as error:
            raise ValueError(f"got the encoding {given!r}, expected one such as utf-8, latin-1 or cp1252") from error
        if name == "utf-8" and look.startswith(codecs.BOM_UTF8):
            return "utf-8-sig"
        try:
            look.decode(name)
        except UnicodeDecodeError as error:
            if error.end < len(look) - 4:
                raise ValueError(f"cannot read the {what} in {path} as {given} ({error})") from error
        return name
    if look.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        notes.append("the text is UTF-16")
        return "utf-16"
    if b"\0" in look[:200]:
        raise ValueError(
            f"got {path} with zero bytes as {what}, expected text: another encoding, such as encoding='utf-16-le', or "
            "no text at all"
        )
    try:
        look.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.end < len(look) - 4:
            raise _not_utf8(path, what, error, look) from error
    return "utf-8-sig" if look.startswith(codecs.BOM_UTF8) else "utf-8"


def _not_utf8(path: Path, what: str, error: Exception, look: bytes = b"") -> ValueError:
    shown = ""
    if isinstance(error, UnicodeDecodeError) and look:
        start = look.rfind(b"\n", 0, error.start) + 1
        end = look.find(b"\n", error.start)
        line = look[start : end if end >= 0 else len(look)].decode("cp1252", "replace").strip()[:80]
        shown = f", in line {look.count(bytes([10]), 0, error.start) + 1}, which would be {line!r} as cp1252"
    return ValueError(
        f"got {path} with {what} that are not UTF-8{shown}, expected UTF-8, or its encoding by name: "
        "encoding='cp1252', 'latin-1' or another (--encoding)"
    )


def _delimiter(path: Path, given: str | None, lines: Sequence[str], notes: list[str]) -> str:
    if given:
        mark = DELIMITERS.get(given, given.encode().decode("unicode_escape") if given.startswith("\\") else given)
        if len(mark) != 1:
            raise ValueError(f"got the delimiter {given!r}, expected one character, or {', '.join(DELIMITERS)}")
        return mark
    usual = "\t" if ".tsv" in path.name.lower() else ","
    count = {mark: _fields(lines[0], mark) for mark in DELIMITERS.values()}
    found = max(count, key=lambda mark: (count[mark], mark == usual))
    if count[usual] > 1 and sum(_fields(one, usual) == count[usual] for one in lines[:50]) == len(lines[:50]):
        found = usual
    if found != usual:
        name = next(name for name, mark in DELIMITERS.items() if mark == found)
        notes.append(f"the delimiter is a {name}")
    return found


def _fields(line: str, delimiter: str) -> int:
    """Fields of a line, delimiters inside quotes left out."""
    return re.sub(r'"[^"]*"', "", line).count(delimiter) + 1


class _Counted(io.RawIOBase):
    """A binary file that counts the lines which are read from it."""

    def __init__(self, file: Any) -> None:
        self._file, self._num_breaks, self._last = file, 0, b"\n"
        self.is_over = False
        """Nobody wants more of it: what is left is not read."""

    @property
    def num_lines(self) -> int:
        return self._num_breaks + (self._last != b"\n")

    def read(self, size: int = -1) -> bytes:
        piece: bytes = b"" if self.is_over else self._file.read(size)
        if piece:
            self._num_breaks += piece.count(b"\n")
            self._last = piece[-1:]
        return piece

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def _decoded(look: bytes, encoding: str) -> str:
    """The beginning of a file, which may end within a character."""
    return codecs.getincrementaldecoder(encoding)().decode(look)


def _text(
    source: Any,
    found: Found,
    wanted: Sequence[str] | None = None,
    handle: Callable[[pyarrow.csv.InvalidRow], str] | None = None,
) -> pyarrow.csv.CSVStreamingReader:
    """A reader of the ``wanted`` columns; None: of the names alone."""
    convert = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(wanted or (), pa.string()),
        include_columns=wanted,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
    )
    parse = pyarrow.csv.ParseOptions(
        delimiter=found.delimiter,
        quote_char='"' if found.quoting else False,
        escape_char="\\" if found.escape else False,
        newlines_in_values=found.quoting,
        invalid_row_handler=handle or ((lambda _: "skip") if wanted is None else None),
    )
    names = list(found.header) or None
    read = pyarrow.csv.ReadOptions(
        encoding="utf8" if found.encoding.startswith("utf-8") else found.encoding,
        column_names=names,
        block_size=MAX_LINE_BYTES,
        use_threads=False,
    )
    return pyarrow.csv.open_csv(source, read_options=read, parse_options=parse, convert_options=convert)


def _clicked(batch: pa.RecordBatch, wanted: Sequence[str]) -> pa.RecordBatch:
    """A row for each item of an impression that was clicked, ``N10-1``."""
    if "item" not in wanted:
        return batch
    place, keys = [], []
    for row, shown in enumerate(batch.column("item").to_pylist()):
        for one in (shown or "").split():
            if one.endswith("-1"):
                place.append(row)
                keys.append(one.removesuffix("-1"))
    taken = batch.take(pa.array(place, pa.int64()))
    number = batch.schema.get_field_index("item")
    return taken.set_column(number, "item", pa.array(keys, pa.string()))


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _paths(record: Mapping[str, Any]) -> Iterator[str]:
    """The names of a record's fields; of an object inside it those of its fields, ``item.title``."""
    for name, value in record.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{one}" for one in _paths(value))
        else:
            yield name


def _inside(record: Mapping[str, Any], name: str) -> Any:
    """The field of a name of :func:`_paths`; None where it is not there."""
    if name in record:
        return record[name]
    outer, _, rest = name.partition(".")
    inner = record.get(outer)
    return _inside(inner, rest) if rest and isinstance(inner, dict) else None


def _plain(value: Any) -> str | None:
    """A value of JSON as text; lists as :func:`clean` joins them."""
    if isinstance(value, str):
        halves = not value.isascii() and SURROGATE.search(value)
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") if halves else value
    if value is None or isinstance(value, dict) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    if isinstance(value, list | tuple):
        return clean(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(path: Path) -> Iterator[dict[str, Any]]:
    """A file that is one list of objects."""
    with _binary(path) as file:
        try:
            found = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} begins as a list but is no JSON ({error}), expected one object a line") from error
    if not all(isinstance(one, dict) for one in found):
        raise ValueError(f"got {path} with a list of other things than objects, expected objects")
    yield from found
