"""What the cross-silo track knows of a method, and what a search tries for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fedecider.federation.method import FederatedMethod
from fedecider.methods.client_models import ClientModels
from fedecider.methods.rows import sends_own_rows, travelling_rows
from fedecider.models.adapters import Shapes
from fedecider.models.client_model import ClientModel
from fedecider.search_space import Real, Space


class Method(NamedTuple):
    """How a method is configured and built, and what its clients recommend with."""

    config: type
    """Frozen dataclass of the method's own settings."""
    algorithm: Callable[..., FederatedMethod]
    """(models, config) -> the method, over whole adapters; :meth:`build` is what runs."""
    client_model: Callable[..., ClientModel]
    """(models, config, variant, download, own row, client) -> the client's model. ``download`` is what the client
    really has (`fedecider.federation.wire.received`)."""
    scalars: Callable[[Shapes, Sequence[Shapes], int], tuple[int, int]]
    """(shapes, peers, round) -> numbers that one client receives and sends, by the formula; tests compare it with the
    bytes that were sent. ``shapes`` are those of its own adapters, ``peers[j]`` those that it reads of client j.
    They differ where only rows of catalogues travel (`fedecider.methods.rows.travelling_shapes`)."""
    grid: tuple[dict[str, Any], ...] = ({},)
    """Settings to try on validation, the default first: a search of N trials takes the first N, then ``RATES``."""
    space: Space = {}  # noqa: RUF012 (never written to)
    """What a search draws from after ``grid``, together with ``TRAINING_SPACE``."""
    pooled: bool = False
    """Whether all clients form one block, since nothing is federated."""
    beside_training: str = ""
    """Why ``user_privacy`` cannot hide single users: it bounds their gradients, and this method reads them elsewhere
    too. Empty: it can."""
    fusion_weights: str = ""
    """How a client's own row, and its log record after the round, call the weights (K,) that it gives to the directions
    of all clients; empty for a method without."""
    takes_mean: bool = True
    """As `FederatedMethod.takes_mean`, known before anything is built: a run that asks for a robust mean or a secure
    sum is refused at once, not after hours of pre-training."""

    def build(self, models: ClientModels, config: Any) -> FederatedMethod:
        """The method. Of tables only rows of the own catalogue travel, where training changes no others."""
        method = self.algorithm(models, config)
        return method if self.pooled else sends_own_rows(method, travelling_rows(models.rows, method.takes_mean))


RATES = ({"learning_rate": 3e-3}, {"learning_rate": 3e-4}, {"learning_rate": 1e-2})
"""Tried after a method's own grid, so that a method without settings has the same budget as one with many."""
TRAINING_SPACE: Space = {"learning_rate": Real(0.0001, 0.03, log=True)}
"""What a search may set for every method."""
PROXIMAL = "a proximal term asks for the mean gradient, which depends on the number of users"
"""`Method.beside_training` of a method with such a term."""
