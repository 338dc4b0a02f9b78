"""What came in of own tables and what did not, told before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import takewhile

from fedecider.data.card import baskets_in_words
from fedecider.data.domain import UNKNOWN_TIME, Domain
from fedecider.data.dropped import Dropped
from fedecider.data.given import Reading
from fedecider.data.overlap import plain_key, without_point, without_zeros
from fedecider.data.prepare import NOT_CHOSEN
from fedecider.data.readers.reading import RawEvents
from fedecider.data.sellers import by_catalogue, once_each

MUCH = 0.1
"""An import that loses a larger share of its rows says so first."""
HALF = 0.5
"""Of the keys that lack, so many must be found when they are written otherwise."""


@dataclass
class ImportReport:
    """Filled while tables are read and prepared; ``str(report)`` tells what is known so far."""

    reading: Reading = field(default_factory=Reading)
    odd: list[str] = field(default_factory=list)
    """What is odd about order numbers; stands first."""
    read: list[str] = field(default_factory=list)
    """What the tables hold."""
    left: list[str] = field(default_factory=list)
    """What is left of it, and why the rest is not."""
    num_events: int | None = None
    """Events that came in; None as long as they are not prepared."""

    @property
    def num_rows(self) -> int:
        """Rows of the tables of events."""
        return sum(count for what, count in self.reading.num_rows.items() if what.startswith("events"))

    @property
    def num_bad(self) -> int:
        """Rows of all tables that could not be read."""
        return self.reading.num_bad

    @property
    def lost_share(self) -> float | None:
        """The share of rows of events that did not come in."""
        rows = self.num_rows + sum(
            count
            for what, counts in self.reading.bad.items()
            if what.startswith("events")
            for kind, count in counts.items()
            if kind == Reading.NOT_A_ROW
        )
        return None if self.num_events is None or not rows else 1 - self.num_events / rows

    def add_events(self, raw: Mapping[str, RawEvents]) -> None:
        """What the tables of events hold, by domain."""
        for name, events in raw.items():
            known_E = events.time_E[events.time_E != UNKNOWN_TIME]
            span = f", {_day(known_E.min())} to {_day(known_E.max())}" if len(known_E) else ", no times"
            size = events.size()
            counts = [f"{size.events:,} events", f"{size.users:,} customers", f"{size.items:,} items"]
            self.read.append(f"{name}: {', '.join(counts)}{span}")

    def add_missing(self, which: str, example: str, hint: str) -> None:
        """Items of the events that the catalogue does not have."""
        self.read.append(
            f"{which} of the events have no row in items, such as {example!r}{f'; {hint}' if hint else ''}"
        )

    def add_domains(self, domains: Mapping[str, Domain]) -> None:
        """What is left after the filters."""
        self.num_events = sum(one.clients.num_events for one in domains.values())
        pools = [pool for sellers in by_catalogue(domains).values() for pool in sellers.public_pools]
        self.num_events += sum(pool.num_events for pool in pools)
        for name, domain in once_each(domains).items():
            dropped = {why: counts for why, counts in domain.card["dropped"].items() if why != NOT_CHOSEN}
            self.left.append(f"{name}: {Dropped(dropped)}")
            if twice := domain.card["raw"]["exact_duplicate_events"]:
                self.left.append(
                    f"{name}: {twice:,} events repeat customer, item and time of another one; they are kept "
                    "(repeats=first keeps the first event of a customer with an item)"
                )
        for name, domain in domains.items():
            size = domain.size()
            self.left.append(f"{name}: came in: {size}, {len(domain.public.users):,} of the users are public")
            if domain.unsold:
                self.left.append(
                    f"{name}: {len(domain.unsold):,} products without an event stay candidates, as new items"
                )
            self.left += [f"{name}: {line}" for line in baskets_in_words(domain)]

    def lines(self) -> list[str]:
        """The report; a loss of over a tenth comes first."""
        first, lost = list(self.odd), self.lost_share
        if lost is not None and lost > MUCH:
            first += [f"WARNING: {lost:.0%} of the {self.num_rows:,} rows of events did not come in"]
        rows = [f"{what}: {count:,} rows" for what, count in self.reading.num_rows.items()]
        for what, counts in self.reading.bad.items():
            kinds = ", ".join(f"{kind} ({count:,})" for kind, count in counts.most_common())
            rows.append(f"{what}: {sum(counts.values()):,} bad rows: {kinds}")
        rows += [f"  {example}" for example in self.reading.examples]
        return [*first, *rows, *self.read, *self.left]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(int(seconds), timezone.utc).date().isoformat()


def how_keys_differ(ours: Collection[str], theirs: Collection[str]) -> str:
    """How two tables write the same keys, where at least half of ``ours`` are among ``theirs`` then; else nothing."""
    for way, plain in _ways(ours, theirs):
        known: dict[str, str] = {}
        for key in sorted(theirs):
            known.setdefault(plain(key), key)
        pairs = [(key, known[plain(key)]) for key in ours if plain(key) in known]
        if pairs and len(pairs) >= HALF * len(ours):
            mine, their = min(pairs, key=lambda pair: (-len(pair[0].lstrip("0")), pair))
            return f"the tables write keys differently ({mine} and {their}: {way})"
    return ""


def _ways(ours: Collection[str], theirs: Collection[str]) -> list[tuple[str, Callable[[str], str]]]:
    prefixes = [_prefix(keys) for keys in (ours, theirs)]

    def without_prefix(key: str) -> str:
        return next((key[len(one) :] for one in prefixes if one and key.startswith(one)), key)

    def all_of_them(key: str) -> str:
        return plain_key(without_prefix(key.strip()))

    return [
        ("spaces around them", str.strip),
        ("letter case", str.casefold),
        ("leading zeros", without_zeros),
        ("a point and a zero at the end", without_point),
        ("a prefix", without_prefix),
        ("prefix, case or zeros", all_of_them),
    ]


def _prefix(keys: Collection[str]) -> str:
    """What all keys begin with, up to the first digit."""
    first, last = min(keys, default=""), max(keys, default="")
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return re.sub(r"\d.*$", "", first[:num_same]) if first != last else ""
