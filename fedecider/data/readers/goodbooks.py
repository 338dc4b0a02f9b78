"""goodbooks-10k: ``ratings.csv`` (in the order of time, without times), ``books.csv``, and where present the tags.

Every rating is an event unless ``min_rating`` is set. The folder holds one domain, whose name is free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from fedecider.data.readers.files import RawFile, find_file, find_optional
from fedecider.data.readers.lines import finite_number, read_csv, whole_number
from fedecider.data.readers.table import (
    BELOW_RATING,
    NUM_SHELVES,
    STATE_SHELVES,
    Catalogue,
    EventTable,
    ItemFields,
    RawDomain,
    ReadOptions,
    clean,
    collect_items,
    keep_rating,
)


def read(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """The ratings and books in ``raw``; files of the repository's ``samples`` folder serve where the full ones lack."""
    samples = raw / "samples"
    folder = raw if find_optional(raw, ["ratings.csv"]) or not find_optional(samples, ["ratings.csv"]) else samples
    ratings = options.file(find_file(folder, ["ratings.csv"], "goodbooks-10k ratings"))
    books = options.file(find_file(raw, ["books.csv"], "goodbooks-10k books"))
    tags, book_tags = find_optional(raw, ["tags.csv"]), find_optional(folder, ["book_tags.csv"])
    tag_files = [options.file(tags), options.file(book_tags)] if tags and book_tags else []

    table = EventTable()
    for user, item, rating in read_csv(ratings, ("user_id", "book_id", "rating"), _rating_row):
        if keep_rating(rating, options):
            table.add(f"{domain}-{user}", item)
        else:
            table.skip(BELOW_RATING)

    def read_catalogue(wanted: Collection[str]) -> Catalogue:
        shelves = _shelves(tag_files)

        def records() -> Iterator[tuple[str, ItemFields]]:
            for key, goodreads_id, fields in read_csv(books, ("book_id", "title", "authors"), _book_row):
                yield key, {**fields, "shelves": clean(shelves.get(goodreads_id, []))}

        return collect_items(records(), wanted, options, books.path)

    return RawDomain(table.build(), read_catalogue, [ratings, books, *tag_files])


def _rating_row(row: dict[str, str]) -> tuple[str, str, float]:
    return str(int(row["user_id"])), str(int(row["book_id"])), finite_number(row["rating"], "rating")


def _book_row(row: dict[str, str]) -> tuple[str, str, ItemFields]:
    year = row.get("original_publication_year", "")
    fields = {
        "title": clean(row["title"] or row.get("original_title", "")),
        "author": clean(row["authors"]),
        "year": str(int(finite_number(year, "original_publication_year"))) if year else "",
    }
    return str(int(row["book_id"])), row.get("goodreads_book_id", ""), fields


def _tag_row(row: dict[str, str]) -> tuple[str, str]:
    return row["tag_id"], row["tag_name"]


def _book_tag_row(row: dict[str, str]) -> tuple[str, str, int]:
    return row["goodreads_book_id"], row["tag_id"], whole_number(row["count"], "count")


def _shelves(files: list[RawFile]) -> dict[str, list[str]]:
    """Goodreads book id -> the names of its most used topical tags."""
    if not files:
        return {}
    names = dict(read_csv(files[0], ("tag_id", "tag_name"), _tag_row))
    counted: dict[str, list[tuple[int, str]]] = {}
    for book, tag, count in read_csv(files[1], ("goodreads_book_id", "tag_id", "count"), _book_tag_row):
        name = names.get(tag, "")
        if name and name not in STATE_SHELVES:
            counted.setdefault(book, []).append((-count, name.replace("-", " ")))
    return {book: [name for _, name in sorted(tags)[:NUM_SHELVES]] for book, tags in counted.items()}
