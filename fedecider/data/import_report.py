"""What came in of own tables and what did not, told before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedecider.data.card import baskets_in_words
from fedecider.data.domain import UNKNOWN_TIME, Domain
from fedecider.data.dropped import Dropped
from fedecider.data.events import MUCH, Reading
from fedecider.data.prepare import NOT_CHOSEN
from fedecider.data.readers.reading import RawEvents
from fedecider.data.sellers import by_catalogue, once_each
from fedecider.data.times import SINCE_S, day_of


@dataclass
class ImportReport:
    """Filled while tables are read and prepared; ``str(report)`` tells what is known so far."""

    reading: Reading = field(default_factory=Reading)
    read: list[str] = field(default_factory=list)
    """What the tables hold."""
    left: list[str] = field(default_factory=list)
    """What is left of it, and why the rest is not."""
    mapping: dict[str, Any] | None = None
    """Takes what was found of the tables, for a mapping file."""
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
            span = f", {day_of(known_E.min())} to {day_of(known_E.max())}" if len(known_E) else ", no times"
            if len(known_E) and known_E.max() < SINCE_S:
                span = ", in an order without dates"
            size = events.size()
            counts = [f"{size.events:,} events", f"{size.users:,} customers", f"{size.items:,} items"]
            self.read.append(f"{name}: {', '.join(counts)}{span}")

    def add_missing(self, which: str, example: str, hint: str) -> None:
        """Items of the events that the catalogue does not have."""
        self.reading.first.append(
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
                    f"{name}: {len(domain.unsold):,} products without an event can be recommended as new items"
                )
            self.left += [f"{name}: {line}" for line in baskets_in_words(domain)]

    @property
    def first(self) -> list[str]:
        """What changes the answer, or was not understood; a loss of over a tenth is."""
        lost = self.lost_share
        if lost is None or lost <= MUCH:
            return list(self.reading.first)
        return [*self.reading.first, f"WARNING: {lost:.0%} of the {self.num_rows:,} rows of events did not come in"]

    def lines(self) -> list[str]:
        """The report, what has to be said first before all."""
        rows = [f"{what}: {count:,} rows" for what, count in self.reading.num_rows.items()]
        rows += [*self.reading.bad_in_words(), *(f"  {example}" for example in self.reading.examples)]
        return [*self.first, *rows, *self.read, *self.left]

    def __str__(self) -> str:
        return "\n".join(self.lines())
