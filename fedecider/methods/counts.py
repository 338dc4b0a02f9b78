"""Exchanged counts without an exchanged model: what a sum of counts alone is worth, at a fraction of the traffic.

Every client has the model of `local`. Its ensemble counts with the others of its catalogue, and fits its weights
towards the mean of all: two secure sums after the rounds (`fedecider.models.counts`, `fedecider.models.weight_sums`).
"""

from __future__ import annotations

from fedecider.federation.method import FederatedMethod
from fedecider.methods import alone
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import LocalConfig
from fedecider.methods.entries import Method


def counts(models: ClientModels, config: LocalConfig) -> FederatedMethod:
    """Every client trains as in `local`; no round sends anything."""
    return alone.alone(models, "counts")


METHOD = Method(LocalConfig, counts, alone.client_model, alone.scalars, takes_mean=False)
