"""CoFedRec: each round the users who agree on one category of items share a table (He et al., 2024).

Shape legend: N clients of the run, V clients of the cohort, C clients of a block, A active clients of a step, K
categories, I items, D dims, S anchors, B examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from embedding_fr.averaged import Model, score_all
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.clusters import k_means
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import round_examples
from embedding_fr.local_training import train_epochs
from embedding_fr.methods.entry import Method
from embedding_fr.methods.pfedrec import IN_TURN, code_item_rate, linear_model
from embedding_fr.optimisers import Optimiser
from embedding_fr.personal_variant import PERSONAL_TABLE as PERSONAL
from embedding_fr.stacked import check_finite, received
from embedding_fr.tables import personal_table
from fedecider.bounds import Int, NotNegative, OneOrMore, Positive, dataclass
from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.search_space import OneOf, Real, Space, Whole

NO_CATEGORY = -1
"""Label of every item before the first round."""
ROWS = 128
"""Clients whose tables are read at a time."""
BASE_TEMPERATURE = 0.5
"""tau_0 of the contrastive term."""
ROUNDING = 1e-9
"""Distances that differ by less are ties."""


@dataclass(frozen=True)
class CofedrecConfig:
    """Settings of CoFedRec.

    Args:
        num_categories: The number of categories that the server makes of the items.
        group: The users whose tables are averaged in a round: similar takes those who are like the core user in one
            category; random takes as many who are drawn; all takes the cohort; core the core user alone.
        contrast_weight: The weight of the contrastive term; 0 leaves it out.
        temperature: The temperature tau of the contrastive term.
        num_anchors: The number of items that the contrastive term looks at, drawn anew in every round, the same for
            all; 0 takes all items, which costs items squared in every local step.
    """

    num_categories: OneOrMore = 30
    group: Literal["similar", "random", "all", "core"] = "similar"
    contrast_weight: NotNegative = 0.005
    temperature: Positive = 0.5
    num_anchors: Annotated[Int, Field(ge=0)] = 128


DEFAULTS: dict[str, Any] = {"embedding_size": 32, "learning_rate": 0.1, "local_epochs": 2, "init_std": 1.0}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"init_std": 0.1},
    {"init_std": 0.1, "learning_rate": 0.03},
    {"temperature": 0.1},
    {"contrast_weight": 0.0},
)
SPACE: Space = {
    **TRAINING_SPACE,
    "num_categories": Whole(1, 100),
    "contrast_weight": Real(0.0001, 0.1, log=True),
    "temperature": OneOf((0.1, 0.2, 0.5, 1.0)),
}


def cofedrec(federation: Federation, training: EmbeddingTraining, config: CofedrecConfig) -> FederatedMethod:
    """Score ``w_u . q_i + b_u`` of PFedRec: the score function stays, every user has an item table V_u of its own, and
    on every mini-batch the score function takes a step of SGD, then the table.

    Server, each round, over the cohort:

    1. k-means of the rows of ``V = mean_u V_u`` into K categories of items.
    2. A random core user c and a random category M: ``s_u = sum_{i in M} cos(V_c[i], V_u[i])``.
    3. Sorted falling, the place e with the largest distance to the chord from the first to the last s is the elbow:
       places 0 to e are the group (:func:`elbow`).
    4. The group gets the mean of its tables, everybody else the own one back. All get the categories.

    Loss: BCE + contrast_weight L (:func:`contrastive_loss`), from round 2 on; the term draws items of a category
    together. Upload: V_u, 4 I D bytes; download: the table that the user goes on with and the categories, 4 I D + 4 I.
    The server compares tables, so it must see them, and holds one per user: 4 N I D bytes; clients hold as much. A user
    goes on with what the server holds: its own table as it arrived, with the noise of an upload, and the one of before
    where an upload was late or refused.

    Variants: ``personal`` scores with the user's table from before the aggregation, as PFedRec's public code does;
    ``group`` with the one it goes on with.

    Differs from the paper: its text and code were not at hand. Steps and settings are those of others' notes and
    re-implementation; the notes have the mean over a category inside the logarithm. Ours:
    ``num_anchors``; the core user is always in the group; the user's own table is counted as sent back where the server
    has changed nothing; the table's rate is that of PFedRec's public code, learning_rate x 80 x items (others': less
    one learning_rate), unless item_learning_rate is given.
    """
    model = linear_model(federation, training)
    start_ID = model.shared["item_table"]
    rates = {**dict.fromkeys(IN_TURN[0], training.learning_rate), "item_table": code_item_rate(federation, training)}
    optimiser = Optimiser("sgd", rates, training.weight_decay, IN_TURN)

    def init() -> tuple[Tree, Tree]:
        table_NID = personal_table(start_ID, federation.num_clients, federation.table_bytes)
        label_I = torch.full((federation.num_items,), NO_CATEGORY, dtype=torch.int32, device=federation.device)
        server = {"item_table": start_ID.expand(federation.num_clients, *start_ID.shape), "category": label_I}
        return server, {**model.private, PERSONAL: table_NID}

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download({"category": server["category"]}, {"item_table": server["item_table"][clients]})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        num_clients = len(block.clients)
        drawn = round_examples(federation, training, block, round).on_whole_tables(federation.num_items)
        params = {name: tensor.clone() for name, tensor in own.items()}
        params["item_table"] = received(download, "item_table", num_clients).clone()
        anchor_S = anchors(federation, config, round)
        label_CS = received(download, "category", num_clients)[:, anchor_S]
        contrasts = config.contrast_weight > 0.0 and bool((label_CS != NO_CATEGORY).any())

        def penalty(params: Tree) -> Tensor:
            row_ASD = params["item_table"][:, anchor_S]
            return config.contrast_weight * contrastive_loss(row_ASD, label_CS[: len(row_ASD)], config)

        objective = model.objective._replace(penalty=penalty if contrasts else None)
        loss_C = train_epochs(objective, params, drawn, training, optimiser)
        check_finite(params, loss_C, block.clients, round)
        table_CID = params["item_table"]
        upload = Upload(block.clients, torch.ones_like(loss_C), {"item_table": table_CID})
        kept = {**{name: params[name] for name in own}, PERSONAL: table_CID}
        return upload, kept, [{"loss": loss} for loss in loss_C.tolist()]

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        table_NID, present = server["item_table"].clone(), []
        for upload in uploads:
            heard_C = finite_clients(upload)
            present.append(upload.clients[heard_C])
            table_NID[present[-1]] = upload.tensors["item_table"][heard_C]
        client_V = torch.cat(present).sort().values
        if not len(client_V):
            return server
        mean_ID = mean_table(table_NID, client_V)
        categories = k_means(mean_ID, config.num_categories, stream(federation.seed, "categories", round))
        group_G = grouped(table_NID, client_V, categories.label_N, federation.seed, config, round)
        table_NID[group_G] = mean_table(table_NID, group_G).to(table_NID.dtype)
        return {"item_table": table_NID, "category": categories.label_N.int()}

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        if variant == "personal":
            table_CID = own[PERSONAL].to(federation.device)  # a table in a file is read into memory
            download = Download({}, {"item_table": table_CID})
        scored = Model({"item_table": start_ID}, {}, model.logits)
        return rank_users(score_all(scored, download, own), block.data, split, federation.protocol)

    return FederatedMethod(
        "cofedrec",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        variants=("personal", "group"),
        unread=(PERSONAL,),
        upload_like=lambda round, server: {"item_table": server["item_table"][0]},
    )


def anchors(federation: Federation, config: CofedrecConfig, round: int) -> Tensor:
    """(S,) items of this round's contrastive term, ascending."""
    order_I = torch.randperm(federation.num_items, generator=stream(federation.seed, "anchors", round))
    return order_I[: config.num_anchors or None].sort().values.to(federation.device)


def contrastive_loss(row_ASD: Tensor, label_AS: Tensor, config: CofedrecConfig) -> Tensor:
    """(A,) supervised contrastive loss (Khosla et al., 2020) of items with their categories as classes.

    With v the rows divided by their norms, Z(i) the other items of i's category and ``r_iz = exp(v_i . v_z / tau) /
    sum_{a != i} exp(v_i . v_a / tau)``: ``-(tau / tau_0) mean_i mean_{z in Z(i)} log r_iz``. An item that is alone in
    its category counts as 0, as one without category.
    """
    if row_ASD.shape[1] < 2:
        return row_ASD.sum((1, 2)) * 0.0
    unit_ASD = unit(row_ASD)
    itself_SS = torch.eye(row_ASD.shape[1], dtype=torch.bool, device=row_ASD.device)
    score_ASS = (unit_ASD @ unit_ASD.mT / config.temperature).masked_fill(itself_SS, -math.inf)
    log_ratio_ASS = score_ASS.log_softmax(2)
    alike_ASS = (label_AS[:, :, None] == label_AS[:, None]) & ~itself_SS & (label_AS != NO_CATEGORY)[:, :, None]
    count_AS = alike_ASS.sum(2)
    total_AS = torch.where(alike_ASS, log_ratio_ASS, 0.0).sum(2) / count_AS.clamp(min=1)
    return -(config.temperature / BASE_TEMPERATURE) * total_AS.mean(1)


def mean_table(table_NID: Tensor, client_G: Tensor) -> Tensor:
    """(I, D) float64 mean of the tables of these clients."""
    parts = [table_NID[some].sum(0, dtype=torch.float64) for some in client_G.split(ROWS)]
    return torch.stack(parts).sum(0) / len(client_G)


def grouped(
    table_NID: Tensor, client_V: Tensor, label_I: Tensor, seed: int, config: CofedrecConfig, round: int
) -> Tensor:
    """(G,) those of the cohort, given ascending, who share a table in this round, the core user first."""
    order_N = torch.randperm(len(table_NID), generator=stream(seed, "core", round))
    drawn_V = order_N[torch.isin(order_N, client_V)]
    if config.group == "all":
        return drawn_V
    if config.group == "core":
        return drawn_V[:1]
    category_K = label_I.unique()
    draw = torch.randint(len(category_K), (1,), generator=stream(seed, "category", round))
    item_M = (label_I == category_K[int(draw)]).nonzero()[:, 0]

    def rows(some: Tensor) -> Tensor:
        """(., M, D) rows of these clients' tables, of length 1."""
        return unit(table_NID[some[:, None].to(item_M.device), item_M].double())

    core_1MD = rows(drawn_V[:1])
    similarity_V = torch.cat([(rows(some) * core_1MD).sum((1, 2)) for some in client_V.split(ROWS)]).cpu()
    first_V = similarity_V.masked_fill(
        client_V == drawn_V[0], math.inf
    )  # the largest, to rounding; first of its equals
    falling_V = first_V.argsort(descending=True, stable=True)
    size = elbow(similarity_V[falling_V]) + 1
    return client_V[falling_V[:size]] if config.group == "similar" else drawn_V[:size]


def unit(row: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros stays."""
    norm = row.norm(dim=-1, keepdim=True)
    return row / torch.where(norm > 0.0, norm, 1.0)


def elbow(falling_V: Tensor) -> int:
    """The place that is farthest from the straight line from the first to the last one, the first such on ties."""
    last = len(falling_V) - 1
    share_V = torch.arange(last + 1).to(falling_V) / max(last, 1)
    far_V = (falling_V - falling_V[0] - share_V * (falling_V[-1] - falling_V[0])).abs()
    return int((far_V >= far_V.max() - ROUNDING).int().argmax())


METHOD = Method(
    CofedrecConfig,
    cofedrec,
    DEFAULTS,
    GRID,
    SPACE,
    whole_tables=1,
    passing_tables=2,
)
