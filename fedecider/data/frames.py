"""Own data in three lines: tables of events and items, wherever they are, become prepared domains.

>>> domains = from_events("orders.parquet", "products.csv", "data/shop", user="customer", item="sku", time="bought_at")
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedecider.data.domain import Domain
from fedecider.data.given import Given, company_of, event_tables, given_items, item_records
from fedecider.data.prepare import PrepareConfig, prepare_domains
from fedecider.data.readers.files import RawFile
from fedecider.data.readers.table import Catalogue, ItemFields, RawDomain, ReadOptions, collect_items
from fedecider.data.silos import share_by
from fedecider.data.store import check_folder, save_domains


def from_events(
    events: Any,
    items: Any,
    output: str | Path | None = None,
    *,
    name: str = "shop",
    user: str = "user",
    item: str = "item",
    time: str | None = None,
    rating: str | None = None,
    domain: str | None = None,
    company: str | None = None,
    texts: Mapping[str, str] | None = None,
    **settings: Any,
) -> dict[str, Domain]:
    """Prepared domains, written to ``output`` where one is given; domain name -> domain.

    Args:
        events: One row an event, oldest first where there is no ``time``: a pandas or polars frame, a pyarrow table, a
            Hugging Face dataset, a list of dicts, or the path of a .parquet, .csv or .tsv file, which is streamed.
        items: One row an item, in any of these.
        name: What the only domain is called.
        user: The column of users' keys in ``events``; as text, so that 7 and "7" are one user.
        item: The column of items' keys, in both tables.
        time: The column of times: Unix seconds, or dates and times (UTC where they name no zone). None: by row.
        rating: The column of ratings, which ``min_rating`` looks at.
        domain: The column, in both tables, that shares them out into several domains.
        company: The column of ``events`` that says whose customer a user is. The companies of a domain become clients
            with one catalogue and one public pool: ``shop.north``, ``shop.south``. A key is one person's within a
            company alone, so users are called ``north:17``.
        texts: Text field (title, author, brand, series, categories, genres, keywords, description, ...) -> its column.
            None: columns of these names.
        settings: Fields of `PrepareConfig`, such as ``k_core``, ``users_per_domain``, ``silos``, ``seed``.

    Raises:
        ValueError: a table, a column or a value that cannot be read; or what is left is too little.
    """
    check_folder(output)
    for option in ("source", "raw", "domains"):
        if option in settings:
            raise ValueError(f"got the setting {option}, expected the tables, and a name or a domain column")
    keys = {"item": item, **({"domain": domain} if domain else {})}
    optional = {our: their for our, their in (("time", time), ("rating", rating), ("company", company)) if their}
    given = Given("events", events, {"user": user, **keys, **optional}), given_items(items, keys, texts)
    unknown = sorted(set(settings) - set(PrepareConfig.__dataclass_fields__))
    if unknown:
        raise ValueError(f"got the settings {', '.join(unknown)}, expected fields of PrepareConfig, such as k_core")
    if company and settings.get("silos", 1) != 1:
        raise ValueError(f"got silos {settings['silos']} beside a company column, which shares users out already")
    if settings.get("min_rating") is not None and not rating:
        raise ValueError("got min_rating without a rating column, expected rating='...': the column it looks at")
    tables = event_tables(given[0], name.strip(), settings.get("min_rating"))
    pool = {one.strip() for one in settings.get("public_domains", "").split(",") if one.strip()}
    if pool - set(tables):
        raise ValueError(
            f"got public_domains {sorted(pool - set(tables))}, expected some of {', '.join(sorted(tables))}"
        )
    config = PrepareConfig(source="packed", raw="", domains=sorted(set(tables) - pool), **settings)
    catalogues = item_records(given[1], name.strip())

    def read(_: Path, one: str, options: ReadOptions) -> RawDomain:
        files = [RawFile(table.path, 0) for table in given if table.path]
        texts_of = catalogues.get(one, [])
        return RawDomain(tables[one].build(), lambda wanted: _wanted(texts_of, wanted, options), files)

    domains = prepare_domains(config, read=read, share=partial(share_by, company_of=company_of) if company else None)
    for one in domains.values():
        one.card["settings"]["source"] = "tables"
    if output is not None:
        save_domains(domains, output)
    return domains


def _wanted(records: list[tuple[str, ItemFields]], wanted: Collection[str], options: ReadOptions) -> Catalogue:
    return collect_items(records, wanted, options, Path("items"), allow_same=True)
