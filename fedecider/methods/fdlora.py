"""FDLoRA (Qi et al., 2024): a personal and a global adapter per client, fused by two weights that are searched.

State. Server: ``theta_s`` (plain names) and the outer optimiser's ``momentum.*``, which is not sent. Local: ``own.*``,
the personal adapters ``theta_p``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.methods.averaged import averaged, global_or_own, scalars_both_ways, train_from_global
from fedecider.methods.client_models import ClientModels, Update
from fedecider.methods.config import SIMPLEX, FdloraConfig
from fedecider.methods.entries import Method
from fedecider.models.adapters import Adapters, with_prefix, without_prefix
from fedecider.models.client_model import ClientModel
from fedecider.search_space import Real, Space, Whole
from idgen.backbones.family import SHARED, TokenBatch, num_targets
from idgen.losses import sequence_loss
from idgen.precision import autocast

VARIANTS = ("fused", "global", "personal")

GRID: tuple[dict[str, Any], ...] = (
    {},
    {"sync_every": 1},
    {"sync_every": 5, "outer_learning_rate": 1.0, "outer_momentum": 0.0},
    {"sync_every": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0},
)
SPACE: Space = {"sync_every": Whole(1, 5), "outer_learning_rate": Real(0.1, 1.0), "outer_momentum": Real(0.0, 0.9)}

NUM_BATCHES = 4
"""Training batches hold prompts of similar length, so the search takes some of several."""


scalars = scalars_both_ways


def fdlora(models: ClientModels, config: FdloraConfig) -> FederatedMethod:
    """Round 1 trains ``theta_p``; later rounds train ``theta_s`` from the server's, which takes an outer step.

    Stage 1 (round 1): ``theta_p`` is trained from the common start, ``theta_s`` becomes the mean of all. Stage 2: the
    client trains from ``theta_s`` and sends the result; the server moves ``theta_s`` along the mean change
    (:func:`outer_step`). In rounds t with t % H = 0 ``theta_p`` becomes the client's own trained copy. Stage 3:
    :func:`fusion_weights`. Variants: ``fused`` (reported), ``global``, ``personal``.

    A client that missed round 1 has no ``theta_p`` yet and takes its first trained copy. A synchronisation in the last
    round is done like any other: the method does not know which round is the last or will be chosen, and the copy is
    the client's before the aggregation, so that there still are two different models to fuse.

    Differs from the paper: an inner loop lasts ``local_epochs`` epochs, not K = 3 steps. Outer rate and momentum are
    DiLoCo's (Douillard et al., 2023); H, the weight of L1 and the size of the search are ours, as is reading the test
    for a synchronisation as t % H = 0. ``theta_s`` of the fusion is the server's, after the aggregation.
    """

    def train(round: int, download: Download, own: Tree, client: int) -> Update:
        sent, copy, log = train_from_global(models, round, download, own, client)
        untrained = not any(bool(tensor.any()) for key, tensor in own.items() if key.endswith(".lora_b"))
        due = untrained or round % config.sync_every == 0
        return sent, copy if due else own, {**log, "synced": due and log["finite"]}

    made = partial(client_model, models, config)
    base = averaged(models, "fdlora", VARIANTS, train, config.weighting, made)

    def init() -> tuple[Tree, Tree]:
        start, local = base.init()
        return _joined(start, {key: torch.zeros_like(tensor) for key, tensor in start.items()}), local

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download(_theta(server))

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        theta, momentum = _theta(server), without_prefix(server, "momentum")
        sent: Tree = {}
        mean = base.server_aggregate(round, theta, _noting_rows(uploads, sent))
        if mean is theta:  # nothing usable came: momentum alone must not move the model
            return server
        return _joined(mean, momentum) if round == 1 else _joined(*outer_step(config, theta, mean, momentum, sent))

    return base._replace(
        init=init,
        broadcast=broadcast,
        server_aggregate=server_aggregate,
        upload_like=lambda round, server: _theta(server),
    )


def client_model(
    models: ClientModels, config: FdloraConfig, variant: str, download: Download, own: Tree, client: int
) -> ClientModel:
    """The client's model with the fused adapters, the global or its personal ones.

    The search for ``fused`` is done here, not in training: only here ``theta_s`` is the one that is reported, that
    after the aggregation. It always finds the same weights for the same models.
    """
    if variant != "fused":
        return global_or_own(models, config, variant, download, own, client)
    theta_p, theta_s = without_prefix(own, "own"), download.shared
    return models.model(client, fuse(theta_p, theta_s, fusion_weights(models, config, own, theta_s, client)))


def outer_step(
    config: FdloraConfig, theta: Tree, mean: Tree, momentum: Tree, sent: Tree | None = None
) -> tuple[Tree, Tree]:
    """New ``theta_s`` and momentum: ``g = theta - mean``, ``m <- b m + g``, ``theta <- theta - lr (g + b m)``.

    SGD with Nesterov momentum as in torch, b the outer momentum; computed in float64. Of a table named in ``sent`` (I,)
    bool the unmarked rows keep their values and their momentum: nobody sent them.
    """
    sent = sent or {}
    new_theta, new_momentum = {}, {}
    for key, value in theta.items():
        gradient = value.double() - mean[key].double()
        moved = config.outer_momentum * momentum[key].double() + gradient
        step = config.outer_learning_rate * (gradient + config.outer_momentum * moved)
        if key in sent:
            step = torch.where(sent[key][:, None], step, 0.0)
            moved = torch.where(sent[key][:, None], moved, momentum[key].double())
        new_theta[key], new_momentum[key] = (value.double() - step).to(value.dtype), moved.to(value.dtype)
    return new_theta, new_momentum


def fuse(theta_p: Tree, theta_s: Tree, weights: tuple[float, float]) -> Tree:
    """``w1 A_p + w2 A_s`` and ``w1 B_p + w2 B_s`` per layer: sums of factors, not of products."""
    return {key: weights[0] * tensor + weights[1] * theta_s[key] for key, tensor in theta_p.items()}


def fusion_weights(
    models: ClientModels, config: FdloraConfig, own: Tree, theta_s: Tree, client: int
) -> tuple[float, float]:
    """AdaFusion: (w1, w2) of personal and global adapters, by Nelder-Mead from (0.5, 0.5) without gradients.

    Minimises the mean cross-entropy per target token of a few training prompts of the client, the same in every round,
    plus ``l1_weight (|w1| + |w2|)``. Validation is not used, since it chooses the round. Costs ``num_evaluations``
    forward passes over ``num_search_prompts`` prompts.
    """
    theta_p, batches = without_prefix(own, "own"), _search_batches(models, config, client)

    def objective(weight_2: np.ndarray) -> float:
        fused = fuse(theta_p, theta_s, (float(weight_2[0]), float(weight_2[1])))
        return _token_loss(models, fused, batches) + config.l1_weight * float(np.abs(weight_2).sum())

    options = {"initial_simplex": np.array(SIMPLEX), "maxfev": config.num_evaluations, "xatol": 1e-3, "fatol": 1e-4}
    found = scipy.optimize.minimize(objective, SIMPLEX[0], method="Nelder-Mead", options=options).x
    return float(found[0]), float(found[1])


def _search_batches(models: ClientModels, config: FdloraConfig, client: int) -> list[TokenBatch]:
    """About ``num_search_prompts`` training prompts from the first batches of a stream of the search's own."""
    of_client = models.clients[client]
    num_batches = max(NUM_BATCHES, -(-config.num_search_prompts // models.training.batch_size))
    batches = list(islice(of_client.batches(stream(models.seed, "fusion search", of_client.name)), num_batches))
    share, device = -(-config.num_search_prompts // len(batches)), models.base.device
    return [
        {key: (tensor if key in SHARED else tensor[:share]).to(device) for key, tensor in batch.items()}
        for batch in batches
    ]


@torch.no_grad()
def _token_loss(models: ClientModels, pair: Tree, batches: list[TokenBatch]) -> float:
    """Mean cross-entropy per target token of the model with these adapters, without dropout."""
    model = models.base.holding(Adapters(pair)).eval()
    total, count = 0.0, 0
    for batch in batches:
        num_tokens = num_targets(batch)
        with autocast(models.base.device, models.training.precision):
            total += float(sequence_loss(model, batch)) * num_tokens
        count += num_tokens
    return total / count


def _noting_rows(uploads: Iterable[Upload], sent: Tree) -> Iterator[Upload]:
    """``uploads``; on the way ``sent`` gets which rows of the tables with ``sent_rows`` enter their mean."""
    for upload in uploads:
        counted_C = finite_clients(upload) & (upload.weights.cpu() > 0.0)
        for name, sent_CI in upload.sent_rows.items():
            sent_I = sent_CI[counted_C.to(sent_CI.device)].any(0)
            sent[name] = sent[name] | sent_I if name in sent else sent_I
        yield upload


def _theta(server: Tree) -> Tree:
    return {key: tensor for key, tensor in server.items() if not key.startswith("momentum.")}


def _joined(theta: Tree, momentum: Tree) -> Tree:
    return {**theta, **with_prefix(momentum, "momentum")}


METHOD = Method(
    FdloraConfig,
    fdlora,
    client_model,
    scalars,
    GRID,
    SPACE,
    beside_training="fusion weights are searched on training samples",
)
