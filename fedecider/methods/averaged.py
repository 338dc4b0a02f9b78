"""What FedAvg and its kin share: every client gets one pair of adapters, sends one back, the server takes the mean.

State. Server: one client's adapters. Local: ``own.*``, one pair per client, whatever the method keeps there. A method
is its ``TrainClient`` and what its views mean; whoever aggregates otherwise replaces ``server_aggregate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.lora.adapters import (
    Shapes,
    adapter_shapes,
    factor_scalars,
    initial_adapters,
    stack_trees,
    with_prefix,
)
from fedecider.lora.fusion import load_plain
from fedecider.methods.local_training import Pull, train_locally
from fedecider.methods.recommender import ClientModels, client_positions

Weighting = Literal["uniform", "examples"]

TrainClient = Callable[[int, Tree, Tree, int], tuple[Tree, Tree, dict[str, Any]]]
"""round, downloaded adapters, own row (``own.*``), client -> adapters to send, new own row, log."""

Load = Callable[[str, Download, Tree, int], Any]
"""view, download, own row, client: put that client's model into the recommender."""


def averaged(
    recommender: ClientModels, name: str, views: tuple[str, ...], update: TrainClient, load: Load, weighting: Weighting
) -> FederatedMethod:
    """``theta <- sum_i p_i theta_i`` over A and B separately, ``theta_i`` what ``update`` sends for client i.

    All start from the same adapters. ``p_i`` is 1 / C or the share of training samples; clients whose adapters are not
    finite are left out. Where tables travel by rows of catalogues (`fedecider.methods.own_rows`), ``p_i`` of a row are
    brought to sum 1 over the clients that have it; rows of B that nobody sent stay as they are. The mean over all
    clients would thin out what those of one catalogue learnt, by nothing but the number of the others.
    """
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)

    def init() -> tuple[Tree, Tree]:
        return start, with_prefix(stack_trees([start] * recommender.num_clients), "own")

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download(server)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        clients = block.clients.tolist()
        done = [update(round, download.shared, take_row(own, row), client) for row, client in enumerate(clients)]
        sent, rows, logs = zip(*done, strict=True)
        counted = weighting == "examples"  # else the number of samples stays with the client
        weight_C = torch.tensor([float(recommender.num_examples(client)) if counted else 1.0 for client in clients])
        return Upload(block.clients, weight_C, stack_trees(sent)), stack_trees(rows), list(logs)

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return weighted_mean(uploads, fallback=server, uniform=weighting == "uniform")

    positions = client_positions(recommender, load)
    return FederatedMethod(
        name,
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        views,
        upload_like=_like_server,
        takes_mean=True,
    )


def _like_server(round: int, server: Tree) -> Tree:
    return server


def train_from_global(
    recommender: ClientModels, round: int, shared: Tree, own: Tree, client: int, *, pull_strength: float = 0.0
) -> tuple[Tree, Tree, dict[str, Any]]:
    """FedAvg's ``TrainClient``: train from the downloaded adapters and keep a copy of a result that is finite.

    ``pull_strength`` draws the training back to the downloaded adapters.
    """
    load_plain(recommender.model, shared)
    pull = Pull(shared, pull_strength) if pull_strength > 0.0 else None
    trained = train_locally(recommender, client, round, pull=pull)
    kept = with_prefix(trained.adapters, "own") if trained.log["finite"] else own
    return trained.adapters, kept, trained.log


def scalars_both_ways(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """P down and P up in every round, P the scalars of one client's adapters."""
    num_scalars = sum(factor_scalars(shapes).values())
    return num_scalars, num_scalars
