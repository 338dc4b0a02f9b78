"""Local training without any communication: the row every federated method has to beat, by itself or beside one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedecider.evaluation.metrics import mean_metrics
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.methods.config import LocalConfig, UserPrivacy
from fedecider.methods.entries import Method
from fedecider.methods.local_training import train_locally
from fedecider.methods.recommender import ClientModels, client_positions
from fedecider.models.adapters import (
    Shapes,
    adapter_shapes,
    initial_adapters,
    load_plain,
    stack_trees,
    with_prefix,
    without_prefix,
)


def local(recommender: ClientModels, config: LocalConfig) -> FederatedMethod:
    """Every client trains its own adapters for as many epochs as the federated methods do; nothing is sent."""
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)

    def init() -> tuple[Tree, Tree]:
        return {}, with_prefix(stack_trees([start] * recommender.num_clients), "own")

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download({})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        rows, logs = [], []
        for row, client in enumerate(block.clients.tolist()):
            before = without_prefix(take_row(own, row), "own")
            load_plain(recommender.model, before)
            trained = train_locally(recommender, client, round)
            rows.append(with_prefix(trained.adapters if trained.log["finite"] else before, "own"))
            logs.append(trained.log)
        return Upload(block.clients, torch.ones(len(rows)), {}), stack_trees(rows), logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return {}

    positions = client_positions(recommender, partial(load_variant, recommender, config))
    return FederatedMethod(
        "local",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        ("local",),
        upload_like=lambda round, server: {},
    )


def load_variant(
    recommender: ClientModels, config: LocalConfig, variant: str, download: Download, own: Tree, client: int
) -> None:
    """Load the client's own adapters."""
    assert variant == "local", variant
    load_plain(recommender.model, without_prefix(own, "own"))


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """Nothing is sent."""
    return 0, 0


# The same beside another method: what each of its clients would have alone, after as many rounds of as many epochs.

PREFIX = "local"
"""Of the tensors that a client keeps of its own training."""


def beside(method: FederatedMethod, recommender: ClientModels) -> FederatedMethod:
    """``method``, each of whose clients also trains adapters of its own in the rounds in which it takes part.

    What ``method`` does is the same to the last bit; nothing of the own training is sent. State, per client:
    ``local.now.*`` the adapters as they were trained last, ``local.best.*`` those of the round that ranks the own
    validation items best, ``local.score`` () its ndcg@10, -1 before the first, ``local.round`` () its number. Logs
    have ``cpu_s``, seconds of CPU of what ``method`` did for the client, and ``local``: ``loss``, ``score``, ``cpu_s``.
    Trained is without ``user_privacy``: what nobody is sent needs no noise.
    """
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)
    training = replace(recommender.training, user_privacy=UserPrivacy())
    alone = recommender._replace(training=training)

    def init() -> tuple[Tree, Tree]:
        server, local = method.init()
        start_K = stack_trees([start] * recommender.num_clients)
        notes = {
            "score": torch.full((recommender.num_clients,), -1.0, dtype=torch.float64),
            "round": torch.zeros(recommender.num_clients, dtype=torch.int64),
        }
        own = {**with_prefix(start_K, "now"), **with_prefix(start_K, "best"), **notes}
        return server, {**local, **with_prefix(own, PREFIX)}

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        started = time.process_time()
        upload, rows, logs = method.client_update(round, download, _of_method(own), block)
        cpu_s = (time.process_time() - started) / len(upload.clients)
        kept, asked = without_prefix(own, PREFIX), block.clients.tolist()
        found = [
            _train_alone(alone, round, take_row(kept, asked.index(client)), client)
            for client in upload.clients.tolist()
        ]
        own_rows = with_prefix(stack_trees([row for row, _ in found]), PREFIX)
        told = [{**log, "cpu_s": cpu_s, PREFIX: mine} for log, (_, mine) in zip(logs, found, strict=True)]
        return upload, {**rows, **own_rows}, told

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        return method.positions(variant, download, _of_method(own), block, split)

    return method._replace(init=init, client_update=client_update, positions=positions)


def has_local(local: Mapping[str, Tensor]) -> bool:
    """Whether clients whose state this is have trained alone too (`beside`)."""
    return f"{PREFIX}.score" in local


def load_best(recommender: ClientModels, local: Mapping[str, Tensor], client: int) -> None:
    """Load what ``client`` has trained alone, of the round that its validation items like best.

    ``local``: the state after the last round, since the best round of a method need not be that of a client alone.
    """
    best = {name: tensor for name, tensor in local.items() if name.startswith(f"{PREFIX}.best.")}
    load_plain(recommender.model, without_prefix(take_row(best, client), f"{PREFIX}.best"))


def best_score(local: Mapping[str, Tensor], client: int) -> float:
    """Validation ndcg@10 of what `load_best` loads; -1 where no round gave anything."""
    return float(local[f"{PREFIX}.score"][client])


def _of_method(own: Tree) -> Tree:
    return {name: tensor for name, tensor in own.items() if not name.startswith(f"{PREFIX}.")}


def _train_alone(recommender: ClientModels, round: int, own: Tree, client: int) -> tuple[Tree, dict[str, Any]]:
    """One more round of a client alone -> its new row, its log."""
    started = time.process_time()
    load_plain(recommender.model, without_prefix(own, "now"))
    trained = train_locally(recommender, client, round)
    log: dict[str, Any] = {"loss": trained.log["loss"], "score": None}
    new = own
    if trained.log["finite"]:
        log["score"] = score = mean_metrics(recommender.positions(client, "valid"))["ndcg@10"]
        new = {**own, **with_prefix(trained.adapters, "now")}
        if score > float(own["score"]):
            notes = {"score": torch.tensor(score, dtype=torch.float64), "round": torch.tensor(round)}
            new = {**new, **with_prefix(trained.adapters, "best"), **notes}
    return new, {**log, "cpu_s": time.process_time() - started}


METHOD = Method(LocalConfig, local, load_variant, scalars, takes_mean=False)
