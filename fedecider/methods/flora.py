"""FLoRA (Wang et al., NeurIPS 2024): the exact mean of LoRA products, by stacking the clients' factors.

State. Server: ``X.update`` (O, I), all that has been merged in layer X; of layers whose factors travel ``X.lora_a``
(K, R, I) and ``X.lora_b`` (K, O, R), the last round's stack, with the clients' weights in B; ``last_round`` (K,) int64,
the last round in which a usable upload of each client arrived. Local: ``merged.X.update``, what lay below the own pair,
and ``own.*``, the pair as the client trained it.

Shape legend: K clients of the run, J whose uploads are usable, C clients of a block, O outputs, I inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.methods.client_models import ClientModels, Update, client_positions, client_updates, own_state
from fedecider.methods.config import WeightingConfig
from fedecider.methods.entries import Method
from fedecider.methods.local_training import train_locally
from fedecider.methods.rows import TABLE
from fedecider.models import adapters
from fedecider.models.client_model import ClientModel
from fedecider.models.directions import above, add_product
from fedecider.models.tied_table import HEAD

LAST_ROUND = "last_round"


def flora(models: ClientModels, config: WeightingConfig) -> FederatedMethod:
    """``W <- W + sum_i p_i B_i A_i``: every round clients train a new pair above what is merged, and merge the mean.

    ``p_i`` is 1 / J or the share of training samples; where tables travel by rows of catalogues, those of a row are
    brought to sum 1 over the clients that have it. The same mean as FedEx-LoRA (Singhal et al., 2024), which sends it
    as a mean pair and a residual. Upload: the pair (P scalars). Download: of every layer the stack of the round's
    factors, or the sum of all means (O, I) where that is smaller (`is_dense`); in round 1 the common start. Who missed
    the last round, or whose upload then was not usable, is sent the sums of all layers, and so are all clients of its
    block. Variants: ``global`` (after aggregation, reported) and ``local`` (the client's model before the upload).
    Uploads are bounded around the common start. Its server needs every single pair, so that there are no secure sums
    and no robust means: FedAvg has both. Differs from the paper: the base stays, merged updates are kept beside it; a
    new pair starts where the first one did; one rank for all clients; absent clients; uniform weights by default.
    """
    shapes, num_clients, start = models.shapes, models.num_clients, models.start
    stacked = [name for name, shape in shapes.items() if not is_dense(name, shape, num_clients)]

    def init() -> tuple[Tree, Tree]:
        nothing = {_update(name): torch.zeros(shape.out_features, shape.in_features) for name, shape in shapes.items()}
        stacks = {
            f"{name}.{factor}": torch.zeros(num_clients, *start[f"{name}.{factor}"].shape)
            for name in stacked
            for factor in ("lora_a", "lora_b")
        }
        local = {
            **own_state(models, start),
            **adapters.with_prefix(adapters.stack_trees([nothing] * num_clients), "merged"),
        }
        return {**nothing, **stacks, LAST_ROUND: torch.zeros(num_clients, dtype=torch.int64)}, local

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        if round == 1:
            return Download(start)
        heard_K = server[LAST_ROUND] == round - 1
        marks: Tree = {}
        if bool(heard_K[clients].all()):
            shared = adapters.only(server, "lora_a") | adapters.only(server, "lora_b")
            if not heard_K.all():
                marks = {key: heard_K.expand(len(clients), -1) for key in shared}
        else:
            shared = {}
        shared |= {_update(name): server[_update(name)] for name in shapes if f"{name}.lora_a" not in shared}
        if TABLE in models.rows.own and _update(HEAD) in shared:
            marks[_update(HEAD)] = models.rows.own[TABLE][clients]
        return Download(shared, sent_rows=marks)

    def train(round: int, download: Download, own: Tree, client: int) -> Update:
        if round == 1:
            merged, begun = adapters.without_prefix(own, "merged"), adapters.Adapters(download.shared)
        else:
            merged = _merged(download, own)
            begun = above(start, merged)
        trained = train_locally(models, client, round, begun)
        after = {**adapters.with_prefix(trained.pair, "own"), **adapters.with_prefix(merged, "merged")}
        return trained.pair, after if trained.finite else own, trained.log

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        client_J, weight_J, pairs, marks = [], [], [], []
        for upload in uploads:
            for row in finite_clients(upload).nonzero()[:, 0].tolist():
                client_J.append(int(upload.clients[row]))
                weight_J.append(float(upload.weights[row]) if config.weighting == "examples" else 1.0)
                pairs.append(take_row(upload.tensors, row))
                marks.append(take_row(upload.sent_rows, row))
        if sum(weight_J) == 0.0:
            return server
        after = {**server, LAST_ROUND: server[LAST_ROUND].clone()}
        after[LAST_ROUND][client_J] = round
        for name, shape in shapes.items():
            key_a, key_b = f"{name}.lora_a", f"{name}.lora_b"
            held = [mark.get(key_b, torch.ones(shape.out_features, dtype=torch.bool)).double() for mark in marks]
            weight_JO = torch.stack([weight * held_O for weight, held_O in zip(weight_J, held, strict=True)])
            share_JO = weight_JO / weight_JO.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
            factor_a = torch.zeros(num_clients, *start[key_a].shape)
            factor_b = torch.zeros(num_clients, *start[key_b].shape)
            for client, pair, share_O in zip(client_J, pairs, share_JO, strict=True):
                factor_a[client] = pair[key_a]
                factor_b[client] = share_O[:, None] * pair[key_b]
            after[_update(name)] = server[_update(name)] + _summed(factor_a, factor_b)
            if name in stacked:
                after[key_a], after[key_b] = factor_a, factor_b
        return after

    return FederatedMethod(
        "flora",
        init,
        broadcast,
        client_updates(models, train, config.weighting),
        server_aggregate,
        client_positions(partial(client_model, models, config)),
        ("global", "local"),
        upload_like=lambda round, server: start,
        bounded_from=lambda round: start,
        bounds_norms=True,
    )


def client_model(
    models: ClientModels, config: WeightingConfig, variant: str, download: Download, own: Tree, client: int
) -> ClientModel:
    """The client's model with what all have merged, or as it was before its upload."""
    if variant == "local":
        return models.model(client, above(adapters.without_prefix(own, "own"), adapters.without_prefix(own, "merged")))
    return models.model(client, above(models.start, _merged(download, own)))


def scalars(shapes: adapters.Shapes, peers: Sequence[adapters.Shapes], round: int) -> tuple[int, int]:
    """P up; down the common start in round 1, later the smaller form of every layer, where all took part before.

    Of a table travel the rows that the receiver has, of a stack those that the factors' client has too.
    """
    num_scalars = sum(adapters.factor_scalars(shapes).values())
    if round == 1:
        return num_scalars, num_scalars
    down = 0
    for name, shape in shapes.items():
        if is_dense(name, shape, len(peers)):
            down += shape.in_features * shape.out_features
        else:
            down += sum(shape.rank * (shape.in_features + peer[name].out_features) for peer in peers)
    return down, num_scalars


def is_dense(name: str, shape: adapters.AdapterShape, num_clients: int) -> bool:
    """Whether ``O I <= K R (O + I)``; of the output, of which any number of rows may travel, whether ``I <= K R``."""
    sides = shape.in_features, shape.out_features
    side = sides[0] if name == HEAD else sides[0] * sides[1] / sum(sides)
    return side <= num_clients * shape.rank


def _update(name: str) -> str:
    return f"{name}.update"


def _merged(download: Download, own: Tree) -> Tree:
    """All that is merged after a download: what came whole, or what the client has and the stack."""
    merged, shared = adapters.without_prefix(own, "merged"), download.shared
    for key in merged:
        name = key.removesuffix(".update")
        if key in shared:
            merged[key] = shared[key]
        else:
            merged[key] = merged[key] + _summed(shared[f"{name}.lora_a"], shared[f"{name}.lora_b"])
    return merged


def _summed(factor_a: Tensor, factor_b: Tensor) -> Tensor:
    """(O, I) sum of the products of a stack, rounded once."""
    total = torch.zeros(factor_b.shape[1], factor_a.shape[2], dtype=torch.float64)
    for one_a, one_b in zip(factor_a, factor_b, strict=True):
        add_product(total, one_a, one_b)
    return total.to(factor_b.dtype)


METHOD = Method(WeightingConfig, flora, client_model, scalars, takes_mean=False)
