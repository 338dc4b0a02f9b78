"""What a method says of its settings for a search: which of them may be tried, and in which range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Real(NamedTuple):
    """Numbers from ``least`` to ``most``, both included; with ``log`` every factor is as likely as any other.

    Drawn numbers have three digits, so the ends should have no more. With ``of`` they are multiples of that setting,
    which is before this one in the space; where this one starts as 0 or None, it starts as that one.
    """

    least: float
    most: float
    log: bool = False
    of: str = ""

    def holds(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}{', log' if self.log else ''}{f', times {self.of}' if self.of else ''}"


class Whole(NamedTuple):
    """Whole numbers from ``least`` to ``most``, both included."""

    least: int
    most: int
    log: bool = False

    def holds(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least} to {self.most}{', log' if self.log else ''}"


class OneOf(NamedTuple):
    """One of these values: numbers, texts, truth values or None, without an order."""

    values: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        return any(type(one) is type(value) and one == value for one in self.values)

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


Range = Real | Whole | OneOf
Space = Mapping[str, Range]
"""Setting -> what may be tried. Names are those of options; ``block.name`` is a field of a block of settings."""
Setting = dict[str, Any]
"""Setting -> value, for those that differ from the start; ``{}`` is the start itself."""
MAX_LISTED = 10_000
"""Points of a space that are listed; a larger space is no more used up than one with real numbers."""


def points(space: Space) -> list[Setting] | None:
    """All points of a space of whole numbers and choices; None with real numbers, or with more than ``MAX_LISTED``."""
    values = [_values(one) for one in space.values()]
    if any(own is None for own in values) or math.prod(len(own or ()) for own in values) > MAX_LISTED:
        return None
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*(own or () for own in values))]


def _values(one: Range) -> Sequence[Any] | None:
    if isinstance(one, Real):
        return None
    return range(one.least, one.most + 1) if isinstance(one, Whole) else one.values
