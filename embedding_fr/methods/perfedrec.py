"""PerFedRec: a graph of every user's own, and a global, a cluster's and an own model (Luo, Xiao and Song, 2022).

Shape legend: N clients of the run, C clients of a block, A active clients of a step, K clusters, I items, D dims,
T train items, P pairs, R touched rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from embedding_fr.blocks import Federation, rank_users
from embedding_fr.clusters import k_means
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import Examples, RoundExamples, round_examples
from embedding_fr.local_training import Objective, train_epochs
from embedding_fr.methods.entry import Method
from embedding_fr.optimisers import Optimiser
from embedding_fr.personal_variant import PERSONAL_TABLE as PERSONAL
from embedding_fr.stacked import check_finite, inner_products, received, received_rows, take, weighted_sum
from embedding_fr.tables import normal, personal_table
from fedecider.bounds import Int, OneOrMore, dataclass
from fedecider.federation.aggregate import finite_only
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree, Upload
from fedecider.federation.rows import add_rows
from fedecider.federation.streams import stream
from fedecider.federation.wire import dense
from fedecider.search_space import OneOf, Space, Whole

Variant = Literal["paper", "code"]
TRAINED = ("user", "item_table")


@dataclass(frozen=True)
class PerfedrecConfig:
    """Settings of PerFedRec.

    Args:
        num_clusters: The number of clusters of users; each has an item table of its own.
        num_layers: The number of propagation layers on a user's graph; 0 is matrix factorisation.
        target_edge: Whether a train item is in the graph while its own pair is trained: out takes it away, as an item
            that is yet to come is not in it; in leaves it there, and then the layers give the answer away.
        draw: How a cohort is drawn: sizes draws half of it alike and half by the sizes of the users' clusters, random
            all of it alike.
        scores: The embeddings that score: ego takes those that are learnt, graph what the layers make of them.
        variant: The variant: paper has real layers and clusters found before their tables are made; code does as the
            public code does.
    """

    num_clusters: OneOrMore = 5
    num_layers: Annotated[Int, Field(ge=0, le=1000)] = 3
    target_edge: Literal["out", "in"] = "out"
    draw: Literal["sizes", "random"] = "sizes"
    scores: Literal["graph", "ego"] = "graph"
    variant: Variant = "paper"


DEFAULTS: dict[str, Any] = {
    "embedding_size": 64,
    "learning_rate": 0.1,
    "init_std": 0.1,
    "local_epochs": 1,
    "batch_size": 65536,
    "num_negatives": 1,
    "participation": 0.1,
}
CODE: dict[str, Any] = {"variant": "code", "scores": "ego", "target_edge": "in"}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"num_layers": 1},
    {"num_layers": 0},
    {"num_clusters": 2},
    {"learning_rate": 0.03, "local_epochs": 2},
)
SPACE: Space = {
    **TRAINING_SPACE,
    "num_clusters": Whole(1, 20),
    "num_layers": Whole(0, 3),
    "scores": OneOf(("graph", "ego")),
}


def chooses_cohort(config: PerfedrecConfig) -> bool:
    return config.draw != "random"


def perfedrec(federation: Federation, training: EmbeddingTraining, config: PerfedrecConfig) -> FederatedMethod:
    """Score: the mean of three models' ``p_u' . q_i'``, with the global, the cluster's and the user's own item table.

    Graph: the star of the user and of its own n train items. Other users of these items are not in it, since no client
    knows them. With A the adjacency with self-loops, rows divided by their sums, and e the embeddings (p_u; q_i), ``e'
    = (e + A e + ... + A^L e) / (L + 1)``; an item outside the graph is its own neighbour alone, so ``q_j' = q_j``.
    See :func:`mixing`.

    Client: from the cluster's table and p_u, local steps of Adam (fresh in every round) on the mean of ``-log
    sigmoid(p_u' . (q_i' - q_j'))`` over pairs of a train item i and a negative j (BPR, Rendle et al., 2009).

    Server: k-means of all p_u into K clusters. ``Q`` is the plain mean of the cohort's tables, ``Q_k`` that of those
    of cluster k, and Q where none of it is present. Clusters are found first, so everybody starts and is scored with
    the table of the cluster whose centroid is nearest to its own p_u.

    Cohort: half of it is drawn alike, half of those that are left with weights in proportion to the size of the user's
    cluster.

    Upload: Q_u and p_u, 4 (I + 1) D bytes; download: Q, Q_k, p_u and whether the user was heard in the last round,
    4 (2 I + 1) D + 1. Variants: ``personal`` is the mean of the three, of Q and Q_k for users that were not heard in
    the last round; ``cluster`` and ``global`` score with one table alone.

    The server sees the embedding of every user and, in the clear, the table of each one that takes part, which shows
    its history: both the clusters and the means within them need single uploads, so there is no secure sum.

    Source: the abstract and the public code; the text of the paper was not at hand. ``variant="code"`` multiplies the
    learnt embeddings in every layer, so that L layers are the weights 1 : L of e and A e; and makes the tables of the
    clusters of the round before, then numbers the users anew, so a user may go on with another cluster's table.
    Its evaluation takes the learnt embeddings alone: ``scores ego``. Ours, in both variants: the star graph (the code
    cuts the graph of all users to a user and its items), every train item once an epoch (drawn with replacement there),
    Adam with fresh state and its rate (the code: 1e-4 and one state for all users, which no federation has), all
    models ranked on one list (the code: fresh negatives for each model, averaged by their places). Left out: dropped
    nodes, Laplace noise on 100 rows, attributes, an L2 term of 1e-5 on a batch's embeddings after the layers
    (``weight_decay`` is of the learnt ones).
    """
    start_ID = normal(federation, training, "item_table", federation.num_items)
    start_ND = normal(federation, training, "user", federation.num_clients)
    num_clusters = min(config.num_clusters, federation.num_clients)
    rates = {"user": training.learning_rate, "item_table": training.item_rate}
    optimiser = Optimiser("adam", rates, training.weight_decay)
    in_pairs = replace(training, batch_size=max(1, training.batch_size // 2))

    def logits(params: Tree, pair_AB: Tensor | None) -> Tensor:
        assert pair_AB is not None
        user_AD, table_ARD, neighbour_AR = params["user"], params["item_table"], params["neighbour"]
        positive_AB, negative_AB = params["positive"].gather(1, pair_AB), params["negative"].gather(1, pair_AB)
        if config.target_edge == "out":
            return pairs_without_edge(user_AD, table_ARD, neighbour_AR, positive_AB, negative_AB, config)
        score_AR = graph_scores(user_AD, table_ARD, neighbour_AR, config)
        return score_AR.gather(1, positive_AB) - score_AR.gather(1, negative_AB)

    def init() -> tuple[Tree, Tree]:
        server = {
            "global_table": start_ID,
            "cluster_table": start_ID.expand(num_clusters, *start_ID.shape),
            "user": start_ND,
            "cluster": torch.zeros(federation.num_clients, dtype=torch.int64, device=federation.device),
            "heard": torch.zeros(federation.num_clients, dtype=torch.bool, device=federation.device),
        }
        return server, {PERSONAL: personal_table(start_ID, federation.num_clients, federation.table_bytes)}

    def cohort(round: int, server: Tree, size: int) -> set[int]:
        return drawn_by_size(server["cluster"].cpu(), size, stream(federation.seed, "cohort", round))

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        mine = {"item_table": server["cluster_table"][server["cluster"][clients]]}
        mine |= {name: server[name][clients] for name in ("user", "heard")}
        return Download({"global_table": server["global_table"]}, mine)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        drawn = round_examples(federation, training, block, round)
        pairs, sides = paired(drawn, training.num_negatives)
        params = {
            "user": received(download, "user", len(block.clients)).clone(),
            "item_table": received_rows(download, "item_table", drawn.row_CR),
            **sides,
        }
        loss_C = train_epochs(Objective(logits), params, pairs, in_pairs, optimiser)
        trained = {name: params[name] for name in TRAINED}
        check_finite(trained, loss_C, block.clients, round)
        upload = Upload(block.clients, torch.ones_like(loss_C), trained, rows={"item_table": drawn.row_CR})
        return (
            upload,
            {PERSONAL: dense(upload, download).tensors["item_table"]},
            [{"loss": loss} for loss in loss_C.tolist()],
        )

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        user_ND, heard_N = server["user"].clone(), torch.zeros_like(server["heard"])
        held: list[Upload] = []
        for upload in uploads:
            held.append(finite_only(upload))
            user_ND[held[-1].clients] = held[-1].tensors["user"]
            heard_N[held[-1].clients] = True
        if not bool(heard_N.any()):
            return {**server, "heard": heard_N}
        label_N = k_means(user_ND, config.num_clusters, stream(federation.seed, "clusters", round)).label_N
        member_N = server["cluster"] if config.variant == "code" else label_N
        tables = mean_tables(server["cluster_table"], server["cluster"], member_N, held)
        return {**tables, "user": user_ND, "cluster": label_N, "heard": heard_N}

    def scored(user_CD: Tensor, table_CID: Tensor, block: Block) -> Tensor:
        """(C, I)"""
        if config.scores == "ego":
            return inner_products(table_CID, user_CD)
        neighbour_CI = torch.zeros(len(table_CID), federation.num_items + 1, device=table_CID.device)
        neighbour_CI.scatter_(1, block.data.train_CT, 1.0)
        return graph_scores(user_CD, table_CID, neighbour_CI[:, :-1].to(user_CD), config)

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        num_clients = len(block.clients)
        user_CD = received(download, "user", num_clients)

        def with_table(table_CID: Tensor) -> Tensor:
            return scored(user_CD, table_CID.to(user_CD.device), block)

        if variant == "personal":
            sum_CI = with_table(received(download, "global_table", num_clients)) + with_table(
                received(download, "item_table", num_clients)
            )
            heard_C1 = received(download, "heard", num_clients)[:, None]
            score_CI = torch.where(heard_C1, (sum_CI + with_table(own[PERSONAL])) / 3.0, sum_CI / 2.0)
        else:
            score_CI = with_table(received(download, TABLE_OF[variant], num_clients))
        return rank_users(score_CI, block.data, split, federation.protocol)

    def alone(round: int, before: Tree, upload: Upload) -> NewRows:
        table = RowUpdate(upload.rows["item_table"], upload.tensors["item_table"])
        heard_C = torch.ones_like(before["heard"])
        return {"global_table": table, "item_table": table, "user": upload.tensors["user"], "heard": heard_C}

    return FederatedMethod(
        "perfedrec",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        variants=("personal", *TABLE_OF),
        unread=(PERSONAL,),
        upload_like=lambda round, server: {"item_table": server["global_table"], "user": server["user"][0]},
        alone=alone,
        cohort=cohort if chooses_cohort(config) else None,
    )


TABLE_OF = {"cluster": "item_table", "global": "global_table"}
"""variant -> the downloaded table that it scores with."""


class Mixing(NamedTuple):
    """What the layers make of a user p with n items of mean m: ``p' = user p + user_mean m`` and, of its own items,
    ``q_i' = item p + item_mean m + itself (q_i - m)``.
    """

    user_A: Tensor
    user_mean_A: Tensor
    item_A: Tensor
    item_mean_A: Tensor
    itself_A: Tensor


def mixing(degree_A: Tensor, num_layers: int, variant: Variant) -> Mixing:
    """The star graph in closed form: a layer takes p to ``(p + n m) / (n + 1)`` and q_i to ``(q_i + p) / 2``, hence m
    to ``(m + p) / 2`` and ``q_i - m`` to its half.
    """
    one_A, zero_A = torch.ones_like(degree_A), torch.zeros_like(degree_A)
    layers = [Mixing(one_A, zero_A, zero_A, one_A, one_A)]
    for _ in range(num_layers):
        # The public code multiplies the learnt embeddings in every layer.
        last = layers[0 if variant == "code" else -1]
        layers.append(
            Mixing(
                (last.user_A + degree_A * last.item_A) / (degree_A + 1.0),
                (last.user_mean_A + degree_A * last.item_mean_A) / (degree_A + 1.0),
                (last.item_A + last.user_A) / 2.0,
                (last.item_mean_A + last.user_mean_A) / 2.0,
                last.itself_A / 2.0,
            )
        )
    return Mixing(*(torch.stack(parts).mean(0) for parts in zip(*layers, strict=True)))


def graph_scores(user_AD: Tensor, table_ARD: Tensor, neighbour_AR: Tensor, config: PerfedrecConfig) -> Tensor:
    """(A, R) ``p' . q_r'`` of the user with every row; ``neighbour_AR`` is 1 for its train items, else 0."""
    degree_A = neighbour_AR.sum(1)
    by = mixing(degree_A, config.num_layers, config.variant)
    mean_AD = weighted_sum(neighbour_AR, table_ARD) / degree_A[:, None]
    mixed_AD = by.user_A[:, None] * user_AD + by.user_mean_A[:, None] * mean_AD
    common_AD = by.item_A[:, None] * user_AD + (by.item_mean_A - by.itself_A)[:, None] * mean_AD
    common_A1 = (common_AD * mixed_AD).sum(1, keepdim=True)
    score_AR = inner_products(table_ARD, mixed_AD)
    return score_AR + neighbour_AR * (common_A1 - (1.0 - by.itself_A)[:, None] * score_AR)


def pairs_without_edge(
    user_AD: Tensor,
    table_ARD: Tensor,
    neighbour_AR: Tensor,
    positive_AB: Tensor,
    negative_AB: Tensor,
    config: PerfedrecConfig,
) -> Tensor:
    """(A, B) ``p' . (q_i - q_j)`` of each pair, on the graph without i: its n - 1 other items have the mean ``(n m -
    q_i) / (n - 1)``, and i stands outside as j does. Without other items there is no mean, and p stays.
    """
    others_A = neighbour_AR.sum(1) - 1.0
    by = mixing(others_A, config.num_layers, config.variant)
    positive_ABD, negative_ABD = take(table_ARD, positive_AB), take(table_ARD, negative_AB)
    total_A1D = weighted_sum(neighbour_AR, table_ARD)[:, None]
    share_A = by.user_mean_A / others_A.clamp(min=1.0) * (others_A > 0.0)
    mixed_ABD = (by.user_A[:, None] * user_AD)[:, None] + share_A[:, None, None] * (total_A1D - positive_ABD)
    return (mixed_ABD * (positive_ABD - negative_ABD)).sum(2)


def paired(drawn: RoundExamples, num_negatives: int) -> tuple[RoundExamples, Tree]:
    """A client's positive j with its j-th, (j + P)-th, ... negative of P positives: pairs as examples that all have the
    label 1, and by client the rows of the pairs' two sides (C, P) and which rows are its own items (C, R).
    """
    examples, row_CR, place_CB = drawn
    num_pairs_C = examples.num_positive_C * num_negatives
    column_P = torch.arange(int(num_pairs_C.max()), device=place_CB.device)
    num_positive_C1 = examples.num_positive_C[:, None]
    last = place_CB.shape[1] - 1
    positive_CP = place_CB.gather(1, column_P % num_positive_C1)
    negative_CP = place_CB.gather(1, (num_positive_C1 + column_P).clamp(max=last))
    neighbour_CR = torch.zeros(row_CR.shape, device=row_CR.device)
    neighbour_CR.scatter_(1, positive_CP, 1.0)
    pair_CP = column_P.expand_as(positive_CP).contiguous()
    pairs = Examples(pair_CP, num_pairs_C, num_pairs_C, examples.key_C)
    sides = {"positive": positive_CP, "negative": negative_CP, "neighbour": neighbour_CR}
    return drawn._replace(examples=pairs, place_CB=pair_CP), sides


def mean_tables(table_KID: Tensor, start_N: Tensor, member_N: Tensor, held: Sequence[Upload]) -> Tree:
    """``global_table`` (I, D), the mean of all uploaded tables, and ``cluster_table`` (K, I, D), that of each cluster's
    members by ``member_N``, or the global one where no member sent anything. Clients started from the table
    ``start_N`` of ``table_KID``.
    """
    num_clusters, num_items, size = table_KID.shape
    moved = torch.zeros(num_clusters * num_items, size, dtype=torch.float64, device=table_KID.device)
    from_KK = torch.zeros(num_clusters, num_clusters, dtype=torch.float64, device=table_KID.device)
    for upload in held:
        value_CRD, row_CR = upload.tensors["item_table"], upload.rows.get("item_table")
        if row_CR is None:  # whole tables, as noise makes them
            row_CR = torch.arange(num_items, device=value_CRD.device).expand(len(value_CRD), -1)
        member_C, start_C = member_N[upload.clients], start_N[upload.clients]
        step_CRD = value_CRD.double() - table_KID[start_C[:, None], row_CR.clamp(min=0)]
        flat_CR = torch.where(row_CR >= 0, row_CR + member_C[:, None] * num_items, -1)
        one_C = torch.ones(len(value_CRD), dtype=torch.float64, device=value_CRD.device)
        add_rows(moved, flat_CR, step_CRD, one_C)
        from_KK.index_put_((member_C, start_C), one_C, accumulate=True)
    total_KID = moved.view(table_KID.shape) + torch.tensordot(from_KK, table_KID.double(), 1)
    count_K11 = from_KK.sum(1)[:, None, None]
    global_ID = total_KID.sum(0) / count_K11.sum()
    mean_KID = torch.where(count_K11 > 0.0, total_KID / count_K11.clamp(min=1.0), global_ID)
    return {"global_table": global_ID.to(table_KID.dtype), "cluster_table": mean_KID.to(table_KID.dtype)}


def drawn_by_size(cluster_N: Tensor, size: int, generator: torch.Generator) -> set[int]:
    """``size`` users: half of them (or one more) drawn alike, then one after the other of those that are left, with
    weights in proportion to the size of their cluster.
    """
    order_N = torch.randperm(len(cluster_N), generator=generator)
    first = size - size // 2
    left_L = order_N[first:]
    weight_L = torch.bincount(cluster_N)[cluster_N[left_L]].double()
    second = torch.multinomial(weight_L, size // 2, generator=generator).tolist() if size > 1 else []
    return {*order_N[:first].tolist(), *left_L[second].tolist()}


METHOD = Method(
    PerfedrecConfig,
    perfedrec,
    DEFAULTS,
    GRID,
    SPACE,
    passing_tables=4,
    chooses_cohort=chooses_cohort,
    item_tables=("item_table", "global_table"),
    code=CODE,
)
