"""FedCIA without and with parameters, one user at a time, with the matrices of its equations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.fedcia import FedciaConfig
from embedding_fr.methods.fedcia_fitted import FedciaFittedConfig
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters, step
from fedecider.federation.method import Tree


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


def fedcia_fitted(federation: Federation, training: EmbeddingTraining, config: FedciaFittedConfig) -> Reference:
    """SGD on ``||Q Q^T - S||_F``, or its square, with the whole matrices, then Adam, whose state is kept."""

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        params = parameters({name: own[name] for name in ("user", "item_table")})
        if received:
            mean_II = received["axes"] @ torch.diag(received["value"].sign()) @ received["axes"].T
            sgd, table_ID = torch.optim.SGD([params["item_table"]]), params["item_table"]
            for _ in range(config.fit_steps):
                sizes = float((table_ID.T @ table_ID).detach().norm()), float(received["value"][0])
                sgd.param_groups[0]["lr"] = config.fit_learning_rate / (1 if config.variant == "code" else max(*sizes))
                distance = torch.linalg.norm(table_ID @ table_ID.T - mean_II)
                step(sgd, distance if config.variant == "code" else distance.square() / 4.0)
        rates = {"user": training.learning_rate, "item_table": training.item_rate}
        adam = torch.optim.Adam([{"params": [params[name]], "lr": rate} for name, rate in rates.items()])
        kept = {"step": "steps", "exp_avg": "mean", "exp_avg_sq": "square"}
        for name in rates:
            adam.state[params[name]] = {theirs: own[f"{name}.{ours}"].clone() for theirs, ours in kept.items()}
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                row_BD = params["item_table"][item_B]
                product_BD = row_BD * params["user"]
                if config.variant == "code":
                    loss = (product_BD - label_B[:, None]).square().mean()
                else:
                    loss = bce(product_BD.sum(1), label_B)
                squares = params["user"].square().sum() + row_BD.square().sum(1).mean()
                step(adam, loss + training.weight_decay / 2.0 * squares)
        for name in rates:
            params |= {f"{name}.{ours}": adam.state[params[name]][theirs] for theirs, ours in kept.items()}
        table_ID = params["item_table"]
        return ({"factor": table_ID} if config.encoding == "factor" else {"similarity": table_ID @ table_ID.T}), params

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        squares = [{"similarity": one["factor"] @ one["factor"].T} if "factor" in one else one for one in uploads]
        mean_II = mean_of(server, squares, [1.0] * len(squares))["similarity"]
        value_I, vector_II = torch.linalg.eigh(mean_II)
        largest_I = vector_II.abs().argmax(0)
        vector_II = vector_II * vector_II[largest_I, torch.arange(len(mean_II))].sign()
        value_I = torch.where(value_I.abs() > len(mean_II) * 2.0**-52 * value_I.abs().max(), value_I, 0.0)
        axes_II = vector_II * value_I.abs().sqrt()
        first = len(mean_II) - (config.num_vectors or len(mean_II))
        return {"value": value_I[first:].flip(0), "axes": axes_II[:, first:].flip(1)}

    return Reference(client, server)
