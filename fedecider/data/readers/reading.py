"""What all readers stand on: raw files with their bad lines, events in compact arrays, and item fields on demand.

Shape legend: E events, in file order.
"""

from __future__ import annotations

import html
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedecider.data.dropped import Dropped, Size

if TYPE_CHECKING:  # --help does without
    import pyarrow as pa

logger = logging.getLogger(__name__)

Log = Callable[[str], None]
"""Takes one line of news for who waits: how far a file is read, what was left out."""

LOG_EVERY_S = 5.0
NUM_EXAMPLES = 20


def to_stderr(news: str) -> None:
    """The ``Log`` that is used where none is given."""
    print(news, file=sys.stderr, flush=True)


@dataclass
class RawFile:
    """One raw file while it is read: blank and bad lines counted, bad ones named, an error beyond ``max_bad_lines``."""

    path: Path
    max_bad_lines: int
    log: Log | None = None
    num_blank: int = 0
    num_bad: int = 0
    bad_lines: list[str] = field(default_factory=list)
    """The first ones, as file:line: why."""

    def add_bad_line(self, line_number: int, why: str) -> None:
        """Count one bad line; ``ValueError`` when there are more than allowed."""
        place = f"{self.path.name}:{line_number}: {why}"
        self.num_bad += 1
        if len(self.bad_lines) < NUM_EXAMPLES:
            self.bad_lines.append(place)
        if self.num_bad > self.max_bad_lines:
            raise ValueError(
                f"{self.path}: more than {self.max_bad_lines} bad lines, the last one at {place}; expected a file in "
                "its original format. Check the file, or raise max_bad_lines."
            )
        logger.warning("skipped a bad line, %s", place)


def find_file(folder: Path, names: Iterable[str], what: str) -> Path:
    """The first of ``names`` (each also with ``.gz``, any letter case) in ``folder``; ``ValueError`` without any."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"raw folder {folder} {problem}; expected the folder with the {what}. Check --raw.")
    names = list(names)
    path = find_optional(folder, names)
    if path is not None:
        return path
    found = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
    listing = ", ".join(found[:12]) + (", ..." if len(found) > 12 else "") if found else "no file"
    raise ValueError(f"no {what} in {folder}: expected {' or '.join(names)} (or .gz), found {listing}. Check --raw.")


def find_optional(folder: Path, names: Iterable[str]) -> Path | None:
    """As ``find_file``, but None where there is no such file; ``ValueError`` where only a folder has the name."""
    present = {path.name.lower(): path for path in sorted(folder.iterdir())} if folder.is_dir() else {}
    spellings = [name.lower() + ending for name in names for ending in ("", ".gz")]
    found = [present[spelling] for spelling in spellings if spelling in present]
    files = [path for path in found if path.is_file()]
    if found and not files:
        raise ValueError(f"{found[0]} is a folder; expected a file of this name. Move the file out of it, or away.")
    return files[0] if files else None


def describe_bad_lines(files: Iterable[RawFile]) -> dict[str, Any]:
    """The bad lines of all files of a source together: count, and the first examples as file:line: why."""
    files = list(files)
    return {
        "count": sum(file.num_bad for file in files),
        "examples": [example for file in files for example in file.bad_lines],
    }


SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character outside the basic plane: JSON can spell it alone, UTF-8 cannot."""

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
BELOW_RATING = "rating below min_rating"


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
    log: Log | None = None
    """Hears every few seconds how far a file is read."""

    def file(self, path: Path) -> RawFile:
        """``path`` as a file to read under these options."""
        return RawFile(path, self.max_bad_lines, self.log)


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
    basket_E: np.ndarray | None = None
    """(E,) int64, alike for the events of one basket, where order numbers tell; None: times do."""
    orders: Sequence[str] = ()
    """The order numbers, while ``basket_E`` points into them, -1 for none: until `with_orders`."""

    def size(self) -> Size:
        """Users, items and events as read."""
        return Size(len(self.users), len(self.items), len(self.user_E))


def events_of_columns(
    users: pa.ChunkedArray,
    items: pa.ChunkedArray,
    time_E: np.ndarray,
    order_E: np.ndarray | None = None,
    orders: pa.ChunkedArray | None = None,
) -> RawEvents:
    """Events from columns of (E,) keys, none of them NULL, numbered in the order of their first events; an order number
    may be NULL."""
    (user_keys, user_E), (item_keys, item_E) = _coded(users), _coded(items)
    order_keys, basket_E = (None, None) if orders is None else _coded(orders)
    return RawEvents(
        users=user_keys,
        items=item_keys,
        user_E=user_E.astype(np.int32),
        item_E=item_E.astype(np.int32),
        time_E=time_E.astype(np.int64),
        order_E=order_E,
        dropped=Dropped(),
        basket_E=None if basket_E is None else basket_E.astype(np.int64),
        orders=order_keys or (),
    )


def _coded(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """Different keys, and which of them each row has; -1 for NULL."""
    coded = column.combine_chunks().dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.fill_null(-1).to_numpy()


class ItemRecords(NamedTuple):
    """Texts of the wanted items and what was found on the way."""

    items: dict[str, ItemFields]
    num_same: int
    """Repeated records of an item with the same text, skipped."""
    num_different: int
    """Repeated records with another text, skipped (only with duplicate_items="first")."""
    num_unused: int
    """Records of items that are not wanted."""
    unused: Mapping[str, ItemFields] = MappingProxyType({})
    """These, where they are kept."""


class RawDomain(NamedTuple):
    """One domain of a raw source."""

    events: RawEvents
    read_catalogue: Callable[[Collection[str]], ItemRecords]
    """Texts of the wanted item keys, read when called (after k-core, so that few texts are held)."""
    files: list[RawFile]
    """First the one with the events; the counts of the item files fill up when the catalogue is read."""
    hint: str = ""
    """For a message about items without text: how keys of events and items differ."""

    def places(self, first: int, last: int | None = None) -> str:
        """The names of some files, for a message."""
        return ", ".join(file.path.name for file in self.files[first:last]) or "the table"

    def dropped(self) -> Dropped:
        """All that was left out so far while reading: lines first, then what the reader left out on purpose."""
        dropped = Dropped()
        dropped.add("unreadable lines", lines=sum(file.num_bad for file in self.files))
        dropped.add("blank lines", lines=sum(file.num_blank for file in self.files))
        return dropped.include(self.events.dropped)


def collect_items(
    records: Iterable[tuple[str, ItemFields]],
    wanted: Collection[str],
    options: ReadOptions,
    path: Path,
    keep_unused: bool = False,
) -> ItemRecords:
    """The wanted items of a stream of (key, fields), and if asked the others apart.

    A repeated record with equal fields is counted and skipped (Amazon's meta files have such).
    Errors: ``ValueError`` for any other repeated key, unless ``duplicate_items`` is "first".
    """
    items: dict[str, ItemFields] = {}
    unused: dict[str, ItemFields] = {}
    num_same = num_different = num_unused = 0
    for key, fields in records:
        if key not in wanted:
            num_unused += not keep_unused
            if keep_unused:
                unused.setdefault(key, fields)
            continue
        known = items.setdefault(key, fields)
        if known is fields:
            continue
        if known != fields:
            num_different += 1
        else:
            num_same += 1
        if options.duplicate_items != "first" and known != fields:
            raise duplicate_key(path, key, known, fields)
    return ItemRecords(items, num_same, num_different, num_unused, unused)


def no_texts(_wanted: Collection[str]) -> ItemRecords:
    """The catalogue of a source without item texts."""
    return ItemRecords({}, 0, 0, 0)


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


def no_ratings(path: Path, options: ReadOptions) -> None:
    """``ValueError`` where ``min_rating`` is set for a file that has no ratings."""
    if options.min_rating is not None:
        raise ValueError(
            f"{path}: no ratings are read from it, but min_rating is {options.min_rating}; expected none. "
            "Leave the threshold (min_rating, implicit_threshold) out, or name a rating column where there is one."
        )


def finer_than_seconds(events: RawEvents) -> bool:
    """Whether the order of ``events`` is microseconds, which order the events within a second."""
    return events.order_E is not None and bool((events.order_E // MICROSECONDS == events.time_E).all())
