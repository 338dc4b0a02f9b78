"""Put the model of a client, or the shared student, into a recommender."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fedecider.evaluation.metrics import mean_metrics
from fedecider.federation.method import FederatedMethod, Tree
from fedecider.federation.state import RunState
from fedecider.federation.wire import received, take_row
from fedecider.llm.setup import Settings
from fedecider.lora.adapters import adapter_shapes, initial_adapters
from fedecider.lora.fusion import load_plain, scale_update
from fedecider.methods import METHODS
from fedecider.methods.recommender import ClientModels


def load_student(recommender: ClientModels) -> None:
    """The shared student without any adapter."""
    load_plain(recommender.model, initial_adapters(adapter_shapes(recommender.model), recommender.seed))


Shares = Mapping[str, float]
"""Client's name -> the share of its update that its reported model has."""


def load_reported(
    settings: Settings,
    method: FederatedMethod,
    recommender: ClientModels,
    state: RunState,
    client: int,
    share: float = 1.0,
) -> Tree:
    """The reported model of ``client`` at the selected round; returns the client's own row, as it was loaded."""
    download = received(method.broadcast(state.best_round + 1, state.best_server, torch.tensor([client])), 0)
    own = take_row(state.best_local, client)
    entry = METHODS[settings.run.method]
    loaded = entry.load_view(recommender, settings.method, method.views[0], download, own, client)
    scale_update(recommender.model, share)
    return own if loaded is None else loaded


def chosen_shares(
    settings: Settings, method: FederatedMethod, recommender: ClientModels, state: RunState, names: Iterable[str]
) -> Shares:
    """Of each client in ``names`` the share of its update that ranks its validation items best; the largest on ties.

    An update that overfits is taken in part, or left out: a client is never worse off for taking part than its own
    validation items can tell. It is the client's own choice, made after the last round; nobody is told of it.
    """
    found = {}
    for name in names:
        client, scores = recommender.names.index(name), {}
        for share in settings.run.share_grid:
            load_reported(settings, method, recommender, state, client, share)
            scores[share] = mean_metrics(recommender.positions(client, "valid"))["ndcg@10"]
        found[name] = max(scores, key=lambda share: (scores[share], share))
    return found
