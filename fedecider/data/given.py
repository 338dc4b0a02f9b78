"""Tables that somebody gives: frames in memory or .parquet, .csv and .tsv files, read row by row."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.readers.reading import (
    BELOW_RATING,
    DEFAULT_TEXT_FIELDS,
    MAX_TIME,
    MICROSECONDS,
    OTHER_TEXT_FIELDS,
    SURROGATE,
    EventTable,
    ItemFields,
    ReadOptions,
    clean,
    keep_rating,
)
from fedecider.data.table_files import TableFile
from fedecider.data.times import Clock, expected, guessed_clock, in_words, is_date

TEXT_COLUMNS = (*DEFAULT_TEXT_FIELDS, *OTHER_TEXT_FIELDS)
USUAL = {
    "user": "user userid username customer customerid customerno clientid client buyer buyerid member memberid "
    "visitor visitorid clientuid customeruid account accountid reviewer reviewerid uid email borrower borrowerid "
    "patron patronid kunde kundennummer kundennr",
    "item": "item itemid sku product productid article articleid parentasin asin isbn movie movieid book bookid "
    "track trackid song songid stockcode businessid gameid newsid lineitemsku artikel "
    "artikelnummer artikelnr",
    "time": "time timestamp ts t date datetime day tdat boughtat orderedat purchasedat createdat eventtime "
    "ordertime orderdate purchasedate orderedon boughton invoicedate unixreviewtime eventtimestamp checkout "
    "checkoutdate loandate eventdate eventms datum bestelldatum zeitstempel",
    "quantity": "quantity qty lineitemquantity menge",
}
"""What columns are called by others, in small letters, without spaces, dots, dashes and underscores."""
BARCODES = {"ean", "gtin", "barcode", "itemean", "itemgtin", "productean", "productgtin"}
"""Names of columns that are items' keys where no other column is called so."""
TIME_WORDS = re.compile(r"time|date|stamp|epoch|zeit|datum|(^|_)(at|ts|ms)$", re.IGNORECASE)
"""In the names of columns whose numbers may be times."""
YEARS_2000_TO_2040 = (946_684_800, 2_208_988_800)
NUM_LOOKED_AT = 100
"""Values by which a column is taken for times."""
USUAL_TEXTS = {
    "title": "title maintitle fulltitle lineitemname name label itemname itemtitle productname producttitle "
    "prodname appname booktitle movietitle gametitle trackname songname headline bezeichnung artikelbezeichnung",
    "author": "author authors bookauthor writer artist artistname",
    "brand": "brand brandname manufacturer maker vendor store publisher developer marke hersteller",
    "categories": "categories category categoryname maincategory productcategory producttype producttypename "
    "productgroupname department departmentname subcategory warengruppe kategorie",
    "genres": "genres genre",
    "keywords": "keywords tags subjects",
    "description": "description desc detaildesc productdescription longdescription abstract summary beschreibung",
    "price": "price unitprice listprice preis einzelpreis",
    "year": "year yearofpublication releaseyear",
}
"""The same of texts; the first one that is there counts."""
OF_REVIEWS = {"text", "reviewtext", "reviewbody", "verifiedpurchase"}
"""Columns of reviews, whose title is not the item's."""
RETURNS = "returns (a quantity of 0 or less)"
EXACT = 2**53
"""From here on floats leave whole numbers out, so that two keys could become one."""
STREAMED_ROWS = 10_000
"""Rows of a streamed data set that are held at a time."""
NAME = re.compile(r"\w[\w.-]*")
PER_UNIT = {"s": MICROSECONDS, "ms": 1000, "us": 1}
"""Microseconds in one unit of Arrow's times."""
NUM_EXAMPLES = 3


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
    clock: Clock | None = None
    """What its times mean; None: the first ones tell."""

    @property
    def file(self) -> TableFile | None:
        """The table on disk, if it is one."""
        if isinstance(self.table, str | Path):
            return TableFile(Path(self.table), self.what)
        return self.table if isinstance(self.table, TableFile) else None

    @property
    def paths(self) -> list[Path]:
        """The files that hold it."""
        return self.file.parts if self.file else []

    @property
    def column_names(self) -> list[str]:
        """Of the whole table. ``ValueError`` where it cannot be read."""
        return _schema(self)

    def place(self, what: str, number: int) -> str:
        """``in row 3 of the events (column 'sku')``."""
        return f"in row {number} of the {self.what} (column {self.columns[what]!r})"


class BadValue(ValueError):
    """What makes one row unreadable."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class Reading:
    """What was read of tables, and which rows could not be."""

    NOT_A_ROW: ClassVar[str] = "not in the file's form"
    skip: bool = False
    """Whether unreadable rows are left out and counted; else the first one is an error."""
    num_rows: Counter[str] = field(default_factory=Counter)
    """By table."""
    bad: dict[str, Counter[str]] = field(default_factory=dict)
    """Table -> what is wrong -> rows."""
    examples: list[str] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)
    """Table -> its first bad row."""
    notes: list[str] = field(default_factory=list)

    def add_bad(self, what: str, kind: str, text: str) -> None:
        """One row of the table ``what``; ``ValueError`` unless such rows are left out."""
        if not self.skip:
            raise ValueError(f"{text} (bad_rows='skip' leaves such rows out)")
        self.bad.setdefault(what, Counter())[kind] += 1
        self.first.setdefault(what, text)
        if len(self.examples) < NUM_EXAMPLES:
            self.examples.append(text)

    def num_bad_of(self, what: str) -> int:
        """Of one table."""
        return sum(self.bad.get(what, Counter()).values())

    @property
    def num_bad(self) -> int:
        return sum(sum(counts.values()) for counts in self.bad.values())


def usual_column(given: Given, what: str) -> str | None:
    """The one column that is called as ``what`` usually is; None where there is none.

    Raises:
        ValueError: there are several.
    """
    found = [name for name in given.column_names if _bare(name) in USUAL[what].split()]
    if {"asin", "parentasin"} == set(map(_bare, found)):  # sizes and colours of a product have one parent
        found = [name for name in found if _bare(name) == "parentasin"]
    if what == "item" and not found:
        found = [name for name in given.column_names if _bare(name) in BARCODES]
    if len(found) > 1:
        raise ValueError(
            f"got {given.what} with the columns {', '.join(found)}, which could all be the {what}, expected one: name "
            f"yours with {what}='...'"
        )
    return found[0] if found else None


def _bare(name: str) -> str:
    """A column's name in small letters, without spaces, dots, dashes and underscores."""
    return re.sub(r"[\s._-]", "", name).lower()


def time_like_columns(given: Given, used: Collection[str]) -> dict[str, str]:
    """Columns outside ``used`` whose first values all are times, whatever they are called -> the first one."""
    names = [name for name in dict.fromkeys(given.column_names) if name not in used]
    batch = next(_batches(given._replace(columns=dict(zip(names, names, strict=True))), Reading(skip=True)), None)
    found: dict[str, str] = {}
    if batch is None:
        return found
    for name in names:
        if name in batch.schema.names:
            values = [one for one in batch.column(name)[:NUM_LOOKED_AT].to_pylist() if not _is_nothing(one)]
            if values and all(_is_time(one, name) for one in values):
                found[name] = str(values[0])
    return found


def _is_time(value: Any, name: str) -> bool:
    if isinstance(value, date):
        return True
    try:
        number = float(value)
    except (TypeError, ValueError):
        return isinstance(value, str) and is_date(value)
    if isinstance(value, bool) or not TIME_WORDS.search(name) or not 0 < number < EXACT:
        return False
    first, last = YEARS_2000_TO_2040
    try:
        return first <= guessed_clock([value]).moment(value)[0] < last
    except (TypeError, ValueError, OverflowError):  # 1e9, 1_000: numbers that no clock is written with
        return False


def needed_column(given: Given, what: str) -> str:
    """As :func:`usual_column`; ``ValueError`` where there is none too."""
    found = usual_column(given, what)
    if found is None:
        raise ValueError(
            f"got {given.what} with the columns {', '.join(given.column_names)[:300]}, of which none is called as the "
            f"{what} usually is: name yours with {what}='...' (--{what}; in a file without a line of names, all of "
            f"them: header='user,item,...'){_unpack(given)}"
        )
    return found


def text_columns(
    given: Given, texts: Mapping[str, str] | None, others: Iterable[str] = (), of_events: bool = False
) -> dict[str, str]:
    """Text field -> its column, by ``texts`` or else by names; ``others`` hold keys and times.

    ``of_events``: the table is one of events, and may be of reviews.

    Raises:
        ValueError: there is none, or the texts are those of reviews.
    """
    odd = sorted(set(texts or ()) - set(TEXT_COLUMNS))
    if odd:
        raise ValueError(f"got the text field {odd[0]!r}, expected some of {', '.join(TEXT_COLUMNS)}")
    chosen = dict(texts or {})
    if texts is None:
        names = [name for name in given.column_names if name not in set(others)]
        chosen = {what: what for what in TEXT_COLUMNS if what in names}
        for what, usual in USUAL_TEXTS.items():
            free = {_bare(name): name for name in reversed(names) if name not in chosen.values()}
            if what not in chosen and (found := next((free[one] for one in usual.split() if one in free), None)):
                chosen[what] = found
        chosen = {what: chosen[what] for what in TEXT_COLUMNS if what in chosen}
        if "title" not in chosen and not set(chosen) - {"description", "price", "year"} and "description" in chosen:
            chosen = {"title": chosen.pop("description"), **chosen}
        if set(chosen) <= {"price", "year"}:
            chosen = {}
        if of_events and OF_REVIEWS & set(map(_bare, given.column_names)):
            raise ValueError(
                f"got reviews ({', '.join(given.column_names)[:200]}) without a table of items: the texts are those of "
                "reviews, expected items, or the columns with items' texts: texts={'title': '...'}"
            )
    if not chosen:
        raise ValueError(
            f"got {given.what} without a column of texts, expected one at least of {', '.join(TEXT_COLUMNS)}: name "
            f"yours with texts={{'title': '...'}}; its columns are {', '.join(given.column_names)[:200]}"
            f"{_unpack(given)}"
        )
    return chosen


def _unpack(given: Given) -> str:
    """What to do where a column of a file of objects holds lists of objects, such as the items of an order."""
    nested = given.file.nested if given.file else ""
    if not nested:
        return ""
    others = [name for name in given.column_names if name != nested]
    return (
        f". {nested!r} holds lists of objects; make a line of each: pandas.json_normalize([json.loads(line) for line "
        f"in open(FILE)], {nested!r}, {others}).to_json('lines.jsonl', orient='records', lines=True)"
    )


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
    givens: Sequence[Given],
    min_rating: float | None,
    consents: Consents | None = None,
    reading: Reading | None = None,
) -> dict[str, EventTable]:
    """Domain -> its events, in one pass over each table; users of companies are called ``company:key``.

    ``consents`` takes what a column of this name says, ``reading`` what was read and which rows could not be.
    """
    tables: dict[str, EventTable] = {}
    reading = reading or Reading()
    options = ReadOptions(min_rating)
    empty = partial(EventTable, *(any(one in given.columns for given in givens) for one in ("time", "order")))
    for given in givens:
        read, before = 0, sum(table.num_events for table in tables.values())
        for batch in _checked_batches(given, reading):
            if "time" in given.columns and given.clock is None and batch.num_rows:
                given = given._replace(clock=_guessed_clock(batch, given, reading))
            first, read = read, read + batch.num_rows
            if consents is None and _add_columns(batch, given, tables, empty):
                continue
            for number, row in enumerate(_rows_of(batch, given), first + 1):
                try:
                    _add_row(row, given, number, tables, empty, consents, options)
                except BadValue as error:
                    reading.add_bad(given.what, error.kind, str(error))
        reading.num_rows[given.what] += read
        if not read:
            raise ValueError(f"got no {given.what}, expected one row for each")
        if reading.num_bad_of(given.what) and sum(table.num_events for table in tables.values()) == before:
            raise ValueError(
                f"got {given.what} of which no row can be read as an event, expected some: {reading.first[given.what]}"
            )
    return tables


def _add_row(
    row: Mapping[str, Any],
    given: Given,
    number: int,
    tables: dict[str, EventTable],
    empty: Callable[[], EventTable],
    consents: Consents | None,
    options: ReadOptions,
) -> None:
    """One event, or what is counted in its place; `BadValue`, and nothing done, where it cannot be read."""
    of = _key(row["domain"], "domain", given, number) if "domain" in row else given.domain
    user, item = (_key(row[one], one, given, number) for one in ("user", "item"))
    company = _company(row["company"], given, number) if "company" in row else given.company
    is_low = "rating" in row and not keep_rating(_number(row["rating"], "rating", given, number), options)
    is_return = "quantity" in row and _number(row["quantity"], "quantity", given, number) <= 0
    time = _time(row["time"], given, number) if "time" in row and not (is_low or is_return) else ()
    order = "" if _is_nothing(row.get("order")) else _key(row["order"], "order", given, number)
    table = tables.setdefault(of, empty())
    if company:
        user, order = f"{company}:{user}", order and f"{company}:{order}"
    if consents is not None:
        consents.add(user, row["consents"], given, number)
    if is_low or is_return:
        table.skip(BELOW_RATING if is_low else RETURNS)
    else:
        table.add(user, item, *(time or (UNKNOWN_TIME, 0)), order)


def _guessed_clock(batch: pa.RecordBatch, given: Given, reading: Reading) -> Clock:
    if given.file and (form := given.file.time_format):
        return Clock(form)
    column = batch.column(given.columns["time"])
    clock = guessed_clock([one for one in column.to_pylist() if not _is_nothing(one)])
    if clock != Clock():
        reading.notes.append(
            f"{given.what}: column {given.columns['time']!r}: {in_words(clock)} (else: time_format='...')"
        )
    return clock


def _add_columns(
    batch: pa.RecordBatch, given: Given, tables: dict[str, EventTable], empty: Callable[[], EventTable]
) -> bool:
    """Add the events of a batch at once; False, and nothing added, where it takes more than plain keys, times, order
    numbers and quantities."""
    if not batch.num_rows or set(given.columns) - {"user", "item", "time", "order", "quantity"}:
        return False
    num_returns = 0
    if "quantity" in given.columns:
        is_event_N = _is_sold(batch.column(given.columns["quantity"]))
        if is_event_N is None or not is_event_N.any():
            return False
        num_returns, batch = batch.num_rows - int(is_event_N.sum()), batch.filter(pa.array(is_event_N))
    coded_users, coded_items = (_coded(batch.column(given.columns[one])) for one in ("user", "item"))
    has_times = "time" in given.columns
    micro_N: np.ndarray | None = np.zeros(batch.num_rows, np.int64)
    if has_times:
        micro_N = _microseconds(batch.column(given.columns["time"]), given.clock or Clock())
    orders = _coded(batch.column(given.columns["order"])) if "order" in given.columns else None
    if coded_users is None or coded_items is None or micro_N is None or (orders is None and "order" in given.columns):
        return False
    (users, user_N), (items, item_N) = coded_users, coded_items
    if given.company:
        users = [f"{given.company}:{user}" for user in users]
        orders = orders and ([f"{given.company}:{one}" for one in orders[0]], orders[1])
    time_N = micro_N // MICROSECONDS if has_times else np.full(batch.num_rows, UNKNOWN_TIME)
    table = tables.setdefault(given.domain, empty())
    table.add_all(users, user_N, items, item_N, time_N, micro_N, orders)
    if num_returns:
        table.dropped.add(RETURNS, events=num_returns)
    return True


def _is_sold(column: pa.Array) -> np.ndarray | None:
    """(N,) bool: a quantity above 0; None where one is no number, which :func:`_number` tells."""
    try:
        quantity_N = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        return None
    return quantity_N > 0 if np.isfinite(quantity_N).all() else None


def _coded(column: pa.Array) -> tuple[list[str], np.ndarray] | None:
    """The different keys in the order in which they come, and which of them each row has; None for other columns than
    texts and whole numbers without gaps."""
    if column.null_count or not (_is_text(column.type) or pa.types.is_integer(column.type)):
        return None
    coded = column.dictionary_encode()
    keys = [str(key) for key in coded.dictionary.to_pylist()]
    return None if any(not key or "\n" in key for key in keys) else (keys, coded.indices.to_numpy())


def _microseconds(column: pa.Array, clock: Clock) -> np.ndarray | None:
    """Times since 1970; None where :func:`_time` has to look at every single one."""
    if column.null_count:
        return None
    if clock.factor and _is_text(column.type) and pc.all(pc.match_substring_regex(column, r"^\d{1,18}$")).as_py():
        column = column.cast(pa.int64())
    if clock.factor and pa.types.is_integer(column.type):
        time_N, factor = column.cast(pa.int64(), safe=False).to_numpy(), clock.factor
    elif pa.types.is_timestamp(column.type) and column.type.unit in PER_UNIT:
        time_N, factor = column.view(pa.int64()).to_numpy(), PER_UNIT[column.type.unit]
    elif _is_text(column.type) or pa.types.is_integer(column.type):
        return _of_different(column, clock)
    else:
        return None
    is_good = time_N.min() >= 0 and time_N.max() < MAX_TIME * MICROSECONDS // factor
    return time_N * factor if is_good else None


def _of_different(column: pa.Array, clock: Clock) -> np.ndarray | None:
    """Each different time is read once; None where one cannot be."""
    coded = column.dictionary_encode()
    try:
        micro_K = np.array([clock.moment(one)[1] for one in coded.dictionary.to_pylist()], np.int64)
    except (ValueError, TypeError, OverflowError):
        return None
    return micro_K[coded.indices.to_numpy()]


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def company_of(user: str) -> str:
    """The company in front of a key of :func:`event_tables`."""
    return user.partition(":")[0]


def key_within_company(user: str) -> str:
    """The key behind the company, as it was given."""
    return user.partition(":")[2]


def item_records(
    given: Given, duplicate_items: str = "error", once: bool = False, reading: Reading | None = None
) -> dict[str, list[tuple[str, ItemFields]]]:
    """Domain -> keys and texts of its items.

    Args:
        given: The table.
        duplicate_items: What an item in two rows with other texts is: ``error``, or ``first`` leaves it to others.
        once: The rows are events, of which an item has the texts that most of its rows have.
        reading: Takes what was read, and rows without a key.

    Raises:
        ValueError: an item is in two rows with other texts, and may not.
    """
    found: dict[str, list[tuple[str, ItemFields]]] = {}
    first: dict[tuple[str, str], tuple[ItemFields, int]] = {}
    counts: dict[tuple[str, str], Counter[tuple[str, ...]]] = {}
    fields = [one for one in given.columns if one in TEXT_COLUMNS]
    reading = reading or Reading()
    number = 0
    for number, row in enumerate(_rows(given, reading), 1):
        try:
            of = _key(row["domain"], "domain", given, number) if "domain" in row else given.domain
            key = _key(row["item"], "item", given, number)
        except BadValue as error:
            if not once:  # else it was counted among the events
                reading.add_bad(given.what, error.kind, str(error))
            continue
        texts = {one: "" if _is_nothing(row[one]) else clean(row[one]) for one in fields}
        if once:
            counts.setdefault((of, key), Counter())[tuple(texts.values())] += 1
            continue
        before, where = first.setdefault((of, key), (texts, number))
        if before != texts and duplicate_items == "error":
            raise ValueError(
                f"got the duplicate item key {key!r} {given.place('item', number)}, with other texts than in row "
                f"{where}, expected each item once: correct the table, or keep the first one (duplicate_items='first')"
            )
        found.setdefault(of, []).append((key, texts))
    for (of, key), of_item in counts.items():
        found.setdefault(of, []).append((key, dict(zip(fields, of_item.most_common(1)[0][0], strict=True))))
    several = [key for (_, key), of_item in counts.items() if len(of_item) > 1]
    if several:
        reading.notes.append(
            f"{given.what}: {len(several)} items such as {several[0]!r} have several texts; what most rows say is taken"
        )
    if not once:
        reading.num_rows[given.what] += number
    return found


def table_columns(given: Given, names: Sequence[str]) -> list[list[Any]]:
    """The values of some columns of a table, which is small enough to be held."""
    named = given._replace(columns={name: name for name in names})
    rows = [tuple(row.values()) for row in _rows(named)]
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in names]


def keys_of(given: Given) -> list[str]:
    """The users of a table, in its order."""
    return [_key(row["user"], "user", given, number) for number, row in enumerate(_rows(given), 1)]


def plain_keys(values: Iterable[Any], what: str) -> list[str]:
    """Keys from a list, set, array or series as texts. ``ValueError`` for one that is none."""
    given = Given(what, None, {"user": "key"})
    tolist = getattr(values, "tolist", None) or getattr(values, "to_list", None)
    return [_key(value, "user", given, number) for number, value in enumerate(tolist() if tolist else values, 1)]


def _rows(given: Given, reading: Reading | None = None) -> Iterator[dict[str, Any]]:
    """Our column name -> value, row after row; a file is never held as a whole."""
    for batch in _checked_batches(given, reading):
        yield from _rows_of(batch, given)


def _rows_of(batch: pa.RecordBatch, given: Given) -> Iterator[dict[str, Any]]:
    lists = [batch.column(their).to_pylist() for their in given.columns.values()]
    for values in zip(*lists, strict=True):
        yield dict(zip(given.columns, values, strict=True))


def _checked_batches(given: Given, reading: Reading | None = None) -> Iterator[pa.RecordBatch]:
    """The batches of a table that has the columns, each once."""
    names = _schema(given)
    missing = [their for their in given.columns.values() if their not in names]
    if missing:
        raise ValueError(
            f"got {given.what} with the columns {', '.join(names)[:300]}, expected {missing[0]!r} among them: name "
            f"your own, such as {next(iter(given.columns))}='...'{_unpack(given)}"
        )
    twice = [their for their in given.columns.values() if names.count(their) > 1]
    if twice:
        raise ValueError(f"got {given.what} with two columns {twice[0]!r}, expected each name once")
    batches = _batches(given, reading or Reading())
    yield from _carried(batches, given) if "order" in given.columns else batches


def _carried(batches: Iterable[pa.RecordBatch], given: Given) -> Iterator[pa.RecordBatch]:
    """Blank customers and times on further lines of an order are those of the line before, as shops export orders."""
    names = [given.columns[one] for one in ("user", "company", "time") if one in given.columns]
    before: dict[str, Any] = {}
    for batch in batches:
        if batch.num_rows and not any(_has_blank(batch.column(name)) for name in names):
            last = batch.slice(batch.num_rows - 1)
            before = {"": last.column(given.columns["order"])[0].as_py()}
            before |= {name: last.column(name)[0].as_py() for name in names}
            yield batch
            continue
        orders = batch.column(given.columns["order"]).to_pylist()
        columns = {name: batch.column(name).to_pylist() for name in names}
        for row, order in enumerate(orders):
            goes_on = not _is_nothing(order) and order == before.get("")
            for name, values in columns.items():
                if goes_on and _is_nothing(values[row]):
                    values[row] = before[name]
            before = {"": order, **{name: values[row] for name, values in columns.items()}}
        for name, values in columns.items():
            place = batch.schema.get_field_index(name)
            batch = batch.set_column(place, name, pa.array(values, batch.schema.field(name).type))
        yield batch


def _has_blank(column: pa.Array) -> bool:
    if column.null_count:
        return True
    if pa.types.is_floating(column.type):
        return bool(np.isnan(column.to_numpy(zero_copy_only=False)).any())
    return _is_text(column.type) and "" in column.unique().to_pylist()


def _schema(given: Given) -> list[str]:
    if file := given.file:
        return file.column_names
    if _is_stream(given.table):
        names = given.table.column_names or list(next(iter(given.table), {}))
        return [str(name) for name in names]
    return [str(name) for name in _names_in_memory(given)]


def _names_in_memory(given: Given) -> Iterable[Any]:
    """The columns of a table in memory, which is not converted for them where it says so itself."""
    table = given.table
    if isinstance(table, list) and all(isinstance(row, Mapping) for row in table):
        return dict.fromkeys(name for row in table for name in row)
    known = None if isinstance(table, Mapping) else getattr(table, "column_names", None)
    return known if isinstance(known, list) else _table(given._replace(columns={})).column_names


def _batches(given: Given, reading: Reading) -> Iterator[pa.RecordBatch]:
    wanted = list(dict.fromkeys(given.columns.values()))
    if file := given.file:

        def add_bad_row(text: str) -> None:
            reading.add_bad(given.what, Reading.NOT_A_ROW, text)

        file.add_bad_row = add_bad_row if reading.skip else None
        yield from file.batches(wanted)
        return
    if _is_stream(given.table):
        for part in given.table.select_columns(wanted).with_format("arrow").iter(batch_size=STREAMED_ROWS):
            yield from part.to_batches()
        return
    table = _table(given)
    odd = [one.name for one in table.schema if one.name in given.columns.values() and _is_extension(one.type)]
    if odd:
        raise ValueError(f"got the column {odd[0]!r} of a kind of its own in the {given.what}, expected plain values")
    yield from table.to_batches()


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
    except UnicodeEncodeError as error:
        raise ValueError(
            f"got {given.what} with half of a character ({error.object[:60]!r}), expected text that UTF-8 can write"
        ) from error
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise ValueError(
            f"got {given.what} with a column of mixed or too large values ({_odd_value(table, wanted) or error}), "
            "expected one kind in a column"
        ) from error
    raise ValueError(
        f"got {type(table).__name__} as {given.what}, expected a pandas or polars frame, a pyarrow table, a Hugging "
        "Face data set (one split), a list of dicts, or the path of a .parquet, .csv, .tsv or .jsonl file or folder"
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
        raise BadValue(f"no {what}", f"got no {what} {given.place(what, number)}, expected one in every row")
    if what in ("domain", "company") and isinstance(value, str) and not (value := value.strip()):
        raise BadValue(f"no {what}", f"got an empty {what} {given.place(what, number)}, expected a name in every row")
    if isinstance(value, float | Decimal) and abs(float(value)) < EXACT and value == int(value):
        value = int(value)  # a column of whole numbers that a gap has made floats
    if not isinstance(value, str | int) or isinstance(value, bool):
        text = f"got the {what} {value!r} {given.place(what, number)}, expected text or a whole number"
        raise BadValue(f"unreadable {what}", text)
    if isinstance(value, str) and not value.isascii() and SURROGATE.search(value):
        text = f"got the {what} {value!r} {given.place(what, number)}, expected text without halves of a character"
        raise BadValue(f"unreadable {what}", text)
    if isinstance(value, str) and "\n" in value:
        text = f"got the {what} {value[:60]!r} {given.place(what, number)}, expected one line: does a quote never end?"
        raise BadValue(f"unreadable {what}", f"{text} quoting=False takes quotes as letters")
    return str(value)


def _company(value: Any, given: Given, number: int) -> str:
    company = _key(value, "company", given, number)
    if not NAME.fullmatch(company):
        raise ValueError(
            f"got the company {company!r} {given.place('company', number)}, expected letters, digits, '_', '-' and "
            "'.' only (it names a folder)"
        )
    return company


def _number(value: Any, what: str, given: Given, number: int) -> float:
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        text = f"got the {what} {value!r} {given.place(what, number)}, expected a number"
        raise BadValue(f"unreadable {what}", text)
    return found


def _time(value: Any, given: Given, number: int) -> tuple[int, int]:
    """Unix seconds and microseconds."""
    clock = given.clock or Clock()
    if _is_nothing(value):
        text = (
            f"got no time {given.place('time', number)}, expected one in every row: leave such rows out, or the column "
            "where rows are in order"
        )
        raise BadValue("no time", text)
    try:
        return clock.moment(value)
    except (ValueError, TypeError, OverflowError) as error:
        text = f"got the time {value!r} {given.place('time', number)}, {expected(value, clock)}"
        raise BadValue("unreadable time", text) from error
