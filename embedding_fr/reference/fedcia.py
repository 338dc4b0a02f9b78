"""FedCIA without parameters, one user at a time, with the matrices of its equations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.fedcia import FedciaConfig
from embedding_fr.reference.loop import Reference, User, mean_of
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
