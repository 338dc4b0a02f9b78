"""FilmTrust (Guo, Zhang and Yorke-Smith, IJCAI 2013): ``ratings.txt``, lines ``user item rating``, blanks between.

No times (the order is that of the file) and no texts. Every rating is an event unless ``min_rating`` is set. The folder
holds one domain, whose name is free.
"""

from __future__ import annotations

from pathlib import Path

from fedecider.data.readers.lines import BadLines, find_file, finite_number, read_records
from fedecider.data.readers.table import EventTable, RawDomain, ReadOptions, keep_rating, no_texts


def read(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """The ratings in ``raw``; user keys carry the domain name (they are small numbers)."""
    ratings = find_file(raw, ["ratings.txt"], "FilmTrust ratings")
    bad = BadLines(ratings, options.max_bad_lines)
    table = EventTable()
    for user, item, rating in read_records(ratings, _rating_line, bad):
        if keep_rating(rating, options):
            table.add(f"{domain}-{user}", item)
        else:
            table.skip("rating below min_rating")
    return RawDomain(table.build(), no_texts, [ratings], [bad])


def _rating_line(line: bytes) -> tuple[str, str, float]:
    user, item, rating = line.split()
    return str(int(user)), str(int(item)), finite_number(rating.decode("ascii"), "rating")
