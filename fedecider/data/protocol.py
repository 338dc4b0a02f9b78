"""The protocol of a run where the data decide it, and the data as it reads them: in baskets, or event by event.

Shape legend: E events, U users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import date, timedelta

import numpy as np

from fedecider.data.domain import UNKNOWN_TIME, Domain, Events, clients_of
from fedecider.evaluation.protocols import (
    AUTO,
    LAST_MONTH,
    MIN_EVENTS,
    NEXT_BASKET,
    SPLITS,
    STRICT,
    WINDOW_DAYS,
    Protocol,
    get_protocol,
    histories,
    targets,
    train_parts,
    with_target,
)
from fedecider.evaluation.sequences import SequenceArray

MANY_REPEATS = 0.05
"""Share of held-out items bought before from which on customers buy again. Amazon's reviews have up to .03, where a
product is reviewed twice; a grocer .39."""
FEWEST_TESTED = 20
"""Customers of a company who bought in a window of the calendar: fewer say nothing."""
DAY_S = 86_400
_1970 = date(1970, 1, 1)


def chosen_protocol(name: str, domains: Mapping[str, Domain], obstacle: str = "") -> tuple[str, list[str]]:
    """The protocol ``name``, or what `AUTO` stands for on these data (as they were read), and the reason in a line.

    ``obstacle``: why the run can know no baskets, such as "fedsasrec knows no baskets"; it is ``strict`` then. The
    calendar of `LAST_MONTH` is one of all companies, up to the newest event of any: with a calendar each, what one
    trains on would be later than what another is tested on.

    Raises:
        ValueError: the last month of data without times.
    """
    if name == LAST_MONTH.name:
        groups = [group for domain in clients_of(domains).values() for group in (domain.clients, domain.public)]
        times = [group.arrays().timestamps for group in groups]
        newest = max((int(one.value_E.max(initial=UNKNOWN_TIME)) for one in times if one is not None), default=-1)
        if newest == UNKNOWN_TIME:
            raise ValueError(
                f"got protocol {name} for data without times (a deployment sees public users alone), expected times: "
                f"import the data with them, give its first day as in {name}/2014-06-23, or {NEXT_BASKET.name}"
            )
        name = f"{name}/{_1970 + timedelta(newest // DAY_S - WINDOW_DAYS + 1)}"
        return name, [f"protocol {name}: it is the first of the last {WINDOW_DAYS} days of all data"]
    if name != AUTO:
        return name, []
    clients = clients_of(domains)
    by_order = any(domain.card.get("baskets") == "by order number" for domain in clients.values())
    share = repeated_share(clients)
    facts = f"{share:.1%} of last purchases are repeats"
    facts = f"events have order numbers, and {facts}" if by_order else facts
    if not by_order and share < MANY_REPEATS:
        return STRICT.name, [
            f"protocol {STRICT.name}: items are not recommended again to those who bought them, as {facts}"
        ]
    if obstacle:
        return STRICT.name, [
            f"warning: protocol {STRICT.name}, because {obstacle}, although {facts}: earlier purchases are no "
            "candidates, and events are ranked one by one"
        ]
    return NEXT_BASKET.name, [
        f"protocol {NEXT_BASKET.name}: items may be recommended again to those who bought them, as {facts}"
    ]


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
    events of which nothing is known are baskets of one. Without, there are none. By the calendar, what a client user
    bought in a window is one basket, in the last places of all (`SequenceArray`); who bought nothing before both is
    left out, who bought nothing in one has no target there; and public users end before both.

    Raises:
        ValueError: fewer than two client users of a domain are left; or, by the calendar, an event has no time or fewer
            than `FEWEST_TESTED` have a target.
    """
    protocol = get_protocol(name)
    assert protocol != LAST_MONTH, "of which day, says chosen_protocol"
    read: dict[int, Events] = {}  # silos keep one object of their public users
    found, lines = {}, []
    for domain in domains.values():
        events = []
        for group in (domain.clients, domain.public):
            if id(group) not in read:
                read[id(group)], lost = _read(domain.name, group, protocol, group is domain.public)
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
        if domain.clients.users and protocol.first_day is not None:
            lines.append(_tested(domain.name, events[0], protocol.first_day))
        found[domain.name] = replace(domain, clients=events[0], public=events[1])
    return found, lines


def customers_tested(domain: Domain) -> list[str]:
    """The client users with something held out for the test, of data that a protocol has read."""
    return [domain.clients.users[place] for place in with_target(domain.clients.sequences, "test").tolist()]


def _tested(name: str, events: Events, first_day: date) -> str:
    """Who has a target, in a line; ``ValueError`` where they are too few."""
    month, size = timedelta(WINDOW_DAYS), {split: len(with_target(events.sequences, split)) for split in SPLITS}
    last_day, before = first_day + month - timedelta(1), first_day - month
    if min(size.values()) < FEWEST_TESTED:
        raise ValueError(
            f"got {size['test']} customers of {name} to test, who bought before and from {first_day} to {last_day}, "
            f"and {size['valid']} to validate, from {before} on, expected {FEWEST_TESTED} of each: give --protocol "
            f"{LAST_MONTH.name}/DAY with the first of {WINDOW_DAYS} days in which more bought, or {NEXT_BASKET.name}"
        )
    return (
        f"{name}: {size['test']:,} of {len(events.users):,} customers bought from {first_day} to {last_day} and are "
        f"tested, {size['valid']:,} from {before} on and validate; all train"
    )


def _read(name: str, events: Events, protocol: Protocol, is_public: bool) -> tuple[Events, list[str]]:
    """One group of users; itself where there is nothing to change."""
    users, rows, times = events.arrays()
    if not users or (rows.basket_E is None and not protocol.baskets):
        return events, []
    if not protocol.baskets:
        return Events(users, rows.with_baskets(None), times), []
    if rows.basket_E is None:
        rows = SequenceArray(rows.start_U, rows.value_E, basket_E=np.arange(len(rows.value_E), dtype=np.int32))
    few, lines = f"fewer than {MIN_EVENTS} baskets", []
    if protocol.first_day is not None:
        month_E = _months(name, rows, times, protocol.first_day)
        kept_E = month_E < (-1 if is_public else 1)
        if not is_public:
            late = int((~kept_E).sum())
            lines += [f"{late:,} events after the {WINDOW_DAYS} days of the test are left out"] if late else []
            few = f"bought nothing before both windows, or have fewer than {MIN_EVENTS} items"
            label_E = np.where(month_E < -1, -3 - rows.num_after_E, month_E - 1)
            rows = SequenceArray(rows.start_U, rows.value_E, basket_E=label_E)
        assert times is not None
        rows, times = rows.keep(kept_E), times.keep(kept_E)
    first_E = rows.is_first_in_basket_E
    if not first_E.all():
        lines.append(f"{int((~first_E).sum()):,} events repeat an item of their basket and count once")
        rows, times = rows.keep(first_E), None if times is None else times.keep(first_E)
    enough_U = (train_parts(rows).length_U > 0) & (rows.length_U >= MIN_EVENTS)
    if not enough_U.all():
        lines.append(f"{int((~enough_U).sum()):,} of {len(users):,} customers have {few} and are left out")
    return Events(users, rows, times).take(np.flatnonzero(enough_U)), lines


def _months(name: str, rows: SequenceArray, times: SequenceArray | None, first_day: date) -> np.ndarray:
    """(E,) int64: 0 for events of the `WINDOW_DAYS` from ``first_day`` on, -1 for as many before, and so on.

    An event that stands behind a later one, as in an order of several days, is as late as that: a history is what
    stands in front.

    Raises:
        ValueError: an event without a time.
    """
    if times is None or (times.value_E == UNKNOWN_TIME).any():
        raise ValueError(
            f"got events of {name} without a time, expected the time of every one for the protocol {LAST_MONTH.name}: "
            f"import the data with a column of times, or give --protocol {NEXT_BASKET.name}"
        )
    since_E = times.value_E.astype(np.int64) - (first_day - _1970).days * DAY_S
    apart = int(since_E.max(initial=0)) - int(since_E.min(initial=0)) + 1
    latest_E = np.maximum.accumulate(since_E + rows.row_E * apart) - rows.row_E * apart
    return latest_E // (WINDOW_DAYS * DAY_S)
