"""What a method says of its settings for a search: which of them may be tried, and in which range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Real(NamedTuple):
    """Numbers from ``least`` to ``most``, both included; with ``log`` every factor is as likely as any other.

    Drawn numbers have three digits, so the ends should have no more.
    """

    least: float
    most: float
    log: bool = False

    def holds(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}{', log' if self.log else ''}"


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
