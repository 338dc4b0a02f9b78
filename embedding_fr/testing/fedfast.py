"""FedFast, one user and one item at a time; k-means is that of the method."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.fedfast import FedfastConfig
from embedding_fr.similarity import k_means
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters, step
from fedecider.federation.method import Tree
from fedecider.federation.streams import stream


def fedfast(federation: Federation, training: EmbeddingTraining, config: FedfastConfig) -> Reference:
    """Score ``w . (p_u * q_i) + b``; the server holds all of it."""

    def download(server: Tree, client: int) -> Tree:
        return {**server, "user": server["user"][client]}

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        names = ("user", "scorer.0.weight", "scorer.0.bias", "item_table")
        theta = parameters({name: received[name] for name in names})
        user_D, weight, bias, table = theta.values()
        optimiser = torch.optim.Adam(
            [
                {"params": [user_D, weight, bias], "lr": training.learning_rate},
                {"params": [table], "lr": training.item_rate},
            ],
            weight_decay=training.weight_decay,
        )
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                logit_B = ((user_D * table[item_B]) @ weight)[:, 0] + bias
                step(optimiser, bce(logit_B, label_B))
        return theta, {}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        mean = mean_of(server, uploads, weights)
        table, users = mean["item_table"], server["user"].clone()
        if config.item_rule == "moved":
            table = torch.stack([item_row(server, uploads, item) for item in range(federation.num_items)])
        for client, upload in zip(clients, uploads, strict=True):
            users[client] = upload["user"]
        generator = stream(federation.seed, "clusters", round)
        cluster = k_means(users, config.num_clusters, generator).label_N
        gamma = config.follow * math.exp(-config.follow_decay * (round - 1))
        for absent in set(range(federation.num_clients)) - set(clients):
            steps = [users[one] - server["user"][one] for one in clients if cluster[one] == cluster[absent]]
            if steps:
                users[absent] += gamma * torch.stack(steps).mean(0)
        scorer = {name: mean[name] for name in ("scorer.0.weight", "scorer.0.bias")}
        return {**scorer, "item_table": table, "user": users, "cluster": cluster}

    return Reference(client, server, download)


def item_row(server: Tree, uploads: Sequence[Tree], item: int) -> Tensor:
    """The row of one item: the clients' rows, weighted by how far they are from where they started."""
    start_D = server["item_table"][item]
    rows = [upload["item_table"][item] for upload in uploads]
    moved = [float((row_D - start_D).abs().sum()) for row_D in rows]
    if sum(moved) == 0.0:
        return start_D
    return torch.stack([weight * row_D for weight, row_D in zip(moved, rows, strict=True)]).sum(0) / sum(moved)
