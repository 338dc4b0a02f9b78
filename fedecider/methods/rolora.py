"""RoLoRA (Chen et al., 2024): one factor at a time is trained and averaged, the other one is the same everywhere.

State. Server: the last averages of A and B, and ``last_round`` (K,) int64, the last round in which a usable upload of
each client arrived. Local: ``own.*``, the pair as the client trained it; its frozen half is the server's average.

Shape legend: K clients of the run, C clients of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from fedecider.federation.aggregate import heard_clients, weighted_mean
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.methods.client_models import ClientModels, Update, client_positions, client_updates, own_state
from fedecider.methods.config import WeightingConfig
from fedecider.methods.entries import Method
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import Shapes, factor_scalars, only, with_prefix, without_prefix
from fedecider.models.client_model import ClientModel

LAST_ROUND = "last_round"


def rolora(models: ClientModels, config: WeightingConfig) -> FederatedMethod:
    """Odd rounds: ``B <- sum_i p_i B_i`` with A frozen; even rounds: ``A <- sum_i p_i A_i`` with B frozen.

    B comes first, since A has no gradient while B = 0. Every round is exact: ``sum_i p_i B_i A = (sum_i p_i B_i) A``.
    Up goes the trained factor. Down comes the frozen one, averaged in the round before; the other one the client was
    sent in the round before. A client that missed that round, or whose upload then was not finite, is sent both, and so
    are all clients of its block (cross-silo ones hold one client). Where uploads are bounded all are sent both: the
    trained factor is bounded around that of the download. Variants: ``local`` (the client's model before the
    upload, reported) and ``global``. Differs from the paper: uniform weights by default; absent clients.
    """
    start = models.start

    def init() -> tuple[Tree, Tree]:
        return {**start, LAST_ROUND: torch.zeros(models.num_clients, dtype=torch.int64)}, own_state(models, start)

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        up_to_date = bool((server[LAST_ROUND][clients] == round - 1).all())
        frozen, trained = only(server, frozen_factor(round)), only(server, trained_factor(round))
        return Download(frozen if up_to_date and not models.protected else {**frozen, **trained})

    def train(round: int, download: Download, own: Tree, client: int) -> Update:
        factor = trained_factor(round)
        trained = train_locally(
            models, client, round, {**without_prefix(own, "own"), **download.shared}, factors=(factor,)
        )
        return only(trained.pair, factor), with_prefix(trained.pair, "own") if trained.finite else own, trained.log

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        last_round_K = server[LAST_ROUND].clone()

        def noted() -> Iterator[Upload]:
            for upload in uploads:
                last_round_K[heard_clients(upload)] = round
                yield upload

        fallback = only(server, trained_factor(round))
        mean = weighted_mean(noted(), fallback=fallback, uniform=config.weighting == "uniform")
        return {**server, **mean, LAST_ROUND: last_round_K}

    return FederatedMethod(
        "rolora",
        init,
        broadcast,
        client_updates(models, train, config.weighting),
        server_aggregate,
        client_positions(partial(client_model, models, config)),
        ("local", "global"),
        upload_like=lambda round, server: only(server, trained_factor(round)),
        takes_mean=True,
        bounds_norms=True,
    )


def client_model(
    models: ClientModels, config: WeightingConfig, variant: str, download: Download, own: Tree, client: int
) -> ClientModel:
    """The client's model before its upload, or with the global adapters: the download over what the client has."""
    return models.model(client, {**without_prefix(own, "own"), **(download.shared if variant == "global" else {})})


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """The frozen factor down and the trained one up; for clients that took part in the round before, without a clip."""
    num_scalars = factor_scalars(shapes)
    return num_scalars[frozen_factor(round)], num_scalars[trained_factor(round)]


def trained_factor(round: int) -> str:
    """``lora_b`` in odd rounds, ``lora_a`` in even ones."""
    return "lora_b" if round % 2 == 1 else "lora_a"


def frozen_factor(round: int) -> str:
    """The other one."""
    return trained_factor(round + 1)


METHOD = Method(WeightingConfig, rolora, client_model, scalars)
