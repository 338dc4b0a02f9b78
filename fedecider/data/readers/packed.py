"""The packed format: ``items.jsonl.gz`` with ``interactions.csv.gz`` or ``sequences.tsv.gz``, many domains in a file.

items: one JSON object a line with ``domain``, ``item`` (integer, unique within its domain), ``title`` and where known
``asin``, ``brand``, ``categories``, ``description``, ``attribute``, ``genres``, ``keywords``.
interactions: ``domain,user,pos,item,rating,timestamp`` (pos 0 is the oldest; rating and timestamp may be empty).
sequences: ``domain<TAB>user<TAB>items`` (item numbers separated by spaces, oldest first).
The item key is the ASIN where known, else ``domain:item``.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.readers.lines import (
    BadLines,
    find_file,
    finite_number,
    json_object,
    read_csv,
    read_records,
    text_field,
    whole_number,
)
from fedecider.data.readers.table import (
    Catalogue,
    EventTable,
    ItemFields,
    RawDomain,
    ReadOptions,
    clean,
    collect_items,
    duplicate_key,
    keep_rating,
    no_ratings,
    unix_time,
)

_FIELDS = ("title", "author", "brand", "series", "categories", "genres", "attribute", "keywords", "description", "year")


def read(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """The events and items of one domain of the folder ``raw``."""
    items_file = find_file(raw, ["items.jsonl"], "packed items")
    events_file = find_file(raw, ["interactions.csv", "sequences.tsv"], "packed interactions or sequences")
    bad = [BadLines(events_file, options.max_bad_lines), BadLines(items_file, options.max_bad_lines)]
    items = _read_items(items_file, domain, bad[1])
    keys = {number: key for number, key, _ in reversed(items)}  # the first one wins
    if len(keys) < len(items) and options.duplicate_items != "first":
        raise _repeated_number(items_file, items)

    table = EventTable(with_order=True)
    if events_file.name.startswith("interactions"):
        _add_interactions(table, events_file, domain, keys, options, bad[0])
    else:
        _add_sequences(table, events_file, domain, keys, options, bad[0])

    def read_catalogue(wanted: Collection[str]) -> Catalogue:
        return collect_items(((key, fields) for _, key, fields in items), wanted, options, items_file)

    return RawDomain(table.build(), read_catalogue, [events_file, items_file], bad)


def _read_items(path: Path, domain: str, bad: BadLines) -> list[tuple[int, str, ItemFields]]:
    """(number, key, fields) of the items of one domain, in file order; ``ValueError`` for an unknown domain."""
    items = []
    found: set[str] = set()

    def parse(line: bytes) -> tuple[int, str, ItemFields] | None:
        record = json_object(line)
        of_domain, number = text_field(record, "domain"), whole_number(record["item"], "item")
        found.add(of_domain)
        if of_domain != domain:
            return None
        key = text_field(record, "asin") if record.get("asin") else f"{domain}:{number}"
        return number, key, {name: clean(record.get(name)) for name in _FIELDS}

    for item in read_records(path, parse, bad):
        if item is not None:
            items.append(item)
    if not items:
        raise ValueError(f"unknown domain {domain!r}: {path} holds {sorted(found)}. Check --domains.")
    return items


def _repeated_number(path: Path, items: list[tuple[int, str, ItemFields]]) -> ValueError:
    first: dict[int, ItemFields] = {}
    for number, _, fields in items:
        if number in first:
            return duplicate_key(path, str(number), first[number], fields)
        first[number] = fields
    raise AssertionError("called only when a number is repeated")


def _add_interactions(
    table: EventTable, path: Path, domain: str, keys: dict[int, str], options: ReadOptions, bad: BadLines
) -> None:
    def parse(row: dict[str, str]) -> tuple[str, str, float | None, int, int] | None:
        if row["domain"] != domain:
            return None
        if not row["user"]:
            raise ValueError("no user")
        rating = finite_number(row["rating"], "rating") if row["rating"] else None
        time = unix_time(row["timestamp"]) if row["timestamp"] else UNKNOWN_TIME
        number = whole_number(row["item"], "item")
        return row["user"], keys.get(number, f"{domain}:{number}"), rating, time, whole_number(row["pos"], "pos")

    columns = ("domain", "user", "pos", "item", "rating", "timestamp")
    for event in read_csv(path, columns, parse, bad):
        if event is None:
            continue
        user, item, rating, time, order = event
        if rating is None and options.min_rating is not None:
            raise ValueError(
                f"{path}: min_rating is {options.min_rating}, but events of {domain!r} have no rating. "
                "Leave min_rating out."
            )
        if rating is None or keep_rating(rating, options):
            table.add(user, item, time, order)
        else:
            table.skip("rating below min_rating")


def _add_sequences(
    table: EventTable, path: Path, domain: str, keys: dict[int, str], options: ReadOptions, bad: BadLines
) -> None:
    no_ratings(path, options)

    def parse(row: dict[str, str]) -> tuple[str, list[int]]:
        if row["domain"] != domain:
            return "", []
        if not row["user"]:
            raise ValueError("no user")
        return row["user"], [whole_number(item, "item") for item in row["items"].split()]

    order = 0  # runs on through the file, so that a second line of a user continues the first one
    columns = ("domain", "user", "items")
    for user, numbers in read_csv(path, columns, parse, bad, delimiter="\t", quoting=False):
        for number in numbers:
            table.add(user, keys.get(number, f"{domain}:{number}"), UNKNOWN_TIME, order)
            order += 1
