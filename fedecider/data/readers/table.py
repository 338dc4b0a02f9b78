"""What every reader gives: events in compact arrays, and item fields on demand.

Shape legend: E events, in file order.
"""

from __future__ import annotations

import html
import re
from array import array
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.dropped import Dropped, Size
from fedecider.data.readers.files import RawFile, Tell
from fedecider.data.readers.lines import SURROGATE

ItemFields = dict[str, str]
"""Clean one-line texts of one item by field name; "title" is empty where unknown."""

DEFAULT_TEXT_FIELDS = (
    "title",
    "author",
    "brand",
    "series",
    "categories",
    "genres",
    "shelves",
    "attribute",
    "keywords",
    "description",
)
OTHER_TEXT_FIELDS = ("year", "price", "sales_rank")
"""Off by default: numbers pollute item IDs, and price and sales rank are snapshots taken after the interactions."""


MICROSECONDS = 1_000_000
MAX_TIME = 1 << 33
"""Unix seconds end here (the year 2242)."""
NUM_SHELVES = 5
NO_ITEMS = "users listed without items"
BELOW_RATING = "rating below min_rating"
_STATES = (
    "to-read currently-reading read favorites favourites owned owned-books books-i-own i-own kindle ebook ebooks "
    "library my-books my-library default all-time-favorites did-not-finish dnf abandoned wish-list to-buy re-read "
    "reviewed own book-club audiobook audiobooks audio favorite-books maybe home-library"
)
STATE_SHELVES = frozenset(_STATES.split())
"""Shelves of book readers that say what was done with a book, not what it is about."""


class Columns(NamedTuple):
    """Which columns of a csv hold what; "" for what is not there."""

    user: str = "user"
    item: str = "item"
    rating: str = ""
    time: str = ""


class ReadOptions(NamedTuple):
    """What all readers are told."""

    min_rating: float | None = None
    """Keep events rated at least this; None keeps all (Goodreads: all that are read or rated)."""
    max_bad_lines: int = 100
    """Unreadable lines allowed in each file."""
    duplicate_items: str = "error"
    """An item key that occurs twice: "error", or "first" keeps the first one."""
    texts_required: bool = True
    """A missing file of item texts is an error; False: the items have no texts then (MovieLens and Last.fm)."""
    columns: Columns = Columns()
    """Columns of source csv."""
    tell: Tell | None = None
    """Hears every few seconds how far a file is read."""

    def file(self, path: Path) -> RawFile:
        """``path`` as a file to read under these options."""
        return RawFile(path, self.max_bad_lines, self.tell)


class RawEvents(NamedTuple):
    """Events of one domain as arrays of numbers; ``users[user_E[e]]`` is the user key of event e."""

    users: list[str]
    items: list[str]
    user_E: np.ndarray
    """(E,) int32."""
    item_E: np.ndarray
    """(E,) int32."""
    time_E: np.ndarray
    """(E,) int64 Unix seconds, ``UNKNOWN_TIME`` where not known."""
    order_E: np.ndarray | None
    """(E,) int64 order within a user where the source gives one; None: ordered by time, ties in file order."""
    dropped: Dropped
    """What the reader could read and left out on purpose."""

    def size(self) -> Size:
        """Users, items and events as read."""
        return Size(len(self.users), len(self.items), len(self.user_E))


class Catalogue(NamedTuple):
    """Texts of the wanted items and what was found on the way."""

    items: dict[str, ItemFields]
    num_same: int
    """Repeated records of an item with the same text, skipped."""
    num_different: int
    """Repeated records with another text, skipped (only with duplicate_items="first")."""
    num_unused: int
    """Records of items that are not wanted."""


class RawDomain(NamedTuple):
    """One domain of a raw source."""

    events: RawEvents
    read_catalogue: Callable[[Collection[str]], Catalogue]
    """Texts of the wanted item keys, read when called (after k-core, so that few texts are held)."""
    files: list[RawFile]
    """First the one with the events; the counts of the item files fill up when the catalogue is read."""

    def places(self, first: int, last: int | None = None) -> str:
        """The names of some files, for a message."""
        return ", ".join(file.path.name for file in self.files[first:last]) or "the table"

    def dropped(self) -> Dropped:
        """All that was left out so far while reading: lines first, then what the reader left out on purpose."""
        dropped = Dropped()
        dropped.add("unreadable lines", lines=sum(file.num_bad for file in self.files))
        dropped.add("blank lines", lines=sum(file.num_blank for file in self.files))
        return dropped.include(self.events.dropped)


class EventTable:
    """Grows by one event at a time; 16 bytes an event (24 with an order) plus one key per user and item."""

    def __init__(self, with_order: bool = False) -> None:
        self._users: dict[str, int] = {}
        self._items: dict[str, int] = {}
        self._user = array("i")
        self._item = array("i")
        self._time = array("q")
        self._order = array("q") if with_order else None
        self.dropped = Dropped()

    def add(self, user: str, item: str, time: int = UNKNOWN_TIME, order: int = 0) -> None:
        """Append one event."""
        users, items = self._users, self._items
        self._user.append(users.setdefault(user, len(users)))
        self._item.append(items.setdefault(item, len(items)))
        self._time.append(time)
        if self._order is not None:
            self._order.append(order)

    def skip(self, reason: str) -> None:
        """Count a readable event that is left out on purpose."""
        self.dropped.add(reason, events=1)

    def build(self) -> RawEvents:
        """The events; no more may be added afterwards (the arrays are shared, not copied)."""
        return RawEvents(
            users=list(self._users),
            items=list(self._items),
            user_E=np.frombuffer(self._user, dtype=np.int32) if self._user else np.zeros(0, np.int32),
            item_E=np.frombuffer(self._item, dtype=np.int32) if self._item else np.zeros(0, np.int32),
            time_E=np.frombuffer(self._time, dtype=np.int64) if self._time else np.zeros(0, np.int64),
            order_E=None if self._order is None else np.asarray(self._order, dtype=np.int64),
            dropped=self.dropped,
        )


def collect_items(
    records: Iterable[tuple[str, ItemFields]],
    wanted: Collection[str],
    options: ReadOptions,
    path: Path,
    allow_same: bool = False,
) -> Catalogue:
    """The wanted items of a stream of (key, fields).

    With ``allow_same``, a repeated record with equal fields is counted and skipped (Amazon's meta files have such).
    Errors: ``ValueError`` for any other repeated key, unless ``duplicate_items`` is "first".
    """
    items: dict[str, ItemFields] = {}
    num_same = num_different = num_unused = 0
    for key, fields in records:
        if key not in wanted:
            num_unused += 1
            continue
        known = items.setdefault(key, fields)
        if known is fields:
            continue
        if known != fields:
            num_different += 1
        else:
            num_same += 1
        if options.duplicate_items != "first" and not (allow_same and known == fields):
            raise duplicate_key(path, key, known, fields)
    return Catalogue(items, num_same, num_different, num_unused)


def no_texts(_wanted: Collection[str]) -> Catalogue:
    """The catalogue of a source without item texts."""
    return Catalogue({}, 0, 0, 0)


def duplicate_key(path: Path, key: str, first: ItemFields, second: ItemFields) -> ValueError:
    """The error for an item key that occurs twice."""
    return ValueError(
        f"{path}: duplicate item key {key!r} ({first.get('title', '')!r} and {second.get('title', '')!r}); expected "
        "each item once. Correct the file, or pass --duplicate_items first to keep the first one."
    )


_INLINE_TAG = re.compile(r"</?(a|b|i|u|em|strong|span|font|sup|sub)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"<(script|style)\b.*?</\1\s*>|</?[a-zA-Z!][^<>]*>", re.IGNORECASE | re.DOTALL)


def clean(value: Any) -> str:
    """One line of text: HTML tags and entities removed, white space collapsed; lists joined by commas.

    Halves of a character are joined where both are there (Python literals spell them so) and left out else.
    """
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        parts = [clean(part) for part in value]
        return ", ".join(dict.fromkeys(part for part in parts if part))
    text = str(value)
    if "&" in text:
        text = html.unescape(text)
    if not text.isascii() and SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")
    if "<" in text:
        text = _TAG.sub(" ", _INLINE_TAG.sub("", text))
    return " ".join(text.split())


def item_text(fields: ItemFields, names: Iterable[str], description_chars: int) -> str:
    """``title: ...; brand: ...; ...`` in lower case, of the fields that are known; "" when none is.

    Format after IDGenRec (SIGIR 2024). Differs from the paper: an unknown brand is left out, not written as "na", and
    price and sales rank are off by default.
    """
    parts = []
    for name in names:
        value = fields.get(name, "")
        if name == "description" and len(value) > description_chars:
            value = value[:description_chars].rsplit(" ", 1)[0]
        # "; " separates fields, so it may not occur inside one.
        value = value.replace(";", ",").lower().strip()
        if value:
            parts.append(f"{name.replace('_', ' ')}: {value}")
    return "; ".join(parts)


def display_title(fields: ItemFields) -> str:
    """The title, or where there is none the first other text, shortened."""
    for name in DEFAULT_TEXT_FIELDS:
        if value := fields.get(name, ""):
            return value if name == "title" else value[:80]
    return ""


def keep_rating(rating: float, options: ReadOptions) -> bool:
    """Whether an event passes ``min_rating``."""
    return options.min_rating is None or rating >= options.min_rating


def no_ratings(path: Path, options: ReadOptions) -> None:
    """``ValueError`` where ``min_rating`` is set for a file that has no ratings."""
    if options.min_rating is not None:
        raise ValueError(
            f"{path}: no ratings are read from it, but min_rating is {options.min_rating}; expected none. "
            "Leave the threshold (min_rating, implicit_threshold) out, or name a rating column where there is one."
        )


def moment(value: Any) -> tuple[int, int]:
    """Unix seconds as :func:`unix_time`, and microseconds: what orders the events within a second."""
    return unix_time(value), round(float(value) * MICROSECONDS)


def finer_than_seconds(events: RawEvents) -> bool:
    """Whether the order of ``events`` is that of :func:`moment`."""
    return events.order_E is not None and bool((events.order_E // MICROSECONDS == events.time_E).all())


def unix_time(value: Any) -> int:
    """Unix seconds; ``ValueError`` for what is no time from 1970 on (milliseconds count as a mistake)."""
    try:
        time = int(value)
    except (ValueError, OverflowError):
        time = -1
    if not 0 <= time < MAX_TIME:
        raise ValueError(f"timestamp {value!r} is not in Unix seconds")
    return time
