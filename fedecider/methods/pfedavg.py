"""PFedAvg on LoRA factors: FedAvg, then every client fine-tunes the global adapter on its own data."""

from __future__ import annotations

from functools import partial

from fedecider.federation.method import FederatedMethod
from fedecider.methods.averaged import averaged, global_or_own, scalars_both_ways, train_from_global
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import WeightingConfig
from fedecider.methods.entries import Method

client_model, scalars = global_or_own, scalars_both_ways


def pfedavg(models: ClientModels, config: WeightingConfig) -> FederatedMethod:
    """FedAvg whose reported model is ``w`` after ``local_epochs`` epochs on the client's own data.

    A client's adapters before its upload in round t are ``w`` of round t - 1, fine-tuned. They are kept and reported
    as ``fine_tuned``. So T rounds are T - 1 rounds of FedAvg and the fine-tuning: as many epochs per client as every
    other method gets. Validation chooses T. The other variant is ``global``. This is not Per-FedAvg (Fallah
    et al., 2020), which trains for a good start of fine-tuning. Differs from the paper: nothing that it states;
    FeDecider names neither the length of the fine-tuning nor the weights.
    """
    return averaged(models, "pfedavg", ("fine_tuned", "global"), partial(train_from_global, models), config.weighting)


METHOD = Method(WeightingConfig, pfedavg, client_model, scalars)
