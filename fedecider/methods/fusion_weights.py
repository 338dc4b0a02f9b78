"""Where a method with fusion weights keeps them: all that results and reports know about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fedecider.federation.method import Tree


class FusionWeights(NamedTuple):
    """How much every client weights the direction of each of K clients."""

    read: Callable[[Tree], Tensor]
    """(local tree, or a client's row of it) -> (..., K) weights in use, or (..., M, K) with a row for each layer."""
    log: str
    """Field of a client's log record with its K weights after the round, mean over layers."""
    log_per_layer: str
    """The same for each layer, (M, K), where there is one row per layer."""
