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
from fedecider.data.readers import reading

_FIELDS = ("title", "author", "brand", "series", "categories", "genres", "attribute", "keywords", "description", "year")
OTHER_DOMAINS = "rows of other domains"


def read(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """The events and items of one domain of the folder ``raw``."""
    items_file = options.file(reading.find_file(raw, ["items.jsonl"], "packed items"))
    names = ["interactions.csv", "sequences.tsv"]
    events_file = options.file(reading.find_file(raw, names, "packed interactions or sequences"))
    items = _read_items(items_file, domain)
    keys = {number: key for number, key, _ in reversed(items)}  # the first one wins
    if len(keys) < len(items) and options.duplicate_items != "first":
        raise _repeated_number(items_file.path, items)

    table = reading.EventTable(with_order=True)
    if events_file.path.name.lower().startswith("interactions"):
        _add_interactions(table, events_file, domain, keys, options)
    else:
        _add_sequences(table, events_file, domain, keys, options)

    def read_catalogue(wanted: Collection[str]) -> reading.ItemRecords:
        return reading.collect_items(((key, fields) for _, key, fields in items), wanted, options, items_file.path)

    return reading.RawDomain(table.build(), read_catalogue, [events_file, items_file])


def _read_items(file: reading.RawFile, domain: str) -> list[tuple[int, str, reading.ItemFields]]:
    """(number, key, fields) of the items of one domain, in file order; ``ValueError`` for an unknown domain."""
    items = []
    found: set[str] = set()

    def parse(line: bytes) -> tuple[int, str, reading.ItemFields] | None:
        record = reading.json_object(line)
        of_domain, number = reading.text_field(record, "domain"), reading.whole_number(record["item"], "item")
        found.add(of_domain)
        if of_domain != domain:
            return None
        key = reading.text_field(record, "asin") if record.get("asin") else f"{domain}:{number}"
        return number, key, {name: reading.clean(record.get(name)) for name in _FIELDS}

    for item in reading.read_records(file, parse):
        if item is not None:
            items.append(item)
    if not items:
        raise ValueError(f"unknown domain {domain!r}: {file.path} holds {sorted(found)}. Check --domains.")
    return items


def _repeated_number(path: Path, items: list[tuple[int, str, reading.ItemFields]]) -> ValueError:
    first: dict[int, reading.ItemFields] = {}
    for number, _, fields in items:
        if number in first:
            return reading.duplicate_key(path, str(number), first[number], fields)
        first[number] = fields
    raise AssertionError("called only when a number is repeated")


def _add_interactions(
    table: reading.EventTable, file: reading.RawFile, domain: str, keys: dict[int, str], options: reading.ReadOptions
) -> None:
    def parse(row: dict[str, str]) -> tuple[str, str, float | None, int, int] | None:
        if row["domain"] != domain:
            return None
        if not row["user"]:
            raise ValueError("no user")
        rating = reading.finite_number(row["rating"], "rating") if row["rating"] else None
        time = reading.unix_time(row["timestamp"]) if row["timestamp"] else UNKNOWN_TIME
        number = reading.whole_number(row["item"], "item")
        return (
            row["user"],
            keys.get(number, f"{domain}:{number}"),
            rating,
            time,
            reading.whole_number(row["pos"], "pos"),
        )

    columns = ("domain", "user", "pos", "item", "rating", "timestamp")
    for event in reading.read_csv(file, columns, parse):
        if event is None:
            table.dropped.add(OTHER_DOMAINS, lines=1)
            continue
        user, item, rating, time, order = event
        if rating is None and options.min_rating is not None:
            raise ValueError(
                f"{file.path}: min_rating is {options.min_rating}, but events of {domain!r} have no rating. "
                "Leave min_rating out."
            )
        if rating is None or reading.keep_rating(rating, options):
            table.add(user, item, time, order)
        else:
            table.skip(reading.BELOW_RATING)


def _add_sequences(
    table: reading.EventTable, file: reading.RawFile, domain: str, keys: dict[int, str], options: reading.ReadOptions
) -> None:
    reading.no_ratings(file.path, options)

    def parse(row: dict[str, str]) -> tuple[str, list[int]] | None:
        if row["domain"] != domain:
            return None
        if not row["user"]:
            raise ValueError("no user")
        return row["user"], [reading.whole_number(item, "item") for item in row["items"].split()]

    order = 0  # runs on through the file, so that a second line of a user continues the first one
    columns = ("domain", "user", "items")
    for listed in reading.read_csv(file, columns, parse, delimiter="\t", quoting=False):
        if listed is None:
            table.dropped.add(OTHER_DOMAINS, lines=1)
            continue
        user, numbers = listed
        if not numbers:
            table.dropped.add(reading.NO_ITEMS, lines=1)
        for number in numbers:
            table.add(user, keys.get(number, f"{domain}:{number}"), UNKNOWN_TIME, order)
            order += 1
