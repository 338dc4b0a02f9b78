"""What a column of times means: units since 1970, days as numbers, dates in many forms, or an order.

Every form is tried by DuckDB on values from the whole column; the one that makes times of most of them is taken, and
what it makes no time between 1990 and tomorrow of is a bad row. A form that could be read in two ways is an error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import NamedTuple

import duckdb

from fedecider.data.tables import Table, literal

UNITS = {"s": 1_000_000.0, "ms": 1000.0, "us": 1.0, "ns": 0.001}
"""Microseconds in one of them."""
IN_WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
ISO, SERIAL, ORDER = "iso", "serial", "order"
FIRST_YEAR = 1990
SINCE_S = int(datetime(FIRST_YEAR, 1, 1, tzinfo=timezone.utc).timestamp())
SINCE_US = SINCE_S * 1_000_000
DAY_US = 86_400_000_000
SERIAL_1970 = 25_569
"""Spreadsheets count days from 1899-12-30."""
DIGITS = ("%Y%m%d", "%d%m%Y", "%m%d%Y", "%y%m%d", "%d%m%y", "%Y%m%d%H%M", "%Y%m%d%H%M%S")
LENGTH_OF = {"%Y%m%d": 8, "%d%m%Y": 8, "%m%d%Y": 8, "%y%m%d": 6, "%d%m%y": 6, "%Y%m%d%H%M": 12, "%Y%m%d%H%M%S": 14}
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p", ", %H:%M", ", %I:%M %p")
DAYS = (
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%d.%m.%Y",
    "%d-%m-%Y",
    "%Y/%m/%d",
    "%d.%m.%y",
    "%m/%d/%y",
    "%d/%m/%y",
    "%b %d, %Y",
    "%B %d, %Y",
    "%d %b %Y",
    "%d %B %Y",
    "%d-%b-%Y",
    "%d-%b-%y",
)
OTHERS = (
    "%d/%b/%Y:%H:%M:%S %z",
    "%a %b %d %H:%M:%S %z %Y",
    "%a, %d %b %Y %H:%M:%S %Z",
    "%a, %d %b %Y %H:%M:%S %z",
    "%d-%b-%y %I.%M.%S.%f %p",
    "%d-%b-%y %I.%M.%S %p",
    "%Y.%m.%d",
    "%Y.%m.%d %H:%M:%S",
    "%Y%m%d %H:%M:%S",
    "%Y%m%d%H%M%S.%f",
    "%Y%m%dT%H%M%S",
    "%Y%m%dT%H%M%SZ",
)
FORMATS = (*DIGITS, *(day + clock for day in DAYS for clock in CLOCKS), *OTHERS)
NUM_LOOKED_AT = 2000
"""Values by which a form is found."""
MOST = 0.5
_CLOCK = re.compile(r"([01]?\d|2[0-3])[:.h][0-5]\d([:.][0-5]\d)?( ?[AaPp][Mm])?")
_ISO = re.compile(r"\d{4}-\d\d-\d\d([T ]|$)")
_DATE = re.compile(r"([A-Za-z]{3,9},? )*\d{1,8}([-/. ,T]|$)")
_NAMED = re.compile(r"time|date|stamp|epoch|zeit|datum|fecha|data|heure|jour|(^|_)(at|ts|ms)$", re.IGNORECASE)
"""In the names of columns whose numbers may be times."""


class TimeForm(NamedTuple):
    """How a column of times is read."""

    form: str
    """A unit of ``UNITS``, ``iso``, ``serial``, ``order``, or a format of `datetime.strptime`."""

    def sql(self, column: str) -> str:
        """SQL of microseconds since 1970; of an order its number; NULL: it is no such time."""
        number = f"TRY_CAST(replace({column}, ',', '.') AS DECIMAL(28, 7))"
        if self.form in UNITS:
            return f"TRY_CAST(round({number} * {UNITS[self.form]}) AS BIGINT)"
        if self.form == ORDER:
            return f"TRY_CAST(round({number} * 1000000) AS BIGINT)"
        if self.form == SERIAL:
            return f"TRY_CAST(round(({number} - {SERIAL_1970}) * {DAY_US}) AS BIGINT)"
        if self.form == ISO:
            colon = rf"regexp_replace({column}, ' ?([+-]\d\d):?(\d\d)$', '\1:\2')"  # -0500
            parsed = f"epoch_us(coalesce(TRY_CAST({column} AS TIMESTAMPTZ), TRY_CAST({colon} AS TIMESTAMPTZ)))"
            return parsed
        parsed = f"epoch_us(try_strptime({column}, {literal(self.form)}))"
        if self.form in LENGTH_OF:
            text = rf"regexp_replace({column}, '\.0+$', '')"
            return f"CASE WHEN length({text}) = {LENGTH_OF[self.form]} THEN {parsed.replace(column, text)} END"
        return parsed

    @property
    def in_words(self) -> str:
        """``numbers are milliseconds since 1970``; empty: nothing to say."""
        if self.form in ("s", ISO):
            return ""
        if self.form in IN_WORDS:
            return f"numbers are {IN_WORDS[self.form]} since 1970"
        if self.form == SERIAL:
            return "numbers are days as spreadsheets count them, from 1899-12-30"
        if self.form == ORDER:
            return "small whole numbers are taken as an order, not as times"
        return f"times are read as {self.form}"


def latest_us() -> int:
    """Tomorrow: no purchase is later."""
    return int(time.time() * 1_000_000) + DAY_US


def checked_form(form: str) -> TimeForm:
    """``ValueError`` for what is neither a unit nor a format that knows a year."""
    known = form in (*UNITS, ISO, SERIAL, ORDER)
    if not known and ("%" not in form or not any(code in form for code in ("%Y", "%y", "%c", "%x", "%G", "%s"))):
        raise ValueError(
            f"got the time_format {form!r}, expected s, ms, us or ns since 1970, serial (a spreadsheet's days), order, "
            "or a format such as '%d/%m/%Y %H:%M'"
        )
    if not known:
        try:
            duckdb.execute(f"SELECT {TimeForm(form).sql(literal('1'))}")
        except duckdb.Error as error:
            raise ValueError(
                f"got the time_format {form!r} ({' '.join(str(error).split())[:120]}), expected s, ms, us or ns since "
                "1970, or a format such as '%d/%m/%Y %H:%M'"
            ) from error
    return TimeForm(form)


def find_form(table: Table, column: str, name: str) -> TimeForm:
    """The form of a column of ``rows``, SQL ``column``, which is called ``name``.

    Raises:
        ValueError: it holds no times, or times that can be read in two ways.
    """
    step = max(1, int(table.value("SELECT count(*) FROM rows")) // NUM_LOOKED_AT)
    looked_at = f"SELECT {column} AS value FROM rows WHERE rowid % {step} = 0 AND {column} IS NOT NULL"
    table.query(f"CREATE OR REPLACE TEMP TABLE looked_at AS {looked_at}")
    values = "looked_at"
    fits = _fits(table, values)
    num_values = int(table.value(f"SELECT count(*) FROM {values}"))
    if not num_values:
        raise ValueError(
            f"got {table.what} without a time in the column {name!r}, expected some; time='none': no times"
        )
    best = [form for form, (count, _) in fits.items() if count == max(num for num, _ in fits.values())]
    if fits[best[0]][0] > MOST * num_values:
        return TimeForm(_only(table, column, name, best, fits))
    whole, low, high, zeros, kinds = table.query(
        f"SELECT count(*) FILTER (number IS NOT NULL), min(number), max(number), "
        f"count(*) FILTER (value SIMILAR TO '0[0-9]+'), count(DISTINCT value) FROM "
        f"(SELECT value, TRY_CAST(value AS DECIMAL(28, 7)) AS number FROM {values})"
    )[0]
    example = str(table.value(f"SELECT value FROM {values} LIMIT 1"))
    if whole == num_values and low >= 0 and high < SINCE_S:
        is_day = "regexp_matches(value, '^(0?[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])$')"
        days = int(table.value(f"SELECT count(*) FROM {values} WHERE {is_day}"))
        if (zeros and high < 1300 and days == num_values) or (days == num_values and kinds > 30):
            raise ValueError(
                f"got {table.what} with times such as {example!r} in the column {name!r}, which are days without a "
                "year, expected one: put the year in front (20211231), or where rows are oldest first: time='none'"
            )
        return TimeForm(ORDER)
    raise ValueError(
        f"got {table.what} with times such as {example!r} in the column {name!r}, of which most can be read in no "
        "known form, expected Unix seconds, or a date and time as in ISO 8601: name another format with "
        f"time_format='...' (--time_format), such as '%d/%m/%Y %H:%M'; or where rows are oldest first: time='none'"
    )


def _fits(table: Table, values: str) -> dict[str, tuple[int, int]]:
    """Form -> of how many values it makes times between 1990 and tomorrow, and a hash of these."""
    shapes = table.query(
        "SELECT regexp_replace(regexp_replace(value, '[0-9]', '0', 'g'), '[A-Za-z]+', 'a', 'g') AS shape, count(*) "
        f"AS num FROM {values} GROUP BY shape ORDER BY num DESC, shape LIMIT 50"
    )
    numbers = [num for shape, num in shapes if re.fullmatch(r"-?0+([.,]0*)?", shape)]
    marks = set("".join(shape for shape, _ in shapes))
    forms = [ISO, *(form for form in FORMATS if form not in DIGITS and _marks(form) <= marks)]
    if 2 * sum(numbers) >= sum(num for _, num in shapes):
        forms = [*UNITS, SERIAL, *DIGITS]
    inside = f"BETWEEN {SINCE_US} AND {latest_us()}"
    columns = ", ".join(f"{TimeForm(form).sql('value')} AS f{number}" for number, form in enumerate(forms))
    counts = ", ".join(
        f"count(*) FILTER (f{n} {inside}), sum(hash(value, f{n}) % 1000003) FILTER (f{n} {inside})"
        for n in range(len(forms))
    )
    row = table.query(f"SELECT {counts} FROM (SELECT value, {columns} FROM {values})")[0]
    return {form: (int(row[2 * n]), int(row[2 * n + 1] or 0)) for n, form in enumerate(forms)}


def _marks(form: str) -> set[str]:
    """The characters between a format's fields."""
    return set(re.sub(r"%\w|[A-Za-z]", "", form))


def _only(table: Table, column: str, name: str, best: list[str], fits: dict[str, tuple[int, int]]) -> str:
    """The one form among those that fit equally well; two that give other times are compared on all rows."""
    different = list({fits[form][1]: form for form in reversed(best)}.values())[::-1]
    if len(different) == 1:
        return best[0]
    inside = f"BETWEEN {SINCE_US} AND {latest_us()}"
    counts = {
        form: int(table.value(f"SELECT count(*) FROM rows WHERE {TimeForm(form).sql(column)} {inside}"))
        for form in different
    }
    winners = [form for form in different if counts[form] == max(counts.values())]
    if len(winners) > 1:
        example = table.value(f"SELECT {column} FROM rows WHERE {column} IS NOT NULL LIMIT 1")
        ways = " or ".join(f"time_format={form!r}" for form in winners[:3])
        raise ValueError(
            f"got {table.what} with times such as {example!r} in the column {name!r}, which can be read in several "
            f"ways, expected to be told which: {ways} (--time_format)"
        )
    return winners[0]


def holds_times(values: Sequence[str], name: str = "time") -> bool:
    """Whether most of some texts are times; numbers are only where the column's ``name`` says so."""
    looked_at = list(values[:100])
    if are_numbers(looked_at):
        return bool(_NAMED.search(name)) and any(
            sum(_may_be(value, unit) for value in looked_at) > MOST * len(looked_at) for unit in (*UNITS.values(), 0.0)
        )
    shown = [sum(bool(shape.match(value)) for value in looked_at) > MOST * len(looked_at) for shape in (_ISO, _DATE)]
    if any(shown[:1]) or not any(shown):
        return shown[0]
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    rows = Table("values", ["value"], "memory", [], connection)
    listed = ", ".join(f"({literal(value)})" for value in looked_at)
    fits = _fits(rows, f"(SELECT * FROM (VALUES {listed}) AS given(value))")
    return max(count for count, _ in fits.values()) > MOST * len(looked_at)


def are_numbers(values: Sequence[str]) -> bool:
    """Whether most of the first texts are numbers."""
    looked_at = values[:100]
    return 2 * sum(bool(re.fullmatch(r"-?\d+([.,]\d*)?", value)) for value in looked_at) > len(looked_at)


def _may_be(value: str, unit: float) -> bool:
    """Whether a number counts so many microseconds to a time from 1990 to tomorrow; 0: it is a day, written as one."""
    try:
        number = float(value.replace(",", "."))
    except ValueError:
        return False
    return (
        SINCE_US <= number * unit <= latest_us() if unit else len(value) in (6, 8, 12, 14) or 32_874 <= number < 60_000
    )


def is_clock(values: Sequence[str]) -> bool:
    """Whether all texts are times of a day."""
    return all(_CLOCK.fullmatch(value.strip()) for value in values)


def day_of(seconds: int) -> str:
    """``2021-03-01``."""
    return datetime.fromtimestamp(int(seconds), timezone.utc).date().isoformat()
