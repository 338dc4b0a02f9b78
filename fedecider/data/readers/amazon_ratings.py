"""Amazon ratings without reviews: ``ratings.dat``, lines ``reviewerID,asin,rating,timestamp``, no header, no texts.

Every rating is an event unless ``min_rating`` is set; times are Unix seconds of whole days. The folder holds one
domain, whose name is free.
"""

from __future__ import annotations

from pathlib import Path

from fedecider.data.readers.files import find_file
from fedecider.data.readers.lines import decode, finite_number, read_records
from fedecider.data.readers.table import (
    BELOW_RATING,
    EventTable,
    RawDomain,
    ReadOptions,
    keep_rating,
    no_texts,
    unix_time,
)


def read(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """The ratings in ``raw``; a reviewer is the same user in every domain."""
    ratings = options.file(find_file(raw, ["ratings.dat"], f"Amazon ratings of {domain!r}"))
    table = EventTable()
    for user, item, rating, time in read_records(ratings, _rating_line):
        if keep_rating(rating, options):
            table.add(user, item, time)
        else:
            table.skip(BELOW_RATING)
    return RawDomain(table.build(), no_texts, [ratings])


def _rating_line(line: bytes) -> tuple[str, str, float, int]:
    user, item, rating, time = decode(line).strip().split(",")
    if not (user and item):
        raise ValueError("no user or no item")
    return user, item, finite_number(rating, "rating"), unix_time(time)
