"""Tables that somebody gives: frames in memory or .parquet, .csv and .tsv files, read row by row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.readers.raw import (
    BELOW_RATING,
    DEFAULT_TEXT_FIELDS,
    MAX_TIME,
    MICROSECONDS,
    OTHER_TEXT_FIELDS,
    EventTable,
    ItemFields,
    ReadOptions,
    clean,
    keep_rating,
    moment,
)

TEXT_COLUMNS = (*DEFAULT_TEXT_FIELDS, *OTHER_TEXT_FIELDS)
USUAL = {
    "user": "user userid customer customerid client clientid buyer buyerid member memberid visitor visitorid account "
    "accountid reviewer reviewerid uid",
    "item": "item itemid sku product productid article articleid asin parentasin isbn movie movieid book bookid track "
    "trackid song songid",
    "time": "time timestamp ts date datetime day boughtat orderedat purchasedat createdat eventtime ordertime "
    "orderdate purchasedate orderedon boughton unixreviewtime",
    "title": "title name label itemname itemtitle productname producttitle",
}
"""What columns are called by others, in small letters, without spaces, dots, dashes and underscores."""
EXACT = 2**53
"""From here on floats leave whole numbers out, so that two keys could become one."""
STREAMED_ROWS = 10_000
"""Rows of a streamed data set that are held at a time."""
NAME = re.compile(r"\w[\w.-]*")
PER_UNIT = {"s": MICROSECONDS, "ms": 1000, "us": 1}
"""Microseconds in one unit of Arrow's times."""
_NUMBER = re.compile(r"\d{1,10}(\.\d*)?")


class Given(NamedTuple):
    """One of the tables, and what its columns are called."""

    what: str
    """For messages: ``events``, ``items``, ``events of north``."""
    table: Any
    columns: dict[str, str]
    """Ours -> theirs, of the columns that are read."""
    domain: str = "shop"
    """Where rows belong that have no column of domains."""
    company: str = ""
    """Whose customers the users are, where all of them are one company's."""

    @property
    def path(self) -> Path | None:
        return Path(self.table) if isinstance(self.table, str | Path) else None

    @property
    def column_names(self) -> list[str]:
        """Of the whole table. ``ValueError`` where it cannot be read."""
        return _schema(self)

    def place(self, what: str, number: int) -> str:
        """``in row 3 of the events (column 'sku')``."""
        return f"in row {number} of the {self.what} (column {self.columns[what]!r})"


FROM_2001 = 10**9
"""Unix seconds in September 2001; ten times as many are in the year 2286."""


def usual_column(given: Given, what: str) -> str | None:
    """The one column that is called as ``what`` usually is; None where there is none.

    Raises:
        ValueError: there are several.
    """
    found = [name for name in given.column_names if re.sub(r"[\s._-]", "", name).lower() in USUAL[what].split()]
    if len(found) > 1:
        raise ValueError(
            f"got {given.what} with the columns {', '.join(found)}, which could all be the {what}, expected one: name "
            f"yours with {_option(what)}"
        )
    return found[0] if found else None


def _option(what: str) -> str:
    return "texts={'title': '...'}" if what == "title" else f"{what}='...'"


def needed_column(given: Given, what: str) -> str:
    """As :func:`usual_column`; ``ValueError`` where there is none too."""
    found = usual_column(given, what)
    if found is None:
        raise ValueError(
            f"got {given.what} with the columns {', '.join(given.column_names)[:300]}, of which none is called as the "
            f"{what} usually is: name yours with {_option(what)}"
        )
    return found


def text_columns(given: Given, texts: Mapping[str, str] | None) -> dict[str, str]:
    """Text field -> its column, by ``texts`` or else by names. ``ValueError`` where there is none."""
    odd = sorted(set(texts or ()) - set(TEXT_COLUMNS))
    if odd:
        raise ValueError(f"got the text field {odd[0]!r}, expected some of {', '.join(TEXT_COLUMNS)}")
    chosen = dict(texts or {})
    if texts is None:
        names = set(given.column_names)
        chosen = {field: field for field in TEXT_COLUMNS if field in names}
        if "title" not in names and (title := usual_column(given, "title")):
            chosen["title"] = title
    if not chosen:
        raise ValueError(
            f"got {given.what} without a column of texts, expected one at least of {', '.join(TEXT_COLUMNS)}: name "
            "yours with texts={'title': '...'}"
        )
    return chosen


class Consents:
    """What a column says about whose events everybody may see: user -> answer."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[bool, Given, int]] = {}

    def add(self, user: str, value: Any, given: Given, number: int) -> None:
        """One row's answer. ``ValueError`` for one that is none, or differs from the user's others."""
        answer = _truth(value)
        if answer is None:
            raise ValueError(f"got {value!r} {given.place('consents', number)}, expected true or false in every row")
        before, table, row = self._found.setdefault(user, (answer, given, number))
        if before != answer:
            raise ValueError(
                f"got {answer} for the customer {user!r} {given.place('consents', number)}, but {before} "
                f"{table.place('consents', row)}, expected the same in all rows of a customer"
            )

    @property
    def public(self) -> frozenset[str]:
        """The users whose answer is yes."""
        return frozenset(user for user, (answer, _, _) in self._found.items() if answer)


def _truth(value: Any) -> bool | None:
    """True, 1 and their texts; False, 0 and theirs; else None."""
    if isinstance(value, float) and value in (0.0, 1.0):
        value = int(value)
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())


def event_tables(
    givens: Sequence[Given], min_rating: float | None, consents: Consents | None = None
) -> dict[str, EventTable]:
    """Domain -> its events, in one pass over each table; users of companies are called ``company:key``.

    ``consents`` takes what a column of this name says.
    """
    tables: dict[str, EventTable] = {}
    options, with_order = ReadOptions(min_rating), any("time" in given.columns for given in givens)
    for given in givens:
        read = 0
        for batch in _checked_batches(given):
            first, read = read, read + batch.num_rows
            if consents is None and _add_columns(batch, given, tables, with_order):
                continue
            for number, row in enumerate(_rows_of(batch, given), first + 1):
                of = _key(row["domain"], "domain", given, number) if "domain" in row else given.domain
                table = tables.setdefault(of, EventTable(with_order))
                user, item = (_key(row[one], one, given, number) for one in ("user", "item"))
                company = _company(row["company"], given, number) if "company" in row else given.company
                if company:
                    user = f"{company}:{user}"
                if consents is not None:
                    consents.add(user, row["consents"], given, number)
                if "rating" in row and not keep_rating(_rating(row["rating"], given, number), options):
                    table.skip(BELOW_RATING)
                    continue
                table.add(user, item, *(_time(row["time"], given, number) if "time" in row else ()))
        if not read:
            raise ValueError(f"got no {given.what}, expected one row for each")
    return tables


def _add_columns(batch: pa.RecordBatch, given: Given, tables: dict[str, EventTable], with_order: bool) -> bool:
    """Add the events of a batch at once; False, and nothing added, where it takes more than plain keys and times."""
    if not batch.num_rows or set(given.columns) - {"user", "item", "time"}:
        return False
    coded_users, coded_items = (_coded(batch.column(given.columns[one])) for one in ("user", "item"))
    has_times = "time" in given.columns
    micro_N = _microseconds(batch.column(given.columns["time"])) if has_times else np.zeros(batch.num_rows, np.int64)
    if coded_users is None or coded_items is None or micro_N is None:
        return False
    (users, user_N), (items, item_N) = coded_users, coded_items
    if given.company:
        users = [f"{given.company}:{user}" for user in users]
    time_N = micro_N // MICROSECONDS if has_times else np.full(batch.num_rows, UNKNOWN_TIME)
    table = tables.setdefault(given.domain, EventTable(with_order))
    table.add_all(users, user_N, items, item_N, time_N, micro_N)
    return True


def _coded(column: pa.Array) -> tuple[list[str], np.ndarray] | None:
    """The different keys in the order in which they come, and which of them each row has; None for other columns than
    texts and whole numbers without gaps."""
    if column.null_count or not (_is_text(column.type) or pa.types.is_integer(column.type)):
        return None
    coded = column.dictionary_encode()
    keys = [str(key) for key in coded.dictionary.to_pylist()]
    return None if "" in keys else (keys, coded.indices.to_numpy())


def _microseconds(column: pa.Array) -> np.ndarray | None:
    """Times since 1970; None where :func:`_time` has to look at every single one."""
    if column.null_count:
        return None
    if _is_text(column.type) and pc.all(pc.match_substring_regex(column, r"^\d{1,10}$")).as_py():
        column = column.cast(pa.int64())
    if pa.types.is_integer(column.type):
        time_N, factor = column.cast(pa.int64(), safe=False).to_numpy(), MICROSECONDS
    elif pa.types.is_timestamp(column.type) and column.type.unit in PER_UNIT:
        time_N, factor = column.view(pa.int64()).to_numpy(), PER_UNIT[column.type.unit]
    else:
        return None
    is_good = time_N.min() >= 0 and time_N.max() < MAX_TIME * MICROSECONDS // factor
    return time_N * factor if is_good else None


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def company_of(user: str) -> str:
    """The company in front of a key of :func:`event_tables`."""
    return user.partition(":")[0]


def key_within_company(user: str) -> str:
    """The key behind the company, as it was given."""
    return user.partition(":")[2]


def item_records(
    given: Given, duplicate_items: str = "error", once: bool = False
) -> dict[str, list[tuple[str, ItemFields]]]:
    """Domain -> keys and texts of its items.

    Args:
        given: The table.
        duplicate_items: What an item in two rows with other texts is: ``error``, or ``first`` leaves it to others.
        once: The rows are events, of which the first one of an item has its texts.

    Raises:
        ValueError: an item is in two rows with other texts, and may not.
    """
    found: dict[str, list[tuple[str, ItemFields]]] = {}
    first: dict[tuple[str, str], tuple[ItemFields, int]] = {}
    fields = [one for one in given.columns if one in TEXT_COLUMNS]
    for number, row in enumerate(_rows(given), 1):
        of = _key(row["domain"], "domain", given, number) if "domain" in row else given.domain
        key = _key(row["item"], "item", given, number)
        if once and (of, key) in first:
            continue
        texts = {one: "" if _is_nothing(row[one]) else clean(row[one]) for one in fields}
        before, where = first.setdefault((of, key), (texts, number))
        if before != texts and duplicate_items == "error":
            raise ValueError(
                f"got the duplicate item key {key!r} {given.place('item', number)}, with other texts than in row "
                f"{where}, expected each item once: correct the table, or keep the first one (duplicate_items='first')"
            )
        found.setdefault(of, []).append((key, texts))
    return found


def keys_of(given: Given) -> list[str]:
    """The users of a table, in its order."""
    return [_key(row["user"], "user", given, number) for number, row in enumerate(_rows(given), 1)]


def plain_keys(values: Iterable[Any], what: str) -> list[str]:
    """Keys from a list, set, array or series as texts. ``ValueError`` for one that is none."""
    given = Given(what, None, {"user": "key"})
    tolist = getattr(values, "tolist", None) or getattr(values, "to_list", None)
    return [_key(value, "user", given, number) for number, value in enumerate(tolist() if tolist else values, 1)]


def _rows(given: Given) -> Iterator[dict[str, Any]]:
    """Our column name -> value, row after row; a file is never held as a whole."""
    for batch in _checked_batches(given):
        yield from _rows_of(batch, given)


def _rows_of(batch: pa.RecordBatch, given: Given) -> Iterator[dict[str, Any]]:
    lists = [batch.column(their).to_pylist() for their in given.columns.values()]
    for values in zip(*lists, strict=True):
        yield dict(zip(given.columns, values, strict=True))


def _checked_batches(given: Given) -> Iterator[pa.RecordBatch]:
    """The batches of a table that has the columns, each once."""
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
    yield from _batches(given)


def _schema(given: Given) -> list[str]:
    path = given.path
    if path is None and _is_stream(given.table):
        names = given.table.column_names or list(next(iter(given.table), {}))
        return [str(name) for name in names]
    if path is None:
        return [str(name) for name in _names_in_memory(given)]
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


def _names_in_memory(given: Given) -> Iterable[Any]:
    """The columns of a table in memory, which is not converted for them where it says so itself."""
    table = given.table
    if isinstance(table, list) and all(isinstance(row, Mapping) for row in table):
        return dict.fromkeys(name for row in table for name in row)
    known = None if isinstance(table, Mapping) else getattr(table, "column_names", None)
    return known if isinstance(known, list) else _table(given._replace(columns={})).column_names


def _batches(given: Given) -> Iterator[pa.RecordBatch]:
    path = given.path
    if path is None and _is_stream(given.table):
        wanted = list(dict.fromkeys(given.columns.values()))
        for part in given.table.select_columns(wanted).with_format("arrow").iter(batch_size=STREAMED_ROWS):
            yield from part.to_batches()
        return
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
            f"got {given.what} with a column of mixed or too large values ({_odd_value(table, wanted) or error}), "
            "expected one kind in a column"
        ) from error
    raise ValueError(
        f"got {type(table).__name__} as {given.what}, expected a pandas or polars frame, a pyarrow table, a Hugging "
        "Face data set (one split), a list of dicts, or the path of a .parquet, .csv or .tsv file"
    )


def _is_stream(table: Any) -> bool:
    """Whether this is a Hugging Face `IterableDataset`."""
    known = all(hasattr(table, name) for name in ("column_names", "select_columns", "with_format", "iter"))
    return known and not hasattr(table, "num_rows") and not isinstance(table, Mapping)


def _odd_value(table: Any, wanted: Sequence[str]) -> str:
    """The first value of another kind than those before it, or too large, with its row and column; else nothing."""
    is_rows = isinstance(table, list)
    for name in wanted or (dict.fromkeys(name for row in table for name in row) if is_rows else table.columns):
        kind: Any = None
        for number, value in enumerate((row.get(name) for row in table) if is_rows else table[name], 1):
            if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
                continue
            if value is None or value != value:
                continue
            found = "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value)
            kind = kind or found
            if found != kind or (isinstance(value, int) and abs(value) >= 2**63):
                return f"{value!r} in row {number}, column {name!r}"
    return ""


def _is_extension(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.BaseExtensionType)


def _is_nothing(value: Any) -> bool:
    return value is None or value == "" or value != value  # NaN and NaT are unlike themselves


def _key(value: Any, what: str, given: Given, number: int) -> str:
    if _is_nothing(value):
        raise ValueError(f"got no {what} {given.place(what, number)}, expected one in every row")
    if what in ("domain", "company") and isinstance(value, str) and not (value := value.strip()):
        raise ValueError(f"got an empty {what} {given.place(what, number)}, expected a name in every row")
    if isinstance(value, float | Decimal) and abs(float(value)) < EXACT and value == int(value):
        value = int(value)  # a column of whole numbers that a gap has made floats
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f"got the {what} {value!r} {given.place(what, number)}, expected text or a whole number")
    return str(value)


def _company(value: Any, given: Given, number: int) -> str:
    company = _key(value, "company", given, number)
    if not NAME.fullmatch(company):
        raise ValueError(
            f"got the company {company!r} {given.place('company', number)}, expected letters, digits, '_', '-' and "
            "'.' only (it names a folder)"
        )
    return company


def _rating(value: Any, given: Given, number: int) -> float:
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"got the rating {value!r} {given.place('rating', number)}, expected a number")
    return found


def _time(value: Any, given: Given, number: int) -> tuple[int, int]:
    """Unix seconds and microseconds; times without a zone are taken as UTC."""
    if _is_nothing(value):
        raise ValueError(
            f"got no time {given.place('time', number)}, expected one in every row: leave such rows out, or the "
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
            f"got the time {value!r} {given.place('time', number)}, expected Unix seconds, or a date and time"
            f"{_finer(value)}"
        ) from error


def _finer(value: Any) -> str:
    """What to do with milliseconds, microseconds and nanoseconds of this century, which are too large for seconds."""
    for unit, factor in (("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9)):
        if isinstance(value, int | float) and FROM_2001 <= value / factor < 10 * FROM_2001:
            return f"; if these are {unit}, divide the column by {factor}"
    return ""
