"""What FedAvg and its kin share: every client gets one pair of adapters, sends one back, the server takes the mean.

State. Server: one client's adapters. Local: ``own.*``, one pair per client, whatever the method keeps there. A method
is its ``TrainClient`` and what its variants mean; whoever aggregates otherwise replaces ``server_aggregate``.

Shape legend: K clients of the run, C clients of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.methods import client_models
from fedecider.methods.config import Weighting
from fedecider.methods.local_training import ProximalTerm, train_locally
from fedecider.models.adapters import Shapes, factor_scalars, with_prefix, without_prefix
from fedecider.models.client_model import ClientModel


def averaged(
    models: client_models.ClientModels,
    name: str,
    variants: tuple[str, ...],
    train: client_models.TrainClient,
    weighting: Weighting,
    client_model: client_models.MakesModel | None = None,
) -> FederatedMethod:
    """``theta <- sum_i p_i theta_i`` over A and B separately, ``theta_i`` what ``train`` sends for client i.

    All start from the same adapters. ``p_i`` is 1 / C or the share of training samples; clients whose adapters are not
    finite are left out. Where tables travel by rows of catalogues (`fedecider.methods.rows`), ``p_i`` of a row are
    brought to sum 1 over the clients that have it; rows of B that nobody sent stay as they are. The mean over all
    clients would thin out what those of one catalogue learnt, by nothing but the number of the others: FedSubAvg (Ding
    et al., 2022) by what a client sells, not by what its users bought, which nobody is told. ``client_model``: by
    default `global_or_own`.
    """
    start = models.start

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download(server)

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return weighted_mean(uploads, fallback=server, uniform=weighting == "uniform")

    return FederatedMethod(
        name,
        lambda: (start, client_models.own_state(models, start)),
        broadcast,
        client_models.client_updates(models, train, weighting),
        server_aggregate,
        client_models.client_positions(client_model or partial(global_or_own, models, None)),
        variants,
        upload_like=lambda round, server: server,
        takes_mean=True,
        bounds_norms=True,
    )


def global_or_own(
    models: client_models.ClientModels, config: Any, variant: str, download: Download, own: Tree, client: int
) -> ClientModel:
    """The client's model with the adapters of the download for ``global``, with what it keeps for other variants."""
    return models.model(client, download.shared if variant == "global" else without_prefix(own, "own"))


def train_from_global(
    models: client_models.ClientModels,
    round: int,
    download: Download,
    own: Tree,
    client: int,
    *,
    proximal_strength: float = 0.0,
) -> client_models.Update:
    """FedAvg's ``TrainClient``: train from the downloaded adapters and keep a copy of a result that is finite.

    ``proximal_strength`` draws the training back to the downloaded adapters.
    """
    proximal = ProximalTerm(download.shared, proximal_strength) if proximal_strength > 0.0 else None
    trained = train_locally(models, client, round, download.shared, proximal=proximal)
    return trained.pair, with_prefix(trained.pair, "own") if trained.finite else own, trained.log


def scalars_both_ways(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """P down and P up in every round, P the scalars of one client's adapters."""
    num_scalars = sum(factor_scalars(shapes).values())
    return num_scalars, num_scalars
