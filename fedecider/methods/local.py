"""Local training without any communication: the row every federated method has to beat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.methods.config import LocalConfig
from fedecider.methods.local_training import train_locally
from fedecider.methods.recommender import ClientModels, client_positions
from fedecider.models.adapters import (
    Shapes,
    adapter_shapes,
    initial_adapters,
    load_plain,
    stack_trees,
    with_prefix,
    without_prefix,
)


def local(recommender: ClientModels, config: LocalConfig) -> FederatedMethod:
    """Every client trains its own adapters for as many epochs as the federated methods do; nothing is sent."""
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)

    def init() -> tuple[Tree, Tree]:
        return {}, with_prefix(stack_trees([start] * recommender.num_clients), "own")

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download({})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        rows, logs = [], []
        for row, client in enumerate(block.clients.tolist()):
            before = without_prefix(take_row(own, row), "own")
            load_plain(recommender.model, before)
            trained = train_locally(recommender, client, round)
            rows.append(with_prefix(trained.adapters if trained.log["finite"] else before, "own"))
            logs.append(trained.log)
        return Upload(block.clients, torch.ones(len(rows)), {}), stack_trees(rows), logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return {}

    positions = client_positions(recommender, partial(load_variant, recommender, config))
    return FederatedMethod(
        "local",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        ("local",),
        upload_like=lambda round, server: {},
    )


def load_variant(
    recommender: ClientModels, config: LocalConfig, variant: str, download: Download, own: Tree, client: int
) -> None:
    """Load the client's own adapters."""
    assert variant == "local", variant
    load_plain(recommender.model, without_prefix(own, "own"))


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """Nothing is sent."""
    return 0, 0
