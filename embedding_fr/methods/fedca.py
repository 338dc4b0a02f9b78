"""FedCA: mixes of clients that are alike and of clients that complement each other (Zhang et al., *Beyond Similarity:
Personalized Federated Recommendation with Composite Aggregation*, arXiv 2406.03933, ACM TOIS 2026).

Shape legend: N clients of the run, V clients of a cohort (U the ones a mix is for), C clients of a block, I items, R
touched rows, D dims, K principal directions, B examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from embedding_fr.averaged import score_all
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import round_examples
from embedding_fr.local_training import train_epochs
from embedding_fr.merging import LAST
from embedding_fr.methods.entry import Method, two
from embedding_fr.methods.fedem_code import few_places, mixed_few, part_of
from embedding_fr.methods.fedmf import fedmf_optimiser, mf_model
from embedding_fr.mixing import PERSONAL, collect, squared_distances, start_server
from embedding_fr.similarity import code_similarity, first_components, project_on_simplex
from embedding_fr.stacked import check_finite, set_rows, take
from embedding_fr.tables import personal_table
from fedecider.bounds import NotNegative, Share, ShareAbove0, Width, dataclass
from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.search_space import OneOf, Real, Space

TABLE, BASIS = "item_table", "principal_directions"
FLAT = 1e-10
"""Directions with less than this share of the largest variance are none."""
ROWS = 64
"""Clients whose angles to all others are computed at a time."""


@dataclass(frozen=True)
class FedcaConfig:
    """Settings of FedCA.

    Args:
        similarity_weight: The weight of similar item tables against the clients' sizes.
        complement_weight: The weight of near principal directions against the clients' sizes.
        num_components: The number of principal directions that a client sends of the rows it trained on.
        own_share: The share of a client's own last table in what it trains and scores with; the rest is its mix.
        mixed_share: The share of a cohort whose tables the server mixes, drawn anew in every round.
    """

    similarity_weight: NotNegative = 0.3
    complement_weight: NotNegative = 0.3
    num_components: Width = 4
    own_share: Share = 0.9
    mixed_share: ShareAbove0 = 0.1


DEFAULTS: dict[str, Any] = {"learning_rate": 0.01, "init_std": 1.0}
SHARED: dict[str, Any] = {"own_share": 0.0, "mixed_share": 1.0, "init_std": 0.1}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {**SHARED, "local_epochs": 1, "learning_rate": 0.1, "similarity_weight": 0.0, "complement_weight": 0.0},
    {**SHARED, "local_epochs": 1, "learning_rate": 0.1},
    {**SHARED, "local_epochs": 2, "learning_rate": 0.03, "own_share": 0.5},
)
SPACE: Space = {
    **TRAINING_SPACE,
    "similarity_weight": Real(0.0, 2.0),
    "complement_weight": Real(0.0, 2.0),
    "own_share": Real(0.0, 1.0),
    "mixed_share": OneOf((0.1, 1.0)),
}


def fedca(federation: Federation, training: EmbeddingTraining, config: FedcaConfig) -> FederatedMethod:
    """Score ``p_u . q_i`` with the table ``rho Q_u + (1 - rho) G_u`` of a client: Q_u is what it uploaded last, rho
    ``own_share``, and ``G_u = sum_v w_uv Q_v`` its mix. From there it trains p_u, which stays, and the table.

    Row u of w minimises ``||w||^2 - 2 (p + beta s_u + alpha c_u) . w`` over ``w >= 0, sum w = 1``, p being the shares
    of train items: the projection of ``p + beta s_u + alpha c_u`` on the simplex. s_uv = 1 / (1 + distance) of the
    tables' first principal components, 1 above 0.9. ``c_uv = cos(mean angle)`` over the K principal angles between the
    subspaces in which the rows vary that clients u and v trained on (:func:`closeness`): each client sends these K
    directions besides its table. Only a random ``mixed_share`` of the cohort is mixed among itself; only these have a
    mix in the next round, all others train on alone from Q_u.

    Variants: ``mixed``; ``local`` is Q_u. Source: the public code; the text of the paper was not at hand. There c is
    called complementarity, but it is largest for equal subspaces and raises w: a second similarity.

    Differs from the public code: principal angles are those of the subspaces (singular values), where it matches
    directions greedily by their cosines, with signs that are free; its README calls alpha the weight of similarity,
    its code beta; clients do not stop early when their loss stalls and draw user embeddings of their own; the rest of
    a network (its FedNCF form) is not built. The traffic counts a table for every client, mixed or not.
    """
    if config.num_components > training.embedding_size:
        raise ValueError(
            f"got num_components {config.num_components} with embedding_size {training.embedding_size}, expected at "
            "most as many directions as an embedding has"
        )
    model, optimiser = mf_model(federation, training), fedmf_optimiser(training)

    def init() -> tuple[Tree, Tree]:
        last_NID = personal_table(model.shared[TABLE], federation.num_clients, federation.table_bytes)
        return start_server(model.shared[TABLE], federation.num_clients), {**model.private, LAST: last_NID}

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download({}, {TABLE: server[TABLE][clients], PERSONAL: server[PERSONAL][clients]})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        drawn = round_examples(federation, training, block, round)
        start_CID = current_table(download, own, config.own_share)
        params = {"user": own["user"].clone(), TABLE: take(start_CID, drawn.row_CR.clamp(min=0))}
        loss_C = train_epochs(model.objective, params, drawn, training, optimiser)
        check_finite(params, loss_C, block.clients, round)
        real_CB = (drawn.examples.item_CB < federation.num_items).to(torch.float64)
        count_CR = real_CB.new_zeros(drawn.row_CR.shape).scatter_add_(1, drawn.place_CB, real_CB)
        sent = {
            TABLE: set_rows(start_CID, drawn.row_CR, params[TABLE]),
            BASIS: principal_directions(params[TABLE], count_CR, config.num_components),
        }
        upload = Upload(block.clients, block.data.num_train_C.to(loss_C.dtype), sent)
        return upload, {"user": params["user"], LAST: sent[TABLE]}, [{"loss": loss} for loss in loss_C.tolist()]

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        bases: list[Tensor] = []

        def read() -> Iterator[Upload]:
            for upload in uploads:
                bases.append(upload.tensors[BASIS][finite_clients(upload)])
                yield upload

        cohort = collect(server, read())
        if cohort is None:
            return server
        chosen = few_places(cohort, config.mixed_share, federation.seed, round)
        few = part_of(cohort, chosen)
        component_VI = first_components((few.table_VF + few.mean_F).view(-1, *server[TABLE].shape[1:]))
        alike_VV = code_similarity(squared_distances(component_VI))
        near_VV = closeness(torch.cat(bases)[chosen].to(alike_VV))
        goal_VV = config.similarity_weight * alike_VV + config.complement_weight * near_VV
        return mixed_few(server, cohort, few, project_on_simplex(few.share_V.to(goal_VV) + goal_VV))

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        table_CID = current_table(download, own, 1.0 if variant == "local" else config.own_share)
        scores_CI = score_all(model, Download({}, {TABLE: table_CID}), {"user": own["user"]})
        return rank_users(scores_CI, block.data, split, federation.protocol)

    def upload_like(round: int, server: Tree) -> Tree:
        table_ID = server[TABLE][0]
        return {TABLE: table_ID, BASIS: table_ID.new_empty(config.num_components, table_ID.shape[1])}

    return FederatedMethod(
        "fedca",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        ("mixed", "local"),
        upload_like=upload_like,
        alone=lambda round, received, upload: {
            TABLE: upload.tensors[TABLE],
            PERSONAL: torch.ones_like(received[PERSONAL]),
        },
    )


def current_table(download: Download, own: Tree, own_share: float) -> Tensor:
    """(C, I, D) ``rho Q + (1 - rho) G`` of clients that have a mix G, and Q of the others."""
    sent_CID, mixed = download.per_client[TABLE], download.per_client[PERSONAL].nonzero()[:, 0]
    table_CID = own[LAST].to(sent_CID.device, copy=True)
    table_CID[mixed] = own_share * table_CID[mixed] + (1.0 - own_share) * sent_CID[mixed]
    return table_CID


def principal_directions(row_CRD: Tensor, count_CR: Tensor, num_directions: int) -> Tensor:
    """(C, K, D) unit vectors along which the rows vary most, row r counted ``count_CR`` times; the largest entry of
    each is positive. Where rows vary along fewer, the others are zero: at right angles to everything.
    """
    row_CRD, share_CR1 = row_CRD.double(), (count_CR / count_CR.sum(1, keepdim=True))[:, :, None]
    centred_CRD = row_CRD - (share_CR1 * row_CRD).sum(1, keepdim=True)
    variance_CD, axis_CDD = torch.linalg.eigh(centred_CRD.mT @ (share_CR1 * centred_CRD))
    top_CK = variance_CD[:, -num_directions:].flip(1)
    direction_CKD = axis_CDD[:, :, -num_directions:].flip(2).mT
    largest_CK1 = direction_CKD.gather(2, direction_CKD.abs().argmax(2, keepdim=True))
    real_CK1 = (top_CK > FLAT * top_CK[:, :1])[:, :, None]
    return (direction_CKD * largest_CK1.sign() * real_CK1).to(torch.get_default_dtype())


def closeness(basis_VKD: Tensor) -> Tensor:
    """(V, V) ``cos((phi_1 + ... + phi_K) / K)``, phi the principal angles between two clients' subspaces: their
    cosines are the singular values of ``B_u B_v^T``.
    """
    parts = []
    for some_UKD in basis_VKD.split(ROWS):
        cosine_UVK = torch.linalg.svdvals(some_UKD[:, None] @ basis_VKD.mT).clamp(max=1.0)
        parts.append(cosine_UVK.acos().mean(2).cos())
    return torch.cat(parts)


METHOD = Method(FedcaConfig, fedca, DEFAULTS, GRID, SPACE, passing_tables=4, server_tables=two)
