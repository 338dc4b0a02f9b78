"""What a prepared domain is: a catalogue, its private client users and a public pool, split by leave-last-out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from fedecider.evaluation.protocols import MIN_EVENTS
from fedecider.evaluation.sequences import SequenceArray

ROWS_AT_ONCE = 4096
"""Users whose events are written as text together."""
UNITS = ("files", "lines", "records", "users", "items", "events")
"""What is counted; a record is the text of one item."""


class Size(NamedTuple):
    """How much there is before or after a step."""

    users: int
    items: int
    events: int

    def __str__(self) -> str:
        return _counts(self._asdict())


class Dropped:
    """Counts of what was left out, by reason, in the order in which the reasons came up."""

    def __init__(self, counts: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self.counts = {reason: dict(units) for reason, units in (counts or {}).items()}

    def add(self, reason: str, **counts: int) -> None:
        """Count what one cause took away: ``add("rating below min_rating", events=1)``, in ``UNITS``."""
        known = self.counts.setdefault(reason, {})
        for unit, count in counts.items():
            known[unit] = known.get(unit, 0) + count

    def include(self, other: Dropped) -> Dropped:
        """Count all of ``other`` too; -> itself."""
        for reason, counts in other.counts.items():
            self.add(reason, **counts)
        return self

    def step(self, reason: str, before: Size, after: Size) -> Size:
        """Count what a filter took away, be it nothing; -> ``after``."""
        self.add(reason, **{unit: a - b for unit, a, b in zip(Size._fields, before, after, strict=True)})
        return after

    def plain(self) -> dict[str, dict[str, int]]:
        """The counts for a data card."""
        return {reason: dict(counts) for reason, counts in self.counts.items()}

    def __str__(self) -> str:
        """``left out: rating below min_rating (44,625 events); repeats (1 user, 2 events)``."""
        parts = [f"{reason} ({_counts(counts)})" for reason, counts in self.counts.items() if any(counts.values())]
        return f"left out: {'; '.join(parts) or 'nothing'}"


def _counts(counts: Mapping[str, int]) -> str:
    """``1 user, 2,000 events``: what is not zero, in the order of ``UNITS``."""
    named = [(counts.get(unit, 0), unit) for unit in UNITS]
    return ", ".join(f"{count:,} {unit[:-1] if count == 1 else unit}" for count, unit in named if count)


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


class EventArrays(NamedTuple):
    """As :class:`Events`, of arrays for certain."""

    users: list[str]
    sequences: SequenceArray
    timestamps: SequenceArray | None


NO_EVENTS = Events([], [], None)


@dataclass(frozen=True)
class Domain:
    """One product area, ready for training: catalogue, clients' events and public events.

    Raises:
        ValueError: fewer than two items, keys that are not sorted and unique, an item without a text of one line, a
            user with too few events or an item outside the catalogue, or one who is both a client's and public.
    """

    name: str
    item_keys: list[str]
    """Sorted; an item number is an index into this list."""
    titles: list[str]
    item_texts: list[str]
    """What the ID generator reads, such as ``title: ...; brand: ...``, lower case, one line."""
    clients: Events
    """The private users of this client of the federation; none in a domain that only serves a foreign pool."""
    public: Events
    """Users for public pre-training; none of them is a client in any domain."""
    card: dict[str, Any]
    """Counts, ties, overlaps, checksums: the data card."""
    catalogue: str = ""
    """Domains of one catalogue have the same item under the same key: all items and public users in common, as silos,
    or a part of the items each, as companies whose catalogues overlap; if empty, the domain's own name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "catalogue", self.catalogue or self.name)
        _check_catalogue(self)
        for group, field in (("client", "clients"), ("public", "public")):
            events = getattr(self, field).arrays()
            _check_events(self, group, events)
            items = events.sequences.of_type(np.int32)
            object.__setattr__(self, field, Events(events.users, items, events.timestamps))
        both = set(self.clients.users).intersection(self.public.users)
        if both:
            raise ValueError(
                f"domain {self.name!r}: {len(both)} users such as {min(both)!r} are both clients and public; "
                "expected disjoint groups. Prepare the data again."
            )

    def size(self) -> Size:
        """All users, clients and public, the items of the catalogue, and all events."""
        users = len(self.clients.users) + len(self.public.users)
        return Size(users, len(self.item_keys), self.clients.num_events + self.public.num_events)

    def content_hash(self) -> str:
        """Hexadecimal SHA-256 over everything that can influence a result (all but the card)."""
        digest = hashlib.sha256()
        parts: list[Any] = [self.name, self.item_keys, self.titles, self.item_texts]
        for events in (self.clients, self.public):
            parts += [events.users, events.sequences, events.timestamps or None]
        if self.catalogue != self.name:
            parts.append(self.catalogue)
        update_json(digest, parts)
        return digest.hexdigest()


def update_json(digest: Any, parts: Iterable[Any]) -> None:
    """Give a hash the JSON text of every part and a line break; of sequences of numbers a few thousand at a time."""
    for part in parts:
        for piece in _json_pieces(part):
            digest.update(piece.encode())
        digest.update(b"\n")


def _json_pieces(part: Any) -> Iterator[str]:
    if not isinstance(part, SequenceArray):
        yield json.dumps(part, ensure_ascii=True, separators=(",", ":"))
        return
    yield "["
    for first in range(0, len(part), ROWS_AT_ONCE):
        text = json.dumps(list(part[first : first + ROWS_AT_ONCE]), separators=(",", ":"))
        yield f"{',' if first else ''}{text[1:-1]}"
    yield "]"


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


def by_catalogue(domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """Catalogue -> what its domains share: the first one where all have the same, else the union of them (`united`)."""
    members: dict[str, list[Domain]] = {}
    for domain in domains.values():
        members.setdefault(domain.catalogue, []).append(domain)
    return {name: found[0] if _are_alike(found) else united(name, found) for name, found in members.items()}


def once_a_catalogue(domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """Catalogue -> one of its silos, and each domain that has a part of a catalogue under its own name."""
    wholes = by_catalogue(domains)
    alike = {one.catalogue: one for one in domains.values() if wholes[one.catalogue].name in domains}
    return alike | {name: one for name, one in domains.items() if one.catalogue not in alike}


def with_unions(domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """The domains, and behind them the unions of catalogues that they have parts of, by the catalogue's name."""
    return {**domains, **{whole.name: whole for whole in by_catalogue(domains).values() if whole.name not in domains}}


def united(name: str, members: Sequence[Domain]) -> Domain:
    """All items that any of ``members`` sells, matched by key, and their public users; no clients.

    An item that several sell has title and text of the first of them by name. Public users of one key are one person,
    whose events are put in the order of their times, and count once where several companies tell the same; without
    times the company speaks that has most of them.
    """
    ordered = sorted(members, key=lambda one: one.name)
    about: dict[str, tuple[str, str]] = {}
    for one in ordered:
        for key, title, text in zip(one.item_keys, one.titles, one.item_texts, strict=True):
            about.setdefault(key, (title, text))
    keys = sorted(about)
    titles, texts = ([about[key][field] for key in keys] for field in (0, 1))
    whole = Domain(name, keys, titles, texts, NO_EVENTS, NO_EVENTS, {})
    return replace(whole, public=_public_of(ordered, whole))


def _public_of(members: Sequence[Domain], whole: Domain) -> Events:
    """The public users of a catalogue's domains, by key, with its item numbers; in order, without times."""
    groups = [one.public.arrays() for one in members]
    users = [user for group in groups for user in group.users]
    items = [
        SequenceArray(group.sequences.start_U, numbers_in(one, whole)[group.sequences.value_E])
        for one, group in zip(members, groups, strict=True)
    ]
    if len(set(users)) == len(users):
        lengths, numbers = ([getattr(one, name) for one in items] for name in ("length_U", "value_E"))
        every = SequenceArray.of_lengths(np.concatenate(lengths), np.concatenate(numbers))
        return Events(users, every, None).take(sorted(range(len(users)), key=users.__getitem__))
    histories: dict[str, list[list[tuple[int, int]]]] = {}
    for group, of_group in zip(groups, items, strict=True):
        unknown = [[UNKNOWN_TIME] * length for length in of_group.length_U.tolist()]
        for user, item_H, time_H in zip(group.users, of_group, group.timestamps or unknown, strict=True):
            histories.setdefault(user, []).append(list(zip(time_H, item_H, strict=True)))
    names = sorted(histories)
    return Events(names, [[item for _, item in _together(histories[user])] for user in names], None)


def _together(histories: Sequence[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """One person's events (time, item) at several companies, as one history."""
    if len(histories) == 1 or any(time == UNKNOWN_TIME for history in histories for time, _ in history):
        return max(histories, key=len)
    found: list[tuple[int, int]] = []
    for history in histories:
        known = Counter(found)
        for event in history:
            if known[event]:
                known[event] -= 1
            else:
                found.append(event)
    return sorted(found, key=itemgetter(0))


def numbers_in(domain: Domain, whole: Domain) -> np.ndarray:
    """(I,) int64: the numbers that the items of ``domain`` have in the union of its catalogue."""
    number_of = {key: number for number, key in enumerate(whole.item_keys)}
    return np.array([number_of[key] for key in domain.item_keys], np.int64)


def is_part(domain: Domain, whole: Domain) -> bool:
    """Whether ``domain`` sells a part of its catalogue alone."""
    return len(domain.item_keys) < len(whole.item_keys)


SHARED_BY_SILOS = ("item_keys", "titles", "item_texts", "public")


def _are_alike(members: Sequence[Domain]) -> bool:
    """Whether domains of one catalogue have all in common but their clients."""
    first = members[0]
    return all(getattr(one, field) == getattr(first, field) for one in members[1:] for field in SHARED_BY_SILOS)


def clients_of(domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """The domains that have client users."""
    return {name: domain for name, domain in domains.items() if domain.clients.users}


def check_catalogues(domains: Mapping[str, Domain]) -> None:
    """Raise ``ValueError`` unless silos have items and public users of their domain, and no client in common; or where
    a domain has the name of the catalogue of which it is a part."""
    wholes = by_catalogue(domains)
    owner: dict[tuple[str, str], str] = {}
    for name, domain in domains.items():
        whole = wholes[domain.catalogue]
        if whole.name == name and is_part(domain, whole):
            raise ValueError(
                f"got the domain {name!r} with a part of the items of the catalogue {name!r}, expected another name of "
                "one of the two. Prepare it under another name."
            )
        silos = domain.card.get("silo", {}).get("same_catalogue", [])
        _check_alike(domain, next((domains[silo] for silo in silos if silo in domains), domain))
        if is_part(domain, whole):
            continue  # customers of companies that sell different things may be the same persons
        for user in domain.clients.users:
            before = owner.setdefault((domain.catalogue, user), name)
            if before != name:
                raise ValueError(
                    f"got user {user!r} as a client of both {before!r} and {name!r}, expected one of them: both have "
                    f"the catalogue of {domain.catalogue!r}. Take silos of one run of scripts/prepare_data.py."
                )


def _check_alike(domain: Domain, other: Domain) -> None:
    for field in SHARED_BY_SILOS:
        if getattr(domain, field) != getattr(other, field):
            raise ValueError(
                f"got other {field.replace('_', ' ')} in {domain.name!r} than in {other.name!r}, expected the same: "
                f"both are silos of {domain.catalogue!r}. Prepare them together, in one run of scripts/prepare_data.py."
            )


def _check_catalogue(domain: Domain) -> None:
    keys = domain.item_keys
    if not len(keys) == len(domain.titles) == len(domain.item_texts):
        raise ValueError(
            f"domain {domain.name!r}: got {len(keys)} item keys, {len(domain.titles)} titles and "
            f"{len(domain.item_texts)} item texts; expected the same number of each."
        )
    if len(keys) < 2:
        raise ValueError(
            f"domain {domain.name!r} has {len(keys)} item(s); expected at least 2. "
            "Lower k_core or min_length, or give more raw data."
        )
    for before, after in pairwise(keys):
        if before == after:
            raise ValueError(f"domain {domain.name!r}: duplicate item key {after!r}; expected each key once.")
        if before > after:
            raise ValueError(f"domain {domain.name!r}: item keys are not sorted ({after!r} follows {before!r}).")
    bad = [key for key, text in zip(keys, domain.item_texts, strict=True) if not text.strip()]
    if bad:
        raise ValueError(
            f"domain {domain.name!r}: {len(bad)} items without text, such as {bad[0]!r}; "
            "expected a title or another text field for each item."
        )
    torn = [key for key, text in zip(keys, domain.item_texts, strict=True) if "\n" in text]
    if torn:
        raise ValueError(f"domain {domain.name!r}: the text of item {torn[0]!r} has line breaks; expected one line.")


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
