"""Local training without any communication: the row every federated method has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fedecider.federation.method import Download, FederatedMethod, Tree
from fedecider.methods.averaged import global_or_own
from fedecider.methods.client_models import ClientModels, Update, client_positions, client_updates, own_state
from fedecider.methods.config import LocalConfig
from fedecider.methods.entries import Method
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import Shapes, with_prefix, without_prefix

client_model = global_or_own


def local(models: ClientModels, config: LocalConfig) -> FederatedMethod:
    """Every client trains its own adapters for as many epochs as the federated methods do; nothing is sent."""

    def train(round: int, download: Download, own: Tree, client: int) -> Update:
        trained = train_locally(models, client, round, without_prefix(own, "own"))
        return {}, with_prefix(trained.pair, "own") if trained.finite else own, trained.log

    return FederatedMethod(
        "local",
        lambda: ({}, own_state(models, models.start)),
        lambda round, server, clients: Download({}),
        client_updates(models, train),
        lambda round, server, uploads: {},
        client_positions(partial(client_model, models, config)),
        ("local",),
        upload_like=lambda round, server: {},
    )


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """Nothing is sent."""
    return 0, 0


METHOD = Method(LocalConfig, local, client_model, scalars, takes_mean=False)
