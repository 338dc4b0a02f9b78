"""Local training that starts every round between the client's own adapters and the mean of all clients."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor

from fedecider.bounds import Share, dataclass
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.methods import Method
from fedecider.methods.averaged import scalars_both_ways
from fedecider.methods.client_models import ClientModels, Update, client_positions, client_updates, own_state
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import with_prefix, without_prefix
from fedecider.models.client_model import ClientModel


@dataclass(frozen=True)
class InterpolatedConfig:
    """Settings of interpolation.

    Args:
        share: The share of the mean adapters in a client's model; 0 is local training, 1 is FedAvg.
    """

    share: Share = 0.5


def interpolated(models: ClientModels, config: InterpolatedConfig) -> FederatedMethod:
    """``start_i = share * mean_j theta_j + (1 - share) * theta_i``, factor by factor."""
    start = models.start

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download(server)

    def train(round: int, download: Download, own: Tree, client: int) -> Update:
        trained = train_locally(models, client, round, mixture(config.share, download, own))
        return trained.pair, with_prefix(trained.pair, "own") if trained.finite else own, trained.log

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return weighted_mean(uploads, fallback=server, uniform=True)

    return FederatedMethod(
        "interpolated",
        lambda: (start, own_state(models, start)),
        broadcast,
        client_updates(models, train, "examples"),
        server_aggregate,
        client_positions(partial(client_model, models, config)),
        variants=("mixed", "local"),
        upload_like=lambda round, server: server,
    )


def mixture(share: float, download: Download, own: Tree) -> Tree:
    """The mean adapters and the client's own, factor by factor."""
    pair = without_prefix(own, "own")
    return {key: share * download.shared[key] + (1.0 - share) * pair[key] for key in pair}


def client_model(
    models: ClientModels, config: InterpolatedConfig, variant: str, download: Download, own: Tree, client: int
) -> ClientModel:
    """The client's model with the mixture, from which the next round starts, or as it was before the upload."""
    return models.model(client, mixture(config.share if variant == "mixed" else 0.0, download, own))


METHOD = Method(
    InterpolatedConfig, interpolated, client_model, scalars_both_ways, grid=({}, {"share": 0.3}, {"share": 0.8})
)
