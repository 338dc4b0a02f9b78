"""What the track of ID-based methods knows of a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fedecider.federation.method import FederatedMethod
from fedecider.search_space import Space


def anything(num_rounds: int, patience: int, participation: float, config: Any) -> None:
    """Any number of rounds and any share of the clients will do."""


class Method(NamedTuple):
    """How a method is configured, built and tuned."""

    config: type
    """Frozen dataclass of the method's own settings."""
    build: Callable[..., FederatedMethod]
    """(clients, config) -> the method; ``clients`` are `fedecider.id_based.clients.IdClients`."""
    grid: tuple[dict[str, Any], ...] = ({},)
    """Settings to try on validation, the default first: a search of N trials takes the first N."""
    space: Space = {}  # noqa: RUF012 (never written to)
    """What a search draws from when it has tried these."""
    patience: int = 4
    """Rounds without a better validation score after which a run of a comparison stops; 0: its rounds are stages of one
    schedule, so that all of them are run."""
    check: Callable[[int, int, float, Any], None] = anything
    """num_rounds, patience, participation, config -> ``ValueError`` where the method could not do what it is for."""
