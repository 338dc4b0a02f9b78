"""What the parties of a federation prepare apart: one the catalogue and its public users, each company its own users.

>>> publish("disclosed.csv", "products.csv", "public", companies=["north", "south"], user="customer", item="sku")
>>> own_users("orders.parquet", "project/public", "shop.north", "prepared", user="customer", item="sku")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedecider.data.card import RawSummary, make_card
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.dropped import Dropped
from fedecider.data.filtering import (
    chosen_events,
    compress,
    count_exact_duplicates,
    filter_core,
    numbered,
    order_events,
    take,
)
from fedecider.data.given import NAME, Given, event_tables, item_records, text_columns
from fedecider.data.prepare import NO_TEXT, TOO_LONG
from fedecider.data.readers.raw import (
    DEFAULT_TEXT_FIELDS,
    ReadOptions,
    collect_items,
    display_title,
    item_text,
)
from fedecider.data.store import check_folder, file_sha256, load_domains, save_domains
from fedecider.evaluation.protocols import MIN_EVENTS

DESCRIPTION_CHARS = 500
SHORT = "users with too few events"
UNKNOWN_ITEMS = "items that the catalogue does not have"
PUBLIC = "users of the public pool"
NOTHING_READ = RawSummary({}, 0, 0, 0, {"count": 0, "examples": []}, 0)


def publish(
    events: Any | None,
    items: Any,
    output: str | Path | None = None,
    *,
    companies: Sequence[str],
    name: str = "shop",
    user: str = "user",
    item: str = "item",
    time: str | None = None,
    texts: Mapping[str, str] | None = None,
    missing_text: str = "error",
    min_length: int = MIN_EVENTS,
    max_length: int | None = None,
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
        user: The column of customers' keys in ``events``.
        item: The column of items' keys in both tables.
        time: The column of times. None: rows of ``events`` are oldest first.
        texts: Text field (title, brand, ...) -> its column of ``items``. None: columns of these names.
        missing_text: What items without any text are: ``error``, or ``drop`` leaves them and their events out.
        min_length: Users with fewer events are left out.
        max_length: So many newest events of each user are kept; None: all.

    Raises:
        ValueError: a table, a column or a value that cannot be read; fewer than two companies or items; or no user.
    """
    check_folder(output)
    _check_names(name, companies)
    if missing_text not in ("error", "drop"):
        raise ValueError(f"got missing_text {missing_text!r}, expected error or drop")
    things = Given("items", items, {}, name)
    things = things._replace(columns={"item": item, **text_columns(things, texts)})
    records = item_records(things).get(name, [])
    fields = collect_items(records, {key for key, _ in records}, ReadOptions(), Path("items"), allow_same=True).items
    text_of = {key: item_text(one, DEFAULT_TEXT_FIELDS, DESCRIPTION_CHARS) for key, one in fields.items()}
    without = sorted(key for key, text in text_of.items() if not text)
    if without and missing_text == "error":
        raise ValueError(
            f"got {len(without)} of {len(text_of)} items without text, such as {without[0]!r}, expected at least one "
            f"of {', '.join(DEFAULT_TEXT_FIELDS)}: complete the table, or leave such items out (missing_text drop)"
        )
    keys, dropped = sorted(text_of.keys() - set(without)), Dropped()
    dropped.add(NO_TEXT, items=len(without))
    public, raw = NO_EVENTS, NOTHING_READ
    if events is not None:
        given = _given_events(events, user, item, time)
        public, raw = _users_of(given, keys, frozenset(), min_length, max_length, dropped)
        if not public.users:
            raise ValueError(f"got no public user ({dropped}), expected some, or no events where nobody is public")
    titles = [display_title(fields[key]) for key in keys]
    catalogue = Catalogue(name, keys, titles, [text_of[key] for key in keys])
    whole = Domain(name, catalogue, NO_EVENTS, public, {})
    settings = {"source": "tables", "min_length": min_length, "max_length": max_length, "missing_text": missing_text}
    whole.card.update(make_card(whole, raw, dropped=dropped.plain(), settings=settings))
    names = [f"{name}.{company}" for company in companies]
    domains = {one: replace(whole, name=one, card={**whole.card, "name": one}) for one in names}
    if output is not None:
        save_domains(domains, output)
    return domains


def own_users(
    events: Any,
    public: str | Path,
    client: str,
    output: str | Path | None = None,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = None,
    min_length: int = MIN_EVENTS,
    max_length: int | None = None,
) -> Domain:
    """The domain ``client`` with this company's users, and what is public of it as it stands in the folder ``public``.

    Events of items that the catalogue does not have are left out, and so are users with a key of the public pool, whose
    events everybody has. What was left out is in the card.

    Args:
        events: The company's events, a table as :func:`fedecider.data.from_events` takes.
        public: Prepared domains without client users, such as ``public`` in the project of a deployment.
        client: The company's name there, such as ``shop.north``.
        output: The folder to write to. None: nothing is written.
        user: The column of customers' keys.
        item: The column of items' keys.
        time: The column of times. None: rows are oldest first.
        min_length: Users with fewer events are left out.
        max_length: So many newest events of each user are kept; None: all.

    Raises:
        ValueError: a table, a column or a value that cannot be read; no such domain; or fewer than two users are left.
    """
    check_folder(output)
    shared = load_domains(public, [client])[client]
    dropped = Dropped()
    given = _given_events(events, user, item, time)
    taken = frozenset(shared.public.users)
    clients, raw = _users_of(given, shared.item_keys, taken, min_length, max_length, dropped)
    if len(clients.users) < 2:
        raise ValueError(
            f"got {len(clients.users)} users of {client} ({dropped}), expected at least 2 with {min_length} events of "
            "items that the catalogue has: are keys written as they are there?"
        )
    domain = replace(shared, clients=clients, card={})
    settings = {"source": "tables", "min_length": min_length, "max_length": max_length}
    domain.card.update(make_card(domain, raw, dropped=dropped.plain(), settings=settings))
    if output is not None:
        save_domains({client: domain}, output)
    return domain


def _check_names(name: str, companies: Sequence[str]) -> None:
    if isinstance(companies, str) or len(companies) < 2 or len(set(companies)) != len(companies):
        raise ValueError(f"got companies {companies!r}, expected two or more different names")
    odd = [one for one in (name, *companies) if not isinstance(one, str) or not NAME.fullmatch(one)]
    if odd:
        raise ValueError(
            f"got the name {odd[0]!r}, expected letters, digits, '_', '-' and '.' only (it names a folder)"
        )


def _given_events(events: Any, user: str, item: str, time: str | None) -> Given:
    return Given("events", events, {"user": user, "item": item, **({"time": time} if time else {})})


def _users_of(
    given: Given, keys: Sequence[str], taken: frozenset[str], min_length: int, max_length: int | None, dropped: Dropped
) -> tuple[Events, RawSummary]:
    """The users of a table, by key, with the items ``keys``; what is left out is counted in ``dropped``."""
    if min_length < MIN_EVENTS or (max_length is not None and max_length < MIN_EVENTS):
        raise ValueError(f"got min_length {min_length} and max_length {max_length}, expected at least {MIN_EVENTS}")
    (table,) = event_tables([given], None).values()
    raw, number_of = table.build(), {key: number for number, key in enumerate(keys)}
    known_I = np.array([key in number_of for key in raw.items], dtype=bool)
    events = order_events(compress(raw, known_I[raw.item_E]))
    size = dropped.step(UNKNOWN_ITEMS, raw.size(), events.size())
    free_U = np.array([key not in taken for key in events.users], dtype=bool)
    events = take(events, np.repeat(free_U, np.diff(events.start_U)))
    size = dropped.step(PUBLIC, size, events.size())
    events = filter_core(events, min_length, 1)
    size = dropped.step(SHORT, size, events.size())
    number_I = np.array([number_of.get(key, 0) for key in events.items], np.int32)  # no unknown item is left
    users = numbered(chosen_events(events, np.ones(len(events.users), bool), max_length), number_I)
    dropped.add(TOO_LONG, events=size.events - users.num_events)
    summary = RawSummary(
        files={path.name: file_sha256(path) for path in given.paths},
        events=raw.size().events,
        users=raw.size().users,
        items=raw.size().items,
        bad_lines={"count": 0, "examples": []},
        exact_duplicate_events=count_exact_duplicates(events),
    )
    return users, summary
