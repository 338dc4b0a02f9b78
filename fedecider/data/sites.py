"""What the parties of a federation prepare apart: one the catalogue and its public users, each company its own users.

>>> publish("disclosed.csv", "products.csv", "public", companies=["north", "south"], user="customer", item="sku")
>>> own_users("orders.parquet", "project/public", "shop.north", "prepared", user="customer", item="sku")
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedecider.data import filtering
from fedecider.data.card import RawSummary, make_card
from fedecider.data.catalogue import Catalogue
from fedecider.data.columns import find_columns, text_columns
from fedecider.data.constant_words import CARD, constant_words, in_words, without_constant
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.dropped import Dropped
from fedecider.data.events import Reading, Source, item_records
from fedecider.data.frames import events_of
from fedecider.data.mapping import TableOptions
from fedecider.data.names import check_name
from fedecider.data.prepare import NO_TEXT, TOO_LONG
from fedecider.data.readers.reading import (
    DEFAULT_TEXT_FIELDS,
    ItemFields,
    ReadOptions,
    collect_items,
    display_title,
    item_text,
)
from fedecider.data.store import check_folder, file_sha256, load_domains, save_domains
from fedecider.data.tables import open_table
from fedecider.evaluation.protocols import MIN_EVENTS

DESCRIPTION_CHARS = 500
SHORT = "users with too few events"
UNKNOWN_ITEMS = "items that the catalogue does not have"
PUBLIC = "users of the public pool"
NOTHING_READ = RawSummary({}, 0, 0, 0, {"count": 0, "examples": []}, 0)


@dataclass(frozen=True)
class SiteTables:
    """How tables are read and what is kept of them."""

    columns: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TableOptions`, such as ``user``, ``item``, ``time``, ``order``; columns of usual names are found."""
    min_length: int = MIN_EVENTS
    """Users with fewer events are left out."""
    max_length: int | None = None
    """So many newest events of each user are kept; None: all."""
    texts: Mapping[str, str] | None = None
    """Text field (title, brand, ...) -> its column of items. None: columns of these names."""
    missing_text: str = "error"
    """What items without any text are: ``error``, or ``drop`` leaves them and their events out."""

    def __post_init__(self) -> None:
        if self.missing_text not in ("error", "drop"):
            raise ValueError(f"got missing_text {self.missing_text!r}, expected error or drop")
        for name in ("min_length", "max_length"):
            if (length := getattr(self, name)) is not None and length < MIN_EVENTS:
                raise ValueError(f"got {name} {length}, expected at least {MIN_EVENTS}")

    @property
    def card(self) -> dict[str, Any]:
        """What shaped the events, for a data card."""
        return {"source": "tables", "min_length": self.min_length, "max_length": self.max_length}


OF_ITEMS = ("texts", "missing_text")


def publish(
    events: Any | None,
    items: Any,
    output: str | Path | None = None,
    *,
    companies: Sequence[str],
    name: str = "shop",
    **options: Any,
) -> dict[str, Domain]:
    """A domain without client users for each company, ``shop.north``, ``shop.south``, ...: what all of them share.

    The catalogue is every row of ``items``, bought by a public user or not, since each company may sell any of them.

    Args:
        events: Events of the users that may be seen by everybody, a table as :func:`fedecider.data.from_events` takes.
            None: nobody's may.
        items: One row an item, the whole catalogue.
        output: The folder to write to. None: nothing is written.
        companies: Who takes part; each is a client of the federation.
        name: What the catalogue is called.
        options: Fields of `SiteTables`, such as ``user``, ``item``, ``time`` and ``texts``.

    Raises:
        ValueError: a table, a column or a value that cannot be read; fewer than two companies or items; or no user.
    """
    check_folder(output)
    _check_names(name, companies)
    asked = _site_tables(options, frozenset())
    (fields, said), dropped = _fields_of(items, asked, name), Dropped()
    text_of = {key: item_text(one, DEFAULT_TEXT_FIELDS, DESCRIPTION_CHARS) for key, one in fields.items()}
    without = sorted(key for key, text in text_of.items() if not text)
    if without and asked.missing_text == "error":
        raise ValueError(
            f"got {len(without)} of {len(text_of)} items without text, such as {without[0]!r}, expected at least one "
            f"of {', '.join(DEFAULT_TEXT_FIELDS)}: complete the table, or leave such items out (missing_text drop)"
        )
    constant = constant_words(list(text_of.values()))
    text_of = {key: without_constant(text, constant) for key, text in text_of.items()}
    keys = sorted(text_of.keys() - set(without))
    dropped.add(NO_TEXT, items=len(without))
    public, raw, odd = NO_EVENTS, NOTHING_READ, list[str]()
    if events is not None:
        public, raw, odd = _users_of(events, keys, frozenset(), asked, dropped)
        if not public.users:
            raise ValueError(f"got no public user ({dropped}), expected some, or no events where nobody is public")
    odd = said + odd
    if constant:
        odd.append(f"left out of all texts, as every item has it: {in_words(constant)}")
    titles = [display_title(fields[key]) for key in keys]
    whole = Domain(name, Catalogue(name, keys, titles, [text_of[key] for key in keys]), NO_EVENTS, public, {})
    settings = {**asked.card, "missing_text": asked.missing_text}
    whole.card.update(make_card(whole, raw, None, dropped.plain(), settings, "order" in asked.columns) | {"notes": odd})
    whole.card.update({CARD: constant} if constant else {})
    names = [f"{name}.{company}" for company in companies]
    domains = {one: replace(whole, name=one, card={**whole.card, "name": one}) for one in names}
    if output is not None:
        save_domains(domains, output)
    return domains


def own_users(events: Any, public: str | Path, client: str, output: str | Path | None = None, **options: Any) -> Domain:
    """The domain ``client`` with this company's users, and what is public of it as it stands in the folder ``public``.

    Events of items that the catalogue does not have are left out, and so are users with a key of the public pool, whose
    events everybody has. What was left out is in the card.

    Args:
        events: The company's events, a table as :func:`fedecider.data.from_events` takes.
        public: Prepared domains without client users, such as ``public`` in the project of a deployment.
        client: The company's name there, such as ``shop.north``.
        output: The folder to write to. None: nothing is written.
        options: Fields of `SiteTables` about events: ``user``, ``item``, ``time``, ``min_length``, ``max_length``.

    Raises:
        ValueError: a table, a column or a value that cannot be read; no such domain; or fewer than two users are left.
    """
    check_folder(output)
    asked, dropped = _site_tables(options, frozenset(OF_ITEMS)), Dropped()
    shared = load_domains(public, [client])[client]
    clients, raw, odd = _users_of(events, shared.own_keys, frozenset(shared.public.users), asked, dropped)
    if len(clients.users) < 2:
        raise ValueError(
            f"got {len(clients.users)} users of {client} ({dropped}), expected at least 2 with {asked.min_length} "
            "events of items that the catalogue has: are keys written as they are there?"
        )
    domain = replace(shared, clients=clients, card={})
    domain.card.update(
        make_card(domain, raw, None, dropped.plain(), asked.card, "order" in asked.columns)
        | {name: value for name, value in shared.card.items() if name == CARD}
        | {"notes": odd}
    )
    if output is not None:
        save_domains({client: domain}, output)
    return domain


def prepared_users(data: str | Path, public: str | Path, client: str, output: str | Path) -> Domain:
    """The domain ``client`` of a project with the users of this company's own prepared data, as in a pilot.

    Args:
        data: The folder that ``fedecider import`` wrote, in which the company may have another name.
        public: Prepared domains without client users, such as ``public`` in the project of a deployment.
        client: The company's name there.
        output: The folder to write to.

    Raises:
        ValueError: several companies in ``data``, items that the project does not have, or public users of another one.
    """
    found, shared = load_domains(data), load_domains(public, [client])[client]
    own = found.get(client) or next(iter(found.values()))
    number_of = {key: number for number, key in enumerate(shared.own_keys)}
    missing = [key for key in own.own_keys if key not in number_of]
    wrong = f"{len(missing)} items that {client} of the project does not have, such as {missing[0]}" if missing else ""
    if (len(found) > 1 and client not in found) or not own.clients.users:
        wrong = f"no client users of {client} alone, but of {', '.join(found)}"
    if wrong:
        raise ValueError(
            f"got {data} with {wrong}, expected the company's own data, whose items were published: fedecider deploy "
            f"publish --data {data}"
        )
    clients = own.clients.renumbered(np.array([number_of[key] for key in own.own_keys], np.int64))
    domain = replace(shared, clients=clients, card={**own.card, "name": client})
    save_domains({client: domain}, output)
    return domain


def _site_tables(options: Mapping[str, Any], without: Collection[str]) -> SiteTables:
    known = [name for name in SiteTables.__dataclass_fields__ if name not in (*without, "columns")]
    of_tables = [name for name in TableOptions.__dataclass_fields__ if name not in ("name", "public", "texts")]
    if unknown := sorted(set(options) - {*known, *of_tables}):
        raise ValueError(f"got the option {unknown[0]!r}, expected some of {', '.join([*known, *of_tables])}")
    columns = {name: options[name] for name in of_tables if options.get(name) is not None}
    return SiteTables(**{name: options[name] for name in known if name in options}, columns=columns)


def _fields_of(items: Any, asked: SiteTables, name: str) -> tuple[Mapping[str, ItemFields], list[str]]:
    """Item key -> its text fields, and what has to be said of them."""
    options = TableOptions(**{**asked.columns, "name": name, "texts": asked.texts})
    table = open_table(items, "items", options.item_form)
    key = (
        asked.columns.get("items_key")
        or asked.columns.get("item")
        or find_columns(table, {"item": None}).by_role["item"]
    )
    fields, first = text_columns(table, asked.texts, key)
    if not fields:
        raise ValueError(f"got items without a column of texts ({', '.join(table.column_names)}), expected a title")
    reading = Reading(skip=True)
    records = item_records(Source(table, options, {"item": key, **fields}, name), reading).get(name, [])
    if options.bad_rows == "error":
        reading.refuse_bad()
    wanted, said = {key for key, _ in records}, [*first, *reading.first, *reading.bad_in_words()]
    return collect_items(records, wanted, ReadOptions(), Path("items")).items, said


def _check_names(name: str, companies: Sequence[str]) -> None:
    if isinstance(companies, str) or len(companies) < 2 or len(set(companies)) != len(companies):
        raise ValueError(f"got companies {companies!r}, expected two or more different names")
    for one in (name, *companies):
        check_name(one, "name")


def _users_of(
    events: Any, keys: Sequence[str], public: Collection[str], asked: SiteTables, dropped: Dropped
) -> tuple[Events, RawSummary, list[str]]:
    """The users of a table who are not ``public``, by key, with the items ``keys``, and what is odd about its orders;
    what is left out is counted in ``dropped``."""
    raw, odd, paths = events_of(events, asked.columns)
    number_of = {key: number for number, key in enumerate(keys)}
    dropped.include(raw.dropped)
    known_I = np.array([key in number_of for key in raw.items], dtype=bool)
    kept = filtering.order_events(filtering.compress(raw, known_I[raw.item_E]))
    size = dropped.step(UNKNOWN_ITEMS, raw.size(), kept.size())
    free_U = np.array([key not in public for key in kept.users], dtype=bool)
    kept = filtering.take(kept, np.repeat(free_U, np.diff(kept.start_U)))
    size = dropped.step(PUBLIC, size, kept.size())
    kept = filtering.filter_core(kept, asked.min_length, 1)
    size = dropped.step(SHORT, size, kept.size())
    number_I = np.array([number_of.get(key, 0) for key in kept.items], np.int32)  # no unknown item is left
    users = filtering.numbered(
        filtering.chosen_events(kept, np.ones(len(kept.users), bool), asked.max_length), number_I
    )
    dropped.add(TOO_LONG, events=size.events - users.num_events)
    summary = RawSummary(
        files={path.name: file_sha256(path) for path in paths},
        events=raw.size().events,
        users=raw.size().users,
        items=raw.size().items,
        bad_lines={"count": 0, "examples": []},
        exact_duplicate_events=filtering.count_exact_duplicates(kept),
    )
    return users, summary, odd
