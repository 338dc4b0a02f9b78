"""FedFast: cohorts from clusters of users, items by how much they moved, absent users follow (Muhammad et al., 2020).

Shape legend: N clients of the run, V clients of the cohort, C clients of a block, A active clients of a step, K
clusters, I items, D dims, R touched rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from embedding_fr.averaged import Model, averaged
from embedding_fr.blocks import Federation
from embedding_fr.clusters import k_means
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.methods.entry import Method
from embedding_fr.mlp import start_mlp
from embedding_fr.optimisers import Optimiser
from embedding_fr.stacked import inner_products, take
from embedding_fr.tables import normal
from fedecider.bounds import NotNegative, OneOrMore, dataclass
from fedecider.federation.aggregate import finite_clients, weighted_mean
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.federation.rows import add_rows
from fedecider.federation.streams import stream
from fedecider.search_space import OneOf, Real, Space, Whole

SCORER = ("scorer.0.weight", "scorer.0.bias")
CLUSTER = "cluster"
"""Server tensor (N,) int64: the cluster of each user's embedding."""


@dataclass(frozen=True)
class FedfastConfig:
    """Settings of FedFast.

    Args:
        num_clusters: The number of clusters of users.
        draw: How a cohort is drawn from the clusters: equal takes as many users of each as far as they reach, random
            looks at no cluster.
        follow: The share of the mean step of a cluster's present users that its absent users take, in the first round;
            0 leaves absent users where they are.
        follow_decay: How fast that share falls: after t rounds it is follow x exp(-follow_decay t).
    """

    num_clusters: OneOrMore = 5
    draw: Literal["equal", "random"] = "equal"
    follow: NotNegative = 1.0
    follow_decay: NotNegative = 1.0


DEFAULTS: dict[str, Any] = {"learning_rate": 0.1, "participation": 0.1}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"local_epochs": 1, "init_std": 0.1},
    {"local_epochs": 2, "learning_rate": 0.03, "init_std": 0.1},
    {"local_epochs": 1, "init_std": 0.1, "follow_decay": 0.1},
)
SPACE: Space = {
    **TRAINING_SPACE,
    "num_clusters": Whole(2, 50),
    "follow": Real(0.0, 1.0),
    "follow_decay": OneOf((0.0, 0.01, 0.1, 1.0)),
}


def chooses_cohort(config: FedfastConfig) -> bool:
    return config.draw != "random"


def fedfast(federation: Federation, training: EmbeddingTraining, config: FedfastConfig) -> FederatedMethod:
    """Score ``w . (p_u * q_i) + b`` (GMF). All of it is uploaded, the user embedding p_u too: the server clusters
    users by it. 0 marks values before the round, n_k are train items.

    - Cohort (ActvSAMP): k-means on all p_u; clusters give users in turn (:func:`drawn_in_turn`).
    - Scorer: ``w = sum_k n_k w_k / sum_k n_k``, b alike.
    - Item i (ActvAGG): ``Q[i] = sum_k c_ki Q_k[i] / sum_k c_ki`` with ``c_ki = ||Q_k[i] - Q_0[i]||_1``; a row that
      nobody changed stays.
    - Present users: p_k as uploaded, and the clusters are found anew. Absent users of a cluster with present ones:
      ``p_s += gamma_t mean_k (p_k - p_k0)`` over these; ``gamma_t = follow exp(-follow_decay t)``, t from 0.

    Upload: p_u, Q, w and b, 4 (I D + 2 D + 1) bytes; download: the same. The variant ``global`` scores with what the
    next round starts from. With ``participation 1`` nobody is absent and nothing is drawn: the item rule alone is left.

    Differs from the paper: its text and code were not at hand. The equations are those that two independent
    descriptions of it agree on; the L1 norm and exp(-t) are from one of them. Ours: users are clustered by their
    embeddings, never by attributes; a cohort has as many clients as participation says, also where a cluster is too
    small for its part; rates and start values are FedMF's; Adam with fresh state in every round.
    """
    model = gmf_model(federation, training)
    rates = {"user": training.learning_rate, "item_table": training.item_rate}
    rates |= dict.fromkeys(SCORER, training.learning_rate)
    optimiser = Optimiser("adam", rates, training.weight_decay)
    method = averaged("fedfast", model, federation, training, optimiser=optimiser)

    def clusters(round: int, user_ND: Tensor) -> Tensor:
        return k_means(user_ND, config.num_clusters, stream(federation.seed, "clusters", round)).label_N

    def init() -> tuple[Tree, Tree]:
        return {**model.shared, CLUSTER: clusters(0, model.shared["user"])}, {}

    def cohort(round: int, server: Tree, size: int) -> set[int]:
        generator = stream(federation.seed, "cohort", round)
        return drawn_in_turn(server[CLUSTER].cpu(), size, generator)

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download({name: server[name] for name in common}, {"user": server["user"][clients]})

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        table_ID, user_ND = server["item_table"], server["user"].clone()
        moves = Moves(table_ID)
        present = []

        def scorers() -> Iterator[Upload]:
            for upload in uploads:
                heard_C = finite_clients(upload)
                present.append(upload.clients[heard_C])
                user_ND[present[-1]] = upload.tensors["user"][heard_C]
                moves.add(upload, heard_C)
                tensors = {name: upload.tensors[name] for name in SCORER}
                yield upload._replace(tensors=tensors, rows={}, finite=heard_C)

        mean = weighted_mean(scorers(), fallback={name: server[name] for name in SCORER})
        client_V = torch.cat(present)
        if not len(client_V):
            return server
        label_N = clusters(round, user_ND)
        share = config.follow * math.exp(-config.follow_decay * (round - 1))
        user_ND = followed(server["user"], user_ND, client_V, label_N, share)
        return {**mean, "item_table": moves.table(), "user": user_ND, CLUSTER: label_N}

    common = ("item_table", *SCORER)
    return method._replace(
        init=init,
        broadcast=broadcast,
        server_aggregate=server_aggregate,
        upload_like=lambda round, server: {**{name: server[name] for name in common}, "user": server["user"][0]},
        takes_mean=False,
        cohort=cohort if chooses_cohort(config) else None,
    )


def drawn_in_turn(cluster_N: Tensor, size: int, generator: torch.Generator) -> set[int]:
    """``size`` users: clusters give a user each in turn, drawn alike among those that are left, as far as they reach.

    Between equal turns chance decides.
    """
    order_N = torch.randperm(len(cluster_N), generator=generator)
    grouped_N = order_N[cluster_N[order_N].sort(stable=True).indices]
    count_K = torch.bincount(cluster_N)
    place_N = torch.arange(len(cluster_N)) - (count_K.cumsum(0) - count_K).repeat_interleave(count_K)
    mixed_N = torch.randperm(len(cluster_N), generator=generator)
    first_N = place_N[mixed_N].sort(stable=True).indices
    return set(grouped_N[mixed_N[first_N[:size]]].tolist())


class Moves:
    """``sum_k c_ki (Q_k[i] - Q_0[i])`` and ``sum_k c_ki`` of a stream of uploads, float64."""

    def __init__(self, table_ID: Tensor):
        self.table_ID = table_ID
        size = (len(table_ID), table_ID.shape[1] + 1)
        self._total = torch.zeros(size, dtype=torch.float64, device=table_ID.device)

    def add(self, upload: Upload, heard_C: Tensor) -> None:
        """Of the clients that are heard."""
        value_CRD = upload.tensors["item_table"][heard_C].double()
        row_CR = upload.rows.get("item_table")
        if row_CR is None:  # whole tables, as noise makes them
            row_CR = torch.arange(len(self.table_ID), device=value_CRD.device).expand(len(heard_C), -1)
        row_CR = row_CR[heard_C].contiguous()
        move_CRD = (value_CRD - self.table_ID[row_CR.clamp(min=0)]) * (row_CR >= 0)[:, :, None]
        weight_CR1 = move_CRD.abs().sum(2, keepdim=True)
        weighted = torch.cat([weight_CR1 * move_CRD, weight_CR1], 2)
        add_rows(self._total, row_CR, weighted, torch.ones(len(row_CR), dtype=torch.float64, device=row_CR.device))

    def table(self) -> Tensor:
        """(I, D) ``sum_k c_ki Q_k[i] / sum_k c_ki``; rows that nobody moved as they were."""
        weight_I1 = self._total[:, -1:]
        step_ID = torch.where(weight_I1 > 0.0, self._total[:, :-1] / weight_I1, 0.0)
        return (self.table_ID + step_ID).to(self.table_ID.dtype)


def followed(before_ND: Tensor, after_ND: Tensor, client_V: Tensor, label_N: Tensor, share: float) -> Tensor:
    """(N, D) embeddings of present clients as they are after the round; each absent one goes ``share`` of the mean step
    of the present ones of its cluster, if there are any.
    """
    num_clusters, present_N = int(label_N.max()) + 1, torch.zeros(len(label_N), dtype=torch.bool)
    present_N[client_V] = True
    step_VD = after_ND[client_V].double() - before_ND[client_V]
    total_KD = step_VD.new_zeros(num_clusters, step_VD.shape[1]).index_add_(0, label_N[client_V], step_VD)
    count_K = torch.bincount(label_N[client_V], minlength=num_clusters)
    mean_KD = total_KD / count_K.clamp(min=1)[:, None]
    moved_ND = (after_ND + share * mean_KD[label_N]).to(after_ND.dtype)
    return torch.where(present_N.to(after_ND.device)[:, None], after_ND, moved_ND)


def gmf_model(federation: Federation, training: EmbeddingTraining) -> Model:
    """``item_table`` (I, D) and ``user`` (N, D), both normal with ``init_std``, and a linear layer D -> 1.

    ``user`` stands among what is uploaded, since the server holds it; a client gets and sends its own row of it.
    """
    shared = {
        "item_table": normal(federation, training, "item_table", federation.num_items),
        **start_mlp(federation, "scorer", (training.embedding_size, 1)),
        "user": normal(federation, training, "user", federation.num_clients),
    }
    return Model(shared=shared, private={}, logits=gmf_logits, by_row=True)


def gmf_logits(params: Tree, item: Tensor | None) -> Tensor:
    """(C, B) ``w . (p_u * q_i) + b``."""
    weight_CD = params["scorer.0.weight"][:, :, 0] * params["user"]
    return inner_products(take(params["item_table"], item), weight_CD) + params["scorer.0.bias"]


METHOD = Method(
    FedfastConfig,
    fedfast,
    DEFAULTS,
    GRID,
    SPACE,
    chooses_cohort=chooses_cohort,
)
