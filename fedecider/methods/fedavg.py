"""FedAvg on LoRA factors (McMahan et al., 2017): one global adapter, the mean of the clients' adapters."""

from __future__ import annotations

from functools import partial

from fedecider.federation.method import Download, FederatedMethod, Tree
from fedecider.methods.averaged import averaged, scalars_both_ways, train_from_global
from fedecider.methods.config import WeightingConfig
from fedecider.methods.entries import Method
from fedecider.methods.recommender import ClientModels
from fedecider.models.adapters import load_plain, without_prefix

VARIANTS = ("global", "local")

scalars = scalars_both_ways


def fedavg(recommender: ClientModels, config: WeightingConfig) -> FederatedMethod:
    """``theta <- sum_i p_i theta_i`` over A and B separately, ``theta_i`` trained from ``theta``.

    The mean of the factors is not the mean of the products. Variants: ``global`` (after aggregation, reported) and
    ``local`` (the client's model before the upload). Differs from the paper: nothing; FeDecider's comparison does not
    name the weights, the default is uniform.
    """
    update, load = partial(train_from_global, recommender), partial(load_variant, recommender, config)
    return averaged(recommender, "fedavg", VARIANTS, update, load, config.weighting)


def load_variant(
    recommender: ClientModels, config: WeightingConfig, variant: str, download: Download, own: Tree, client: int
) -> None:
    """Load the global adapters, or the client's before its upload."""
    assert variant in VARIANTS, variant
    load_plain(recommender.model, download.shared if variant == "global" else without_prefix(own, "own"))


METHOD = Method(WeightingConfig, fedavg, load_variant, scalars)
