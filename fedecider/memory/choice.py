"""Which weights a client takes: those of the mixture, unless one side of it ranks its validation items better.

Weights are fitted to likelihood, on train events; places in a list are another thing, and the newest events of a user
are others than those before. On dense data (MovieLens-1M) a mixture was below the model that it held.

Shape legend: U users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from fedecider.evaluation.metrics import user_metrics
from fedecider.evaluation.standard_error import clearly_best
from fedecider.memory.memory import MODEL, Memory
from fedecider.memory.mixture import Mixture

Weights = Literal["mixture", "model", "memory"]
METRIC = "ndcg@10"


class Choice(NamedTuple):
    """What was taken, and what decided it."""

    weights: Weights
    valid: dict[Weights, float]
    """Mean ndcg@10 of validation items."""


def one_sided(memory: Memory, weights: Weights) -> Memory:
    """``memory`` whose weights beside the model are those of one side alone, or as they are."""
    mixture = memory.beside_model
    assert mixture is not None
    if weights == "mixture":
        return memory
    only = {"model": _model_alone, "memory": _memory_alone}[weights](memory, mixture)
    return memory._replace(beside_model=only)


def choose_weights(memory: Memory, positions_of: Callable[[Memory], Tensor]) -> tuple[Memory, Choice]:
    """The memory with the weights that ranked best, and why.

    ``positions_of``: a memory -> places of its client's validation items (U,). A side is taken in place of the mixture
    where its mean ndcg@10 is clearly above that of the mixture, which is what is expected to be best
    (`fedecider.evaluation.standard_error`); of two such sides, the better one.
    """
    sides: dict[Weights, Memory] = {name: one_sided(memory, name) for name in ("mixture", "model", "memory")}
    gain_U = {name: user_metrics(positions_of(one))[METRIC].double().numpy() for name, one in sides.items()}
    valid = {name: float(values.mean()) for name, values in gain_U.items()}
    best = list(sides)[clearly_best([[gain_U[name]] for name in sides])]
    return sides[best], Choice(best, valid)


def _model_alone(memory: Memory, mixture: Mixture) -> Mixture:
    only_E = np.array([float(name == MODEL) for name in mixture.experts])
    return mixture._replace(weight_QE=np.tile(only_E, (len(mixture.weight_QE), 1)), mean_E=only_E)


def _memory_alone(memory: Memory, mixture: Mixture) -> Mixture:
    places = [mixture.experts.index(name) for name in memory.alone.experts]
    weight_QE, mean_E = np.zeros_like(mixture.weight_QE), np.zeros_like(mixture.mean_E)
    weight_QE[:, places], mean_E[places] = memory.alone.weight_QE, memory.alone.mean_E
    return mixture._replace(cut_Q=memory.alone.cut_Q, weight_QE=weight_QE, mean_E=mean_E)
