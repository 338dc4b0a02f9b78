"""Every client trained alone beside a method: what each would have after as many rounds of as many epochs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedecider.evaluation.metrics import mean_metrics
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import UserPrivacy
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import stack_trees, with_prefix, without_prefix
from fedecider.models.client_model import ClientModel

PREFIX = "local"
"""Of the tensors that a client keeps of its own training."""


def beside(method: FederatedMethod, models: ClientModels) -> FederatedMethod:
    """``method``, each of whose clients also trains adapters of its own in the rounds in which it takes part.

    What ``method`` does is the same to the last bit; nothing of the own training is sent. State, per client:
    ``local.now.*`` the adapters as they were trained last, ``local.best.*`` those of the round that ranks the own
    validation items best, ``local.score`` () its ndcg@10, -1 before the first, ``local.round`` () its number. Logs
    have ``cpu_s``, seconds of CPU of what ``method`` did for the client, and ``local``: ``loss``, ``score``, ``cpu_s``.
    Trained is without ``user_privacy``: what nobody is sent needs no noise.
    """
    start = models.start
    alone = models._replace(training=replace(models.training, user_privacy=UserPrivacy()))

    def init() -> tuple[Tree, Tree]:
        server, local = method.init()
        start_K = stack_trees([start] * models.num_clients)
        notes = {
            "score": torch.full((models.num_clients,), -1.0, dtype=torch.float64),
            "round": torch.zeros(models.num_clients, dtype=torch.int64),
        }
        own = {**with_prefix(start_K, "now"), **with_prefix(start_K, "best"), **notes}
        return server, {**local, **with_prefix(own, PREFIX)}

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        started = time.process_time()
        upload, rows, logs = method.client_update(round, download, _of_method(own), block)
        cpu_s = (time.process_time() - started) / len(upload.clients)
        kept, clients = without_prefix(own, PREFIX), block.clients.tolist()
        trained = [
            _train_alone(alone, round, take_row(kept, clients.index(client)), client)
            for client in upload.clients.tolist()
        ]
        own_rows = with_prefix(stack_trees([row for row, _ in trained]), PREFIX)
        both = [{**log, "cpu_s": cpu_s, PREFIX: mine} for log, (_, mine) in zip(logs, trained, strict=True)]
        return upload, {**rows, **own_rows}, both

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        return method.positions(variant, download, _of_method(own), block, split)

    return method._replace(init=init, client_update=client_update, positions=positions)


def has_local(local: Mapping[str, Tensor]) -> bool:
    """Whether clients whose state this is have trained alone too (`beside`)."""
    return f"{PREFIX}.score" in local


def best_model(models: ClientModels, own: Tree, client: int) -> ClientModel:
    """What ``client`` has trained alone, of the round that its validation items like best.

    ``own``: its row after the last round, since the best round of a method need not be that of a client alone.
    """
    best = {name: tensor for name, tensor in own.items() if name.startswith(f"{PREFIX}.best.")}
    return models.model(client, without_prefix(best, f"{PREFIX}.best"))


def best_score(own: Tree) -> float:
    """Validation ndcg@10 of `best_model`; -1 where no round gave anything."""
    return float(own[f"{PREFIX}.score"])


def _of_method(own: Tree) -> Tree:
    return {name: tensor for name, tensor in own.items() if not name.startswith(f"{PREFIX}.")}


def _train_alone(models: ClientModels, round: int, own: Tree, client: int) -> tuple[Tree, dict[str, Any]]:
    """One more round of a client alone -> its new row, its log."""
    started = time.process_time()
    trained = train_locally(models, client, round, without_prefix(own, "now"))
    log: dict[str, Any] = {"loss": trained.log["loss"], "score": None}
    new = own
    if trained.finite:
        log["score"] = score = mean_metrics(models.model(client, trained.adapters).positions("valid"))["ndcg@10"]
        new = {**own, **with_prefix(trained.pair, "now")}
        if score > float(own["score"]):
            notes = {"score": torch.tensor(score, dtype=torch.float64), "round": torch.tensor(round)}
            new = {**new, **with_prefix(trained.pair, "best"), **notes}
    return new, {**log, "cpu_s": time.process_time() - started}
