"""Any table with a header, ``<domain>.csv`` (commas) or ``<domain>.tsv`` (tabs); the options name its columns.

Users and items are any texts, a user the same in every domain. Every row is an event unless ``min_rating`` is set. A
time column (Unix seconds) gives the order, without one the file does. No texts.
"""

from __future__ import annotations

from pathlib import Path

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.readers.files import find_file
from fedecider.data.readers.lines import finite_number, read_csv
from fedecider.data.readers.table import (
    BELOW_RATING,
    EventTable,
    RawDomain,
    ReadOptions,
    keep_rating,
    moment,
    no_ratings,
    no_texts,
)


def read(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """The rows of the table named after ``domain``."""
    path = find_file(raw, [f"{domain}.csv", f"{domain}.tsv"], f"table of {domain!r}")
    columns = options.columns
    if not columns.rating:
        no_ratings(path, options)

    def parse(row: dict[str, str]) -> tuple[str, str, float | None, int, int]:
        user, item = row[columns.user], row[columns.item]
        if not (user and item):
            raise ValueError("no user or no item")
        rating = finite_number(row[columns.rating], "rating") if columns.rating else None
        # By way of a float, for the many tables that write whole seconds as 881250949.0.
        time, order = moment(finite_number(row[columns.time], "time")) if columns.time else (UNKNOWN_TIME, 0)
        return user, item, rating, time, order

    file = options.file(path)
    delimiter = "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else ","
    named = [name for name in columns if name]
    expected = "the columns that the settings name (user, item, and where wanted rating and time)"
    table = EventTable(with_order=bool(columns.time))
    for user, item, rating, time, order in read_csv(file, named, parse, delimiter, expected=expected):
        if rating is None or keep_rating(rating, options):
            table.add(user, item, time, order)
        else:
            table.skip(BELOW_RATING)
    return RawDomain(table.build(), no_texts, [file])
