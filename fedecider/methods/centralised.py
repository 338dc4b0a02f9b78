"""Centralised training: one adapter on the data of all clients, which no federated method may use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.federation.wire import take_row
from fedecider.methods.averaged import global_or_own
from fedecider.methods.client_models import ClientModels, client_positions, own_state
from fedecider.methods.config import CentralisedConfig
from fedecider.methods.entries import Method
from fedecider.methods.local import scalars
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import stack_trees, with_prefix, without_prefix
from idgen.backbones.family import TokenBatch

client_model = global_or_own


def centralised(models: ClientModels, config: CentralisedConfig) -> FederatedMethod:
    """One adapter, trained in every round for ``local_epochs`` passes over the batches of all clients, mixed.

    Nothing is federated and nothing is sent: a round is one block that holds all clients, and every client's local row
    is the same adapter. All clients log the one training, its steps and seconds included.
    """
    num_clients, pooled = models.num_clients, pooled_models(models)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        if block.clients.tolist() != list(range(num_clients)):
            raise ValueError(
                f"got a block of the clients {block.clients.tolist()}, expected one block of all {num_clients}: "
                "centralised trains on everybody's data"
            )
        before = take_row(own, 0)
        trained = train_locally(pooled, 0, round, without_prefix(before, "own"))
        row = with_prefix(trained.pair, "own") if trained.finite else before
        upload = Upload(block.clients, torch.ones(num_clients), {})
        return upload, stack_trees([row] * num_clients), [dict(trained.log) for _ in range(num_clients)]

    return FederatedMethod(
        "centralised",
        lambda: ({}, own_state(models, models.start)),
        lambda round, server, clients: Download({}),
        client_update,
        lambda round, server, uploads: {},
        client_positions(partial(client_model, models, config)),
        ("pooled",),
    )


def pooled_models(models: ClientModels) -> ClientModels:
    """The same model with a single client ``pooled``: an epoch is all batches of all clients in random order.

    A batch holds samples of one client, every sample comes once. Clients draw from streams of their own names and
    stand in the order of these, so that the order of the clients does not matter. It only trains: to rank, use
    ``models``.
    """
    clients = sorted(models.clients, key=lambda client: client.name)
    batch_size = models.training.batch_size

    def batches(generator: torch.Generator) -> Iterator[TokenBatch]:
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        epochs = [client.batches(stream(seed, "batches", client.name)) for client in clients]
        counts = torch.tensor([-(-client.num_examples // batch_size) for client in clients])
        turns = torch.arange(len(clients)).repeat_interleave(counts)
        for place in turns[torch.randperm(len(turns), generator=generator)].tolist():
            yield next(epochs[place])
        assert all(next(epoch, None) is None for epoch in epochs), "a client has more batches than its samples need"

    total = sum(client.num_examples for client in clients)
    return models._replace(clients=[models.clients[0]._replace(name="pooled", batches=batches, num_examples=total)])


METHOD = Method(
    CentralisedConfig,
    centralised,
    client_model,
    scalars,
    pooled=True,
    beside_training="the data of all clients are pooled",
    takes_mean=False,
)
