"""Federated methods of the LLM line; one file and one line here for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fedecider.federation.method import FederatedMethod
from fedecider.methods import fedavg, fedecider, local


class Method(NamedTuple):
    """How a method is configured, built and loaded."""

    config: type
    """Frozen dataclass of the method's own settings."""
    build: Callable[..., FederatedMethod]
    """(recommender, config) -> the method."""
    load_view: Callable[..., Any]
    """(recommender, config, view, download, own row, client): put that client's model into ``recommender.model``."""


METHODS = {
    "fedecider": Method(fedecider.FedeciderConfig, fedecider.fedecider, fedecider.load_view),
    "local": Method(local.LocalConfig, local.local, local.load_view),
    "fedavg": Method(fedavg.FedavgConfig, fedavg.fedavg, fedavg.load_view),
}
