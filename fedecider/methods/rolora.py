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
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.methods.config import WeightingConfig
from fedecider.methods.entries import Method
from fedecider.methods.local_training import train_locally
from fedecider.methods.recommender import ClientModels, client_positions
from fedecider.models.adapters import (
    Shapes,
    adapter_shapes,
    factor_scalars,
    initial_adapters,
    load_plain,
    stack_trees,
    with_prefix,
    without_prefix,
)

LAST_ROUND = "last_round"


def rolora(recommender: ClientModels, config: WeightingConfig) -> FederatedMethod:
    """Odd rounds: ``B <- sum_i p_i B_i`` with A frozen; even rounds: ``A <- sum_i p_i A_i`` with B frozen.

    B comes first, since A has no gradient while B = 0. Every round is exact: ``sum_i p_i B_i A = (sum_i p_i B_i) A``.
    Up goes the trained factor. Down comes the frozen one, averaged in the round before; the other one the client was
    sent in the round before. A client that missed that round, or whose upload then was not finite, is sent both, and so
    are all clients of its block (cross-silo ones hold one client). Where uploads are bounded all are sent both: the
    trained factor is bounded around that of the download. Variants: ``local`` (the client's model before the
    upload, reported) and ``global``. Differs from the paper: uniform weights by default; absent clients.
    """
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)

    def init() -> tuple[Tree, Tree]:
        last_round_K = torch.zeros(recommender.num_clients, dtype=torch.int64)
        local = with_prefix(stack_trees([start] * recommender.num_clients), "own")
        return {**start, LAST_ROUND: last_round_K}, local

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        up_to_date = bool((server[LAST_ROUND][clients] == round - 1).all())
        frozen, trained = only(server, frozen_factor(round)), only(server, trained_factor(round))
        return Download(frozen if up_to_date and not recommender.protected else {**frozen, **trained})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        factor = trained_factor(round)
        uploads, rows, logs = [], [], []
        for row, client in enumerate(block.clients.tolist()):
            before = take_row(own, row)
            load_plain(recommender.model, {**without_prefix(before, "own"), **download.shared})
            trained = train_locally(recommender, client, round, factors=(factor,))
            uploads.append(only(trained.adapters, factor))
            rows.append(with_prefix(trained.adapters, "own") if trained.log["finite"] else before)
            logs.append(trained.log)
        counted = config.weighting == "examples"  # else the number of samples stays with the client
        counts = [float(recommender.num_examples(client)) if counted else 1.0 for client in block.clients.tolist()]
        weight_C = torch.tensor(counts)
        return Upload(block.clients, weight_C, stack_trees(uploads)), stack_trees(rows), logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        last_round_K = server[LAST_ROUND].clone()

        def noted() -> Iterator[Upload]:
            for upload in uploads:
                last_round_K[heard_clients(upload)] = round
                yield upload

        fallback = only(server, trained_factor(round))
        mean = weighted_mean(noted(), fallback=fallback, uniform=config.weighting == "uniform")
        return {**server, **mean, LAST_ROUND: last_round_K}

    positions = client_positions(recommender, partial(load_variant, recommender, config))
    variants = ("local", "global")
    return FederatedMethod(
        "rolora",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        variants,
        upload_like=lambda round, server: only(server, trained_factor(round)),
        takes_mean=True,
        bounds_norms=True,
    )


def load_variant(
    recommender: ClientModels, config: WeightingConfig, variant: str, download: Download, own: Tree, client: int
) -> None:
    """Load the client's adapters before its upload, or the global ones: the download over what the client has."""
    assert variant in ("local", "global"), variant
    load_plain(recommender.model, {**without_prefix(own, "own"), **(download.shared if variant == "global" else {})})


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


def only(tree: Tree, factor: str) -> Tree:
    """The entries of one factor."""
    return {key: tensor for key, tensor in tree.items() if key.endswith(f".{factor}")}


METHOD = Method(WeightingConfig, rolora, load_variant, scalars)
