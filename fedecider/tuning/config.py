"""Settings of a search."""

from __future__ import annotations

from dataclasses import dataclass

from fedecider.bounds import OneOrMore, check


@dataclass(frozen=True)
class TuneConfig:
    """Search.

    Args:
        trials: The number of settings that are tried, the method's defaults among them; with resume, those that are
            there count too.
    """

    trials: OneOrMore = 20

    def __post_init__(self) -> None:
        check(self)
