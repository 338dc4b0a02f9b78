"""pFedGraph, one user at a time: weights pair by pair, the likeness to the mix by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.pfedgraph import PfedgraphConfig
from embedding_fr.tables import normal
from embedding_fr.testing.fedem import nearest_on_simplex
from embedding_fr.testing.loop import Reference, User, bce, parameters, step
from fedecider.federation.method import Tree


def pfedgraph(federation: Federation, training: EmbeddingTraining, config: PfedgraphConfig) -> Reference:
    """Score ``p_u . q_i``; every client has a table of its own, mixed from all of the cohort's."""
    start_ID = normal(federation, training, "item_table", federation.num_items)
    sign = 1.0 if config.variant == "code" else -1.0

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({"user": own["user"], "item_table": received["item_table"]})
        optimiser = torch.optim.Adam(
            [
                {"params": [theta["user"]], "lr": training.learning_rate},
                {"params": [theta["item_table"]], "lr": training.item_rate},
            ],
            weight_decay=training.weight_decay,
        )
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                loss = bce(theta["item_table"][item_B] @ theta["user"], label_B)
                if "direction" in received:
                    alike = (received["direction"] * theta["item_table"]).sum() / theta["item_table"].norm()
                    loss = loss + sign * config.likeness_weight * alike
                step(optimiser, loss)
        return {"item_table": theta["item_table"]}, {"user": theta["user"]}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        tables = [upload["item_table"] for upload in uploads]
        shares = [weight / sum(weights) for weight in weights]
        new = {name: tensor.clone() for name, tensor in server.items()}
        new["is_personal"][list(clients)] = True
        new["item_table"][~new["is_personal"]] = mix(shares, tables)
        for client, own in zip(clients, tables, strict=True):
            weight_V = nearest_on_simplex(goals(own - start_ID, [table - start_ID for table in tables], shares, config))
            new["item_table"][client] = mix(weight_V, tables)
            if "direction" in new:
                new["direction"][client] = mix(weight_V, [table / table.norm() for table in tables])
        return new

    def download(server: Tree, client: int) -> Tree:
        return {name: server[name][client] for name in ("item_table", "direction") if name in server}

    return Reference(client, server, download)


def goals(own: Tensor, others: Sequence[Tensor], shares: Sequence[float], config: PfedgraphConfig) -> list[float]:
    """``p_v + c_v / (2 alpha)``, of which the nearest point on the simplex is taken."""
    found = []
    for share, other in zip(shares, others, strict=True):
        cosine = float(cosine_similarity(own.flatten(), other.flatten(), dim=0))
        found.append(share + (1.0 if cosine > config.same_above else cosine) / (2.0 * config.size_weight))
    return found


def mix(weights: Sequence[float], tables: Sequence[Tensor]) -> Tensor:
    """``sum_v w_v x_v``."""
    return torch.stack([weight * table for weight, table in zip(weights, tables, strict=True)]).sum(0)
