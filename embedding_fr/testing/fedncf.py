"""FedNCF, one user at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.fedncf import FedncfConfig
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters, step
from fedecider.federation.method import Tree


def fedncf(federation: Federation, training: EmbeddingTraining, config: FedncfConfig) -> Reference:
    """Score ``mlp([p_u, q_i])``; item table and network are averaged, the user embedding stays."""

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**received, **own})
        table = theta["item_table"]
        others = [tensor for name, tensor in theta.items() if name != "item_table"]
        groups = [{"params": others, "lr": training.learning_rate}, {"params": [table], "lr": training.item_rate}]
        optimiser = torch.optim.Adam(groups, weight_decay=training.weight_decay)
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                step(optimiser, bce(ncf_scores(theta, theta["user"], table[item_B]), label_B))
        return {name: theta[name] for name in received}, {"user": theta["user"]}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        return mean_of(server, uploads, weights)

    return Reference(client, server)


def ncf_scores(theta: Tree, user_D: Tensor, item_BD: Tensor) -> Tensor:
    """(B,) logits of the network on every pair."""
    hidden = torch.cat([user_D.expand(len(item_BD), -1), item_BD], dim=1)
    num_layers = sum(name.endswith("weight") for name in theta)
    for layer in range(num_layers):
        hidden = hidden @ theta[f"scorer.{layer}.weight"] + theta[f"scorer.{layer}.bias"]
        if layer < num_layers - 1:
            hidden = hidden.clamp(min=0.0)
    return hidden[:, 0]
