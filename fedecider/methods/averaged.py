"""What FedAvg and its kin share: every client gets one pair of adapters, sends one back, the server takes the mean.

State. Server: one client's adapters. Local: ``own.*``, one pair per client, whatever the method keeps there. A method
is its ``TrainClient`` and what its variants mean; whoever aggregates otherwise replaces ``server_aggregate``.

State. Server: the last usable upload of every client (K rows), ``weights`` (K, K) float64 of the last aggregation,
``uploaded`` (K,) bool and, where losses are sent, ``loss`` (K,). Local: ``own.*``, the pair as the client trained it.

Sums over clients are rounded once or start with the client itself, so that neither the order nor the number of a client
decides over bits.

Shape legend: K clients of the run, J those that have uploaded so far, C clients of a block, M modules, N scalars of a
module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedecider.federation.aggregate import finite_clients, weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import download_of, message, take_row
from fedecider.methods.config import Weighting
from fedecider.methods.local_training import Pull, train_locally
from fedecider.methods.recommender import ClientModels, client_positions
from fedecider.models.adapters import (
    FACTORS,
    Shapes,
    adapter_shapes,
    factor_scalars,
    initial_adapters,
    load_plain,
    module_names,
    stack_trees,
    with_prefix,
    without_prefix,
)

# What FedAvg and its kin share: every client gets one pair of adapters, sends one back, the server takes the
# mean.


TrainClient = Callable[[int, Tree, Tree, int], tuple[Tree, Tree, dict[str, Any]]]
"""round, downloaded adapters, own row (``own.*``), client -> adapters to send, new own row, log."""

Load = Callable[[str, Download, Tree, int], Any]
"""variant, download, own row, client: put that client's model into the recommender."""


def averaged(
    recommender: ClientModels,
    name: str,
    variants: tuple[str, ...],
    update: TrainClient,
    load: Load,
    weighting: Weighting,
) -> FederatedMethod:
    """``theta <- sum_i p_i theta_i`` over A and B separately, ``theta_i`` what ``update`` sends for client i.

    All start from the same adapters. ``p_i`` is 1 / C or the share of training samples; clients whose adapters are not
    finite are left out. Where tables travel by rows of catalogues (`fedecider.methods.recommender`), ``p_i`` of a row
    are brought to sum 1 over the clients that have it; rows of B that nobody sent stay as they are. The mean over all
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
        variants,
        upload_like=_like_server,
        takes_mean=True,
        bounds_norms=True,
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


# Shared by methods whose server gives every client its own weighted average of all clients' LoRA factors.

VARIANTS = ("aggregated", "local")
WEIGHTS, UPLOADED, LOSS = "weights", "uploaded", "loss"

Weigh = Callable[[int, Tree], Tensor]
"""round, uploads (J, ...) with ``loss`` (J,) where it is sent -> (J, J) float64 weights, every row with sum 1."""


def personal_average(
    name: str, recommender: ClientModels, weigh: Weigh, *, sends_loss: bool = False
) -> FederatedMethod:
    """``theta_i <- sum_j weights_ij theta_j`` for all clients, from the uploads as they arrived.

    A client that is absent, or whose upload is not finite, stands in the averages with its last upload; one that has
    never uploaded is left out and keeps the common start. Variants: ``aggregated`` (reported) and ``local`` (the
    client's model before the upload).
    """
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)
    num_clients = recommender.num_clients

    def init() -> tuple[Tree, Tree]:
        start_K = stack_trees([start] * num_clients)
        notes = {
            WEIGHTS: torch.eye(num_clients, dtype=torch.float64),
            UPLOADED: torch.zeros(num_clients, dtype=torch.bool),
            **({LOSS: torch.zeros(num_clients)} if sends_loss else {}),
        }
        return {**start_K, **notes}, with_prefix(start_K, "own")

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        own_rows = recommender.own_rows
        mixed = [mixed_row(server, server[WEIGHTS][client], client, own_rows) for client in clients.tolist()]
        return Download({}, stack_trees(mixed))

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        uploads, rows, logs = [], [], []
        for row, client in enumerate(block.clients.tolist()):
            load_plain(recommender.model, message(download, row))
            trained = train_locally(recommender, client, round)
            loss = {LOSS: torch.tensor(trained.log["loss"])} if sends_loss else {}
            uploads.append({**trained.adapters, **loss})
            rows.append(with_prefix(trained.adapters, "own") if trained.log["finite"] else take_row(own, row))
            logs.append(trained.log)
        weight_C = torch.ones(len(rows))  # similarity decides, not the number of samples
        return Upload(block.clients, weight_C, stack_trees(uploads)), stack_trees(rows), logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        updated = {key: tensor.clone() for key, tensor in server.items()}
        num_arrived = 0
        for upload in uploads:
            kept_C = finite_clients(upload)
            clients = upload.clients[kept_C]
            for key, tensor in upload.tensors.items():
                updated[key][clients] = tensor[kept_C]
            updated[UPLOADED][clients] = True
            num_arrived += len(clients)
        if num_arrived == 0:
            return server
        known_J = updated[UPLOADED].nonzero()[:, 0]
        rows = {key: tensor[known_J] for key, tensor in updated.items() if key not in (WEIGHTS, UPLOADED)}
        updated[WEIGHTS][known_J[:, None], known_J] = weigh(round, rows)
        return updated

    positions = _row_by_row(recommender)
    like = {**start, **({LOSS: torch.zeros(())} if sends_loss else {})}
    return FederatedMethod(
        name,
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        VARIANTS,
        upload_like=lambda round, server: like,
        bounds_norms=True,
    )


def load_row(recommender: ClientModels, variant: str, download: Download, own: Tree, client: int) -> None:
    """Load the client's average, or its model before the upload; ``download`` is that of the client alone."""
    assert variant in VARIANTS, variant
    load_plain(recommender.model, message(download, 0) if variant == "aggregated" else without_prefix(own, "own"))


def module_products(adapters: Tree) -> Tensor:
    """(M, K, K) float64 inner products of the clients' modules, A and B of a module laid flat as one vector.

    Pair by pair, so that a product does not depend on where in the matrix it stands.
    """
    products = []
    for name in module_names(adapters):
        flat_KN = torch.cat([adapters[f"{name}.{factor}"].flatten(1) for factor in FACTORS], 1).double()
        products.append([[float((left_N * right_N).sum()) for right_N in flat_KN] for left_N in flat_KN])
    return torch.tensor(products, dtype=torch.float64)


def cosines(product_KK: Tensor) -> Tensor:
    """(..., K, K) cosines from inner products; 0 with a vector that is zero."""
    norm_K = product_KK.diagonal(dim1=-2, dim2=-1).sqrt()
    scale_KK = norm_K[..., :, None] * norm_K[..., None, :]
    return torch.where(scale_KK > 0.0, product_KK / scale_KK.clamp(min=1e-300), 0.0).clamp(-1.0, 1.0)


def exact_sum(value: Tensor) -> Tensor:
    """Float64 sum over the last axis, rounded once: the order of the terms does not matter."""
    sums = [math.fsum(terms) for terms in value.reshape(-1, value.shape[-1]).tolist()]
    return torch.tensor(sums, dtype=torch.float64).reshape(value.shape[:-1])


def mixed_row(rows: Tree, weight_K: Tensor, client: int, own_rows: Tree) -> Tree:
    """``sum_k weight_k theta_k`` factor by factor in float64, ``client`` first and then the others by number.

    Factors in ``own_rows`` (K, V) are averaged row by row over those whose row it is, by their share of these clients'
    weight: who knows nothing of an item does not thin it out.
    """
    weights = weight_K.tolist()
    order = [client, *(other for other in range(len(weights)) if other != client)]
    mixed: Tree = {}
    for name in module_names(rows):
        for factor in FACTORS:
            tensor = rows[f"{name}.{factor}"]
            total = torch.zeros_like(tensor[0], dtype=torch.float64)
            for other in order:
                total += weights[other] * tensor[other].double()
            if f"{name}.{factor}" in own_rows:
                own_KV = own_rows[f"{name}.{factor}"]
                weight_V = sum((weights[other] * own_KV[other].double() for other in order), torch.zeros(()))
                total = torch.where(weight_V > 0.0, 1.0 / weight_V, 0.0)[:, None] * total
            mixed[f"{name}.{factor}"] = total.to(tensor.dtype)
    return mixed


def _row_by_row(recommender: ClientModels) -> Callable[[str, Download, Tree, Block, str], list[Tensor]]:
    """``client_positions`` for downloads that hold one row per client."""
    single = client_positions(recommender, partial(load_row, recommender))

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        found = []
        for row in range(len(block.clients)):
            here = slice(row, row + 1)
            own_row = {key: tensor[here] for key, tensor in own.items()}
            found += single(variant, download_of(download, row), own_row, Block(block.clients[here], None), split)
        return found

    return positions
