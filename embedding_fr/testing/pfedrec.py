"""PFedRec, one user at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.pfedrec import PfedrecConfig
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters
from fedecider.federation.method import Tree


def pfedrec(federation: Federation, training: EmbeddingTraining, config: PfedrecConfig) -> Reference:
    """Score ``w_u . q_i + b_u``; the table is averaged, score function and last table stay."""
    item_rate = training.item_rate
    if config.variant == "code":
        item_rate = training.item_learning_rate or training.learning_rate * federation.num_items * 80
    kind = torch.optim.SGD if config.variant == "code" else torch.optim.Adam

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**own, **received})
        table, weight, bias = theta["item_table"], theta["scorer.0.weight"], theta["scorer.0.bias"]
        scorer_optimiser = kind([weight, bias], lr=training.learning_rate, weight_decay=training.weight_decay)
        table_optimiser = kind([table], lr=item_rate, weight_decay=training.weight_decay)
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                for optimiser in (scorer_optimiser, table_optimiser):
                    for parameter in (weight, bias, table):
                        parameter.grad = None
                    bce((table[item_B] @ weight)[:, 0] + bias, label_B).backward()
                    optimiser.step()
        return {"item_table": table}, {"scorer.0.weight": weight, "scorer.0.bias": bias, "personal_table": table}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        return mean_of(server, uploads, [1.0] * len(uploads))

    return Reference(client, server)
