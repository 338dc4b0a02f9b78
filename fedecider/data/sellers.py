"""The domains that sell from one catalogue: which they are, what all may see of them, and how they come to share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from fedecider.data.baskets import by_time
from fedecider.data.catalogue import Catalogue, union
from fedecider.data.domain import NO_EVENTS, UNKNOWN_TIME, Domain, Events
from fedecider.evaluation.sequences import SequenceArray


@dataclass(frozen=True)
class Sellers:
    """A catalogue, and the domains that hold it."""

    catalogue: Catalogue
    domains: dict[str, Domain]

    @property
    def public_pools(self) -> list[Events]:
        """The public users of each domain; once where several have them in common."""
        pools = {id(domain.public): domain.public for domain in self.domains.values() if domain.public.users}
        return list(pools.values())

    @property
    def whole(self) -> Domain:
        """All that may be seen by everybody, as a domain: the whole catalogue, all public users, no clients.

        Public users of one key are one person, whose events are put in the order of their times, and count once where
        several companies have the same; without times the company counts that has most of them.
        """
        name, catalogue = self.catalogue.name, self.catalogue
        if len(self.public_pools) <= 1 and not any(domain.is_part for domain in self.domains.values()):
            return Domain(name, catalogue, NO_EVENTS, next(iter(self.public_pools), NO_EVENTS), {})
        ordered = sorted(self.domains.values(), key=lambda domain: domain.name)
        return Domain(name, catalogue, NO_EVENTS, _public_of(ordered), {})


def by_catalogue(domains: Mapping[str, Domain]) -> dict[str, Sellers]:
    """Catalogue's name -> who sells from it. ``ValueError`` where two catalogues have one name."""
    found: dict[str, Sellers] = {}
    for name, domain in domains.items():
        sellers = found.setdefault(domain.catalogue.name, Sellers(domain.catalogue, {}))
        if sellers.catalogue is not domain.catalogue:
            other = next(iter(sellers.domains))
            raise ValueError(
                f"got two catalogues called {domain.catalogue.name!r}, of {other!r} and {name!r}, expected one, or two "
                "names. Prepare these domains together, in one run of scripts/prepare_data.py."
            )
        sellers.domains[name] = domain
    return found


def once_each(domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """One domain of all that sell the same items: by the name of the catalogue, a part of one by its own name."""
    found: dict[str, Domain] = {}
    for domain in domains.values():
        found.setdefault(domain.items.name, domain)
    return found


def with_shared_catalogues(domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """The same domains, those that were read apart and name one catalogue now with one object.

    It holds the items of all of them. Silos, whose items are the same, share public users too.

    Raises:
        ValueError: silos have other items or public users than those that were prepared with them, or a client in
            common; or a domain has the name of the catalogue of which it sells a part.
    """
    named: dict[str, list[Domain]] = {}
    for domain in domains.values():
        named.setdefault(domain.catalogue.name, []).append(domain)
    found: dict[str, Domain] = {}
    for name, members in named.items():
        shared = _shared(name, members) if len(members) > 1 else members
        _check(name, shared)
        found |= {domain.name: domain for domain in shared}
    return {name: found[domain.name] for name, domain in domains.items()}


def _shared(name: str, members: Sequence[Domain]) -> list[Domain]:
    """``members`` on one catalogue, and those with the same items on one object of them."""
    whole = union(name, [domain.items for domain in sorted(members, key=lambda domain: domain.name)])
    own_items: dict[str, Catalogue | None] = {whole.content_key: None}
    shared: list[Domain] = []
    for domain in members:
        key = domain.items.content_key
        if key not in own_items:
            own_items[key] = replace(domain.items, name=domain.name)
        own = own_items[key]
        twin = next((one for one in shared if one.own_items is own and one.public == domain.public), domain)
        shared.append(replace(domain, catalogue=whole, own_items=own, public=twin.public))
    return shared


def _check(name: str, members: Sequence[Domain]) -> None:
    owner: dict[str, str] = {}
    known = {domain.name: domain for domain in members}
    for domain in members:
        if domain.name == name and domain.is_part:
            raise ValueError(
                f"got the domain {name!r} with a part of the items of the catalogue {name!r}, expected another name of "
                "one of the two. Prepare it under another name."
            )
        silos = domain.card.get("silo", {}).get("same_catalogue", [])
        other = next((known[silo] for silo in silos if silo in known), domain)
        for what, same in (("items", other.items is domain.items), ("public users", other.public is domain.public)):
            if not same:
                raise ValueError(
                    f"got other {what} in {domain.name!r} than in {other.name!r}, expected the same: both are silos of "
                    f"{name!r}. Prepare them together, in one run of scripts/prepare_data.py."
                )
        if domain.is_part:
            continue  # customers of companies that sell different things may be the same persons
        for user in domain.clients.users:
            before = owner.setdefault(user, domain.name)
            if before != domain.name:
                raise ValueError(
                    f"got user {user!r} as a client of both {before!r} and {domain.name!r}, expected one of them: both "
                    f"have the catalogue of {name!r}. Take silos of one run of scripts/prepare_data.py."
                )


def _public_of(members: Sequence[Domain]) -> Events:
    """The public users of a catalogue's domains, by key, with its item numbers; in order, without times."""
    groups = [domain.public.arrays() for domain in members]
    users = [user for group in groups for user in group.users]
    items = [
        SequenceArray(rows.start_U, domain.catalogue_number_I[rows.value_E], basket_E=rows.basket_E)
        for domain, rows in zip(members, (group.sequences for group in groups), strict=True)
    ]
    with_baskets = any(one.basket_E is not None for one in items)
    if len(set(users)) == len(users):
        lengths, numbers = ([getattr(one, name) for one in items] for name in ("length_U", "value_E"))
        every = SequenceArray.of_lengths(np.concatenate(lengths), np.concatenate(numbers))
        if with_baskets:
            basket_E = [np.arange(len(one.value_E)) if one.basket_E is None else one.basket_E for one in items]
            every = every.with_baskets(np.concatenate(basket_E))
        return Events(users, every, None).take(sorted(range(len(users)), key=users.__getitem__))
    histories: dict[str, list[list[tuple[int, int]]]] = {}
    for group, of_group in zip(groups, items, strict=True):
        unknown = [[UNKNOWN_TIME] * length for length in of_group.length_U.tolist()]
        for user, item_H, time_H in zip(group.users, of_group, group.timestamps or unknown, strict=True):
            histories.setdefault(user, []).append(list(zip(time_H, item_H, strict=True)))
    names = sorted(histories)
    rows = [_together(histories[user]) for user in names]
    sequences = SequenceArray.of([[item for _, item in row] for row in rows])
    if with_baskets:  # one person's orders at two companies at one time are one basket
        sequences = sequences.with_baskets(by_time(SequenceArray.of([[time for time, _ in row] for row in rows])))
    return Events(names, sequences, None)


def _together(histories: Sequence[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """One person's events (time, item) at several companies, as one history."""
    if len(histories) == 1 or any(time == UNKNOWN_TIME for history in histories for time, _ in history):
        return max(histories, key=len)
    merged: list[tuple[int, int]] = []
    for history in histories:
        known = Counter(merged)
        for event in history:
            if known[event]:
                known[event] -= 1
            else:
                merged.append(event)
    return sorted(merged, key=itemgetter(0))
