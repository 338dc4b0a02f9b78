"""Slow, plain per-user loops of every method: read them beside the paper, and hold the batched runtime to them.

FedEASE and FedNear do not train: their tests compare them with the centralised solution in the place of a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity, l1_loss, mse_loss

from embedding_fr.blocks import Federation
from embedding_fr.clusters import k_means
from embedding_fr.config import EmbeddingTraining
from embedding_fr.examples import Examples, shuffled
from embedding_fr.merging import Merging
from embedding_fr.methods.cofedrec import CofedrecConfig
from embedding_fr.methods.colr import ColrConfig, random_basis
from embedding_fr.methods.fedca import FedcaConfig
from embedding_fr.methods.fedcia import FedciaConfig
from embedding_fr.methods.feddae import RAMP, FeddaeConfig, draw_noise
from embedding_fr.methods.fedem import FedemConfig
from embedding_fr.methods.fedfast import FedfastConfig
from embedding_fr.methods.fedmf import FedmfConfig
from embedding_fr.methods.fedncf import FedncfConfig
from embedding_fr.methods.fedrap import FedrapConfig, FedrapRound, fedrap_round
from embedding_fr.methods.fedrecgel import FedrecgelConfig
from embedding_fr.methods.gpfedrec import GpfedrecConfig
from embedding_fr.methods.ifedrec import IfedrecConfig
from embedding_fr.methods.perfedrec import PerfedrecConfig
from embedding_fr.methods.pfedclr import PfedclrConfig
from embedding_fr.methods.pfedgraph import PfedgraphConfig
from embedding_fr.methods.pfedrec import PfedrecConfig
from embedding_fr.tables import normal
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters, step
from fedecider.federation.method import Tree
from fedecider.federation.streams import stream


def by_examples(
    round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
) -> Tree:
    """A server that averages by train items."""
    return mean_of(server, uploads, weights)


def all_alike(
    round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
) -> Tree:
    """A server that averages all clients alike."""
    return mean_of(server, uploads, [1.0] * len(uploads))


# FedMF and FCF, one user at a time.


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


# CoLR, one user at a time.


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


# FedCIA without and with parameters, one user at a time, with the matrices of its equations.


def fedcia(federation: Federation, training: EmbeddingTraining, config: FedciaConfig) -> Reference:
    """``F_k = R~^T R~ + w_p D^-1/2 V V^T D^1/2`` by singular vectors; the mean of all F_k; the same filter at the
    server."""

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        if user.round > 1:
            return {}, {}
        history_1I = torch.zeros(1, federation.num_items)
        history_1I[0, user.train_items[: user.num_train]] = 1.0
        weight = config.low_pass_weight if config.low_pass == "client" else 0.0
        return {"similarity": graph_filter(history_1I, weight, config.num_vectors)}, {}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        if round > 1:
            return server
        mean_II = mean_of(server, uploads, [1.0] * len(uploads))["similarity"]
        if config.low_pass == "server":
            singular_IR = leading_vectors(mean_II, config.num_vectors)
            mean_II = mean_II + config.low_pass_weight * singular_IR @ singular_IR.T
        return {"similarity": mean_II}

    return Reference(client, server)


def graph_filter(history_UI: Tensor, weight: float, num_vectors: int) -> Tensor:
    """(I, I) F_k of a client with U users."""
    user_U, item_I = history_UI.sum(1), history_UI.sum(0)
    down_U, down_I = (torch.where(degree > 0, degree.clamp(min=1) ** -0.5, 0.0) for degree in (user_U, item_I))
    normal_UI = down_U[:, None] * history_UI * down_I
    vector_IR = leading_vectors(normal_UI, num_vectors)
    return normal_UI.T @ normal_UI + weight * (down_I[:, None] * vector_IR) @ (vector_IR.T * item_I.sqrt())


def leading_vectors(matrix: Tensor, num_vectors: int) -> Tensor:
    """(I, R) right singular vectors, at most ``num_vectors``, of the singular values that are not zero."""
    _, value_R, vector_RI = torch.linalg.svd(matrix, full_matrices=False)
    return vector_RI[:num_vectors][value_R[:num_vectors] > 1e-6 * value_R[0]].T


# FedNCF, one user at a time.


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

    return Reference(client, by_examples)


def ncf_scores(theta: Tree, user_D: Tensor, item_BD: Tensor) -> Tensor:
    """(B,) logits of the network on every pair."""
    hidden = torch.cat([user_D.expand(len(item_BD), -1), item_BD], dim=1)
    num_layers = sum(name.endswith("weight") for name in theta)
    for layer in range(num_layers):
        hidden = hidden @ theta[f"scorer.{layer}.weight"] + theta[f"scorer.{layer}.bias"]
        if layer < num_layers - 1:
            hidden = hidden.clamp(min=0.0)
    return hidden[:, 0]


# FedRAP and its variants, one user at a time: the losses as they are written, differentiated by autograd.
# Shape legend: B examples of a batch, I items, D dims.


def fedrap(federation: Federation, training: EmbeddingTraining, config: FedrapConfig) -> Reference:
    """ClientUpdate of Algorithm 1; the server averages C over its clients."""
    loss = paper_loss if config.variant == "paper" else code_loss

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        now = fedrap_round(training, config, user.round)
        rates_of = {"common_table": now.common_rate, "personal_table": now.personal_rate}
        rates_of |= {"user": now.user_rate, "bias": now.user_rate}
        theta = parameters({**received, **own})
        optimiser = torch.optim.SGD(
            [{"params": [theta[name]], "lr": rates_of[name]} for name in theta],
            weight_decay=training.weight_decay,
        )
        rates = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.95 if config.variant == "code" else 1.0)
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                optimiser.zero_grad()
                loss(theta, item_B, label_B, config, now).backward()
                optimiser.step()
                rates.step()
                if config.variant == "paper" and config.sparsity == "l1" and "common_table" in theta:
                    shrink(theta["common_table"], now.common_rate * now.sparsity)
        upload = {name: theta[name] for name in theta if name == "common_table"}
        return upload, {name: theta[name] for name in theta if name in own}

    return Reference(client, all_alike)


def paper_loss(theta: Tree, item_B: Tensor, label_B: Tensor, config: FedrapConfig, now: FedrapRound) -> Tensor:
    """Eq. 3 for one client: sums; the L1 term is left to the soft-threshold (Eq. 13)."""
    total = len(item_B) * bce(predicted(theta, item_B), label_B)
    if "common_table" in theta and "personal_table" in theta:
        square_I = (theta["personal_table"] - theta["common_table"]).square().sum(1)
        total = total - now.distance * (square_I / (1 + square_I) if config.distance == "bounded" else square_I).sum()
    if config.sparsity == "l2" and "common_table" in theta:
        total = total + now.sparsity * theta["common_table"].square().sum()
    return total


def code_loss(theta: Tree, item_B: Tensor, label_B: Tensor, config: FedrapConfig, now: FedrapRound) -> Tensor:
    """The public code's: means, and only the rows of the batch are regularised."""
    total = bce(predicted(theta, item_B), label_B)
    common = theta["common_table"][item_B] if "common_table" in theta else None
    if common is not None and "personal_table" in theta:
        personal = theta["personal_table"][item_B]
        square_B = (personal - common).square().sum(1)
        bounded = (square_B / (1 + square_B)).sum() / common.numel()
        total = total - now.distance * (bounded if config.distance == "bounded" else mse_loss(personal, common))
    if common is not None and config.sparsity != "none":
        measure = mse_loss if config.sparsity == "l2" else l1_loss
        total = total + now.sparsity * measure(common, torch.zeros_like(common))
    return total


def predicted(theta: Tree, item_B: Tensor) -> Tensor:
    """Logits ``<u, C_j + D_j>``, plus the bias where there is one."""
    row_BD = torch.stack([theta[name][item_B] for name in theta if name.endswith("_table")]).sum(0)
    logit_B = row_BD @ theta["user"]
    return logit_B + theta["bias"] if "bias" in theta else logit_B


def clip(common: Tensor, bound: float) -> None:
    """Eq. 4: the gradient times min(1, bound / its Frobenius norm)."""
    assert common.grad is not None
    common.grad *= min(1.0, bound / float(common.grad.norm()))


@torch.no_grad()
def shrink(common: Tensor, theta: float) -> None:
    """S_theta(v) = max(v - theta, 0) - max(-v - theta, 0)."""
    common.copy_((common - theta).clamp(min=0.0) - (-common - theta).clamp(min=0.0))


# PFedCLR and its variants, one user at a time.


def pfedclr(federation: Federation, training: EmbeddingTraining, config: PfedclrConfig) -> Reference:
    """Step 1 trains the table and uploads it, step 2 trains the user embedding and the buffer on the frozen table."""
    beta = training.learning_rate if config.buffer_learning_rate is None else config.buffer_learning_rate
    rates = {"user": training.learning_rate, "item_table": training.item_rate}

    def buffer(theta: Tree) -> Tensor:
        return theta["buffer_a"] @ theta["buffer_b"] if config.variant == "clr" else theta["buffer"]

    def local_epochs(user: User, first: int, theta: Tree, names: Sequence[str], table: Callable[[], Tensor]) -> None:
        groups = [{"params": [theta[name]], "lr": rates.get(name, beta)} for name in names]
        optimiser = torch.optim.Adam(groups, weight_decay=training.weight_decay)
        for epoch in range(first, first + training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                step(optimiser, bce(table()[item_B] @ theta["user"], label_B))

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**received, **own})
        names = [name for name in theta if name not in ("item_table", "personal_table")]
        if config.variant == "af":
            names.append("item_table")
            local_epochs(user, 0, theta, names, lambda: theta["item_table"] + buffer(theta))
        else:
            local_epochs(user, 0, theta, ["item_table"], lambda: theta["item_table"])
            frozen = theta["item_table"].detach()
            local_epochs(user, training.local_epochs, theta, names, lambda: frozen + buffer(theta))
        upload = {"item_table": theta["item_table"]}
        return upload, {**{name: theta[name] for name in own}, "personal_table": theta["item_table"]}

    return Reference(client, by_examples)


# PFedRec, one user at a time.


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

    return Reference(client, all_alike)


# GPFedRec, one user at a time: full tables, neighbours found pair by pair.


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
        tables = [torch.stack([tables[v] for v in linked]).mean(0) for linked in neighbours(tables, config)]
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


# FedEM, one user at a time.


def fedem(federation: Federation, training: EmbeddingTraining, config: FedemConfig) -> Reference:
    """The ablations of Table 2: how a client merges, and how the server aggregates."""
    if config.variant == "code":
        return public_code(federation, training, config)
    merging = config.local_merging
    client = fedmf(federation, training, FedmfConfig()).client

    def merging_client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        assert merging is not None
        last_ID, sent_ID = own["last_table"], received["item_table"]
        adapter = parameters({"adapter": own["adapter"]} if merging.learns else {})
        theta = parameters({"user": own["user"], "item_table": last_ID})
        adapter_rate = merging.adapter_rate(training)
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
    rates["adapter"] = merging.adapter_rate(training)

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


# FedCA, one user at a time: a PCA of every training example's row, angles pair by pair.


def fedca(federation: Federation, training: EmbeddingTraining, config: FedcaConfig) -> Reference:
    """Score ``p_u . q_i`` with a table that is partly the client's own, partly its mix."""
    plain = fedmf(federation, training, FedmfConfig())

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        start_ID = own["last_table"]
        if "item_table" in received:
            start_ID = config.own_share * start_ID + (1.0 - config.own_share) * received["item_table"]
        sent, kept = plain.client(user, {"item_table": start_ID}, {"user": own["user"]})
        table_ID = sent["item_table"].detach()
        item_B = user.examples.item_CB[0, : int(user.examples.count_C[0])]
        sent["principal_directions"] = variance_axes(table_ID[item_B], config.num_components)
        return sent, {**kept, "last_table": table_ID}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        order = torch.randperm(len(clients), generator=stream(federation.seed, "mixed", round)).tolist()
        few = order[: max(1, int(len(clients) * config.mixed_share))]
        lines = [first_component(uploads[place]["item_table"]) for place in few]
        personal, has_mix = server["item_table"].clone(), torch.zeros_like(server["is_personal"])
        for place, line in zip(few, lines, strict=True):
            goal = []
            for other, far in zip(few, lines, strict=True):
                alike = 1.0 / (1.0 + float(torch.dist(line, far)))
                angles = principal_angles(*(uploads[one]["principal_directions"] for one in (place, other)))
                goal.append(
                    weights[other] / sum(weights[one] for one in few)
                    + config.similarity_weight * (1.0 if alike > 0.9 else alike)
                    + config.complement_weight * math.cos(sum(angles) / len(angles))
                )
            personal[clients[place]] = mix(nearest_on_simplex(goal), [uploads[one]["item_table"] for one in few])
            has_mix[clients[place]] = True
        return {"item_table": personal, "is_personal": has_mix}

    def download(server: Tree, client: int) -> Tree:
        return {"item_table": server["item_table"][client]} if server["is_personal"][client] else {}

    return Reference(client, server, download)


def variance_axes(row_BD: Tensor, num_axes: int) -> Tensor:
    """(K, D) right singular vectors of the centred rows, their largest entries made positive; zeros where rank ends."""
    _, size_K, axis_KD = torch.linalg.svd(row_BD - row_BD.mean(0), full_matrices=True)
    found_KD = torch.zeros(num_axes, row_BD.shape[1])
    for place in range(min(num_axes, len(size_K))):
        if size_K[place] > 1e-5 * size_K[0]:
            axis_D = axis_KD[place]
            found_KD[place] = axis_D * axis_D[axis_D.abs().argmax()].sign()
    return found_KD


def principal_angles(one_KD: Tensor, other_KD: Tensor) -> list[float]:
    """From the singular values of the product; the cosine of each is at most 1."""
    return [math.acos(min(1.0, float(value))) for value in torch.linalg.svdvals(one_KD @ other_KD.T)]


# FedDAE, one user at a time, on the whole vector of a user's items; only the draws are those of the method.


def feddae(federation: Federation, training: EmbeddingTraining, config: FeddaeConfig) -> Reference:
    """Scores are the logits of a decoder, whose input is a gated sum of what two encoders make of the user's items."""
    num_items, size = federation.num_items, training.embedding_size

    def climb(theta: Tree, name: str, value: Tensor) -> Tensor:
        for number in range(config.num_layers):
            value = value.tanh() if number else value
            value = value @ theta[f"{name}.{number}.weight"] + theta[f"{name}.{number}.bias"]
        return value

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**received, **own})
        optimiser = torch.optim.Adam(theta.values(), lr=training.learning_rate, weight_decay=training.weight_decay)
        item_T = user.train_items[: user.num_train]
        x = torch.zeros(num_items)
        x[item_T] = 1.0
        for epoch in range(training.local_epochs):
            one = torch.tensor([user.client])
            noise = draw_noise(federation.seed, user.round, epoch, one, len(item_T), size, config.dropout)
            seen = [torch.zeros(num_items) for _ in range(2)]
            for mask, vector in zip((noise.shared_CT[0], noise.own_CT[0]), seen, strict=True):
                vector[item_T] = mask / x.norm()
            hidden = torch.relu(x @ theta["gate.0.weight"] + theta["gate.0.bias"]) * noise.gate_CD[0]
            w = torch.softmax(hidden @ theta["gate.1.weight"] + theta["gate.1.bias"], 0)
            one_mu, one_log = climb(theta, "encoder", seen[0]).split(size)
            two_mu, two_log = climb(theta, "own_encoder", seen[1]).split(size)
            z = w[0] * (one_mu + torch.exp(one_log / 2) * noise.shared_CD[0])
            z = z + w[1] * (two_mu + torch.exp(two_log / 2) * noise.own_CD[0])
            mu, variance = w[0] * one_mu + w[1] * two_mu, w[0] ** 2 * one_log.exp() + w[1] ** 2 * two_log.exp()
            likelihood = torch.log_softmax(climb(theta, "decoder", z), 0) @ x
            standard = torch.distributions.Normal(torch.zeros(size), torch.ones(size))
            divergence = torch.distributions.kl_divergence(torch.distributions.Normal(mu, variance.sqrt()), standard)
            beta = config.kl_weight * math.tanh((user.round - 1) / RAMP)
            step(optimiser, beta * divergence.sum() - likelihood)
        return {name: theta[name] for name in received}, {name: theta[name] for name in own}

    return Reference(client, all_alike)


# IFedRec, one user at a time: whole tables, losses as they are written, one optimiser of torch at the server.


def ifedrec(federation: Federation, training: EmbeddingTraining, config: IfedrecConfig) -> Reference:
    """Score ``w_u . q_i + b_u`` or ``mlp([p_u, q_i])``, all of it personal; the table is averaged, and a network from
    attributes learns it."""
    assert federation.attribute_IA is not None
    raw_IA, linear = federation.attribute_IA.to(torch.get_default_dtype()), config.backbone == "pfedrec"
    attribute_IA = raw_IA * (raw_IA.numel() ** 0.5 / raw_IA.norm())
    item_rate = training.item_learning_rate or training.learning_rate * (80 * federation.num_items - (not linear))
    largest = federation.num_items * training.embedding_size / (2.0 * item_rate)
    at_server: list[tuple[Tree, torch.optim.Adam]] = []

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**own, "item_table": received["item_table"]})
        table = theta["item_table"]

        def loss(item_B: Tensor, label_B: Tensor) -> Tensor:
            scorer = {name: tensor for name, tensor in theta.items() if name.startswith("scorer")}
            if linear:
                logit_B = (table[item_B] @ theta["scorer.0.weight"])[:, 0] + theta["scorer.0.bias"]
            else:
                logit_B = ncf_scores(scorer, theta["user"], table[item_B])
            pull = min(config.alignment_weight, largest) * mse_loss(table, received["attribute_table"])
            return bce(logit_B, label_B) + pull

        rates = {"user": training.learning_rate * 79, "item_table": item_rate}
        groups = [{"params": [one], "lr": rates.get(name, training.learning_rate)} for name, one in theta.items()]
        in_turn = [groups[:-1], groups[-1:]] if linear else [groups]
        optimisers = [torch.optim.SGD(some, weight_decay=training.weight_decay) for some in in_turn]
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                for optimiser in optimisers:
                    for tensor in theta.values():
                        tensor.grad = None
                    step(optimiser, loss(item_B, label_B))
        return {"item_table": table}, {name: theta[name] for name in own}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        table_ID = mean_of(server, uploads, [1.0] * len(uploads))["item_table"]
        if not at_server:
            names = [name for name in server if name.startswith("network") and name.endswith(("weight", "bias"))]
            theta = parameters({name: server[name] for name in names})
            at_server.append((theta, torch.optim.Adam(theta.values(), lr=config.server_learning_rate)))
        theta, optimiser = at_server[0]

        def outputs() -> Tensor:
            value, num_layers = attribute_IA, len(theta) // 2
            for layer in range(num_layers):
                value = value @ theta[f"network.{layer}.weight"] + theta[f"network.{layer}.bias"]
                value = value.clamp(min=0.0) if layer < num_layers - 1 else value.tanh()
            return value

        for _ in range(config.server_epochs):
            step(optimiser, mse_loss(outputs(), table_ID))
        unit = server["attribute_unit"]
        after = {"attribute_unit": unit, "item_table": table_ID, "attribute_table": outputs().detach()}
        for name, tensor in theta.items():
            state = optimiser.state[tensor]
            after[name] = tensor.detach().clone()
            after[f"{name}.mean"], after[f"{name}.square"] = state["exp_avg"][None], state["exp_avg_sq"][None]
            after[f"{name}.steps"] = state["step"][None].to(tensor)
        return after

    return Reference(client, server)


# pFedGraph, one user at a time: weights pair by pair.


def pfedgraph(federation: Federation, training: EmbeddingTraining, config: PfedgraphConfig) -> Reference:
    """Score ``p_u . q_i``; every client has a table of its own, mixed from all of the cohort's."""
    start_ID = normal(federation, training, "item_table", federation.num_items)

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
        return new

    def download(server: Tree, client: int) -> Tree:
        return {"item_table": server["item_table"][client]}

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


# FedRecGEL, one user at a time: as in the paper, and as in its public code.


def fedrecgel(federation: Federation, training: EmbeddingTraining, config: FedrecgelConfig) -> Reference:
    """Each side takes its gradient where a step of its radius along its own gradient leads."""
    return _recgel_code(training, config) if config.variant == "code" else _recgel_paper(training, config)


def _recgel_paper(training: EmbeddingTraining, config: FedrecgelConfig) -> Reference:
    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**received, **own})
        rate = {"item_table": training.item_rate}
        groups = [{"params": [theta[name]], "lr": rate.get(name, training.learning_rate)} for name in theta]
        optimiser = torch.optim.Adam(groups, weight_decay=training.weight_decay)
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):

                def loss(theta: Tree, item_B: Tensor = item_B, label_B: Tensor = label_B) -> Tensor:
                    return bce(ncf_scores(theta, theta["user"], theta["item_table"][item_B]), label_B)

                for name, gradient in _sharp_gradients(loss, theta, received, own, config).items():
                    theta[name].grad = gradient
                optimiser.step()
        return {name: theta[name] for name in received}, {name: theta[name] for name in own}

    return Reference(client, by_examples)


def _recgel_code(training: EmbeddingTraining, config: FedrecgelConfig) -> Reference:
    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        private = {name: own[name] for name in ("user", "user_mlp")}
        theta = parameters({**received, **private})

        def loss(theta: Tree) -> Tensor:
            return torch.stack([bce(_neumf(theta, item_B), label_B) for item_B, label_B in user.batches(0)]).sum()

        gradient = _sharp_gradients(loss, theta, received, private, config)
        upload = {f"{name}.gradient": gradient[name] for name in received}
        return upload, _recgel_adam(own, {name: gradient[name] for name in private}, training.learning_rate)

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        mean = mean_of(server, uploads, [1.0] * len(uploads))
        gradient = {name.removesuffix(".gradient"): value for name, value in mean.items()}
        return _recgel_adam(server, gradient, config.server_learning_rate)

    def download(server: Tree, client: int) -> Tree:
        return {name: tensor for name, tensor in server.items() if not name.endswith((".mean", ".square", ".steps"))}

    return Reference(client, server, download)


def _sharp_gradients(
    loss: Callable[[Tree], Tensor], theta: Tree, shared: Tree, private: Tree, config: FedrecgelConfig
) -> Tree:
    """For each side the gradient at the point to which its own plain gradient leads, the other side unmoved."""
    plain = dict(zip(theta, torch.autograd.grad(loss(theta), list(theta.values())), strict=True))
    sharp: Tree = {}
    for side, radius in ((private, config.private_radius), (shared, config.shared_radius)):
        norm = torch.sqrt(torch.stack([(plain[name] ** 2).sum() for name in side]).sum())
        moved = parameters({name: (theta[name] + radius * plain[name] / norm).detach() for name in side})
        sharp.update(zip(side, torch.autograd.grad(loss({**theta, **moved}), list(moved.values())), strict=True))
    return sharp


def _recgel_adam(tree: Tree, gradient: Tree, rate: float) -> Tree:
    """A step of the tensors in ``gradient``, whose moments stand beside them in ``tree``."""
    new = {name: tensor.clone() for name, tensor in tree.items()}
    for name, value in gradient.items():
        steps = new[f"{name}.steps"].add_(1.0)
        mean = new[f"{name}.mean"].mul_(0.9).add_(0.1 * value)
        square = new[f"{name}.square"].mul_(0.999).add_(0.001 * value**2)
        mean, square = mean.view_as(value) / (1.0 - 0.9**steps), square.view_as(value) / (1.0 - 0.999**steps)
        new[name] -= rate * mean / (torch.sqrt(square) + 1e-8)
    return new


def _neumf(theta: Tree, item_B: Tensor) -> Tensor:
    product_BD = theta["item_table"][item_B] * theta["user"]
    user_BF = theta["user_mlp"].expand(len(item_B), -1)
    hidden = torch.cat([user_BF, theta["item_table_mlp"][item_B]], 1)
    for layer in range(3):
        hidden = torch.relu(hidden @ theta[f"tower.{layer}.weight"] + theta[f"tower.{layer}.bias"])
    output = torch.cat([product_BD, hidden], 1) @ theta["output.0.weight"] + theta["output.0.bias"]
    return output[:, 0]


# FedFast, one user and one item at a time; k-means is that of the method.


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
        users = server["user"].clone()
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


# CoFedRec, one user at a time, and the contrastive term one item at a time; k-means is that of the method.


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
        total = total - config.temperature / 0.5 * ratios.log().mean()
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


# PerFedRec, one user and one pair at a time, with the matrix of the user's graph; k-means is that of the method.


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


# Elastic merging as a plug-in, one user at a time: any reference method whose client merges before it trains.


Scores = Callable[[Tree, Tensor, Tensor], Tensor]
"""A client's tensors, rows of the merged table (B, D), item numbers (B,) -> logits (B,)."""


def elastic(
    reference: Reference, scores: Scores, training: EmbeddingTraining, merging: Merging, table: str = "item_table"
) -> Reference:
    """The adapter's epochs come first, then ``reference`` trains on the merged table."""

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        own = dict(own)
        last_ID, sent_ID = own.pop("last_table"), received[table]
        adapter = parameters({"adapter": own.pop("adapter")} if merging.learns else {})
        frozen = {**received, **own}
        if merging.learns:
            optimiser = torch.optim.Adam(adapter.values(), merging.adapter_rate(training))
            for epoch in range(training.local_epochs):
                for item_B, label_B in user.batches(epoch):
                    merged_ID = merge(merging, adapter, last_ID, sent_ID)
                    step(optimiser, bce(scores(frozen, merged_ID[item_B], item_B), label_B))
        merged_ID = merge(merging, adapter, last_ID, sent_ID).detach()
        upload, mine = reference.client(user, {**received, table: merged_ID}, own)
        mine = {name: mine[name] for name in own}  # nothing for variants of the method without merging
        return upload, {**mine, **adapter, "last_table": upload[table].detach().clone()}

    return reference._replace(client=client)


def fedmf_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> Reference:
    inner = fedmf(federation, training, FedmfConfig())
    return elastic(inner, lambda own, row_BD, item_B: row_BD @ own["user"], training, config)


def fedncf_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> Reference:
    inner = fedncf(federation, training, FedncfConfig())
    return elastic(inner, lambda own, row_BD, item_B: ncf_scores(_network(own), own["user"], row_BD), training, config)


def pfedrec_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> Reference:
    inner = pfedrec(federation, training, PfedrecConfig())

    def scores(own: Tree, row_BD: Tensor, item_B: Tensor) -> Tensor:
        return (row_BD @ own["scorer.0.weight"] + own["scorer.0.bias"])[:, 0]

    return elastic(inner, scores, training, config)


def gpfedrec_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> Reference:
    inner = gpfedrec(federation, training, GpfedrecConfig())
    return elastic(inner, lambda own, row_BD, item_B: ncf_scores(_network(own), own["user"], row_BD), training, config)


def fedrap_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> Reference:
    inner = fedrap(federation, training, FedrapConfig())

    def scores(own: Tree, row_BD: Tensor, item_B: Tensor) -> Tensor:
        return (row_BD + own["personal_table"][item_B]) @ own["user"]

    return elastic(inner, scores, training, config, table="common_table")


def _network(own: Tree) -> Tree:
    return {name: tensor for name, tensor in own.items() if name.startswith("scorer.")}


REFERENCES: dict[str, Callable[[Federation, EmbeddingTraining, Any], Reference]] = {
    "colr": colr,
    "fedcia": fedcia,
    "fedmf": fedmf,
    "pfedclr": pfedclr,
    "fedncf": fedncf,
    "fedrap": fedrap,
    "pfedrec": pfedrec,
    "gpfedrec": gpfedrec,
    "fedem": fedem,
    "fedca": fedca,
    "pfedgraph": pfedgraph,
    "fedrecgel": fedrecgel,
    "fedfast": fedfast,
    "cofedrec": cofedrec,
    "perfedrec": perfedrec,
    "feddae": feddae,
    "ifedrec": ifedrec,
    "fedmf_em": fedmf_em,
    "fedncf_em": fedncf_em,
    "pfedrec_em": pfedrec_em,
    "gpfedrec_em": gpfedrec_em,
    "fedrap_em": fedrap_em,
}
