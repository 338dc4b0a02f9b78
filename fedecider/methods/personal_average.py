"""Methods whose server gives every client its own weighted average of all clients' LoRA factors.

State. Server: the last usable upload of every client (K rows), ``weights`` (K, K) float64 of the last aggregation,
``uploaded`` (K,) bool and, where losses are sent, ``loss`` (K,). Local: ``own.*``, the pair as the client trained it.

Sums over clients are rounded once or start with the client itself, so that neither the order nor the number of a client
decides over bits.

Shape legend: K clients of the run, J those that have uploaded so far, M modules, N scalars of a module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import message
from fedecider.methods.client_models import ClientModels, Update, client_positions, client_updates, own_state
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import FACTORS, module_names, stack_trees, with_prefix, without_prefix
from fedecider.models.client_model import ClientModel

VARIANTS = ("aggregated", "local")
WEIGHTS, UPLOADED, LOSS = "weights", "uploaded", "loss"

Weigh = Callable[[int, Tree], Tensor]
"""round, uploads (J, ...) with ``loss`` (J,) where it is sent -> (J, J) float64 weights, every row with sum 1."""


def personal_average(name: str, models: ClientModels, weigh: Weigh, *, sends_loss: bool = False) -> FederatedMethod:
    """``theta_i <- sum_j weights_ij theta_j`` for all clients, from the uploads as they arrived.

    A client that is absent, or whose upload is not finite, stands in the averages with its last upload; one that has
    never uploaded is left out and keeps the common start. Variants: ``aggregated`` (reported) and ``local`` (the
    client's model before the upload).
    """
    start, num_clients = models.start, models.num_clients

    def init() -> tuple[Tree, Tree]:
        notes = {
            WEIGHTS: torch.eye(num_clients, dtype=torch.float64),
            UPLOADED: torch.zeros(num_clients, dtype=torch.bool),
            **({LOSS: torch.zeros(num_clients)} if sends_loss else {}),
        }
        return {**stack_trees([start] * num_clients), **notes}, own_state(models, start)

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        mixed = [mixed_row(server, server[WEIGHTS][client], client, models.rows.own) for client in clients.tolist()]
        return Download({}, stack_trees(mixed))

    def train(round: int, download: Download, own: Tree, client: int) -> Update:
        trained = train_locally(models, client, round, message(download, 0))
        loss = {LOSS: torch.tensor(trained.log["loss"])} if sends_loss else {}
        return {**trained.pair, **loss}, with_prefix(trained.pair, "own") if trained.finite else own, trained.log

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

    like = {**start, **({LOSS: torch.zeros(())} if sends_loss else {})}
    return FederatedMethod(
        name,
        init,
        broadcast,
        client_updates(models, train),  # similarity decides, not the number of samples
        server_aggregate,
        client_positions(partial(client_model, models, None)),
        VARIANTS,
        upload_like=lambda round, server: like,
        bounds_norms=True,
    )


def client_model(
    models: ClientModels, config: Any, variant: str, download: Download, own: Tree, client: int
) -> ClientModel:
    """The client's model with its average, or as it was before the upload; ``download`` is that of the client alone."""
    return models.model(client, message(download, 0) if variant == "aggregated" else without_prefix(own, "own"))


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
