"""FedProx on LoRA factors (Li et al., 2020): FedAvg whose local training is drawn back to the global adapter."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedecider.federation.method import FederatedMethod
from fedecider.methods.averaged import averaged, global_or_own, scalars_both_ways, train_from_global
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import FedproxConfig
from fedecider.methods.entries import PROXIMAL, Method
from fedecider.search_space import Real, Space

GRID: tuple[dict[str, Any], ...] = ({}, {"mu": 0.001}, {"mu": 0.1}, {"mu": 1.0})
SPACE: Space = {"mu": Real(0.0001, 1.0, log=True)}

client_model, scalars = global_or_own, scalars_both_ways


def fedprox(models: ClientModels, config: FedproxConfig) -> FederatedMethod:
    """``theta_i = argmin F_i(theta) + mu / 2 ||theta - w||^2`` by local training from ``w``, then ``w`` is their mean.

    ``w`` is what the client received; the distance is over all A and B. Variants: ``local`` (the client's model before
    the upload, reported: FeDecider counts FedProx among the personalised methods) and ``global``. Differs from the
    paper: AdamW (Eq. 2 leaves the solver open) and equal work for all clients, so there are no partial solutions.
    """
    train = partial(train_from_global, models, proximal_strength=config.mu)
    return averaged(models, "fedprox", ("local", "global"), train, config.weighting)


METHOD = Method(
    FedproxConfig,
    fedprox,
    client_model,
    scalars,
    GRID,
    SPACE,
    beside_training=PROXIMAL,
)
