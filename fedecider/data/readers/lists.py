"""One user a line, ``user item item ...``: ``train.txt``, and where present ``valid.txt`` and ``test.txt``.

The form of LightGCN's data sets. A user's items of ``valid.txt`` come after those of ``train.txt``, and those of
``test.txt`` last. No times, no ratings, no texts; the order is that of the lines, and many files of this form are
sorted by item, so that a user's last item is not the newest. The folder holds one domain, whose name is free.
"""

from __future__ import annotations

from pathlib import Path

from fedecider.data.readers.files import find_file, find_optional
from fedecider.data.readers.lines import read_records
from fedecider.data.readers.table import NO_ITEMS, EventTable, RawDomain, ReadOptions, no_ratings, no_texts


def read(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """The lists in ``raw``; user keys carry the domain name (they are small numbers)."""
    train = find_file(raw, ["train.txt"], "item lists")
    no_ratings(train, options)
    later = [find_optional(raw, [name]) for name in ("valid.txt", "test.txt")]
    files = [options.file(path) for path in (train, *later) if path is not None]
    table = EventTable()
    for file in files:
        for user, items in read_records(file, _list_line):
            if not items:
                table.dropped.add(NO_ITEMS, lines=1)
            for item in items:
                table.add(f"{domain}-{user}", item)
    for name in _other_texts(raw, {file.path for file in files}):
        table.dropped.add(f"not read: {name}", files=1)
    return RawDomain(table.build(), no_texts, files)


def _other_texts(raw: Path, read: set[Path]) -> list[str]:
    """Files that may be lists under a name that is not known, such as ``val.txt``."""
    others = [path for path in sorted(raw.iterdir()) if path.is_file() and path not in read]
    return [path.name for path in others if path.name.lower().endswith((".txt", ".txt.gz"))]


def _list_line(line: bytes) -> tuple[str, list[str]]:
    user, *items = [str(int(number)) for number in line.split()]
    return user, items
