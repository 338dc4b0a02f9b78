"""PerFedRec, one user and one pair at a time, with the matrix of the user's graph; k-means is that of the method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.local_training import Examples, shuffled
from embedding_fr.methods.perfedrec import PerfedrecConfig
from embedding_fr.similarity import k_means
from embedding_fr.testing.loop import Reference, User, parameters, step
from fedecider.federation.method import Tree
from fedecider.federation.streams import stream


def perfedrec(federation: Federation, training: EmbeddingTraining, config: PerfedrecConfig) -> Reference:
    """Score ``p_u' . q_i'`` on the user's own graph; a user starts from the table of its cluster."""

    def download(server: Tree, client: int) -> Tree:
        table = server["cluster_table"][server["cluster"][client]]
        return {"item_table": table, "user": server["user"][client]}

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters(received)
        rates = {"user": training.learning_rate, "item_table": training.item_rate}
        optimiser = torch.optim.Adam(
            [{"params": [tensor], "lr": rates[name]} for name, tensor in theta.items()],
            weight_decay=training.weight_decay,
        )
        items = user.examples.item_CB[0].tolist()
        mine = items[: user.num_train]
        pairs = [(mine[j % user.num_train], item) for j, item in enumerate(items[user.num_train :])]
        count_1 = torch.tensor([len(pairs)])
        numbers = Examples(torch.arange(len(pairs))[None], count_1, count_1, user.examples.key_C)
        for epoch in range(training.local_epochs):
            for chosen in shuffled(numbers, epoch)[0].split(max(1, training.batch_size // 2)):
                losses = []
                for positive, negative in (pairs[number] for number in chosen.tolist()):
                    graph = [item for item in mine if item != positive or config.target_edge == "in"]
                    user_D, items_ID = propagated(theta["user"], theta["item_table"], graph, config)
                    losses.append(-torch.log(torch.sigmoid(user_D @ (items_ID[positive] - items_ID[negative]))))
                step(optimiser, torch.stack(losses).mean())
        return theta, {"personal_table": theta["item_table"]}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        users, heard = server["user"].clone(), torch.zeros(federation.num_clients, dtype=torch.bool)
        for client, upload in zip(clients, uploads, strict=True):
            users[client], heard[client] = upload["user"], True
        found = k_means(users, config.num_clusters, stream(federation.seed, "clusters", round)).label_N
        member = (server["cluster"] if config.variant == "code" else found).tolist()
        common = torch.stack([upload["item_table"] for upload in uploads]).mean(0)
        tables = []
        for cluster in range(len(server["cluster_table"])):
            its_own = [
                upload["item_table"]
                for client, upload in zip(clients, uploads, strict=True)
                if member[client] == cluster
            ]
            tables.append(torch.stack(its_own).mean(0) if its_own else common)
        return {
            "global_table": common,
            "cluster_table": torch.stack(tables),
            "user": users,
            "cluster": found,
            "heard": heard,
        }

    return Reference(client, server, download)


def propagated(user_D: Tensor, table_ID: Tensor, mine: Sequence[int], config: PerfedrecConfig) -> tuple[Tensor, Tensor]:
    """The user and all items after the layers; node 0 of the graph is the user, node 1 + j its j-th item."""
    item_T = torch.tensor(mine, dtype=torch.int64)
    first = torch.cat([user_D[None], table_ID[item_T]])
    adjacency = torch.eye(len(first))
    adjacency[0, 1:] = adjacency[1:, 0] = 1.0
    adjacency = adjacency / adjacency.sum(1, keepdim=True)
    layers = [first]
    for _ in range(config.num_layers):
        layers.append(adjacency @ (first if config.variant == "code" else layers[-1]))
    mean = torch.stack(layers).mean(0)
    return mean[0], table_ID.index_copy(0, item_T, mean[1:])
