"""Any table as text columns in DuckDB: files of csv, JSON and Parquet, frames and streams, with what was guessed.

A file's delimiter, encoding and names are found from its beginning; DuckDB reads it, and every line that is not in the
file's form is counted with its reason. JSON objects may hold lists of objects: a column inside such a list
(``items.sku``) makes a row of each of its entries.
"""

from __future__ import annotations

import ast
import codecs
import csv
import difflib
import gzip
import json
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET, TEXT, JSON, MEMORY = "Parquet", "text", "JSON", "memory"
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
OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive (or an Excel file: save it as csv)",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"7z\xbc\xaf": "a 7-zip archive",
    b"PAR1": "a Parquet file",
    b"\xd0\xcf\x11\xe0": "an old Excel file: save it as csv",
    b"\x1f\x8b": "compressed with gzip twice",
}
"""First bytes -> what a file is that should be text."""
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
LOOK_BYTES = 1 << 20
"""Of the beginning of a file, by which its form is found."""
LOOK_LINES = 50
MAX_LINE_BYTES = 16 << 20
RECORDS_FOR_NAMES = 1000
"""The first JSON records, whose fields are the columns."""
NUM_EXAMPLES = 3
EXACT = 2**53
"""From here on floats leave whole numbers out, so that two keys could become one."""
MUCH = 0.05
"""A file with a larger share of lines inside quotes says so first."""
MIND_EVENTS = ("impression", "user", "time", "history", "item")
MIND_ITEMS = ("item", "category", "subcategory", "title", "abstract", "url", "title_entities", "abstract_entities")
_IMPRESSIONS = re.compile(r"\d+\t[^\t]+\t[^\t]+\t[^\t]*\t\S+-[01]( \S+-[01])*")
_NEWS = re.compile(r"[^\t]+\t[^\t]*\t[^\t]*\t[^\t]+\t[^\t]*\thttps?:[^\t]*\t\[.*\]\t\[.*\]")
REASONS = {
    "TOO MANY COLUMNS": "too many fields",
    "MISSING COLUMNS": "too few fields",
    "UNQUOTED VALUE": "a quote that does not end its field",
    "LINE SIZE OVER MAXIMUM": "too long",
    "INVALID ENCODING": "other characters than the file's encoding has",
}


class Question(ValueError):
    """Something that has to be said before a table can be read, with a proposal for a mapping file."""

    def __init__(self, text: str, proposal: Mapping[str, Any]) -> None:
        super().__init__(text)
        self.proposal = proposal


@dataclass(frozen=True)
class FileForm:
    """What somebody says of the form of a file; None and empty: it is found."""

    delimiter: str | None = None
    encoding: str | None = None
    quoting: bool | None = None
    header: tuple[str, ...] = ()
    """Names of the columns of a file without a line of names."""


@dataclass
class Table:
    """A table that was opened: what its columns are called, and how DuckDB reads them.

    `load` reads columns into the temporary table ``rows``, in the order of the table; its ``rowid`` counts from 0.
    """

    what: str
    """For messages: ``events``, ``items of north``."""
    column_names: list[str]
    kind: str
    parts: list[_Part]
    connection: duckdb.DuckDBPyConnection
    paths: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was guessed, in sentences."""
    warnings: list[str] = field(default_factory=list)
    """What has to be said first."""
    bad: Counter[str] = field(default_factory=Counter)
    """What is wrong with lines that are no rows -> how many, once it was loaded."""
    examples: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    """The paths of lists of JSON objects: a column inside makes a row of each entry."""
    holder: Any = None
    """Keeps temporary files and the tables in memory."""

    def load(self, columns: Mapping[str, str], wanted: str = "*") -> int:
        """Read columns, ours -> theirs, as text (empty text is NULL) into ``rows``; the number of rows.

        ``wanted``: SQL of what is kept of them.

        Raises:
            ValueError: the file cannot be read, or two columns have a name that is asked for.
        """
        self.check(columns.values())
        pieces = []
        for part in self.parts:
            missing = [name for name in columns.values() if name not in part.column_names]
            if missing and self.kind != JSON:
                raise ValueError(
                    f"got the part {part.path} with the columns {', '.join(part.column_names)[:300]}, expected "
                    f"{missing[0]!r} among them, as in {self.parts[0].path}"
                )
            pieces.append(part.select(columns))
        self._execute(f"CREATE OR REPLACE TEMP TABLE rows AS SELECT {wanted} FROM ({' UNION ALL '.join(pieces)})")
        self.bad, self.examples = Counter(), []
        self._count_rejected()
        if self.kind == JSON:
            self._count_no_objects()
        num_rows = int(self.value("SELECT count(*) FROM rows"))
        if self.kind == TEXT:
            self._check_lines(num_rows)
        return num_rows

    def check(self, names: Iterable[str]) -> None:
        """``ValueError`` where names are not there, all of them with the nearest ones, or where one stands twice."""
        names = list(dict.fromkeys(names))
        missing = [name for name in names if name not in self.column_names]
        if missing:
            near = {name: self._nearest(name) for name in missing}
            told = ", ".join(f"{name!r}{f' (perhaps {other!r})' if other else ''}" for name, other in near.items())
            raise ValueError(
                f"got {self.what} with the columns {', '.join(self.column_names)[:300]}, expected {told} among them"
            )
        if twice := [name for name in names if self.column_names.count(name) > 1]:
            raise ValueError(f"got {self.what} with two columns {twice[0]!r}, expected each name once")

    def _nearest(self, name: str) -> str:
        inside = [one for one in self.column_names if one.rpartition(".")[2] == name]
        return (inside or difflib.get_close_matches(name, self.column_names, 1, 0.5) or [""])[0]

    def sample(self, num: int = 10_000) -> dict[str, list[str]]:
        """Column -> its values in the first rows, without gaps."""
        names = [name for name in dict.fromkeys(self.column_names) if name in self.parts[0].column_names]
        numbered = {f"c{number}": name for number, name in enumerate(names)}
        rows = self._execute(f"{self.parts[0].select(numbered, sampled=True)} LIMIT {num}").fetchall()
        cells = {name: [row[place].strip() for row in rows if row[place]] for place, name in enumerate(names)}
        return {
            name: [cell[2:-1] if cell.startswith('="') else cell for cell in own if cell] for name, own in cells.items()
        }

    def values(self, names: Sequence[str]) -> list[list[str | None]]:
        """The values of some columns of a table that is small enough to be held."""
        self.load({f"c{number}": name for number, name in enumerate(names)})
        rows = self._execute("SELECT * FROM rows").fetchall()
        return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in names]

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of a query about ``rows``."""
        return self._execute(sql, list(values)).fetchall()

    def value(self, sql: str, *values: Any) -> Any:
        """The only value of a query's only row."""
        return self.query(sql, *values)[0][0]

    def arrow(self, sql: str) -> pa.Table:
        """A query's result in columns."""
        return self.connection.sql(sql).to_arrow_table()

    def _execute(self, sql: str, values: Sequence[Any] | None = None) -> duckdb.DuckDBPyConnection:
        try:
            return self.connection.execute(sql, values or None)
        except (duckdb.Error, OSError, UnicodeError) as error:
            told = " ".join(str(error).split())[:300]
            where = f" in {self.paths[0]}" if self.paths else ""
            raise ValueError(f"cannot read the {self.what}{where} ({told}), {EXPECTED}") from error

    def _count_rejected(self) -> None:
        if self.kind != TEXT:
            return
        found = self.query(
            "SELECT file_path, line, error_type, csv_line FROM reject_errors JOIN reject_scans "
            "USING (scan_id, file_id) WHERE scan_id = (SELECT max(scan_id) FROM reject_scans)"
        )
        lines = {(path, line): (kind, text) for path, line, kind, text in reversed(found)}
        for (path, line), (kind, text) in sorted(lines.items()):
            self.add_bad(
                "not in the file's form",
                f"line {line} of {Path(path).name} has {REASONS.get(kind, kind)}: "
                f"{' '.join((text or '').split())[:80]!r}",
            )
        self._num_rejected = sum(1 + (text or "").count("\n") for _, text in lines.values())

    def _count_no_objects(self) -> None:
        for part in self.parts:
            for (number,) in self.query(
                f"SELECT number FROM ({part.source}) WHERE json_type(record) IS DISTINCT FROM 'OBJECT'"
            ):
                self.add_bad("not in the file's form", f"record {number} of {part.path.name} is no JSON object")

    def add_bad(self, kind: str, text: str, count: int = 1) -> None:
        """Rows that cannot be read, with an example."""
        self.bad[kind] += count
        if len(self.examples) < NUM_EXAMPLES:
            self.examples.append(text)

    def _check_lines(self, num_rows: int) -> None:
        """Lines that are no rows of their own are said: a quote that never ends swallows them."""
        num_lines = sum(part.num_lines for part in self.parts)
        inside = num_lines - num_rows - self._num_rejected
        if inside <= 0:
            return
        quoted = any(part.quoting for part in self.parts)
        text = f"{self.what}: {inside:,} of {num_lines:,} lines are no rows of their own: blank, or inside quotes"
        text += " (quoting=False takes quotes as letters)" if quoted else ""
        (self.warnings if quoted and inside > MUCH * num_lines else self.notes).append(text)


class _Part(NamedTuple):
    """One file of a table, or a table in memory."""

    path: Path
    source: str
    """SQL that gives its rows."""
    column_names: list[str]
    expression: Callable[[str], str]
    """A column's name -> SQL of its text."""
    unnested: Callable[[Iterable[str], bool], str]
    """The columns that are read, and whether bad lines are passed over -> SQL of what they are read from."""
    num_lines: int = 0
    quoting: bool = False

    def select(self, columns: Mapping[str, str], sampled: bool = False) -> str:
        named = [
            f"nullif({self.expression(their) if their in self.column_names else 'NULL'}, '') AS {quoted(ours)}"
            for ours, their in columns.items()
        ]
        return f"SELECT {', '.join(named)} FROM {self.unnested(columns.values(), sampled)}"


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text in SQL."""
    return "'" + text.replace("'", "''") + "'"


def open_table(table: Any, what: str, form: FileForm | None = None) -> Table:
    """A table on disk or in memory.

    Args:
        table: The path of a file or a folder of parts; a pandas or polars frame, a pyarrow table, a Hugging Face data
            set (one split, or a stream), or a list of dicts.
        what: What it holds, for messages.
        form: How a file is written, as far as somebody says.

    Raises:
        ValueError: it is something else, empty, or no text.
    """
    connection = duckdb.connect()
    with suppress(duckdb.InvalidInputException):  # of the last: Jupyter without ipywidgets has no bar to take away
        connection.execute("SET TimeZone = 'UTC'; SET enable_progress_bar = false")
    if not isinstance(table, str | Path):
        return _in_memory(table, what, connection)
    paths = _paths(Path(table), what)
    kinds = sorted({TEXT if form and form.header else _kind(path) for path in paths})
    if not paths[0].exists():
        raise ValueError(f"there is no file {table} with the {what}, {EXPECTED}")
    if len(kinds) > 1:
        raise ValueError(f"got {table} with parts of the kinds {' and '.join(kinds)}, expected one kind")
    opened = Table(what, [], kinds[0], [], connection, paths, holder=tempfile.TemporaryDirectory())
    if len(paths) > 1 and any("=" in path.parent.name for path in paths):
        opened.notes.append(f"{what}: names of folders such as {paths[0].parent.name} are not read")
    open_part = {PARQUET: _parquet, JSON: _json, TEXT: _text}[kinds[0]]
    try:
        opened.parts = [open_part(path, opened, form or FileForm()) for path in paths]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"got {what} in {table}, a truncated or damaged gzip file ({error}), expected a whole one: get it again"
        ) from error
    except (duckdb.Error, OSError, UnicodeError) as error:
        told = " ".join(str(error).split())[:300]
        raise ValueError(f"cannot read the {what} in {table} ({told}), {EXPECTED}") from error
    opened.column_names = opened.parts[0].column_names
    opened.notes = list(dict.fromkeys(opened.notes))
    return opened


def _paths(path: Path, what: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    parts = [one for one in sorted(path.rglob("*")) if one.is_file() and one.name[0] not in "._"]
    if not parts:
        raise ValueError(f"got the empty folder {path} with the {what}, {EXPECTED}")
    return parts


def _kind(path: Path) -> str:
    kind = ENDINGS.get(Path(path.name.lower().removesuffix(".gz")).suffix)
    if kind is None:
        raise ValueError(
            f"got the file {path}, expected one whose name ends with .parquet, .csv or .tsv, .txt, .jsonl or .json, "
            "plain or .gz"
        )
    return kind


def _binary(path: Path) -> Any:
    """The content of a plain or gzip file: told by the first bytes, for copies often drop or keep ".gz" wrongly."""
    with open(path, "rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzip else open(path, "rb")


def _beginning(path: Path, what: str) -> bytes:
    with _binary(path) as file:
        look: bytes = file.read(LOOK_BYTES)
    if other := next((kind for magic, kind in OTHER_FORMATS.items() if look.startswith(magic)), ""):
        raise ValueError(f"{path} is {other}, {EXPECTED}. Unpack it first, or give it the name of what it is.")
    if not look.lstrip(codecs.BOM_UTF8).strip():
        raise ValueError(f"got the empty file {path} as {what}, expected a line of names and one row each")
    return look


# Parquet and memory


def _parquet(path: Path, table: Table, form: FileForm) -> _Part:
    return _typed(path, f"read_parquet({literal(str(path))}, hive_partitioning = false)", table)


def _typed(path: Path, source: str, table: Table) -> _Part:
    """Columns with types of their own; objects inside are read as JSON."""
    described = table.connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
    kinds = {str(row[0]): str(row[1]) for row in described}
    if any(kind.startswith(("STRUCT", "MAP")) or "STRUCT" in kind for kind in kinds.values()):
        records = f"SELECT to_json(t) AS record, row_number() OVER () AS number FROM {source} AS t"
        return _of_records(path, records, table)

    def expression(name: str) -> str:
        return _as_text(quoted(name), kinds[name])

    return _Part(path, source, list(kinds), expression, lambda _, __: source)


def _as_text(column: str, kind: str) -> str:
    """SQL of a typed column's text: 7.0 is 7, as a column of whole numbers with a gap has become floats."""
    if kind in ("FLOAT", "DOUBLE"):
        whole = f"{column} = trunc({column}) AND abs({column}) < {EXACT}"
        text = f"CASE WHEN {whole} THEN CAST(CAST({column} AS BIGINT) AS VARCHAR) ELSE CAST({column} AS VARCHAR) END"
        return f"CASE WHEN isnan({column}) THEN NULL ELSE {text} END"
    if kind.startswith("DECIMAL") and not kind.endswith(",0)"):
        return rf"regexp_replace(CAST({column} AS VARCHAR), '\.0+$', '')"
    if kind == "BLOB":
        return f"TRY(decode({column}))"
    if kind.endswith("[]"):
        return f"CAST(to_json({column}) AS VARCHAR)"
    return f"CAST({column} AS VARCHAR)"


def _in_memory(table: Any, what: str, connection: duckdb.DuckDBPyConnection) -> Table:
    import pyarrow as pa  # only where it is used: --help does without

    opened = Table(what, [], MEMORY, [], connection)
    content = _arrow_of(table, what)
    opened.holder = content
    names = [str(name) for name in content.schema.names]
    odd = [one.name for one in content.schema if isinstance(one.type, pa.BaseExtensionType)]
    twice = {name for name, count in Counter(names).items() if count > 1}
    if isinstance(content, pa.Table):
        content = content.select([place for place, name in enumerate(names) if name not in twice and name not in odd])
    connection.register("given", content)
    opened.parts = [_typed(Path(what), "given", opened)]
    opened.column_names = list(dict.fromkeys([*opened.parts[0].column_names, *names])) + sorted(twice)
    return opened


def _arrow_of(table: Any, what: str) -> pa.Table | pa.RecordBatchReader:
    import pyarrow as pa  # only where it is used: --help does without

    try:
        if isinstance(table, pa.Table):
            return table
        if isinstance(table, list) and all(isinstance(row, Mapping) for row in table):
            names = list(dict.fromkeys(name for row in table for name in row))
            return pa.table({str(name): _column([row.get(name) for row in table]) for name in names})
        if hasattr(table, "to_arrow"):  # polars
            return table.to_arrow()
        if hasattr(table, "with_format") and hasattr(table, "select_columns") and not isinstance(table, Mapping):
            return _of_data_set(table)
        if hasattr(table, "to_dict") and hasattr(table, "columns"):  # pandas
            return pa.Table.from_pandas(table, preserve_index=False)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"got {what} with half of a character ({error.object[:60]!r}), expected text that UTF-8 can write"
        ) from error
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise ValueError(
            f"got {what} with a column of mixed or too large values ({_odd_value(table) or error}), expected one kind "
            "in a column"
        ) from error
    raise ValueError(
        f"got {type(table).__name__} as {what}, expected a pandas or polars frame, a pyarrow table, a Hugging Face "
        "data set (one split), a list of dicts, or the path of a .parquet, .csv, .tsv or .jsonl file or folder"
    )


def _odd_value(table: Any) -> str:
    """The first value of another kind than those before it, with its row and column; else nothing."""
    is_rows = isinstance(table, list)
    for name in dict.fromkeys(name for row in table for name in row) if is_rows else table.columns:
        kind: Any = None
        for number, value in enumerate((row.get(name) for row in table) if is_rows else table[name], 1):
            if value is None or value != value:
                continue
            found = "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value)
            kind = kind or found
            if found != kind:
                return f"{value!r} in row {number}, column {name!r}"
    return ""


def _column(values: list[Any]) -> pa.Array:
    """Values of one kind; whole numbers of any size as text."""
    import pyarrow as pa  # only where it is used: --help does without

    if any(isinstance(value, int) and abs(value) >= 2**63 for value in values):
        values = [None if value is None else str(value) for value in values]
    return pa.array(values)


def _of_data_set(table: Any) -> pa.Table | pa.RecordBatchReader:
    """A Hugging Face data set; classes by their names."""
    import pyarrow as pa  # only where it is used: --help does without

    labels = {name: one.names for name, one in (table.features or {}).items() if hasattr(one, "int2str")}

    def named(part: pa.Table) -> pa.Table:
        import pyarrow as pa  # only where it is used: --help does without

        for name in labels.keys() & set(part.column_names):
            place = part.column_names.index(name)
            part = part.set_column(place, name, pa.array(labels[name]).take(part.column(name)))
        return part

    if hasattr(table, "num_rows"):
        return named(table.with_format("arrow")[:])
    parts = table.with_format("arrow").iter(batch_size=10_000)
    return pa.concat_tables([named(part) for part in parts])


# JSON


def _json(path: Path, table: Table, form: FileForm) -> _Part:
    look = _beginning(path, table.what).lstrip(codecs.BOM_UTF8).lstrip()
    first = look.splitlines()[0].strip()
    name, style = path, "newline_delimited"
    if look.startswith(b"["):
        style = "array"
    elif not _loads(first, json.loads):
        if _loads(first, _python_literal):
            name = _rewritten(path, table)
            table.notes.append(f"{table.what}: {path.name}: lines are Python's dicts, no JSON")
        elif look.startswith(b"{"):
            style = "unstructured"
    options = f"format = {literal(style)}, compression = '{_compression(name)}'"
    options += f", maximum_object_size = {max(MAX_LINE_BYTES, _size(path))}"
    options += ", ignore_errors = true" if style == "newline_delimited" else ""
    call = f"read_json_objects({literal(str(name))}, {options})"
    return _of_records(path, f"SELECT json AS record, row_number() OVER () AS number FROM {call}", table)


def _size(path: Path) -> int:
    return path.stat().st_size * (20 if _compression(path) == "gzip" else 1)


def _compression(path: Path) -> str:
    """By the first bytes, as in `_binary`."""
    with open(path, "rb") as file:
        return "gzip" if file.read(2) == b"\x1f\x8b" else "none"


def _loads(line: bytes, load: Callable[[str], Any]) -> Any:
    try:
        found = load(line.decode("utf-8"))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _python_literal(text: str) -> Any:
    return ast.literal_eval(text.strip())


def _rewritten(path: Path, table: Table) -> Path:
    """A temporary file of JSON in the place of Python's dicts; a line that is none stays one."""
    target = Path(table.holder.name) / f"{len(list(Path(table.holder.name).iterdir()))}.jsonl"
    with _binary(path) as file, open(target, "w", encoding="utf-8", errors="replace") as out:
        for line in file:
            record = _loads(line, _python_literal) if line.strip() else None
            out.write(json.dumps(record, ensure_ascii=False, default=str) + "\n" if record else "-\n")
    return target


def _of_records(path: Path, records: str, table: Table) -> _Part:
    """JSON objects: columns are paths (``item.ean``); a list of objects on the way makes a row of each entry."""
    sampled = [
        row[0]
        for row in table.connection.execute(
            f"SELECT record FROM ({records}) WHERE json_type(record) = 'OBJECT' LIMIT {RECORDS_FOR_NAMES}"
        ).fetchall()
    ]
    objects = [json.loads(text) for text in sampled]
    lists = dict.fromkeys(place for record in objects for place in _lists_of(record))
    found = dict.fromkeys(name for record in objects for name in _names_of(record))
    names = [name for name in found if not any(other.startswith(f"{name}.") for other in found)]
    table.lists += [name for name in lists if name not in table.lists]
    if not names:
        raise ValueError(f"got {table.what} in {path} without a JSON object, expected one a line, or a list of them")

    def level(name: str) -> str:
        """The innermost list that a column is in; empty: none."""
        return max((one for one in lists if name.startswith(f"{one}.")), key=len, default="")

    def expression(name: str) -> str:
        inside = level(name)
        rest = name[len(inside) + 1 :] if inside else name
        return f"({quoted(inside or 'record')} ->> {literal(_path(rest))})"

    def unnested(wanted: Iterable[str], sampled: bool) -> str:
        sql = f"(SELECT record FROM ({records}) WHERE json_type(record) = 'OBJECT')"
        needed = {
            outer for name in wanted if (inner := level(name)) for outer in lists if f"{inner}.".startswith(f"{outer}.")
        }
        for one in sorted(needed, key=len):
            outer = level(one)
            rest = one[len(outer) + 1 :] if outer else one
            entries = f"{quoted(outer or 'record')} -> {literal(_path(rest) + '[*]')}"
            if sampled:  # columns of all lists are looked at together, of which one may have no entry
                entries = f"CASE WHEN len({entries}) > 0 THEN {entries} ELSE [NULL] END"
            sql = f"(SELECT *, unnest({entries}) AS {quoted(one)} FROM {sql})"
        return sql

    return _Part(path, records, names, expression, unnested)


def _path(name: str) -> str:
    return "$." + ".".join(f'"{one}"' for one in name.split("."))


def _names_of(record: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The paths of a record's values, inside objects and lists of objects too."""
    for name, value in record.items():
        if isinstance(value, dict) and value:
            yield from _names_of(value, f"{before}{name}.")
        elif _is_nested(value):
            for one in islice(value, RECORDS_FOR_NAMES):
                yield from _names_of(one, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def _lists_of(record: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The paths of lists of objects."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _lists_of(value, f"{before}{name}.")
        elif _is_nested(value):
            yield f"{before}{name}"
            for one in islice(value, RECORDS_FOR_NAMES):
                yield from _lists_of(one, f"{before}{name}.")


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


# Text with a delimiter


class _Form(NamedTuple):
    """The form of one text file."""

    delimiter: str
    quoting: bool
    escape: str
    skip: int
    """Lines above the first row."""
    header: list[str]


def _text(path: Path, table: Table, form: FileForm) -> _Part:
    look = _beginning(path, table.what)
    encoding, name = _encoding(path, table, look, form.encoding), path
    if encoding not in ("utf-8", "utf-8-sig"):
        name = _decoded(path, table, encoding)
    with _binary(name) as file:
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(file.read(LOOK_BYTES)).removeprefix("\ufeff")
    lines = text.splitlines()[: -1 if len(text) >= LOOK_BYTES // 4 else None] or [text]
    found = _found(path, table, lines, form)
    num_lines, num_blank = _count_lines(name)
    if found.quoting and form.quoting is None and _without_quotes_fits(name, found, num_lines, num_blank, table):
        found = found._replace(quoting=False)
    numbered = [f"c{place}" for place in range(len(found.header))]
    place_of = {name: place for place, name in reversed(list(enumerate(found.header)))}

    def expression(column: str) -> str:
        text = quoted(numbered[place_of[column]])
        if found.header == list(MIND_EVENTS) and column == "item":
            return rf"regexp_replace({text}, '-1$', '')"
        return text

    def unnested(wanted: Iterable[str], sampled: bool) -> str:
        sql = _read_csv(name, found, sampled)
        if found.header == list(MIND_EVENTS) and "item" in wanted:
            clicked = "unnest(list_filter(string_split(c4, ' '), lambda one: ends_with(one, '-1')))"
            return f"(SELECT * REPLACE ({clicked} AS c4) FROM {sql})"
        return sql

    num_rows = num_lines - num_blank - found.skip
    if found.header == list(MIND_EVENTS):
        num_rows = 0  # a line has several events
    return _Part(path, "", found.header, expression, unnested, num_rows, found.quoting)


def _read_csv(path: Path, form: _Form, sampled: bool = False) -> str:
    columns = ", ".join(f"'c{place}': 'VARCHAR'" for place in range(len(form.header)))
    quote = "'\"'" if form.quoting else "''"
    escape = literal(form.escape) if form.quoting else "''"
    rest = "ignore_errors = true" if sampled else "store_rejects = true, rejects_limit = 0"
    return (
        f"read_csv({literal(str(path))}, auto_detect = false, header = false, columns = {{{columns}}}, "
        f"delim = {literal(form.delimiter)}, quote = {quote}, escape = {escape}, skip = {form.skip}, "
        f"compression = '{_compression(path)}', max_line_size = {MAX_LINE_BYTES}, buffer_size = {2 * MAX_LINE_BYTES}, "
        f"strict_mode = {'true' if form.quoting else 'false'}, {rest})"
    )


def _found(path: Path, table: Table, lines: list[str], form: FileForm) -> _Form:
    """How a text file is written, by its first lines."""
    notes: list[str] = []
    if not form.header and _IMPRESSIONS.fullmatch(lines[0]):
        table.notes.append(f"{table.what}: impressions as MIND has them; every clicked item is an event")
        return _Form("\t", False, "", 0, list(MIND_EVENTS))
    if not form.header and _NEWS.fullmatch(lines[0]):
        table.notes.append(f"{table.what}: news as MIND has them, without a line of names")
        return _Form("\t", False, "", 0, list(MIND_ITEMS))
    skip, given = 0, form.delimiter
    if match := re.fullmatch(r'"?sep=(.)"?', lines[0].strip()):
        skip, given = 1, given or match[1]
    delimiter, above = _delimiter(path, given, lines[skip:])
    skip += above
    if above:
        notes.append(
            f"{above} lines above the line of names are passed over, such as {lines[skip - above].strip()[:60]!r}"
        )
    usual = "\t" if ".tsv" in path.name.lower() else ","
    if delimiter != usual and not given:
        name = next((name for name, mark in DELIMITERS.items() if mark == delimiter), delimiter)
        notes.append(f"the delimiter is a {name}")
    first = lines[skip] if skip < len(lines) else ""
    quoting = form.quoting
    if quoting is None:
        quoting = delimiter != "\t" or all(one[:1] == one[-1:] == '"' and len(one) > 1 for one in first.split("\t"))
        if not quoting and any('"' in line for line in lines):
            notes.append("quotes are letters (quoting=True: they hold fields together)")
    inside = rf'\\"(?!{re.escape(delimiter)}|$)'
    escape = "\\" if quoting and any(re.search(inside, line) for line in lines) else '"'
    if escape == "\\":
        notes.append('\\" inside a field is a quote')
    header = list(form.header) or [name.strip() for name in _fields(first, delimiter, quoting)]
    table.notes += [f"{table.what}: {note}" for note in notes]
    return _Form(delimiter, quoting, escape, skip if form.header else skip + 1, header)


def _fields(line: str, delimiter: str, quoting: bool = True) -> list[str]:
    if not quoting or '"' not in line:
        return line.split(delimiter)
    return next(csv.reader([line], delimiter=delimiter), [""])


def _delimiter(path: Path, given: str | None, lines: list[str]) -> tuple[str, int]:
    """The delimiter, and the lines above the line of names: they have other numbers of fields, or blank ones."""
    if given:
        mark = DELIMITERS.get(given, given.encode().decode("unicode_escape") if given.startswith("\\") else given)
        if len(mark) != 1:
            raise ValueError(f"got the delimiter {given!r}, expected one character, or {', '.join(DELIMITERS)}")
    usual = "\t" if ".tsv" in path.name.lower() else ","
    best = (0.0, 0, 0, False, usual)
    for one in [mark] if given else DELIMITERS.values():
        rows = [_fields(line, one) for line in lines[:LOOK_LINES]]
        nums = [len(row) if 2 * sum(map(bool, row)) >= len(row) else 0 for row in rows]  # "Sales of 2025;;;;;" is none
        below = nums[len(nums) // 2 :]
        most = Counter(below).most_common(1)[0][0]
        if most > 1:
            above = nums.index(most)
            share = sum(num == most for num in nums[above:]) / len(nums[above:])
            best = max(best, (round(share, 1), -above, most, one == usual, one))
    return (mark if given else best[-1]), -best[1]


def _count_lines(path: Path) -> tuple[int, int]:
    """Lines of a file, and how many of them are blank; a file with lone carriage returns has none of its own."""
    num_lines, num_blank, last, length = 0, 0, b"\n", 0
    with _binary(path) as file:
        while piece := file.read(1 << 22):
            length = len(piece) - piece.rfind(b"\n") - 1 if (found := piece.count(b"\n")) else length + len(piece)
            if length > MAX_LINE_BYTES:
                raise ValueError(
                    f"{path}: line {num_lines + found + 1} has more than {MAX_LINE_BYTES:,} bytes, expected less"
                )
            num_lines += found
            if last == b"\n" or b"\n\n" in piece or b"\n\r\n" in piece:
                num_blank += len(re.findall(rb"(?<=\n)\r?\n", last + piece))
            last = piece[-1:]
    return num_lines + (last != b"\n"), num_blank


def _without_quotes_fits(path: Path, form: _Form, num_lines: int, num_blank: int, table: Table) -> bool:
    """Whether quotes are letters: with them lines are swallowed, without them every line is a row."""

    def num_rows(one: _Form) -> int:
        sql = f"SELECT count(*) FROM {_read_csv(path, one, sampled=True)}"
        try:
            return int(table.connection.execute(sql).fetchall()[0][0])
        except duckdb.Error:
            return 0

    expected = num_lines - num_blank - form.skip
    with _binary(path) as file:
        if not any(b'"' in piece for piece in iter(lambda: file.read(1 << 22), b"")):
            return False
    with_quotes = num_rows(form)
    if with_quotes >= expected or num_rows(form._replace(quoting=False)) != expected:
        return False
    table.warnings.append(
        f"{table.what}: quotes are letters: as quotes {expected - with_quotes:,} of {expected:,} lines of {path.name} "
        "were inside them, and without them every line is a row (quoting=True: they hold fields together)"
    )
    return True


def _encoding(path: Path, table: Table, look: bytes, given: str | None) -> str:
    if given:
        try:
            name = codecs.lookup(given).name
            "".encode(name)
            b"".decode(name)
        except (LookupError, UnicodeError) as error:
            raise ValueError(f"got the encoding {given!r}, expected one such as utf-8, latin-1 or cp1252") from error
        return name
    if look.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        table.notes.append(f"{table.what}: the text is UTF-16")
        return "utf-16"
    if b"\0" in look[:200]:
        raise ValueError(
            f"got {path} with zero bytes as {table.what}, expected text: another encoding, such as "
            "encoding='utf-16-le', or no text at all"
        )
    decoder, number = codecs.getincrementaldecoder("utf-8")(), 0
    with _binary(path) as file:
        for piece in iter(lambda: file.read(1 << 22), b""):
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(piece)
            except UnicodeDecodeError as error:
                place = max(0, error.start - pending)
                return _eight_bits(path, table, piece, number + piece.count(b"\n", 0, place) + 1, place)
            number += piece.count(b"\n")
    return "utf-8"


def _eight_bits(path: Path, table: Table, piece: bytes, number: int, place: int) -> str:
    """cp1252 where that makes letters of nearly all that is not ASCII, said first; else an error."""
    end = piece.find(b"\n", place)
    line = piece[piece.rfind(b"\n", 0, place) + 1 : end if end >= 0 else len(piece)].decode("cp1252", "replace")
    text = piece.decode("cp1252", "replace")
    odd = [letter for letter in text if not letter.isascii()]
    if sum((letter.isalpha() and letter < "\u0180") or letter in "€£°–’\xa0" for letter in odd) >= 0.9 * len(odd):
        table.warnings.append(
            f"{table.what}: {path.name} is not UTF-8 and is read as cp1252 (line {number}: {line.strip()[:60]!r}); "
            "if that is wrong, set encoding='...' (--encoding)"
        )
        return "cp1252"
    raise ValueError(
        f"got {path} with {table.what} that are not UTF-8, in line {number}, which would be {line.strip()[:80]!r} as "
        "cp1252, expected UTF-8, or its encoding by name: encoding='cp1252', 'latin-1' or another (--encoding)"
    )


def _decoded(path: Path, table: Table, encoding: str) -> Path:
    """A temporary copy in UTF-8."""
    target = Path(table.holder.name) / f"{len(list(Path(table.holder.name).iterdir()))}-{path.name.removesuffix('.gz')}"
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        with _binary(path) as file, open(target, "w", encoding="utf-8", newline="") as out:
            while piece := file.read(1 << 22):
                out.write(decoder.decode(piece))
            out.write(decoder.decode(b"", True))
    except (UnicodeError, LookupError, TypeError) as error:
        raise ValueError(f"cannot read the {table.what} in {path} as {encoding} ({error})") from error
    return target
