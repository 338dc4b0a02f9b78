"""FedMF and FCF, one user at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.fedmf import FedmfConfig
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters, step
from fedecider.federation.method import Tree


def fedmf(federation: Federation, training: EmbeddingTraining, config: FedmfConfig) -> Reference:
    """Score ``p_u . q_i``; the table is averaged, the user embedding stays."""

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**received, **own})
        optimiser = torch.optim.Adam(
            [
                {"params": [theta["user"]], "lr": training.learning_rate},
                {"params": [theta["item_table"]], "lr": training.item_rate},
            ],
            weight_decay=training.weight_decay,
        )
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                step(optimiser, bce(theta["item_table"][item_B] @ theta["user"], label_B))
        return {"item_table": theta["item_table"]}, {"user": theta["user"]}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        return mean_of(server, uploads, weights if config.weighting == "examples" else [1.0] * len(weights))

    return Reference(client, server)
