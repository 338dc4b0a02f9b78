"""Local training that starts every round between the client's own adapters and the mean of all clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fedecider.bounds import Share, dataclass
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.methods import Method
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


@dataclass(frozen=True)
class InterpolatedConfig:
    """Settings of interpolation.

    Args:
        share: The share of the mean adapters in a client's model; 0 is local training, 1 is FedAvg.
    """

    share: Share = 0.5


def interpolated(recommender: ClientModels, config: InterpolatedConfig) -> FederatedMethod:
    """``start_i = share * mean_j theta_j + (1 - share) * theta_i``, factor by factor."""
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)

    def init() -> tuple[Tree, Tree]:
        return start, with_prefix(stack_trees([start] * recommender.num_clients), "own")

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download(server)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        uploads, rows, logs = [], [], []
        for row, client in enumerate(block.clients.tolist()):
            before = take_row(own, row)
            load_variant(recommender, config, "mixed", download, before, client)
            trained = train_locally(recommender, client, round)
            uploads.append(trained.adapters)
            rows.append(with_prefix(trained.adapters, "own") if trained.log["finite"] else before)
            logs.append(trained.log)
        weight_C = torch.tensor([float(recommender.num_examples(client)) for client in block.clients.tolist()])
        return Upload(block.clients, weight_C, stack_trees(uploads)), stack_trees(rows), logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return weighted_mean(uploads, fallback=server, uniform=True)

    positions = client_positions(recommender, partial(load_variant, recommender, config))
    return FederatedMethod(
        "interpolated",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        variants=("mixed", "local"),
        upload_like=lambda round, server: server,
    )


def load_variant(
    recommender: ClientModels, config: InterpolatedConfig, variant: str, download: Download, own: Tree, client: int
) -> None:
    """Load the mixture, from which the next round starts, or the client's adapters before the upload."""
    assert variant in ("mixed", "local"), variant
    share = config.share if variant == "mixed" else 0.0
    pair = without_prefix(own, "own")
    load_plain(recommender.model, {key: share * download.shared[key] + (1.0 - share) * pair[key] for key in pair})


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """P down and P up in every round, P the scalars of one client's adapters."""
    num_scalars = sum(factor_scalars(shapes).values())
    return num_scalars, num_scalars


METHOD = Method(InterpolatedConfig, interpolated, load_variant, scalars, grid=({}, {"share": 0.3}, {"share": 0.8}))
