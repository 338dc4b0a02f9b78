"""CoLR, one user at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.colr import ColrConfig, random_basis
from embedding_fr.testing.loop import Reference, User, parameters
from fedecider.federation.method import Tree


def colr(federation: Federation, training: EmbeddingTraining, config: ColrConfig) -> Reference:
    """Score ``p_u . (Q_i + A_i B)``; A from 0 is uploaded with the items that it was trained on, p_u stays."""
    size = training.embedding_size

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        basis_KD = random_basis(federation.seed, user.round, config.rank, size)
        theta = parameters({**own, "factor": torch.zeros(federation.num_items, config.rank)})
        touched_I = torch.zeros(federation.num_items)
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                row_BD = received["item_table"][item_B] + theta["factor"][item_B] @ basis_KD
                loss_B = binary_cross_entropy_with_logits(row_BD @ theta["user"], label_B, reduction="none")
                norm_B = theta["user"].square().sum() + row_BD.square().sum(1)
                loss = (loss_B + training.weight_decay / 2 * norm_B).sum()
                factor_IK, user_D = torch.autograd.grad(loss, (theta["factor"], theta["user"]))
                count_I = torch.bincount(item_B, minlength=federation.num_items).clamp(min=1)
                with torch.no_grad():
                    shrink = math.sqrt(config.rank / size)
                    theta["factor"] -= training.item_rate * shrink * factor_IK / count_I[:, None]
                    theta["user"] -= training.learning_rate * user_D / len(item_B)
                touched_I[item_B] = 1.0
        return {"factor": theta["factor"], "touched": touched_I}, {"user": theta["user"]}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        factor_IK = torch.stack([upload["factor"] for upload in uploads]).sum(0)
        by_I = torch.full((federation.num_items,), float(len(uploads)))
        if config.mean == "touchers":
            by_I = torch.stack([upload["touched"] for upload in uploads]).sum(0).clamp(min=1.0)
        basis_KD = random_basis(federation.seed, round, config.rank, size)
        return {"item_table": server["item_table"] + factor_IK / by_I[:, None] @ basis_KD}

    return Reference(client, server)
