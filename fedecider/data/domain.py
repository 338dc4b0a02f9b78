"""What a prepared domain is: a catalogue, its private client users and a public pool, split by leave-last-out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fedecider.data.catalogue import Catalogue, NewItem
from fedecider.data.content import update_json
from fedecider.data.dropped import Size
from fedecider.data.names import check_name
from fedecider.evaluation.protocols import MIN_EVENTS
from fedecider.evaluation.sequences import SequenceArray

UNKNOWN_TIME = -1
"""Timestamp of an event whose time is not known, in a group where other times are."""


class Events(NamedTuple):
    """The users of one group; row u of the three fields belongs to ``users[u]``. Those of a domain are arrays."""

    users: list[str]
    sequences: Sequence[list[int]]
    """Item numbers of each user, oldest first."""
    timestamps: Sequence[list[int]] | None
    """Unix seconds of each event (``UNKNOWN_TIME`` where not known), or None when no time at all is known."""

    @property
    def num_events(self) -> int:
        """Of all users of the group together."""
        return len(self.arrays().sequences.value_E)

    def arrays(self) -> EventArrays:
        """The same events as arrays: those that are there, or new ones of lists."""
        times = None if self.timestamps is None else SequenceArray.of(self.timestamps)
        return EventArrays(self.users, SequenceArray.of(self.sequences), times)

    def take(self, places: Sequence[int] | np.ndarray) -> Events:
        """The users at ``places``, in this order."""
        users, sequences, times = self.arrays()
        chosen = [users[place] for place in places]
        return Events(chosen, sequences.take(places), None if times is None else times.take(places))

    def renumbered(self, number_I: np.ndarray) -> Events:
        """The events of the items with a new number, -1 being none, of users who keep enough to be split."""
        users, items, times = self.arrays()
        is_kept_E = number_I[items.value_E] >= 0
        kept = items.keep(is_kept_E)
        kept = SequenceArray(kept.start_U, number_I[kept.value_E], basket_E=kept.basket_E)
        kept_times = None if times is None else times.keep(is_kept_E)
        return Events(users, kept, kept_times).take(np.flatnonzero(kept.length_U >= MIN_EVENTS))


class EventArrays(NamedTuple):
    """As :class:`Events`, of arrays for certain."""

    users: list[str]
    sequences: SequenceArray
    timestamps: SequenceArray | None


NO_EVENTS = Events([], [], None)


@dataclass(frozen=True)
class Domain:
    """One product area, ready for training: catalogue, clients' events and public events.

    Item numbers of events are those of the items that the domain sells (`items`).

    Raises:
        ValueError: a user with too few events or an item that the domain does not sell, or one who is both a client's
            and public.
    """

    name: str
    catalogue: Catalogue
    """Domains that hold the same object have the same item under the same key: silos, which sell all of it, and
    companies whose assortments overlap, which sell a part each."""
    clients: Events
    """The private users of this client of the federation; none in a domain that only serves an out-of-domain pool."""
    public: Events
    """Users for public pre-training; none of them is a client in any domain."""
    card: dict[str, Any]
    """Counts, ties, overlaps, checksums: the data card."""
    own_items: Catalogue | None = None
    """What the domain sells of the catalogue, where that is a part of it, or in other words; None: all of it."""
    unsold: tuple[NewItem, ...] = ()
    """Items that nobody has bought yet: nothing is trained or measured with them; recommenders know their texts."""

    def __post_init__(self) -> None:
        check_name(self.name, "company or domain", "prepare it under another name")
        for group, field in (("client", "clients"), ("public", "public")):
            given: Events = getattr(self, field)
            events = given.arrays()
            _check_events(self, group, events)
            if given.sequences is not events.sequences or events.sequences.value_E.dtype != np.int32:
                items = events.sequences.of_type(np.int32)
                object.__setattr__(self, field, Events(events.users, items, events.timestamps))
        both = set(self.clients.users).intersection(self.public.users)
        if both:
            raise ValueError(
                f"domain {self.name!r}: {len(both)} users such as {min(both)!r} are both clients and public; "
                "expected disjoint groups. Prepare the data again."
            )

    @property
    def items(self) -> Catalogue:
        """What it sells; an item number is an index into it."""
        return self.catalogue if self.own_items is None else self.own_items

    @property
    def item_keys(self) -> list[str]:
        """The keys of what it sells, by which other companies know it."""
        return self.items.keys

    @property
    def own_keys(self) -> list[str]:
        """The keys of what it sells as its own tables have them."""
        return self.items.keys if self.items.own_keys is None else self.items.own_keys

    @property
    def titles(self) -> list[str]:
        """The titles of what it sells, in its own words."""
        return self.items.titles

    @property
    def item_texts(self) -> list[str]:
        """The texts of what it sells, in its own words."""
        return self.items.texts

    @property
    def is_part(self) -> bool:
        """Whether it sells a part of its catalogue alone."""
        return len(self.items.keys) < len(self.catalogue.keys)

    @cached_property
    def catalogue_number_I(self) -> np.ndarray:
        """(I,) int64: the numbers that its items have in the catalogue."""
        if self.own_items is None:
            return np.arange(len(self.catalogue.keys))
        number_of = self.catalogue.number_of
        return np.array([number_of[key] for key in self.items.keys], np.int64)

    def size(self) -> Size:
        """All users, clients and public, the items that it sells, and all events."""
        users = len(self.clients.users) + len(self.public.users)
        return Size(users, len(self.item_keys), self.clients.num_events + self.public.num_events)

    def content_hash(self) -> str:
        """Hexadecimal SHA-256 over everything that can influence a result (all but the card)."""
        digest = hashlib.sha256()
        parts: list[Any] = [self.name, self.item_keys, self.titles, self.item_texts]
        for events in (self.clients, self.public):
            parts += [events.users, events.sequences, events.timestamps or None]
            parts += [baskets] if (baskets := events.arrays().sequences.baskets) else []
        if self.catalogue.name != self.name:
            parts.append(self.catalogue.name)
        if self.items.own_keys is not None:
            parts.append(self.items.own_keys)
        update_json(digest, parts)
        return digest.hexdigest()


def check_public_disjoint(domains: Mapping[str, Domain]) -> None:
    """Raise ``ValueError`` when a user is a client of one domain and in the public pool of another."""
    for private in domains.values():
        clients = set(private.clients.users)
        for other in domains.values():
            both = clients.intersection(other.public.users)
            if both:
                raise ValueError(
                    f"{len(both)} users such as {min(both)!r} are clients of {private.name!r} and public in "
                    f"{other.name!r}; expected none, or private events would reach the backbone. "
                    "Prepare these domains together, in one run of scripts/prepare_data.py."
                )


def clients_of(domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """The domains that have client users."""
    return {name: domain for name, domain in domains.items() if domain.clients.users}


def _check_events(domain: Domain, group: str, events: EventArrays) -> None:
    where = f"domain {domain.name!r}, {group} users"
    if len(set(events.users)) != len(events.users):
        raise ValueError(f"{where}: a user appears twice; expected each user once.")
    if len(events.users) != len(events.sequences):
        raise ValueError(f"{where}: got {len(events.users)} users and {len(events.sequences)} sequences.")
    if group == "client" and len(events.users) == 1:
        raise ValueError(
            f"{where}: got {len(events.users)} user(s); expected at least 2. "
            "Lower k_core or min_length, or give more raw data."
        )
    check_item_numbers(where, events, len(domain.item_keys))
    if events.timestamps is not None and not np.array_equal(events.timestamps.start_U, events.sequences.start_U):
        raise ValueError(f"{where}: timestamps and sequences differ in length.")


def check_item_numbers(where: str, events: EventArrays, num_items: int) -> None:
    """``ValueError`` for the first user with fewer than ``MIN_EVENTS`` events or an item outside the catalogue."""
    length_U = events.sequences.length_U
    short_U = length_U < MIN_EVENTS
    if short_U.any():
        user = int(short_U.argmax())
        raise ValueError(
            f"{where}: user {events.users[user]!r} has {length_U[user]} events; expected at least {MIN_EVENTS} "
            "(training, validation, test). Raise min_length."
        )
    item_E = events.sequences.value_E
    if len(item_E) and (item_E.min() < 0 or item_E.max() >= num_items):
        event = int(((item_E < 0) | (item_E >= num_items)).argmax())
        user = int(np.searchsorted(events.sequences.start_U, event, side="right")) - 1
        raise ValueError(f"{where}: user {events.users[user]!r} has an item number outside 0..{num_items - 1}.")
