"""pFedGraph: a mix of all clients' models for each client, by a collaboration graph (Ye et al., *Personalized Federated
Learning with Inferred Collaboration Graphs*, ICML 2023), on FedMF's model as PFedCLR's paper runs it.

Shape legend: N clients of the run, V clients of the cohort (U the ones a mix is for), C clients of a block, A active
clients of a step, I items, D dims, F = I D numbers of a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from embedding_fr import mixing
from embedding_fr.blocks import Federation
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import round_examples
from embedding_fr.local_training import Objective, Penalty, dot_logits, train_epochs
from embedding_fr.methods.entry import Method, two
from embedding_fr.methods.fedmf import FedmfConfig, fedmf, fedmf_optimiser
from embedding_fr.similarity import SAME, cosines, project_on_simplex
from embedding_fr.stacked import check_finite, received
from fedecider.bounds import NotNegative, Positive, Share, dataclass
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.search_space import Real, Space

TABLE, DIRECTION = "item_table", "direction"


@dataclass(frozen=True)
class PfedgraphConfig:
    """Settings of pFedGraph.

    Args:
        size_weight: The weight alpha that holds each mix to the clients' shares of all train items. Large is the mean
            of FedMF, small is a client's own table.
        same_above: Clients whose updates have a cosine above this count as the same, with cosine 1; 1 turns it off.
        likeness_weight: The weight lambda of a term of the local loss in the likeness of a client's table to its mix;
            0 leaves it out.
        variant: The variant: paper draws the table to its mix; code has the sign of the public code, which drives it
            away, and needs a likeness_weight.
    """

    size_weight: Positive = 0.8
    same_above: Share = SAME
    likeness_weight: NotNegative = 0.0
    variant: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        if self.variant == "code" and not self.likeness_weight:
            raise ValueError(
                "got variant code with likeness_weight 0, expected it above 0 (the public code has 0.01): the variants "
                "differ in the sign of that term only"
            )


DEFAULTS: dict[str, Any] = {"learning_rate": 0.1}
CODE: dict[str, Any] = {"variant": "code", "likeness_weight": 0.01}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"local_epochs": 1, "init_std": 0.1, "size_weight": 10.0},
    {"local_epochs": 1, "init_std": 0.1},
    {"local_epochs": 2, "learning_rate": 0.03, "init_std": 0.1, "size_weight": 10.0},
)
SPACE: Space = {**TRAINING_SPACE, "size_weight": Real(0.1, 1000.0, log=True)}


def pfedgraph(federation: Federation, training: EmbeddingTraining, config: PfedgraphConfig) -> FederatedMethod:
    """Score ``p_u . q_i``. Clients train as in FedMF from a table of their own, ``Q_u <- sum_v w_uv Q_v``; p_u stays.

    With Q_0 the table that the run started from, c_uv the cosine of ``Q_u - Q_0`` and ``Q_v - Q_0`` laid flat (1 above
    ``same_above``), and p_v the client's share of the cohort's train items, row u of w minimises ``alpha ||w||^2 -
    (c_u + 2 alpha p) . w`` over ``w >= 0, sum w = 1``: that is the projection of ``p + c_u / (2 alpha)`` on the simplex
    (:func:`graph_weights`), O(n^2 log n) for all clients, beside O(n^2 F) for the cosines, without a general solver.

    With ``likeness_weight`` lambda the local loss has the term ``-lambda z_u . Q / ||Q||`` besides, where ``z_u = sum_v
    w_uv Q_v / ||Q_v||`` is made with the client's last mix; before its first mix there is none. It reaches every row,
    so whole tables train, and z_u is a second table in the download. Where a mix is the client's own table alone, the
    term has no gradient at the start of a round, and Adam takes steps of rounding errors.

    Variant ``mixed``: the client's mix with its p_u. Absent clients keep their older mix, those that never took part
    get the plain mean of the last round. The server holds the tables of all clients in the clear (see
    :mod:`embedding_fr.tables`), so there is no secure sum.

    Source: the public code, which is for images and text; the text of the paper was not at hand. Of the recommender
    version only what PFedCLR's paper says is known: FedMF's model, and mixes for 10 % of the clients of a round since
    the programmes are slow. Ours: the item table is what is flattened, everybody of the cohort gets a mix, local
    training is FedMF's (Adam, fresh in every round; the public code has SGD with momentum 0.9), and the
    term is left out by default. Its sign in the public code is plus, which drives tables away from their mix when it
    is minimised: ``variant="code"``.
    """
    method = fedmf(federation, training, FedmfConfig())
    start_ID = method.init()[0][TABLE]
    optimiser = fedmf_optimiser(training)
    signed = config.likeness_weight * (1.0 if config.variant == "code" else -1.0)

    def init() -> tuple[Tree, Tree]:
        server = mixing.start_server(start_ID, federation.num_clients)
        unmixed = {DIRECTION: torch.zeros_like(start_ID).expand_as(server[TABLE])} if signed else {}
        return {**server, **unmixed}, method.init()[1]

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        sent = mixing.send_personal(server, clients)
        return Download({}, {**sent.per_client, DIRECTION: server[DIRECTION][clients]}) if signed else sent

    def whole_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        drawn = round_examples(federation, training, block, round).on_whole_tables(federation.num_items)
        params = {"user": own["user"].clone(), TABLE: received(download, TABLE, len(block.clients)).clone()}
        objective = Objective(dot_logits, likeness(download.per_client[DIRECTION], signed))
        loss_C = train_epochs(objective, params, drawn, training, optimiser)
        check_finite(params, loss_C, block.clients, round)
        upload = Upload(block.clients, block.data.num_train_C.to(loss_C.dtype), {TABLE: params[TABLE]})
        return upload, {"user": params["user"]}, [{"loss": loss} for loss in loss_C.tolist()]

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        cohort = mixing.collect(server, uploads)
        if cohort is None:
            return server
        cohort = mixing.measured_from(cohort, start_ID.flatten())
        cosine_VV = cosines(mixing.gram_matrix(cohort.table_VF))
        weight_VV = graph_weights(cohort.share_V, cosine_VV, config.size_weight, config.same_above)
        new = {}
        if signed:
            new[DIRECTION] = server[DIRECTION].clone()
            new[DIRECTION][cohort.client_V] = directions(cohort, weight_VV).view(-1, *start_ID.shape)
        return {**mixing.mixed_server(server, cohort, mixing.Mix(weight_VV)), **new}

    return method._replace(
        name="pfedgraph",
        init=init,
        broadcast=broadcast,
        client_update=whole_update if signed else method.client_update,
        server_aggregate=server_aggregate,
        variants=("mixed",),
        upload_like=lambda round, server: {TABLE: server[TABLE][0]},
        takes_mean=False,
    )


def whole_tables(config: PfedgraphConfig) -> int:
    """Whole tables of a client that every local step goes over: the likeness draws every row."""
    return 1 if config.likeness_weight else 0


def graph_weights(share_V: Tensor, cosine_UV: Tensor, size_weight: float, same_above: float) -> Tensor:
    """(U, V) each row's nearest point on the simplex to ``p + c_u / (2 alpha)``; cosines above ``same_above`` are 1."""
    alike_UV = torch.where(cosine_UV > same_above, 1.0, cosine_UV)
    return project_on_simplex(share_V.to(alike_UV) + alike_UV / (2.0 * size_weight))


def directions(cohort: mixing.Cohort, weight_VV: Tensor) -> Tensor:
    """(V, F) ``z_u = sum_v w_uv Q_v / ||Q_v||``; a table of zeros has no direction."""
    mixed_VF = cohort.table_VF + cohort.mean_F
    size_V = torch.linalg.vector_norm(mixed_VF, dim=1).to(weight_VV)
    scaled_VV = weight_VV / size_V.clamp(min=1e-30)
    total_V1 = scaled_VV.sum(1, keepdim=True)
    for columns, one_VF in mixing.mixed_columns(cohort, scaled_VV / total_V1):
        torch.mul(one_VF, total_V1.to(one_VF), out=mixed_VF[:, columns])
    return mixed_VF


def likeness(direction_CID: Tensor, weight: float) -> Penalty:
    """``weight z_u . Q / ||Q||`` of each active client."""

    def penalty(params: Tree) -> Tensor:
        table_AF = params[TABLE].flatten(1)
        size_A = torch.linalg.vector_norm(table_AF, dim=1).clamp(min=1e-30)
        return weight * (direction_CID[: len(table_AF)].flatten(1) * table_AF).sum(1) / size_A

    return penalty


METHOD = Method(
    PfedgraphConfig,
    pfedgraph,
    DEFAULTS,
    GRID,
    SPACE,
    further_tables=whole_tables,
    passing_tables=6,
    server_tables=two,
    code=CODE,
)
