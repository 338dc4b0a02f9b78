"""The protocol of a run where the data decide it, and the data as it reads them: in baskets, or event by event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedecider.data.domain import Domain, Events, clients_of
from fedecider.evaluation.protocols import AUTO, MIN_EVENTS, NEXT_BASKET, STRICT, get_protocol, histories, targets
from fedecider.evaluation.sequences import SequenceArray

MANY_REPEATS = 0.05
"""Share of held-out items bought before from which on customers buy again. Amazon's reviews have up to .03, where a
product is reviewed twice; a grocer .39."""


def chosen_protocol(name: str, domains: Mapping[str, Domain], obstacle: str = "") -> tuple[str, list[str]]:
    """The protocol ``name``, or what `AUTO` stands for on these data (as they were read), and the reason in a line.

    ``obstacle``: why the run can know no baskets, such as "fedsasrec knows no baskets"; it is ``strict`` then.
    """
    if name != AUTO:
        return name, []
    clients = clients_of(domains)
    by_order = any(domain.card.get("baskets") == "by order number" for domain in clients.values())
    share = repeated_share(clients)
    facts = f"{share:.1%} of held-out items were bought before"
    facts = f"events have order numbers, and {facts}" if by_order else facts
    if not by_order and share < MANY_REPEATS:
        return STRICT.name, [f"protocol {STRICT.name}: {facts}"]
    if obstacle:
        return STRICT.name, [
            f"warning: protocol {STRICT.name}, because {obstacle}, although {facts}: items that a customer had are no "
            "candidates, and events are ranked one by one"
        ]
    return NEXT_BASKET.name, [f"protocol {NEXT_BASKET.name}: {facts}"]


def repeated_share(domains: Mapping[str, Domain]) -> float:
    """The share of items in the clients' last baskets that they had bought before; 0 where nobody has two baskets."""
    num_repeats = num_items = 0
    for domain in domains.values():
        rows = domain.clients.arrays().sequences
        before, last = histories(rows, "test"), targets(rows, "test")
        last = last.take(before.length_U > 0)
        before = before.take(before.length_U > 0)
        pairs, held = (one.row_E * len(domain.item_keys) + one.value_E for one in (before, last))
        num_repeats, num_items = num_repeats + int(np.isin(held, pairs).sum()), num_items + len(held)
    return num_repeats / max(num_items, 1)


def under(name: str, domains: Mapping[str, Domain]) -> tuple[dict[str, Domain], list[str]]:
    """The domains as the protocol ``name`` reads them, and what that leaves out, in lines.

    With baskets an item counts once in each, and users with fewer than `MIN_EVENTS` are left out, in training too;
    events of which nothing is known are baskets of one. Without, there are none.

    Raises:
        ValueError: fewer than two client users of a domain are left.
    """
    read: dict[int, Events] = {}  # silos keep one object of their public users
    found, lines = {}, []
    for domain in domains.values():
        events = []
        for group in (domain.clients, domain.public):
            if id(group) not in read:
                read[id(group)], lost = _read(group, get_protocol(name).baskets)
                lines += [f"{domain.name}: {line}" for line in lost]
            events.append(read[id(group)])
        if events[0] is domain.clients and events[1] is domain.public:
            found[domain.name] = domain
            continue
        if domain.clients.users and len(events[0].users) < 2:
            raise ValueError(
                f"got {len(events[0].users)} customers of {domain.name} with {MIN_EVENTS} baskets, expected at least 2 "
                f"for the protocol {name}: give more data, or --protocol strict, which takes every event by itself"
            )
        found[domain.name] = replace(domain, clients=events[0], public=events[1])
    return found, lines


def _read(events: Events, baskets: bool) -> tuple[Events, list[str]]:
    """One group of users; itself where there is nothing to change."""
    users, rows, times = events.arrays()
    if not users or (rows.basket_E is None and not baskets):
        return events, []
    if not baskets:
        return Events(users, rows.with_baskets(None), times), []
    if rows.basket_E is None:
        rows = SequenceArray(rows.start_U, rows.value_E, basket_E=np.arange(len(rows.value_E), dtype=np.int32))
    first_E, lines = rows.is_first_in_basket_E, []
    if not first_E.all():
        lines.append(f"{int((~first_E).sum()):,} events repeat an item of their basket and count once")
        rows, times = rows.keep(first_E), None if times is None else times.keep(first_E)
    enough_U = rows.num_baskets_U >= MIN_EVENTS
    if not enough_U.all():
        few = int((~enough_U).sum())
        lines.append(f"{few:,} of {len(users):,} customers have fewer than {MIN_EVENTS} baskets and are left out")
    return Events(users, rows, times).take(np.flatnonzero(enough_U)), lines
