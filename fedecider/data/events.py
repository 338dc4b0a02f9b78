"""Events and items out of opened tables: purchases with customer, item, time and order, and every row that is none.

Shape legend: E events.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from fedecider.data.columns import (
    TEXT_COLUMNS,
    bare,
    candidates,
    clock_column,
    find_columns,
    time_like_columns,
)
from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.dropped import Dropped
from fedecider.data.keys import SEVERAL, check_keys, nearly_equal, parts_of
from fedecider.data.mapping import NO_TIMES, TableOptions
from fedecider.data.names import check_name
from fedecider.data.purchases import (
    FLAGS,
    NO_CUSTOMER,
    NOT_KEPT,
    RETURNS,
    ZERO,
    ask_about_states,
    keep_rows,
    leave_out_nobody,
    state_columns,
    take_back,
)
from fedecider.data.readers.reading import BELOW_RATING, ItemFields, RawEvents, clean, events_of_columns
from fedecider.data.tables import JSON, Question, Table, literal, quoted
from fedecider.data.times import DAY_US, FIRST_YEAR, ORDER, SINCE_US, checked_form, find_form, latest_us

MUCH = 0.1
"""A larger share of rows that do not come in is said first."""
LEAST_CUSTOMERS = 10
LARGE = 0.2
"""Share of all events, from which on one customer is named."""
ONCE = 0.05
"""Share of customers with two purchases, below which the column of customers is doubted."""
NUM_EXAMPLES = 3
NEWEST_FIRST = 0.9
LOOKED_AT = 100_000
KEYS = ("user", "item", "order", "domain", "company")


class Source(NamedTuple):
    """A table of events or of items, and which of its columns are read."""

    table: Table
    options: TableOptions
    columns: dict[str, str]
    """Ours -> theirs."""
    domain: str = "shop"
    """Where rows belong that have no column of domains."""
    company: str = ""
    """Whose customers the users are, where all of them are one company's."""
    guessed: tuple[str, ...] = ()
    """The columns that nobody named."""

    @property
    def what(self) -> str:
        return self.table.what


@dataclass
class Reading:
    """What was read of tables, and which rows could not be."""

    NOT_A_ROW: ClassVar[str] = "not in the file's form"
    skip: bool = False
    """Whether unreadable rows are left out and counted; else they are an error."""
    num_rows: Counter[str] = field(default_factory=Counter)
    """By table."""
    bad: dict[str, Counter[str]] = field(default_factory=dict)
    """Table -> what is wrong -> rows."""
    examples: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    """What has to be said before everything else."""

    def add_bad(self, what: str, kind: str, text: str, count: int = 1) -> None:
        """Rows of the table ``what``; ``ValueError`` unless such rows are left out."""
        if not self.skip:
            more = f" ({count:,} such rows)" if count > 1 else ""
            raise ValueError(f"{text}{more} (bad_rows='skip' leaves such rows out)")
        self.bad.setdefault(what, Counter())[kind] += count
        if len(self.examples) < NUM_EXAMPLES:
            self.examples.append(text)

    def add_table(self, table: Table, num_rows: int) -> None:
        """What a table that was loaded says of itself."""
        self.num_rows[table.what] += num_rows
        self.first += [text for text in table.warnings if text not in self.first]
        self.notes += [text for text in table.notes if text not in self.notes]
        for kind, count in table.bad.items():
            self.add_bad(table.what, kind, table.examples[0], count)
            self.examples += [text for text in table.examples[1:] if len(self.examples) < NUM_EXAMPLES]

    @property
    def num_bad(self) -> int:
        """Of all tables."""
        return sum(sum(counts.values()) for counts in self.bad.values())

    def bad_in_words(self) -> list[str]:
        """A line for each table with bad rows."""
        lines = []
        for what, counts in self.bad.items():
            kinds = ", ".join(f"{kind} ({count:,})" for kind, count in counts.most_common())
            lines.append(f"{what}: {sum(counts.values()):,} bad rows: {kinds}")
        return lines

    def refuse_bad(self) -> None:
        """``ValueError`` where a row of any table is bad."""
        if self.num_bad:
            raise ValueError(
                f"got {self.num_bad:,} bad rows, the first one: {self.examples[0]}; nothing was written. Correct the "
                "table, or leave them out with bad_rows skip"
            )


def event_source(
    table: Table,
    options: TableOptions,
    domain: str = "shop",
    company: str = "",
    consents: str = "",
    of_items: Sequence[str] = (),
) -> Source:
    """A table of events with the columns that are asked for, and those that are called as they usually are.

    Raises:
        ValueError: columns of customers or items are missing, or one that holds times is called otherwise.
    """
    day, _, clock = (options.time or "").partition("+")
    if not clock or options.time in table.column_names:
        day, clock = options.time or "", ""
    time = "" if day == NO_TIMES else day or None
    asked = {
        "user": options.user,
        "item": options.item,
        "time": time,
        "quantity": options.quantity,
        "order": options.order,
    }
    found = find_columns(table, asked, ("time", "quantity", "order"), of_items)
    columns = dict(found.by_role)
    for role in ("rating", "domain", "company"):
        if name := getattr(options, role):
            columns[role] = name
    if clock:
        columns["clock"] = clock
    elif found.guessed.get("time") and (clock := clock_column(table, columns["time"], columns.values())):
        columns["clock"] = clock
        table.notes.append(f"{table.what}: times are columns {columns['time']!r} and {clock!r} together")
    if "time" not in columns and time is None:
        if like := time_like_columns(table, columns.values()):
            name, example = next(iter(like.items()))
            raise Question(
                f"got {table.what} without a column that is called as times usually are, but {name!r} holds times "
                f"({example}), expected the column's name: time={name!r} (--time), or time={NO_TIMES!r} where it is "
                "not the time of the event and rows are oldest first",
                {**columns, "time": name},
            )
        table.warnings.append(f"{table.what}: no column of times, rows are taken as oldest first (--time: its name)")
    if other := [name for name in table.column_names if bare(name) == "company" and name not in columns.values()]:
        table.warnings.append(
            f"WARNING: {table.what}: column {other[0]!r} is not used: customers of one key in two companies are taken "
            f"for one person (in a mapping file, or in Python: company={other[0]!r})"
        )
    if consents:
        columns["consents"] = consents
    if found.guessed:
        table.notes.append(f"{table.what}: {listed(found.guessed)}")
    used: dict[str, str] = {}
    for role, name in columns.items():
        if role != "consents" and used.setdefault(name, role) != role:
            raise ValueError(
                f"got the column {name!r} of the {table.what} as {used[name]} and as {role}, expected a column for each"
            )
    table.check(columns.values())
    return Source(table, options, columns, domain, company, tuple(found.guessed))


def listed(columns: Mapping[str, str]) -> str:
    """``user is column 'customer', ...``."""
    return ", ".join(f"{what} is column {their!r}" for what, their in columns.items())


class Purchases:
    """Events of several tables, by domain."""

    def __init__(self, reading: Reading, min_rating: float | None = None, known_items: Sequence[str] = ()) -> None:
        self.reading, self.min_rating, self.known_items = reading, min_rating, known_items
        self.parts: dict[str, list[pa.Table]] = {}
        self.dropped: dict[str, Dropped] = {}
        self.public: dict[str, bool] = {}
        """Customer -> what a column says about whether everybody may see the events."""
        self.has_times = self.has_orders = False

    def add(self, source: Source) -> None:
        """The purchases of a table.

        Raises:
            ValueError: a value that cannot be read, or a column that may say which rows are purchases.
        """
        table, reading = source.table, self.reading
        extra = {name: f"p{place}" for place, name in enumerate(_extra_columns(source))}
        self._say_lists(source)
        columns = {**source.columns, **{ours: name for name, ours in extra.items()}}
        num_rows = table.load(columns, _plain_columns(source, extra))
        reading.add_table(table, num_rows)
        if not num_rows:
            raise ValueError(f"got no {source.what}, expected one row for each")
        dropped = Dropped()
        _complete(source, extra)
        if kept := keep_rows(table, source.options.counted, extra):
            dropped.add(NOT_KEPT, events=kept)
        ask_about_states(table, source.options.counted, extra)
        self._say_negative(source, extra)
        num_nobody, keys = leave_out_nobody(table, source.options.nobody)
        if num_nobody:
            dropped.add(NO_CUSTOMER, events=num_nobody)
            other = _other_user(source)
            said = (
                f"{source.what}: {num_nobody:,} of {num_rows:,} rows have no customer ({keys} in column "
                f"{source.columns['user']!r}): left out{other}"
            )
            (reading.first if other or num_nobody > MUCH * num_rows else reading.notes).append(said)
            if num_nobody >= num_rows - kept:
                raise ValueError(f"got {source.what} without a customer: {said}")
        self._say_largest(source)
        _split_cells(source, self.known_items, reading)
        order_form = self._read_times(source)
        self._remove_bad(source, order_form)
        if not table.value("SELECT count(*) FROM rows"):
            raise ValueError(
                f"got {source.what} of which no row can be read as an event, expected some: {reading.examples[:1]}"
            )
        self._check_customers(source)
        if "rating" in source.columns and self.min_rating is not None:
            dropped.add(BELOW_RATING, events=_deleted(table, f"rating < {float(self.min_rating)}"))
        if "quantity" in source.columns:
            dropped.add(ZERO, events=_deleted(table, "amount = 0"))
            self._take_back(source, dropped)
        self._collect(source, order_form, dropped)

    def by_domain(self) -> dict[str, RawEvents]:
        """Domain -> its events, in the order of the tables."""
        found = {}
        for domain, parts in self.parts.items():
            events = pa.concat_tables(parts)
            order = events["order"] if self.has_orders else None
            order_E = events["micro"].to_numpy() if self.has_times else None
            raw = events_of_columns(events["user"], events["item"], events["time"].to_numpy(), order_E, order)
            found[domain] = raw._replace(dropped=self.dropped[domain])
        return found

    def _say_lists(self, source: Source) -> None:
        """Lists beside the one of items that may say what was sent back."""
        for name in _lists_beside(source):
            if FLAGS.search(bare(name.rpartition(".")[2])):
                self.reading.first.append(
                    f"{source.what}: the list {name!r} beside the items may say what was sent back, and is not read: "
                    "write its entries as rows of a negative quantity (--quantity)"
                )

    def _say_negative(self, source: Source, extra: Mapping[str, str]) -> None:
        for name, ours in extra.items():
            if name in source.options.counted:
                continue
            number = _number(quoted(ours))
            others = "amount >= 0" if "quantity" in source.columns else "true"
            low, known = source.table.query(
                f"SELECT count(*) FILTER ({number} < 0 AND {others}), count({number}) FROM rows"
            )[0]
            if 0 < low < known:
                self.reading.first.append(
                    f"{source.what}: column {name!r} has {low:,} negative numbers and is not used; if these rows are "
                    f"returns: quantity={name!r} (--quantity)"
                )

    def _say_largest(self, source: Source) -> None:
        """A customer of a large share of all events may be none."""
        sql = 'SELECT "user", count(*) AS num FROM rows GROUP BY ALL ORDER BY num DESC LIMIT 2'
        (key, most), (_, second), *_ = *source.table.query(sql), ("", 0), ("", 0)
        total = source.table.value("SELECT count(*) FROM rows")
        if source.options.nobody is None and second and most >= LARGE * total and most >= 3 * second:
            self.reading.first.append(
                f"{source.what}: {most / total:.0%} of all events are of the customer {key!r}: if that is no person, "
                f"nobody={key!r} (--nobody)"
            )

    def _read_times(self, source: Source) -> bool:
        """``micro`` of all rows; whether it is an order and no time."""
        table, columns, options = source.table, source.columns, source.options
        if "time" not in columns:
            _add_column(table, "micro", "0")
            return True
        self.has_times = True
        column, name, added = '"time"', columns["time"], ""
        if "clock" in columns:
            name = f"{name}+{columns['clock']}"
            if table.value("SELECT count(*) = count(*) FILTER (TRY_CAST(clock AS DOUBLE) IS NOT NULL) FROM rows"):
                added = " + CAST(coalesce(TRY_CAST(clock AS DOUBLE), 0) * 1000 AS BIGINT)"
            else:
                column = "(regexp_replace(\"time\", '[ T]00:00(:00.*)?$', '') || ' ' || clock)"
        form = checked_form(options.time_format) if options.time_format else find_form(table, column, name)
        if form.in_words and not options.time_format:
            text = f"{source.what}: column {name!r}: {form.in_words} (else: time_format='...')"
            (self.reading.first if form.form == ORDER else self.reading.notes).append(text)
        _add_column(table, "micro", f"{form.sql(column)}{added}")
        if form.form != ORDER:
            self._say_order_within_days(source)
        return form.form == ORDER

    def _say_order_within_days(self, source: Source) -> None:
        if "clock" in source.columns or source.table.value(f"SELECT count(*) FROM rows WHERE micro % {DAY_US} <> 0"):
            return
        free = [name for name in source.table.column_names if name not in source.columns.values()]
        if perhaps := [name for name in free if re.search(r"time|zeit|heure|hora|clock", name, re.IGNORECASE)]:
            self.reading.first.append(
                f"{source.what}: times are whole days; {perhaps[0]!r} may tell the order within a day: "
                f"time='{source.columns['time']}+{perhaps[0]}' (--time)"
            )

    def _remove_bad(self, source: Source, is_order: bool) -> None:
        """Rows that are no events, counted by what is wrong with them."""
        columns, table = source.columns, source.table
        checks: list[tuple[str, str, str, str]] = [("item", "no item", "item IS NULL", "one in every row")]
        for role in ("user", "item"):
            checks.append(
                (
                    role,
                    f"unreadable {role}",
                    f'contains("{role}", chr(10))',
                    "one line: does a quote never end? quoting=False takes quotes as letters",
                )
            )
        checks += [
            (role, f"no {role}", f'"{role}" IS NULL', "a name in every row")
            for role in ("domain", "company")
            if role in columns
        ]
        checks += [
            (role, f"unreadable {role}", f"{ours} IS NULL", "a number")
            for role, ours in (("rating", "rating"), ("quantity", "amount"))
            if role in columns
        ]
        if "time" in columns:
            checks += [
                (
                    "time",
                    "no time",
                    '"time" IS NULL',
                    "one in every row: leave such rows out, or the column where rows are in order (time='none')",
                ),
                (
                    "time",
                    "unreadable time",
                    "micro IS NULL",
                    "a time in the form of the others; name another form with time_format='...' (--time_format)",
                ),
            ]
            if not is_order:
                checks.append(
                    (
                        "time",
                        f"a time outside {FIRST_YEAR} to tomorrow",
                        f"micro NOT BETWEEN {SINCE_US} AND {latest_us()}",
                        f"a time from {FIRST_YEAR} to tomorrow",
                    )
                )
        cases = " ".join(f"WHEN {where} THEN {place}" for place, (_, _, where, _) in enumerate(checks))
        counted = table.query(
            f"SELECT CASE {cases} END AS bad, count(*), min(row) FROM rows GROUP BY bad HAVING bad IS NOT NULL "
            "ORDER BY bad"
        )
        for bad, count, row in counted:
            role, kind, _, expected = checks[bad]
            raw = {"quantity": "quantity_text", "rating": "rating_text"}.get(role, role)
            value = table.value(f"SELECT {quoted(raw)} FROM rows WHERE row = {row}")
            got = f"no {role}" if value is None else f"the {role} {value[:60]!r}"
            place = f"in row {row + 1} of the {source.what} (column {columns[role]!r})"
            self.reading.add_bad(source.what, kind, f"got {got} {place}, expected {expected}", count)
        if counted:
            table.query(f"DELETE FROM rows WHERE CASE {cases} END IS NOT NULL")

    def _check_customers(self, source: Source) -> None:
        """Keys that cannot be right, and a column of customers that is new in every order."""
        table = source.table
        for role in ("user", "item"):
            keys = [key for (key,) in table.query(f'SELECT DISTINCT "{role}" FROM rows')]
            place = f"in the {source.what} (column {source.columns[role]!r})"
            check_keys(keys, role, place)
            if said := nearly_equal(keys, f"{role}s of the {source.what}"):
                self.reading.first.append(said)
        purchase = '"order"' if "order" in source.columns else "micro"
        num_users, num_again = table.query(
            f"SELECT count(*), count(*) FILTER (num > 1) FROM (SELECT count(DISTINCT {purchase}) AS num FROM rows "
            'GROUP BY "user")'
        )[0]
        if (
            ("time" not in source.columns and "order" not in source.columns)
            or num_users < LEAST_CUSTOMERS
            or num_again >= ONCE * num_users
        ):
            return
        text = f"{num_again:,} of {num_users:,} customers (column {source.columns['user']!r}) bought more than once"
        if (other := _other_user(source)) and "user" in source.guessed:
            raise ValueError(f"got {source.what} in which {text}: is this key new in every order?{other}")
        self.reading.first.append(f"{source.what}: {text}: is this key new in every order?")

    def _take_back(self, source: Source, dropped: Dropped) -> None:
        num, back, unmatched = take_back(source.table)
        if not num:
            return
        dropped.add(RETURNS, events=num + back)
        rest = f"; of {unmatched:,} no purchase is in the table" if unmatched else ""
        self.reading.notes.append(f"{source.what}: {num:,} returns take back {back:,} purchases{rest}")

    def _collect(self, source: Source, is_order: bool, dropped: Dropped) -> None:
        table, columns = source.table, source.columns
        self.has_orders |= "order" in columns
        self.has_times |= "time" in columns
        company = '"company"' if "company" in columns else literal(source.company)
        owner = f"CASE WHEN {company} = '' THEN '' ELSE {company} || ':' END"
        number = f"nullif({owner} || \"order\", '')" if "order" in columns else "NULL"
        time = "micro // 1000000" if "time" in columns else str(UNKNOWN_TIME)
        if "company" in columns:
            for (name,) in table.query('SELECT DISTINCT "company" FROM rows'):
                check_name(name, rename=f"change it in the {source.what} (column {columns['company']!r})")
        if "consents" in columns:
            self._add_consents(source, owner)
        direction = "DESC" if not is_order and _is_newest_first(table) else "ASC"
        if direction == "DESC":
            self.reading.notes.append(f"{source.what}: rows are newest first: those of one time are taken in reverse")
        domains = (
            [name for (name,) in table.query('SELECT DISTINCT "domain" FROM rows')]
            if "domain" in columns
            else [source.domain]
        )
        for domain in domains:
            where = f'WHERE "domain" = {literal(domain)}' if "domain" in columns else ""
            sql = (
                f'SELECT {owner} || "user" AS "user", item, CAST({time} AS BIGINT) AS "time", '
                f'CAST(micro AS BIGINT) AS micro, CAST({number} AS VARCHAR) AS "order" '
                f"FROM rows {where} ORDER BY row {direction}"
            )
            self.parts.setdefault(domain, []).append(table.arrow(sql))
            self.dropped.setdefault(domain, Dropped())
        self.dropped[domains[0]].include(dropped)
        table.query("DROP TABLE rows")

    def _add_consents(self, source: Source, owner: str) -> None:
        """What a column says about who is public. ``ValueError`` for an answer that is none, or several of one."""
        truth = (
            "CASE WHEN lower(consents) IN ('true', '1', '1.0') THEN true "
            "WHEN lower(consents) IN ('false', '0', '0.0') THEN false END"
        )
        place = f"in the {source.what} (column {source.columns['consents']!r})"
        odd = source.table.query(f"SELECT row, consents FROM rows WHERE {truth} IS NULL LIMIT 1")
        if odd:
            raise ValueError(
                f"got {odd[0][1]!r} in row {odd[0][0] + 1} {place.replace('in', 'of', 1)}, expected true or false in "
                "every row"
            )
        for user, low, high in source.table.query(
            f'SELECT {owner} || "user" AS name, min({truth}), max({truth}) FROM rows GROUP BY name'
        ):
            if low != high or self.public.setdefault(user, high) != high:
                raise ValueError(
                    f"got true and false for the customer {user!r} {place}, expected the same in all rows of a customer"
                )


def _extra_columns(source: Source) -> list[str]:
    """Those that may say which rows count."""
    keep = source.options.counted
    source.table.check(keep)
    others = state_columns(source.table, {*source.columns.values(), *keep})
    beside = tuple(f"{name}." for name in _lists_beside(source))
    return [*keep, *(name for name in others if not name.startswith(beside))]


def _lists_beside(source: Source) -> list[str]:
    """Lists of JSON objects that hold no column that is read: their entries are no rows."""
    read = [*source.columns.values(), *source.options.counted]
    return [one for one in source.table.lists if not any(name.startswith(f"{one}.") for name in read)]


def _add_column(table: Table, name: str, sql: str) -> None:
    table.query(f"CREATE OR REPLACE TEMP TABLE rows AS SELECT *, {sql} AS {quoted(name)} FROM rows")


def _deleted(table: Table, where: str) -> int:
    count = int(table.value(f"SELECT count(*) FROM rows WHERE {where}"))
    if count:
        table.query(f"DELETE FROM rows WHERE {where}")
    return count


def _number(column: str) -> str:
    """SQL of a number that may have a decimal comma, or its sign behind it; NULL: it is none."""
    column = rf"regexp_replace({column}, '^([\d.,]+)-$', '-\1')"
    comma = f"TRY_CAST(replace(replace({column}, '.', ''), ',', '.') AS DOUBLE)"
    number = f"CASE WHEN contains({column}, ',') THEN {comma} ELSE TRY_CAST({column} AS DOUBLE) END"
    return f"CASE WHEN isfinite({number}) THEN {number} END"


def cleaned(column: str, kind: str) -> str:
    """SQL of a key without blanks around it and what spreadsheets put there (``="007"``)."""
    text = f"CASE WHEN starts_with({column}, '=\"') THEN {column}[3:-2] ELSE {column} END"
    if kind == JSON:  # a whole number that a program has written as a float
        text = rf"CASE WHEN regexp_full_match({column}, '\d{{1,15}}\.0') THEN {column}[:-3] ELSE {text} END"
    return f"nullif(trim({text}), '')"


def _plain_columns(source: Source, extra: Mapping[str, str]) -> str:
    """SQL of the columns: keys without what programs add, numbers beside their texts, and the number of the row."""
    named = ["row_number() OVER () - 1 AS row"]
    for role in source.columns:
        column = quoted(role)
        if role in KEYS:
            named.append(f"{cleaned(column, source.table.kind)} AS {column}")
        elif role in ("quantity", "rating"):
            named += [f"{column} AS {role}_text", f"{_number(column)} AS {'amount' if role == 'quantity' else role}"]
        else:
            named.append(f"trim({column}) AS {column}")
    return ", ".join([*named, *map(quoted, extra.values())])


def _complete(source: Source, extra: Mapping[str, str]) -> None:
    """Blank customers and times of an order's further lines are those of its others; mail addresses know no case."""
    columns, table = source.columns, source.table
    if "order" in columns:
        blank = [role for role in ("user", "company", "time") if role in columns]
        others = [*blank, *extra.values()]
        if table.value(f"SELECT count(*) FROM rows WHERE {' OR '.join(f'{quoted(role)} IS NULL' for role in blank)}"):
            first = ", ".join(
                f'CASE WHEN "order" IS NULL THEN {quoted(role)} ELSE coalesce({quoted(role)}, '
                f"first_value({quoted(role)} IGNORE NULLS) OVER same_order) END AS {quoted(role)}"
                for role in others
            )
            whole = "ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING"
            window = f'WINDOW same_order AS (PARTITION BY "order" ORDER BY row {whole})'
            table.query(
                f"CREATE OR REPLACE TEMP TABLE rows AS SELECT * REPLACE ({first}) FROM rows {window} ORDER BY row"
            )
    if table.value(
        'SELECT count(*) FILTER (contains("user", \'@\')) > 0.9 * count("user") AND count("user") > 0 FROM rows'
    ):
        before = table.value('SELECT count(DISTINCT "user") FROM rows')
        table.query('UPDATE rows SET "user" = lower("user")')
        if (after := table.value('SELECT count(DISTINCT "user") FROM rows')) < before:
            table.notes.append(
                f"{source.what}: {before - after:,} mail addresses differ from others by case alone: they are one"
            )


def _other_user(source: Source) -> str:
    """A column that may hold customers in the place of the one that was taken."""
    table, used = source.table, source.columns["user"]
    sample = table.sample()
    counts = {
        name: len(set(sample.get(name, ())))
        for name in [
            *candidates(table, "user"),
            *(one for one in table.column_names if re.search(r"session|visit|unique|person|household", one.lower())),
        ]
    }
    others = [
        name for name, count in counts.items() if name != used and name not in source.columns.values() and count > 1
    ]
    return f"; customers may be in {others[0]!r}: user={others[0]!r} (--user)" if others else ""


def _split_cells(source: Source, known: Sequence[str], reading: Reading) -> None:
    """Several items in one cell are an event each."""
    table = source.table
    keys = [key for (key,) in table.query("SELECT DISTINCT item FROM rows WHERE regexp_matches(item, '[,;|]')")]
    if not keys:
        return
    all_keys = [key for (key,) in table.query("SELECT DISTINCT item FROM rows WHERE item IS NOT NULL")]
    parts = parts_of(all_keys, known)
    if not parts:
        return
    cells = pa.table({"cell": list(parts), "part": list(parts.values())})
    table.connection.register("cells", cells)
    count = table.value("SELECT count(*) FROM rows WHERE item IN (SELECT cell FROM cells)")
    table.query(
        "CREATE OR REPLACE TEMP TABLE rows AS SELECT * EXCLUDE (cell, part, item), coalesce(one, item) AS item FROM "
        "(SELECT *, unnest(CASE WHEN part IS NULL THEN [item] ELSE part END) AS one "
        "FROM rows LEFT JOIN cells ON item = cell) ORDER BY row"
    )
    example = next(iter(parts))
    reading.first.append(
        f"{source.what}: {count:,} cells of column {source.columns['item']!r} hold several keys, such as {example!r}: "
        "each is an event"
    )


def _is_newest_first(table: Table) -> bool:
    down, up = table.query(
        "SELECT count(*) FILTER (micro < before), count(*) FILTER (micro > before) FROM (SELECT micro, lag(micro) OVER "
        f'(PARTITION BY "user" ORDER BY row) AS before FROM rows WHERE row < {LOOKED_AT})'
    )[0]
    return down > LEAST_CUSTOMERS and down >= NEWEST_FIRST * (down + up)


def item_records(
    source: Source, reading: Reading, duplicate_items: str = "error", of_events: bool = False
) -> dict[str, list[tuple[str, ItemFields]]]:
    """Domain -> keys and texts of its items, in the order of the table.

    Args:
        source: The table; its columns of `TEXT_COLUMNS` are read.
        reading: Takes what was read, and rows without a key.
        duplicate_items: What an item in two rows with other texts is: ``error``, or ``first`` leaves it to others.
        of_events: The rows are events, of which an item has the texts that most of its rows have.

    Raises:
        ValueError: an item is in two rows with other texts, and may not.
    """
    table, columns = source.table, source.columns
    fields = [name for name in columns if name in TEXT_COLUMNS]
    num_rows = table.load(columns)
    domain = cleaned('"domain"', table.kind) if "domain" in columns else literal(source.domain)
    texts = "".join(f", coalesce({quoted(name)}, '')" for name in fields)
    sql = f"SELECT {domain} AS d, {cleaned('item', table.kind)} AS i{texts}, "
    if of_events:
        sql += "count(*) AS num, min(rowid) AS row FROM rows GROUP BY ALL ORDER BY d, i, num DESC, row"
    else:
        reading.add_table(table, num_rows)
        sql += "1 AS num, rowid AS row FROM rows ORDER BY rowid"
    records: dict[str, list[tuple[str, ItemFields]]] = {}
    first: dict[tuple[str, str], tuple[ItemFields, int]] = {}
    several = dict[str, None]()
    missing, missing_row = 0, 0
    rows = table.query(sql)
    keys = list(dict.fromkeys(row[1] for row in rows if row[1]))
    check_keys(keys, "item", f"in the {source.what} (column {columns['item']!r})")
    parts = parts_of(keys) if of_events else {}
    for of, key, *values, _, row in (one for cells in rows for one in _apart(cells, parts)):
        if key is None or of is None:
            missing, missing_row = missing + 1, missing_row or row + 1
            continue
        text = {name: clean(_plain_list(value)) for name, value in zip(fields, values, strict=True)}
        before, where = first.setdefault((of, key), (text, row + 1))
        if of_events:
            if where == row + 1:
                records.setdefault(of, []).append((key, text))
            elif before != text:
                several[key] = None
            continue
        if before != text and duplicate_items == "error":
            raise ValueError(
                f"got the duplicate item key {key!r} in row {row + 1} of the {source.what} (column "
                f"{columns['item']!r}), with other texts than in row {where}, expected each item once: correct the "
                "table, or keep the first one (duplicate_items='first')"
            )
        records.setdefault(of, []).append((key, text))
    if missing and not of_events:
        place = f"in row {missing_row} of the {source.what} (column {columns['item']!r})"
        reading.add_bad(source.what, "no item", f"got no item {place}, expected one in every row", missing)
    if several:
        reading.notes.append(
            f"{source.what}: {len(several):,} items such as {next(iter(several))!r} have several texts; what most rows "
            "say is taken"
        )
    for of, found in records.items():
        if said := nearly_equal({key for key, _ in found}, f"items of the {source.what}"):
            reading.first.append(said)
        _check_titles(of, [text for _, text in found], fields, source, reading)
    return records


def _apart(row: tuple[Any, ...], parts: Mapping[str, Sequence[str]]) -> Iterator[tuple[Any, ...]]:
    """A row of texts for each key of a cell that holds several, where its texts are as many."""
    domain, cell, *texts, num, place = row
    if cell not in parts:
        yield row
        return
    keys = parts[cell]
    split = [SEVERAL.split(text) for text in texts]
    for number, key in enumerate(keys):
        own = [one[number] if len(one) == len(keys) else "" for one in split]
        yield (domain, key, *own, num, place)


def _plain_list(value: str) -> Any:
    """A list that JSON has written, as a list."""
    if value.startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _check_titles(
    domain: str, texts: Sequence[ItemFields], fields: Sequence[str], source: Source, reading: Reading
) -> None:
    """Items that have no title, or mostly the same texts, are said first."""
    if not fields:
        return
    different = len({tuple(text.values()) for text in texts})
    titles = len({text.get("title", "") for text in texts})
    free = [name for name in source.table.column_names if name not in source.columns.values()]
    advice = f"; other columns: {', '.join(free)[:200]} (--texts title=...)" if free else ""
    if "title" not in fields:
        reading.first.append(f"WARNING: {source.what}: no title among the texts ({', '.join(fields)}){advice}")
    elif len(texts) > 1 and different < 0.5 * len(texts):
        reading.first.append(
            f"WARNING: {source.what}: {len(texts):,} items have {different:,} different texts and {titles:,} titles: "
            f"items of one text cannot be told apart by it{advice}"
        )
    elif len(texts) > 1 and titles < 0.5 * len(texts):
        reading.first.append(
            f"{source.what}: {len(texts):,} items have {titles:,} different titles (column "
            f"{source.columns['title']!r}){advice}"
        )
