"""One user a line, ``user item item ...``: ``train.txt``, and where present ``test.txt``, whose items come after.

The form of LightGCN's data sets. No times, no ratings, no texts; the order is that of the lines, and many files of
this form are sorted by item, so that a user's last item is not the newest. The folder holds one domain, whose name is
free.
"""

from __future__ import annotations

from pathlib import Path

from fedecider.data.readers.lines import BadLines, find_file, find_optional, read_records
from fedecider.data.readers.table import EventTable, RawDomain, ReadOptions, no_ratings, no_texts


def read(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """The lists in ``raw``; user keys carry the domain name (they are small numbers)."""
    train, test = find_file(raw, ["train.txt"], "item lists"), find_optional(raw, ["test.txt"])
    no_ratings(train, options)
    files = [train] if test is None else [train, test]
    bad = [BadLines(path, options.max_bad_lines) for path in files]
    table = EventTable()
    for path, counter in zip(files, bad, strict=True):
        for user, items in read_records(path, _list_line, counter):
            for item in items:
                table.add(f"{domain}-{user}", item)
    return RawDomain(table.build(), no_texts, files, bad)


def _list_line(line: bytes) -> tuple[str, list[str]]:
    user, *items = [str(int(number)) for number in line.split()]
    return user, items
