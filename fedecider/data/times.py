"""What a column of times means: seconds or finer units since 1970, days as numbers, dates, or a named format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime, timezone
from typing import Any, NamedTuple

from fedecider.data.readers.reading import MAX_TIME, MICROSECONDS, moment

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""How many of a unit are a second."""
IN_WORDS = {"ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
DAYS = "%Y%m%d"
SINCE_1973 = 10**8
"""Unix seconds; ten times a hundred as many are in the year 5138, so that no two units can be taken for each other."""
TRIED = (
    "%m/%d/%Y %H:%M",
    "%d/%m/%Y %H:%M",
    "%m/%d/%Y %H:%M:%S",
    "%d/%m/%Y %H:%M:%S",
    "%m/%d/%Y %I:%M:%S %p",
    "%m/%d/%Y %I:%M %p",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%d.%m.%Y",
    "%d.%m.%Y %H:%M",
    "%d.%m.%Y %H:%M:%S",
    "%d-%m-%Y",
    "%d-%m-%Y %H:%M",
    "%d-%m-%Y %H:%M:%S",
    "%Y/%m/%d",
    "%Y/%m/%d %H:%M",
    "%Y/%m/%d %H:%M:%S",
    "%b %d, %Y",
    "%b %d, %Y %H:%M",
    "%b %d, %Y %I:%M %p",
    "%B %d, %Y",
    "%d %b %Y",
    "%d %b %Y %H:%M",
    "%d/%b/%Y:%H:%M:%S %z",
    "%Y%m%d%H%M%S",
)
"""Formats that a message may suggest."""
_NUMBER = re.compile(r"-?\d+(\.\d*)?")


class Clock(NamedTuple):
    """How the times of one column are read."""

    form: str = "s"
    """A unit of ``PER_SECOND``, of numbers; or a format of `datetime.strptime`. Dates in ISO 8601 are always read."""

    @property
    def factor(self) -> int | None:
        """Microseconds in one unit where numbers count whole ones of it, else None."""
        per_second = PER_SECOND.get(self.form)
        return MICROSECONDS // per_second if per_second and per_second <= MICROSECONDS else None

    def moment(self, value: Any) -> tuple[int, int]:
        """Unix seconds and microseconds; times without a zone are taken as UTC.

        Raises:
            ValueError, TypeError, OverflowError: it is no time of this form, or one before 1970.
        """
        if isinstance(value, bool):
            raise TypeError("no time")
        number = isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.fullmatch(value.strip()))
        if self.form not in PER_SECOND and (number or isinstance(value, str)):
            if isinstance(value, float) and value == int(value):
                value = int(value)
            value = datetime.strptime(str(value).strip(), self.form)
        elif number:
            return self._of_number(value)
        elif isinstance(value, str):
            value = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        return moment(value)

    def _of_number(self, value: Any) -> tuple[int, int]:
        if isinstance(value, str):
            value = float(value) if "." in value else int(value)
        if self.form == "s":
            return moment(value)
        per_second = PER_SECOND[self.form]
        seconds = int(value) // per_second
        if not 0 <= seconds < MAX_TIME:
            raise ValueError("no time from 1970 on")
        return seconds, int(value) * MICROSECONDS // per_second


def checked_clock(form: str) -> Clock:
    """``ValueError`` for what is neither a unit nor a format that knows a year."""
    if form in PER_SECOND or ("%" in form and any(code in form for code in ("%Y", "%y", "%s", "%c", "%x", "%G"))):
        return Clock(form)
    raise ValueError(
        f"got the time_format {form!r}, expected s, ms, us or ns since 1970, or a format such as '%d/%m/%Y %H:%M'"
    )


def guessed_clock(values: Sequence[Any]) -> Clock:
    """What the first values of a column say; a column that nothing is known of is in seconds, or ISO 8601.

    Numbers of eight digits that all are days (20200115) are days: as seconds they would be in August 1970.
    """
    numbers = [number for value in values if (number := _whole(value)) is not None]
    if not numbers or 2 * len(numbers) < len(values):
        return Clock()
    if len(numbers) == len(values) and all(19_000_000 < one < 22_000_000 and _is_day(one) for one in set(numbers)):
        return Clock(DAYS)
    middle = sorted(numbers)[len(numbers) // 2]
    return Clock(_unit(middle) or "s")


def in_words(clock: Clock) -> str:
    """``numbers are milliseconds since 1970``."""
    if clock.form == DAYS:
        return "numbers such as 20260131 are days"
    return f"numbers are {IN_WORDS[clock.form]} since 1970" if clock.form in IN_WORDS else "numbers are seconds"


def expected(value: Any, clock: Clock) -> str:
    """For a message about ``value``: what was expected, and what to do."""
    number = _whole(value)
    if clock.form not in PER_SECOND:
        return f"expected a time as {clock.form!r} says (time_format)"
    if number is not None and number < 0:
        return "expected a time from 1970 on"
    what = f"expected Unix {IN_WORDS.get(clock.form, 'seconds')}, or a date and time"
    fitting = [form for form in TRIED if _fits(value, form)] if isinstance(value, str) else []
    if fitting:
        return f"{what} as in ISO 8601; name its format: {' or '.join(f'time_format={one!r}' for one in fitting)}"
    unit = "" if number is None else _unit(number)
    if unit and unit != clock.form:
        return f"{what}; if these are {IN_WORDS[unit]}: time_format={unit!r}"
    return f"{what}; name another format with time_format='...'"


def is_date(text: str) -> bool:
    """Whether a text is a date, in ISO 8601 or in a form that a message suggests; a number is none."""
    if _NUMBER.fullmatch(text.strip()):
        return False
    try:
        Clock().moment(text)
    except (ValueError, OverflowError):
        return any(_fits(text, form) for form in TRIED)
    return True


def _unit(number: int) -> str:
    """The unit, finer than seconds, in which a number is a time from 1973 to 2242; empty where there is none."""
    fitting = (unit for unit, per in PER_SECOND.items() if per > 1 and SINCE_1973 * per <= number < MAX_TIME * per)
    return next(fitting, "")


def _fits(value: str, form: str) -> bool:
    try:
        datetime.strptime(value.strip(), form)
    except ValueError:
        return False
    return True


def _whole(value: Any) -> int | None:
    """A number that is written or kept as one, without what stands behind its point."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value.strip().partition(".")[0]) if _NUMBER.fullmatch(value.strip()) else None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and abs(value) < 2**63 else None


def _is_day(number: int) -> bool:
    try:
        datetime.strptime(str(number), DAYS)
    except ValueError:
        return False
    return True
