"""UCSD Book Graph (Wan and McAuley, RecSys 2018): ``goodreads_interactions_*.json.gz``, ``goodreads_books_*.json.gz``.

Choices: an interaction is implicit feedback when the book ``is_read`` or carries a rating above 0 (a shelved but
unread book is none); its time is ``date_added``, the only date that is always there (``read_at`` is missing for about
half of the events), so users who add many books at once have ties. Author and series names come from
``goodreads_book_authors.json.gz`` and ``goodreads_book_series.json.gz`` where present.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import Any

from fedecider.data.readers import reading

STEMS = {
    "crime": "mystery_thriller_crime",
    "comics": "comics_graphic",
    "children": "children",
    "fantasy": "fantasy_paranormal",
    "history": "history_biography",
    "poetry": "poetry",
    "romance": "romance",
    "young_adult": "young_adult",
}
_MONTHS = {name: i for i, name in enumerate("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}  # noqa: SIM905
_EPOCH = date(1970, 1, 1).toordinal()


def read(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """The events of ``domain`` (a key of ``STEMS`` or a file stem) and its books."""
    stem = _stem(raw, domain)
    interactions = options.file(
        reading.find_file(raw, [f"goodreads_interactions_{stem}.json"], f"interactions of {domain!r}")
    )
    books = options.file(reading.find_file(raw, [f"goodreads_books_{stem}.json"], f"books of {domain!r}"))

    table = reading.EventTable()
    for user, book, is_read, rating, time in reading.read_records(interactions, _interaction):
        if not is_read and rating == 0:
            table.skip("neither read nor rated")
        elif not reading.keep_rating(rating, options):
            table.skip(reading.BELOW_RATING)
        else:
            table.add(user, book, time)

    extras = {
        name: options.file(path)
        for name in ("authors", "series")
        if (path := reading.find_optional(raw, [f"goodreads_book_{name}.json"])) is not None
    }

    def read_catalogue(wanted: Collection[str]) -> reading.ItemRecords:
        names = {name: dict(reading.read_records(file, _NAME_OF[name])) for name, file in extras.items()}

        def parse(line: bytes) -> tuple[str, reading.ItemFields]:
            record = book_record(line)
            return record["book_id"], _book(record, names) if record["book_id"] in wanted else {}

        return reading.collect_items(reading.read_records(books, parse), wanted, options, books.path)

    return reading.RawDomain(table.build(), read_catalogue, [interactions, books, *extras.values()])


def book_record(line: bytes) -> dict[str, Any]:
    """One book record with its ``book_id`` as text."""
    record = reading.json_object(line)
    record["book_id"] = reading.text_field(record, "book_id")
    return record


def parse_time(text: str) -> int:
    """Unix seconds of ``Sat Nov 30 14:18:37 -0800 2013`` (ten times faster than strptime)."""
    try:
        _, month, day, clock, zone, year = text.split()
        days = date(int(year), _MONTHS[month], int(day)).toordinal() - _EPOCH
        hours, minutes, seconds = map(int, clock.split(":"))
        offset = int(zone[1:3]) * 3600 + int(zone[3:5]) * 60
    except (ValueError, LookupError, OverflowError):
        raise ValueError(f"{text!r} is not a date") from None
    time = days * 86_400 + hours * 3600 + minutes * 60 + seconds
    time += offset if zone[0] == "-" else -offset
    # 60: a leap second
    if not (0 <= hours < 24 and 0 <= minutes < 60 and 0 <= seconds <= 60 and 0 <= time < reading.MAX_TIME):
        raise ValueError(f"{text!r} is not a date from 1970 on")
    return time


def _interaction(line: bytes) -> tuple[str, str, bool, float, int]:
    record = reading.json_object(line)
    is_read, rating = record["is_read"], record["rating"]
    if type(is_read) is not bool:
        raise ValueError(f"field 'is_read' is {is_read!r}, expected true or false")
    user, book = reading.text_field(record, "user_id"), reading.text_field(record, "book_id")
    return user, book, is_read, reading.finite_number(rating, "rating"), parse_time(record["date_added"])


def _stem(raw: Path, domain: str) -> str:
    stem = STEMS.get(domain, domain)
    prefix = "goodreads_interactions_"
    present = sorted(path.name[len(prefix) :].split(".")[0] for path in raw.glob(prefix + "*")) if raw.is_dir() else []
    if domain not in STEMS and stem not in present:
        raise ValueError(
            f"unknown domain {domain!r} for source goodreads; expected one of {sorted(STEMS)} "
            f"or the stem of a file in {raw} (found {present or 'none'})."
        )
    return stem


def _author_name(line: bytes) -> tuple[str, str]:
    record = reading.json_object(line)
    return reading.text_field(record, "author_id"), reading.clean(record["name"])


def _series_name(line: bytes) -> tuple[str, str]:
    record = reading.json_object(line)
    return reading.text_field(record, "series_id"), reading.clean(record["title"])


_NAME_OF = {"authors": _author_name, "series": _series_name}


def _book(record: dict[str, Any], names: dict[str, dict[str, str]]) -> reading.ItemFields:
    authors = [str(entry.get("author_id", "")) for entry in record.get("authors") or []]
    shelves = [str(entry.get("name", "")) for entry in record.get("popular_shelves") or []]
    topical = [name.replace("-", " ") for name in shelves if name and name not in reading.STATE_SHELVES]
    author_names, series_names = names.get("authors", {}), names.get("series", {})
    return {
        "title": reading.clean(record.get("title") or record.get("title_without_series")),
        "author": reading.clean([author_names.get(key, "") for key in authors]),
        "series": reading.clean([series_names.get(str(key), "") for key in record.get("series") or []]),
        "shelves": reading.clean(topical[: reading.NUM_SHELVES]),
        "description": reading.clean(record.get("description")),
        "year": reading.clean(record.get("publication_year")),
    }
