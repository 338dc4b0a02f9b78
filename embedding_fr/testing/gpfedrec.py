"""GPFedRec, one user at a time: full tables, neighbours found pair by pair."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, mse_loss

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.gpfedrec import GpfedrecConfig
from embedding_fr.testing.fedncf import ncf_scores
from embedding_fr.testing.loop import Reference, User, bce, parameters, step
from fedecider.federation.method import Tree


def gpfedrec(federation: Federation, training: EmbeddingTraining, config: GpfedrecConfig) -> Reference:
    """Score ``mlp([p_u, q_i])``, all of it personal; tables are mixed along the user graph."""
    item_rate = training.item_learning_rate or training.learning_rate * (80 * federation.num_items - 1)
    largest = federation.num_items * training.embedding_size / (2.0 * item_rate)
    graph_weight = min(config.graph_weight, largest)

    def download(server: Tree, client: int) -> Tree:
        return {"item_table": server["item_table"], "neighbourhood": server["graph_table"][client]}

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        scorer = parameters({name: tensor for name, tensor in own.items() if name.startswith("scorer")})
        table, user_D = parameters({"t": received["item_table"], "u": own["user"]}).values()
        groups = [
            {"params": list(scorer.values()), "lr": training.learning_rate},
            {"params": [user_D], "lr": training.learning_rate * 79},
            {"params": [table], "lr": item_rate},
        ]
        optimiser = torch.optim.SGD(groups, weight_decay=training.weight_decay)
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                loss = bce(ncf_scores(scorer, user_D, table[item_B]), label_B)
                step(optimiser, loss + graph_weight * mse_loss(table, received["neighbourhood"]))
        return {"item_table": table}, {**scorer, "user": user_D, "personal_table": table}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        tables = [one["item_table"] for one in uploads]
        for _ in range(config.graph_layers):
            links = neighbours([one["item_table"] for one in uploads], config)
            tables = [torch.stack([tables[v] for v in linked]).mean(0) for linked in links]
        graph_table = server["graph_table"].clone()
        for client, table in zip(clients, tables, strict=True):
            graph_table[client] = table
        return {"item_table": torch.stack(tables).mean(0), "graph_table": graph_table}

    return Reference(client, server, download)


def neighbours(tables: Sequence[Tensor], config: GpfedrecConfig) -> list[list[int]]:
    """For each client, those whose flat tables are like its own."""
    sign = -1.0 if config.variant == "code" else 1.0
    shift = 1.0 if config.variant == "code" else 0.0
    alike = [
        [shift + sign * float(cosine_similarity(one.flatten(), other.flatten(), dim=0)) for other in tables]
        for one in tables
    ]
    mean = sum(map(sum, alike)) / len(tables) ** 2
    links = []
    for client, row in enumerate(alike):
        if config.num_neighbours:
            links.append(sorted(range(len(row)), key=lambda other: -row[other])[: config.num_neighbours])
        else:
            links.append([other for other in range(len(row)) if row[other] > config.threshold * mean] or [client])
    return links
