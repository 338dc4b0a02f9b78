"""PFedAvg on LoRA factors: FedAvg, then every client fine-tunes the global adapter on its own data."""

from __future__ import annotations

from functools import partial

from fedecider.federation.method import Download, FederatedMethod, Tree
from fedecider.methods.averaged import averaged, scalars_both_ways, train_from_global
from fedecider.methods.config import WeightingConfig
from fedecider.methods.entries import Method
from fedecider.methods.recommender import ClientModels
from fedecider.models.adapters import load_plain, without_prefix

VARIANTS = ("fine_tuned", "global")

scalars = scalars_both_ways


def pfedavg(recommender: ClientModels, config: WeightingConfig) -> FederatedMethod:
    """FedAvg whose reported model is ``w`` after ``local_epochs`` epochs on the client's own data.

    A client's adapters before its upload in round t are ``w`` of round t - 1, fine-tuned. They are kept and reported
    as ``fine_tuned``. So T rounds are T - 1 rounds of FedAvg and the fine-tuning: as many epochs per client as every
    other method gets. Validation chooses T. The other variant is ``global``. This is not Per-FedAvg (Fallah
    et al., 2020), which trains for a good start of fine-tuning. Differs from the paper: nothing that it states;
    FeDecider names neither the length of the fine-tuning nor the weights.
    """
    update, load = partial(train_from_global, recommender), partial(load_variant, recommender, config)
    return averaged(recommender, "pfedavg", VARIANTS, update, load, config.weighting)


def load_variant(
    recommender: ClientModels, config: WeightingConfig, variant: str, download: Download, own: Tree, client: int
) -> None:
    """Load the global adapters, or those that the client made of the last ones it received."""
    assert variant in VARIANTS, variant
    load_plain(recommender.model, download.shared if variant == "global" else without_prefix(own, "own"))


METHOD = Method(WeightingConfig, pfedavg, load_variant, scalars)
