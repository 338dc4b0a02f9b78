"""CoFedRec, one user at a time, and the contrastive term one item at a time; k-means is that of the method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.cofedrec import CofedrecConfig
from embedding_fr.similarity import k_means
from embedding_fr.testing.loop import Reference, User, bce, parameters
from fedecider.federation.method import Tree
from fedecider.federation.streams import stream


def cofedrec(federation: Federation, training: EmbeddingTraining, config: CofedrecConfig) -> Reference:
    """Score ``w_u . q_i + b_u``; a group of users goes on with the mean of its tables, everybody else with the own."""
    item_rate = training.item_learning_rate or training.learning_rate * federation.num_items * 80
    seed, num_clients = federation.seed, federation.num_clients

    def download(server: Tree, client: int) -> Tree:
        return {"item_table": server["item_table"][client], "category": server["category"]}

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**own, "item_table": received["item_table"]})
        table, weight, bias = theta["item_table"], theta["scorer.0.weight"], theta["scorer.0.bias"]
        scorer_sgd = torch.optim.SGD([weight, bias], lr=training.learning_rate, weight_decay=training.weight_decay)
        table_sgd = torch.optim.SGD([table], lr=item_rate, weight_decay=training.weight_decay)
        order = torch.randperm(federation.num_items, generator=stream(seed, "anchors", user.round)).tolist()
        anchors = order[: config.num_anchors or None]
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                for optimiser in (scorer_sgd, table_sgd):
                    for parameter in (weight, bias, table):
                        parameter.grad = None
                    loss = bce((table[item_B] @ weight)[:, 0] + bias, label_B)
                    (loss + config.contrast_weight * contrast(table, received["category"], anchors, config)).backward()
                    optimiser.step()
        return {"item_table": table}, {"scorer.0.weight": weight, "scorer.0.bias": bias, "personal_table": table}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        own = {client: upload["item_table"] for client, upload in zip(clients, uploads, strict=True)}
        mean = torch.stack(list(own.values())).mean(0)
        category = k_means(mean, config.num_categories, stream(seed, "categories", round)).label_N
        order = torch.randperm(num_clients, generator=stream(seed, "core", round)).tolist()
        drawn = [client for client in order if client in own]
        numbers = sorted(set(category.tolist()))
        number = numbers[int(torch.randint(len(numbers), (1,), generator=stream(seed, "category", round)))]
        chosen = [item for item in range(federation.num_items) if int(category[item]) == number]
        group = group_of(own, drawn, chosen, config)
        tables = server["item_table"].clone()
        for client, table in own.items():
            tables[client] = torch.stack([own[one] for one in group]).mean(0) if client in group else table
        return {"item_table": tables, "category": category.int()}

    return Reference(client, server, download)


def contrast(table: Tensor, category: Tensor, anchors: Sequence[int], config: CofedrecConfig) -> Tensor:
    """The mean over the anchors of what each one adds."""
    total = table.sum() * 0.0
    for item in anchors:
        others = [one for one in anchors if one != item]
        same = [one for one in others if category[one] == category[item] and category[item] >= 0]
        if not same:
            continue
        near = torch.exp(cosine_similarity(table[item][None], table[others]) / config.temperature)
        ratios = near[[others.index(one) for one in same]] / near.sum()
        if config.contrast == "out":
            total = total - config.temperature / config.base_temperature * ratios.log().mean()
        else:
            total = total - ratios.mean().log()
    return total / len(anchors)


def group_of(
    own: dict[int, Tensor], drawn: Sequence[int], items: Sequence[int], config: CofedrecConfig
) -> Sequence[int]:
    """The clients whose tables are averaged; ``drawn`` is the cohort in random order, the core user first."""
    core = drawn[0]
    if config.group in ("all", "core"):
        return drawn if config.group == "all" else [core]
    alike = {
        client: sum(float(cosine_similarity(own[core][item], table[item], dim=0)) for item in items)
        for client, table in own.items()
    }
    falling = [core, *sorted((one for one in own if one != core), key=lambda one: (-alike[one], one))]
    heights = [alike[one] for one in falling]
    size, farthest = 1, 0.0
    for place, height in enumerate(heights):
        line = heights[0] + place / max(1, len(heights) - 1) * (heights[-1] - heights[0])
        if abs(height - line) > farthest + 1e-9:
            size, farthest = place + 1, abs(height - line)
    return falling[:size] if config.group == "similar" else drawn[:size]
