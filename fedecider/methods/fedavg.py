"""FedAvg on LoRA factors (McMahan et al., 2017): one global adapter, the mean of the clients' adapters."""

from __future__ import annotations

from functools import partial

from fedecider.federation.method import FederatedMethod
from fedecider.methods.averaged import averaged, global_or_own, scalars_both_ways, train_from_global
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import WeightingConfig
from fedecider.methods.entries import Method

client_model, scalars = global_or_own, scalars_both_ways


def fedavg(models: ClientModels, config: WeightingConfig) -> FederatedMethod:
    """``theta <- sum_i p_i theta_i`` over A and B separately, ``theta_i`` trained from ``theta``.

    The mean of the factors is not the mean of the products. Variants: ``global`` (after aggregation, reported) and
    ``local`` (the client's model before the upload). Differs from the paper: nothing; FeDecider's comparison does not
    name the weights, the default is uniform.
    """
    return averaged(models, "fedavg", ("global", "local"), partial(train_from_global, models), config.weighting)


METHOD = Method(WeightingConfig, fedavg, client_model, scalars)
