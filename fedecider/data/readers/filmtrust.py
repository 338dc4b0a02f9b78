"""FilmTrust (Guo, Zhang and Yorke-Smith, IJCAI 2013): ``ratings.txt``, lines ``user item rating``, blanks between.

No times (the order is that of the file) and no texts. Every rating is an event unless ``min_rating`` is set. The folder
holds one domain, whose name is free.
"""

from __future__ import annotations

from pathlib import Path

from fedecider.data.readers.files import find_file
from fedecider.data.readers.lines import finite_number, read_records
from fedecider.data.readers.table import BELOW_RATING, EventTable, RawDomain, ReadOptions, keep_rating, no_texts


def read(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """The ratings in ``raw``; user keys carry the domain name (they are small numbers)."""
    ratings = options.file(find_file(raw, ["ratings.txt"], "FilmTrust ratings"))
    table = EventTable()
    for user, item, rating in read_records(ratings, _rating_line):
        if keep_rating(rating, options):
            table.add(f"{domain}-{user}", item)
        else:
            table.skip(BELOW_RATING)
    return RawDomain(table.build(), no_texts, [ratings])


def _rating_line(line: bytes) -> tuple[str, str, float]:
    user, item, rating = line.split()
    return str(int(user)), str(int(item)), finite_number(rating.decode("ascii"), "rating")
