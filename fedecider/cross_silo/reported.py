"""The models that clients report, as values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedecider.cross_silo.settings import Settings
from fedecider.evaluation.metrics import mean_metrics
from fedecider.federation.method import Download, FederatedMethod, Tree
from fedecider.federation.state import RunState
from fedecider.federation.wire import received, take_row
from fedecider.methods import METHODS
from fedecider.methods.client_models import ClientModels
from fedecider.methods.local import PREFIX, best_model, goes_on, train_alone
from fedecider.methods.rows import as_known, travelling_rows
from fedecider.models.client_model import ClientModel
from fedecider.running.progress import log_line

Scales = Mapping[str, float]
"""Client's name -> the scale of its update in the model that it reports."""


def reported_model(
    settings: Settings, method: FederatedMethod, models: ClientModels, state: RunState, client: int
) -> ClientModel:
    """The reported model of ``client`` at the selected round."""
    download = received(method.broadcast(state.best_round + 1, state.best_server, torch.tensor([client])), 0)
    return model_from(settings, method, models, download, take_row(state.best_local, client), client)


def model_from(
    settings: Settings, method: FederatedMethod, models: ClientModels, download: Download, own: Tree, client: int
) -> ClientModel:
    """The reported model of ``client``, from what it alone was sent and its own row."""
    download = as_known(download, own, travelling_rows(models.rows, method.takes_mean).sent, client)
    return METHODS[settings.run.method].client_model(models, settings.method, method.variants[0], download, own, client)


def trained_alone(models: ClientModels, last_round: int, own: Tree, client: int) -> tuple[ClientModel, float]:
    """What ``client`` has trained alone, and its validation ndcg@10: after the rounds from which it gains by itself,
    also where those of the method have ended before, or without it.

    ``own``: its row of the state after them.
    """
    if goes_on(models, last_round, own):
        log_line(f"{models.names[client]} goes on with its training alone, for comparison, up to round {last_round}")
    own, _ = train_alone(models, last_round, own, client)
    return best_model(models, own, client), float(own[f"{PREFIX}.score"])


def chosen_scale(settings: Settings, model: ClientModel, known: Mapping[float, float] = {}) -> float:
    """The scale of its update at which ``model`` ranks the client's validation items best; the largest on ties.

    An update that overfits is scaled down, or left out. It is the client's own choice, made after the last round;
    nobody is told of it. ``known``: scales whose ndcg@10 has been worked out.
    """
    scales, scores = settings.run.share_grid, dict(known)
    if len(scales) == 1:
        return scales[0]
    for scale in set(scales) - set(known):
        scores[scale] = mean_metrics(model.scaled(scale).positions("valid"))["ndcg@10"]
    return max(scales, key=lambda scale: (scores[scale], scale))
