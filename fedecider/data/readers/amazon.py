"""Amazon reviews and meta data, the 2014 (McAuley et al.) and 2018 (Ni et al., EMNLP 2019) releases, original files.

``Electronics_5.json.gz`` / ``reviews_Electronics_5.json.gz`` (5-core first, else the full file) with
``meta_Electronics.json.gz``. The 2014 meta lines are Python dict literals, not JSON; both are read. Every review is an
event whatever its rating, unless ``min_rating`` is set; its time is ``unixReviewTime`` (whole days: many ties).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedecider.data.readers import reading

STEMS = {
    "beauty": "Beauty",
    "clothing": "Clothing_Shoes_and_Jewelry",
    "electronics": "Electronics",
    "phones": "Cell_Phones_and_Accessories",
    "sports": "Sports_and_Outdoors",
    "toys": "Toys_and_Games",
}
"""Short names; any other domain is the category as it stands in the file name, in any letter case."""

_STORE_PAGE = re.compile(r"^Visit Amazon's (.*) Page$", re.IGNORECASE)


def read(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """The events of ``domain`` and its products."""
    stem = _stem(raw, domain)
    names = [f"{stem}_5.json", f"reviews_{stem}_5.json", f"{stem}.json", f"reviews_{stem}.json"]
    reviews = options.file(reading.find_file(raw, names, f"reviews of {domain!r}"))
    meta = options.file(reading.find_file(raw, [f"meta_{stem}.json"], f"product data of {domain!r}"))

    table = reading.EventTable()
    for user, asin, rating, time in reading.read_records(reviews, _review):
        if reading.keep_rating(rating, options):
            table.add(user, asin, time)
        else:
            table.skip(reading.BELOW_RATING)

    def read_catalogue(wanted: Collection[str]) -> reading.ItemRecords:
        def parse(line: bytes) -> tuple[str, reading.ItemFields]:
            record = json_or_literal(line)
            return record["asin"], _product(record) if record["asin"] in wanted else {}

        return reading.collect_items(reading.read_records(meta, parse), wanted, options, meta.path, allow_same=True)

    return reading.RawDomain(table.build(), read_catalogue, [reviews, meta])


def json_or_literal(line: bytes) -> dict[str, Any]:
    """The record of one meta line, JSON or (2014) Python dict literal, with its ``asin`` checked."""
    try:
        record = reading.json_object(line)
    except json.JSONDecodeError:
        record = ast.literal_eval(line.decode("utf-8").strip())
        if type(record) is not dict:
            raise ValueError(f"got a {type(record).__name__}, expected a dict") from None
    record["asin"] = reading.text_field(record, "asin")
    return record


def _review(line: bytes) -> tuple[str, str, float, int]:
    record = reading.json_object(line)
    user, asin = reading.text_field(record, "reviewerID"), reading.text_field(record, "asin")
    return user, asin, reading.finite_number(record["overall"], "overall"), reading.unix_time(record["unixReviewTime"])


def _stem(raw: Path, domain: str) -> str:
    if domain.lower() in STEMS:
        return STEMS[domain.lower()]
    stem = domain.replace(" ", "_")
    present = sorted(path.name for path in raw.iterdir()) if raw.is_dir() else []
    found = [name[5:].split(".")[0] for name in present if name.lower().startswith("meta_")]
    if present and stem.lower() not in [name.lower() for name in found]:
        raise ValueError(
            f"unknown domain {domain!r} for source amazon; expected one of {sorted(STEMS)} or a category with a "
            f"meta_*.json.gz file in {raw} (found {found or 'none'})."
        )
    return stem


def _product(record: dict[str, Any]) -> reading.ItemFields:
    title = reading.clean(record.get("title"))
    if "getTime()" in title:  # page scripts that the 2018 crawl took for titles
        title = ""
    brand = reading.clean(record.get("brand"))
    if match := _STORE_PAGE.match(brand):
        brand = match.group(1)
    if brand.lower().startswith("by "):
        brand = brand[3:]
    return {
        "title": title,
        "brand": brand,
        "categories": reading.clean(record.get("category") or _flat(record.get("categories"))),
        "description": " ".join(filter(None, map(reading.clean, _as_list(record.get("description"))))),
        "price": reading.clean(record.get("price")),
        "sales_rank": _rank(record.get("salesRank") or record.get("rank")),
    }


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _flat(value: Any) -> list[Any]:
    """2014: a list of category paths."""
    return [part for path in _as_list(value) for part in _as_list(path)]


def _rank(value: Any) -> str:
    if isinstance(value, dict):
        return reading.clean([f"{name}: {place}" for name, place in value.items()])
    return reading.clean(value)
