"""What there is, and what was left out of it and why, in counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
