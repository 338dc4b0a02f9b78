"""Local training without any communication: the row every federated method has to beat.

It is one thing wherever it stands: the method `local`, the models of `counts`, the row ``local`` beside another method
(`fedecider.methods.beside`), and a run over that company alone. So nothing of others decides when it ends or which
round is kept, and no ensemble has counts or weights of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fedecider.evaluation.metrics import mean_metrics
from fedecider.federation.method import Download, FederatedMethod, Tree
from fedecider.methods.client_models import ClientModels, Update, client_positions, client_updates
from fedecider.methods.config import NOT_HIDDEN, LocalConfig
from fedecider.methods.entries import Method
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import Shapes, stack_trees, with_prefix, without_prefix
from fedecider.models.client_model import ClientModel

PREFIX = "local"
"""Of the tensors that a client keeps of its own training."""


def own_start(models: ClientModels) -> Tree:
    """Per client ``local.now.*`` the adapters as they were trained last, ``local.best.*`` those of the round that ranks
    the own validation items best, ``local.score`` () its ndcg@10, -1 before the first, ``local.round`` () its number,
    ``local.trained`` () the last round that it has had."""
    start_K = stack_trees([models.start] * models.num_clients)
    notes = {
        "score": torch.full((models.num_clients,), -1.0, dtype=torch.float64),
        "round": torch.zeros(models.num_clients, dtype=torch.int64),
        "trained": torch.zeros(models.num_clients, dtype=torch.int64),
    }
    return with_prefix({**with_prefix(start_K, "now"), **with_prefix(start_K, "best"), **notes}, PREFIX)


def train_alone(models: ClientModels, last_round: int, own: Tree, client: int) -> tuple[Tree, dict[str, Any]]:
    """The rounds up to ``last_round`` that ``client`` has not had, one where it is never away; none any more after
    ``models.patience`` rounds without a gain of its own -> its new row, the log of the last one.

    ``own``: its row of `own_start`. What is not finite is forgotten. Without ``user_privacy``: what nobody is sent
    needs no noise.
    """
    models = models._replace(training=replace(models.training, user_privacy=NOT_HIDDEN))
    log: dict[str, Any] = {"loss": None, "score": None}
    row = without_prefix(own, PREFIX)
    while goes_on(models, last_round, with_prefix(row, PREFIX)):
        round = int(row["trained"]) + 1
        trained = train_locally(models, client, round, without_prefix(row, "now"))
        row, log = {**row, "trained": torch.tensor(round)}, {**trained.log, "score": None}
        if trained.finite:
            log["score"] = score = mean_metrics(models.model(client, trained.adapters).positions("valid"))["ndcg@10"]
            row = {**row, **with_prefix(trained.pair, "now")}
            if score > float(row["score"]):
                notes = {"score": torch.tensor(score, dtype=torch.float64), "round": torch.tensor(round)}
                row = {**row, **with_prefix(trained.pair, "best"), **notes}
    return with_prefix({**row, "trained": torch.tensor(last_round)}, PREFIX), log


def goes_on(models: ClientModels, last_round: int, own: Tree) -> bool:
    """Whether a client has not had all rounds up to ``last_round`` from which it may gain."""
    trained, best = (int(own[f"{PREFIX}.{name}"]) for name in ("trained", "round"))
    return trained < last_round and not 0 < models.patience <= trained - best


def best_model(models: ClientModels, own: Tree, client: int) -> ClientModel:
    """What ``client`` has trained alone, of the round that its validation items like best.

    ``own``: its row after the last round, since the best round of a method need not be that of a client alone.
    """
    return models.model(client, without_prefix(own, f"{PREFIX}.best"))


def client_model(
    models: ClientModels, config: Any, variant: str, download: Download, own: Tree, client: int
) -> ClientModel:
    """`best_model` of a method in which nobody exchanges a model."""
    return best_model(models, own, client)


def local(models: ClientModels, config: LocalConfig, name: str = "local") -> FederatedMethod:
    """Every client trains its own adapters for as many epochs as the federated methods do; no round sends anything."""

    def train(round: int, download: Download, own: Tree, client: int) -> Update:
        return ({}, *train_alone(models, round, own, client))

    return FederatedMethod(
        name,
        lambda: ({}, own_start(models)),
        lambda round, server, clients: Download({}),
        client_updates(models, train),
        lambda round, server, uploads: {},
        client_positions(partial(client_model, models, config)),
        (name,),
        upload_like=lambda round, server: {},
    )


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """Nothing is sent in a round."""
    return 0, 0


METHOD = Method(LocalConfig, local, client_model, scalars, takes_mean=False)
