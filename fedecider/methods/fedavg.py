"""FedAvg on LoRA factors (McMahan et al., 2017): one global adapter, the mean of the clients' adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.lora.adapters import (
    AdapterShape,
    adapter_shapes,
    factor_scalars,
    initial_adapters,
    stack_trees,
    with_prefix,
    without_prefix,
)
from fedecider.lora.fusion import load_plain
from fedecider.methods.local_training import train_locally
from fedecider.methods.recommender import Recommender, client_positions


@dataclass(frozen=True)
class FedavgConfig:
    """Settings of FedAvg.

    Args:
        weighting: uniform gives every client the same weight, examples weighs by training samples.
    """

    weighting: Literal["uniform", "examples"] = "uniform"

    def __post_init__(self) -> None:
        if self.weighting not in ("uniform", "examples"):
            raise ValueError(f"got weighting {self.weighting}, expected uniform or examples")


def fedavg(recommender: Recommender, config: FedavgConfig) -> FederatedMethod:
    """``theta <- sum_i p_i theta_i`` over A and B separately, ``theta_i`` trained from ``theta``.

    The mean of the factors is not the mean of the products. Views: ``global`` (after aggregation, reported) and
    ``local`` (the client's model before the upload). Differs from the paper: nothing; FeDecider's comparison does not
    name the weights, the default is uniform.
    """
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)

    def init() -> tuple[Tree, Tree]:
        return start, with_prefix(stack_trees([start] * recommender.num_clients), "own")

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download(server)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        uploads, rows, logs = [], [], []
        for row, client in enumerate(block.clients.tolist()):
            load_plain(recommender.model, download.shared)
            trained = train_locally(recommender, client, round)
            uploads.append(trained.adapters)
            finite = trained.log["finite"]
            rows.append(with_prefix(trained.adapters, "own") if finite else take_row(own, row))
            logs.append(trained.log)
        weight_C = torch.tensor([float(recommender.num_examples(client)) for client in block.clients.tolist()])
        return Upload(block.clients, weight_C, stack_trees(uploads)), stack_trees(rows), logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return weighted_mean(uploads, fallback=server, uniform=config.weighting == "uniform")

    positions = client_positions(recommender, partial(load_view, recommender, config))
    return FederatedMethod("fedavg", init, broadcast, client_update, server_aggregate, positions, ("global", "local"))


def load_view(
    recommender: Recommender, config: FedavgConfig, view: str, download: Download, own: Tree, client: int
) -> None:
    """Load the global adapters, or the client's before its upload."""
    assert view in ("global", "local"), view
    load_plain(recommender.model, download.shared if view == "global" else without_prefix(own, "own"))


def scalars(shapes: Mapping[str, AdapterShape], num_clients: int, round: int) -> tuple[int, int]:
    """P both ways."""
    num_scalars = sum(factor_scalars(shapes).values())
    return num_scalars, num_scalars
