"""Tables that somebody gives: frames in memory or .parquet, .csv and .tsv files, read row by row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from fedecider.data.readers.table import (
    BELOW_RATING,
    DEFAULT_TEXT_FIELDS,
    OTHER_TEXT_FIELDS,
    EventTable,
    ItemFields,
    ReadOptions,
    clean,
    keep_rating,
    moment,
)

TEXT_COLUMNS = (*DEFAULT_TEXT_FIELDS, *OTHER_TEXT_FIELDS)
EXACT = 2**53
"""From here on floats leave whole numbers out, so that two keys could become one."""
NAME = re.compile(r"\w[\w.-]*")
_NUMBER = re.compile(r"\d{1,10}(\.\d*)?")


class Given(NamedTuple):
    """One of the two tables, and what its columns are called."""

    what: str
    """``events`` or ``items``."""
    table: Any
    columns: dict[str, str]
    """Ours -> theirs, of the columns that are read."""

    @property
    def path(self) -> Path | None:
        return Path(self.table) if isinstance(self.table, str | Path) else None


FROM_2001 = 10**9
"""Unix seconds in September 2001; ten times as many are in the year 2286."""


def given_items(items: Any, keys: Mapping[str, str], texts: Mapping[str, str] | None) -> Given:
    odd = sorted(set(texts or ()) - set(TEXT_COLUMNS))
    if odd:
        raise ValueError(f"got the text field {odd[0]!r}, expected some of {', '.join(TEXT_COLUMNS)}")
    chosen = texts
    if chosen is None:
        names = set(_schema(Given("items", items, {})))
        chosen = {field: field for field in TEXT_COLUMNS if field in names}
    if not chosen:
        raise ValueError(
            f"got items without a column of texts, expected one at least of {', '.join(TEXT_COLUMNS)}: name yours with "
            "texts={'title': '...'}"
        )
    return Given("items", items, {**keys, **chosen})


def event_tables(given: Given, name: str, min_rating: float | None) -> dict[str, EventTable]:
    """Domain -> its events, in one pass; with a column ``company`` users are called ``company:key``."""
    tables: dict[str, EventTable] = {}
    options = ReadOptions(min_rating)
    for number, row in enumerate(_rows(given), 1):
        of = _key(row["domain"], "domain", given, number) if "domain" in row else name
        table = tables.setdefault(of, EventTable(with_order="time" in row))
        user, item = (_key(row[one], one, given, number) for one in ("user", "item"))
        if "company" in row:
            user = f"{_company(row['company'], given, number)}:{user}"
        if "rating" in row and not keep_rating(_rating(row["rating"], given, number), options):
            table.skip(BELOW_RATING)
            continue
        table.add(user, item, *(_time(row["time"], given, number) if "time" in row else ()))
    if not tables:
        raise ValueError("got no events, expected one row for each")
    return tables


def company_of(user: str) -> str:
    """The company in front of a key of :func:`event_tables`."""
    return user.partition(":")[0]


def item_records(given: Given, name: str) -> dict[str, list[tuple[str, ItemFields]]]:
    """Domain -> keys and texts of its items."""
    found: dict[str, list[tuple[str, ItemFields]]] = {}
    fields = [one for one in given.columns if one in TEXT_COLUMNS]
    for number, row in enumerate(_rows(given), 1):
        of = _key(row["domain"], "domain", given, number) if "domain" in row else name
        texts = {one: "" if _is_nothing(row[one]) else clean(row[one]) for one in fields}
        found.setdefault(of, []).append((_key(row["item"], "item", given, number), texts))
    return found


def _rows(given: Given) -> Iterator[dict[str, Any]]:
    """Our column name -> value, row after row; a file is never held as a whole."""
    names = _schema(given)
    missing = [their for their in given.columns.values() if their not in names]
    if missing:
        raise ValueError(
            f"got {given.what} with the columns {', '.join(names)[:300]}, expected {missing[0]!r} among them: name "
            f"your own, such as {next(iter(given.columns))}='...'"
        )
    twice = [their for their in given.columns.values() if names.count(their) > 1]
    if twice:
        raise ValueError(f"got {given.what} with two columns {twice[0]!r}, expected each name once")
    for batch in _batches(given):
        lists = [batch.column(their).to_pylist() for their in given.columns.values()]
        for values in zip(*lists, strict=True):
            yield dict(zip(given.columns, values, strict=True))


def _schema(given: Given) -> list[str]:
    path = given.path
    if path is None:
        return [str(name) for name in _table(given._replace(columns={})).column_names]
    try:
        if _is_parquet(path):
            return list(pyarrow.parquet.read_schema(path).names)
        with _open_csv(path, None) as reader:
            return list(reader.schema.names)
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path} with the {given.what}, expected .parquet, .csv or .tsv") from error
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"cannot read the {given.what} in {path} ({error}), expected .parquet, .csv or .tsv"
        ) from error


def _batches(given: Given) -> Iterator[pa.RecordBatch]:
    path = given.path
    if path is None:
        table = _table(given)
        odd = [one.name for one in table.schema if one.name in given.columns.values() and _is_extension(one.type)]
        if odd:
            raise ValueError(
                f"got the column {odd[0]!r} of a kind of its own in the {given.what}, expected plain values"
            )
        yield from table.to_batches()
        return
    try:
        if _is_parquet(path):
            yield from pyarrow.parquet.ParquetFile(path).iter_batches(columns=list(given.columns.values()))
            return
        with _open_csv(path, list(dict.fromkeys(given.columns.values()))) as reader:
            yield from reader
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"cannot read the {given.what} in {path} ({error}), expected .parquet, .csv or .tsv"
        ) from error


def _is_parquet(path: Path) -> bool:
    """``ValueError`` for what is neither Parquet nor csv by its name."""
    name = path.name.lower()
    if not name.removesuffix(".gz").endswith((".parquet", ".csv", ".tsv")):
        raise ValueError(f"got the file {path}, expected one whose name ends with .parquet, .csv or .tsv")
    return name.endswith(".parquet")


def _open_csv(path: Path, wanted: Sequence[str] | None) -> pyarrow.csv.CSVStreamingReader:
    """``wanted`` columns as they are written (007 stays 007, NA is a text); an empty field is nothing. None: names."""
    delimiter = "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else ","
    convert = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(wanted or (), pa.string()),
        include_columns=wanted,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
    )
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    return pyarrow.csv.open_csv(path, parse_options=parse, convert_options=convert)


def _table(given: Given) -> pa.Table:
    """A table in memory as pyarrow's, as far as its columns are read."""
    table, wanted = given.table, list(dict.fromkeys(given.columns.values()))
    try:
        if isinstance(table, pa.Table):
            return table
        if isinstance(table, list) and all(isinstance(row, Mapping) for row in table):
            names = list(dict.fromkeys(name for row in table for name in row))
            return pa.Table.from_pylist([{name: row.get(name) for name in wanted or names} for row in table])
        if hasattr(table, "to_arrow"):  # polars
            return table.to_arrow()
        if hasattr(table, "with_format") and hasattr(table, "num_rows") and not isinstance(table, Mapping):
            return table.with_format("arrow")[:]  # Hugging Face
        if hasattr(table, "to_dict") and hasattr(table, "columns"):  # pandas
            known = [name for name in wanted if name in table.columns]
            return pa.Table.from_pandas(table[known] if wanted else table.iloc[:0], preserve_index=False)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise ValueError(
            f"got {given.what} with a column of mixed or too large values ({error}), expected one kind in a column"
        ) from error
    raise ValueError(
        f"got {type(table).__name__} as {given.what}, expected a pandas or polars frame, a pyarrow table, a Hugging "
        "Face dataset, a list of dicts, or the path of a .parquet, .csv or .tsv file"
    )


def _is_extension(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.BaseExtensionType)


def _is_nothing(value: Any) -> bool:
    return value is None or value == "" or value != value  # NaN and NaT are unlike themselves


def _key(value: Any, what: str, given: Given, number: int) -> str:
    if _is_nothing(value):
        raise ValueError(f"got no {what} in row {number} of the {given.what}, expected one in every row")
    if what in ("domain", "company") and isinstance(value, str) and not (value := value.strip()):
        raise ValueError(f"got an empty {what} in row {number} of the {given.what}, expected a name in every row")
    if isinstance(value, float | Decimal) and abs(float(value)) < EXACT and value == int(value):
        value = int(value)  # a column of whole numbers that a gap has made floats
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(
            f"got the {what} {value!r} in row {number} of the {given.what}, expected text or a whole number"
        )
    return str(value)


def _company(value: Any, given: Given, number: int) -> str:
    company = _key(value, "company", given, number)
    if not NAME.fullmatch(company):
        raise ValueError(
            f"got the company {company!r} in row {number} of the {given.what}, expected letters, digits, '_', '-' and "
            "'.' only (it names a folder)"
        )
    return company


def _rating(value: Any, given: Given, number: int) -> float:
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"got the rating {value!r} in row {number} of the {given.what}, expected a number")
    return found


def _time(value: Any, given: Given, number: int) -> tuple[int, int]:
    """Unix seconds and microseconds; times without a zone are taken as UTC."""
    if _is_nothing(value):
        raise ValueError(
            f"got no time in row {number} of the {given.what}, expected one in every row: leave such rows out, or the "
            "column where rows are in order"
        )
    try:
        if isinstance(value, str):
            value = float(value) if _NUMBER.fullmatch(value) else datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        return moment(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(
            f"got the time {value!r} in row {number} of the {given.what}, expected Unix seconds, or a date and time"
            f"{_finer(value)}"
        ) from error


def _finer(value: Any) -> str:
    """What to do with milliseconds, microseconds and nanoseconds of this century, which are too large for seconds."""
    for unit, factor in (("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9)):
        if isinstance(value, int | float) and FROM_2001 <= value / factor < 10 * FROM_2001:
            return f"; if these are {unit}, divide the column by {factor}"
    return ""
