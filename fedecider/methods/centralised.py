"""Centralised training: one adapter on the data of all clients, which no federated method may use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.federation.wire import take_row
from fedecider.methods.config import CentralisedConfig
from fedecider.methods.entries import Method
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


def centralised(recommender: ClientModels, config: CentralisedConfig) -> FederatedMethod:
    """One adapter, trained in every round for ``local_epochs`` passes over the batches of all clients, mixed.

    Nothing is federated and nothing is sent: a round is one block that holds all clients, and every client's local row
    is the same adapter. All clients log the one training, its steps and seconds included.
    """
    num_clients = recommender.num_clients
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)
    pooled = pooled_recommender(recommender)

    def init() -> tuple[Tree, Tree]:
        return {}, with_prefix(stack_trees([start] * num_clients), "own")

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download({})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        if block.clients.tolist() != list(range(num_clients)):
            raise ValueError(
                f"got a block of the clients {block.clients.tolist()}, expected one block of all {num_clients}: "
                "centralised trains on everybody's data"
            )
        before = without_prefix(take_row(own, 0), "own")
        load_plain(recommender.model, before)
        trained = train_locally(pooled, 0, round)
        row = with_prefix(trained.adapters if trained.log["finite"] else before, "own")
        upload = Upload(block.clients, torch.ones(num_clients), {})
        return upload, stack_trees([row] * num_clients), [dict(trained.log) for _ in range(num_clients)]

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return {}

    positions = client_positions(recommender, partial(load_variant, recommender, config))
    return FederatedMethod("centralised", init, broadcast, client_update, server_aggregate, positions, ("pooled",))


def pooled_recommender(recommender: ClientModels) -> ClientModels:
    """The same model with a single client ``pooled``: an epoch is all batches of all clients in random order.

    A batch holds samples of one client, every sample comes once. Clients draw from streams of their own names and
    stand in the order of these, so that the order of the clients does not matter. It only trains: to rank, use
    ``recommender``.
    """
    clients = sorted(range(recommender.num_clients), key=lambda client: recommender.names[client])
    batch_size = recommender.training.batch_size

    def batches(client: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        epochs = [recommender.batches(one, stream(seed, "batches", recommender.names[one])) for one in clients]
        counts = torch.tensor([-(-recommender.num_examples(one) // batch_size) for one in clients])
        turns = torch.arange(len(clients)).repeat_interleave(counts)
        for place in turns[torch.randperm(len(turns), generator=generator)].tolist():
            yield next(epochs[place])
        assert all(next(epoch, None) is None for epoch in epochs), "a client has more batches than its samples need"

    return recommender._replace(
        tasks=[],
        names=["pooled"],
        batches=batches,
        num_examples=lambda client: sum(recommender.num_examples(one) for one in clients),
    )


def load_variant(
    recommender: ClientModels, config: CentralisedConfig, variant: str, download: Download, own: Tree, client: int
) -> None:
    """Load the one adapter."""
    assert variant == "pooled", variant
    load_plain(recommender.model, without_prefix(own, "own"))


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """Nothing is sent."""
    return 0, 0


METHOD = Method(
    CentralisedConfig,
    centralised,
    load_variant,
    scalars,
    pooled=True,
    beside_training="the data of all clients are pooled",
    takes_mean=False,
)
