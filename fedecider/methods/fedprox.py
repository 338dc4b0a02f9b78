"""FedProx on LoRA factors (Li et al., 2020): FedAvg whose local training is drawn back to the global adapter."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedecider.federation.method import Download, FederatedMethod, Tree
from fedecider.methods.averaged import averaged, scalars_both_ways, train_from_global
from fedecider.methods.config import FedproxConfig
from fedecider.methods.entries import PROXIMAL, Method
from fedecider.methods.recommender import ClientModels
from fedecider.models.adapters import load_plain, without_prefix
from fedecider.search_space import Real, Space

VARIANTS = ("local", "global")

GRID: tuple[dict[str, Any], ...] = ({}, {"mu": 0.001}, {"mu": 0.1}, {"mu": 1.0})
SPACE: Space = {"mu": Real(0.0001, 1.0, log=True)}

scalars = scalars_both_ways


def fedprox(recommender: ClientModels, config: FedproxConfig) -> FederatedMethod:
    """``theta_i = argmin F_i(theta) + mu / 2 ||theta - w||^2`` by local training from ``w``, then ``w`` is their mean.

    ``w`` is what the client received; the distance is over all A and B. Variants: ``local`` (the client's model before
    the upload, reported: FeDecider counts FedProx among the personalised methods) and ``global``. Differs from the
    paper: AdamW (Eq. 2 leaves the solver open) and equal work for all clients, so there are no partial solutions.
    """
    update = partial(train_from_global, recommender, pull_strength=config.mu)
    load = partial(load_variant, recommender, config)
    return averaged(recommender, "fedprox", VARIANTS, update, load, config.weighting)


def load_variant(
    recommender: ClientModels, config: FedproxConfig, variant: str, download: Download, own: Tree, client: int
) -> None:
    """Load the client's adapters before its upload, or the global ones."""
    assert variant in VARIANTS, variant
    load_plain(recommender.model, download.shared if variant == "global" else without_prefix(own, "own"))


METHOD = Method(
    FedproxConfig,
    fedprox,
    load_variant,
    scalars,
    GRID,
    SPACE,
    beside_training=PROXIMAL,
)
