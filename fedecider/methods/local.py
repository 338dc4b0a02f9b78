"""Local training without any communication: the row every federated method has to beat.

Neither models nor counts nor weights of ensembles are exchanged, so every company has what it would have by itself.
"""

from __future__ import annotations

from fedecider.federation.method import FederatedMethod
from fedecider.methods import alone
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import LocalConfig
from fedecider.methods.entries import Method


def local(models: ClientModels, config: LocalConfig) -> FederatedMethod:
    """Every client trains its own adapters for as many epochs as the federated methods do, and keeps its best round."""
    return alone.alone(models, "local")


METHOD = Method(LocalConfig, local, alone.client_model, alone.scalars, takes_mean=False)
