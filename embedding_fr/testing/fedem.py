"""FedEM, one user at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.merging import Merging
from embedding_fr.methods.fedem import FedemConfig
from embedding_fr.testing import fedmf
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters, step
from fedecider.federation.method import Tree
from fedecider.federation.streams import stream


def fedem(federation: Federation, training: EmbeddingTraining, config: FedemConfig) -> Reference:
    """The ablations of Table 2: how a client merges, and how the server aggregates."""
    if config.variant == "code":
        return public_code(federation, training, config)
    merging = config.local_merging
    client = fedmf.fedmf(federation, training, fedmf.FedmfConfig()).client

    def merging_client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        assert merging is not None
        last_ID, sent_ID = own["last_table"], received["item_table"]
        adapter = parameters({"adapter": own["adapter"]} if merging.learns else {})
        theta = parameters({"user": own["user"], "item_table": last_ID})
        adapter_rate = merging.adapter_learning_rate or training.learning_rate
        adapter_optimiser = torch.optim.Adam(adapter.values() or [torch.zeros(1)], adapter_rate)
        optimiser = torch.optim.Adam(
            [
                {"params": [theta["user"]], "lr": training.learning_rate},
                {"params": [theta["item_table"]], "lr": training.item_rate},
            ]
        )
        trained_ID = torch.zeros_like(last_ID)
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch) if merging.learns else ():
                merged_ID = merge(merging, adapter, last_ID, sent_ID) + trained_ID
                step(adapter_optimiser, bce(merged_ID[item_B] @ theta["user"].detach(), label_B))
            start_ID = merge(merging, adapter, last_ID, sent_ID).detach()
            theta["item_table"].data = start_ID + trained_ID
            for item_B, label_B in user.batches(epoch):
                step(optimiser, bce(theta["item_table"][item_B] @ theta["user"], label_B))
            trained_ID = theta["item_table"].detach() - start_ID
        return {"item_table": theta["item_table"]}, {
            "user": theta["user"],
            "last_table": theta["item_table"],
            **adapter,
        }

    if config.aggregation == "mean":

        def mean(
            round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
        ) -> Tree:
            return mean_of(server, uploads, weights)

        return Reference(merging_client if merging else client, mean)

    def mix(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        tables = [upload["item_table"] for upload in uploads]
        shares = [weight / sum(weights) for weight in weights]
        personal, ones = server["item_table"].clone(), server["is_personal"].clone()
        ones[list(clients)] = True
        personal[~ones] = sum(share * table for share, table in zip(shares, tables, strict=True))
        for client, own in zip(clients, tables, strict=True):
            weight_V = mix_weights(own, tables, shares, config.similarity_weight)
            personal[client] = sum(w * table for w, table in zip(weight_V, tables, strict=True))
        return {"item_table": personal, "is_personal": ones}

    def download(server: Tree, client: int) -> Tree:
        return {"item_table": server["item_table"][client]}

    return Reference(merging_client if merging else client, mix, download)


def merge(merging: Merging, adapter: Tree, last_ID: Tensor, sent_ID: Tensor) -> Tensor:
    """Equations 9 and 10 on the whole table."""
    if merging.scheme == "SM":
        return last_ID + merging.rho * (sent_ID - last_ID)
    feature_IF = torch.cat([sent_ID - last_ID, last_ID], 1)
    if merging.scheme == "DM":
        feature_IF = feature_IF.mean(0, keepdim=True)
    return last_ID + adapt(adapter["adapter"], merging, feature_IF) * (sent_ID - last_ID)


def adapt(adapter_P: Tensor, merging: Merging, feature_IF: Tensor) -> Tensor:
    """(I, 1) rho from a flat network."""
    hidden, start = feature_IF, 0
    sizes = merging.sizes(feature_IF.shape[1] // 2)
    for layer, (size_in, size_out) in enumerate(pairwise(sizes)):
        hidden = hidden.relu() if layer else hidden
        weight = adapter_P[start : start + size_in * size_out].view(size_in, size_out)
        start += size_in * size_out
        hidden = hidden @ weight + adapter_P[start : start + size_out]
        start += size_out
    return torch.sigmoid(hidden)


def mix_weights(own: Tensor, tables: Sequence[Tensor], shares: Sequence[float], alpha: float) -> list[float]:
    """``(p_v + alpha / (1 + ||Q_u - Q_v||^2)) / (1 + alpha)`` over their sum."""
    alike = [1.0 / (1.0 + float((own - table).square().sum())) for table in tables]
    weight = [(share + alpha * one) / (1.0 + alpha) for share, one in zip(shares, alike, strict=True)]
    return [one / sum(weight) for one in weight]


def public_code(federation: Federation, training: EmbeddingTraining, config: FedemConfig) -> Reference:
    """The other way of the public code: see :mod:`embedding_fr.methods.fedem_code`."""
    merging = config.local_merging
    assert merging is not None
    rates = {"user": training.learning_rate, "item_table": training.item_rate}
    rates["adapter"] = merging.adapter_learning_rate or training.learning_rate

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        sent_ID = received.get("item_table")
        theta = parameters({"user": own["user"], "adapter": own["adapter"], "item_table": own["last_table"]})
        if sent_ID is not None:
            theta["item_table"].data = merge(merging, theta, own["last_table"], sent_ID).detach()
        optimisers = {name: torch.optim.Adam([theta[name]], rate) for name, rate in rates.items()}

        def loss_of(item_B: Tensor, label_B: Tensor) -> Tensor:
            table_ID = theta["item_table"]
            table_ID = table_ID if sent_ID is None else merge(merging, theta, table_ID, sent_ID)
            return bce(table_ID[item_B] @ theta["user"], label_B)

        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                if sent_ID is not None:
                    step(optimisers["adapter"], loss_of(item_B, label_B))
                for optimiser in optimisers.values():
                    optimiser.zero_grad()
                loss_of(item_B, label_B).backward()
                optimisers["user"].step()
                optimisers["item_table"].step()
        table_ID = theta.pop("item_table")
        return {"item_table": table_ID}, {**theta, "last_table": table_ID}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        order = torch.randperm(len(clients), generator=stream(federation.seed, "mixed", round)).tolist()
        few = order[: max(1, int(len(clients) * config.mixed_share))]
        tables = [uploads[place]["item_table"] for place in few]
        shares = [weights[place] / sum(weights[place] for place in few) for place in few]
        lines = [first_component(table) for table in tables]
        personal, has_mix = server["item_table"].clone(), torch.zeros_like(server["is_personal"])
        for place, line in zip(few, lines, strict=True):
            alike = [1.0 / (1.0 + float(torch.dist(line, other))) for other in lines]
            goal = [p + config.similarity_weight * (1.0 if s > 0.9 else s) for p, s in zip(shares, alike, strict=True)]
            weight_V = nearest_on_simplex(goal)
            personal[clients[place]] = sum(w * table for w, table in zip(weight_V, tables, strict=True))
            has_mix[clients[place]] = True
        return {"item_table": personal, "is_personal": has_mix}

    def download(server: Tree, client: int) -> Tree:
        return {"item_table": server["item_table"][client]} if server["is_personal"][client] else {}

    return Reference(client, server, download)


def first_component(table_ID: Tensor) -> Tensor:
    """(I,) coordinates on the right singular vector of the centred table, its largest entry made positive."""
    centred_ID = table_ID - table_ID.mean(0)
    axis_D = torch.linalg.svd(centred_ID, full_matrices=False).Vh[0]
    return centred_ID @ (axis_D * axis_D[axis_D.abs().argmax()].sign())


def nearest_on_simplex(goal: Sequence[float]) -> list[float]:
    """``max(v - t, 0)`` with the t, found by bisection, that makes the sum 1."""
    low, high = min(goal) - 1.0, max(goal)
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if sum(max(v - middle, 0.0) for v in goal) > 1.0 else (low, middle)
    return [max(v - low, 0.0) for v in goal]
