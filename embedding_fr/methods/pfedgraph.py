"""pFedGraph: a mix of all clients' models for each client, by a collaboration graph (Ye et al., *Personalized Federated
Learning with Inferred Collaboration Graphs*, ICML 2023), on FedMF's model as PFedCLR's paper runs it.

Shape legend: N clients of the run, V clients of the cohort (U the ones a mix is for), C clients of a block, A active
clients of a step, I items, D dims, F = I D numbers of a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from embedding_fr import mixing
from embedding_fr.blocks import Federation
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.methods.entry import Method, two
from embedding_fr.methods.fedmf import FedmfConfig, fedmf
from embedding_fr.similarity import SAME, cosines, project_on_simplex
from fedecider.bounds import Positive, Share, dataclass
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.search_space import Real, Space

TABLE = "item_table"


@dataclass(frozen=True)
class PfedgraphConfig:
    """Settings of pFedGraph.

    Args:
        size_weight: The weight alpha that holds each mix to the clients' shares of all train items. Large is the mean
            of FedMF, small is a client's own table.
        same_above: Clients whose updates have a cosine above this count as the same, with cosine 1; 1 turns it off.
    """

    size_weight: Positive = 0.8
    same_above: Share = SAME


DEFAULTS: dict[str, Any] = {"learning_rate": 0.1}
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

    Variant ``mixed``: the client's mix with its p_u. Absent clients keep their older mix, those that never took part
    get the plain mean of the last round. The server holds the tables of all clients in the clear (see
    :mod:`embedding_fr.tables`), so there is no secure sum.

    Source: the public code, which is for images and text; the text of the paper was not at hand. Of the recommender
    version only what PFedCLR's paper says is known: FedMF's model, and mixes for 10 % of the clients of a round since
    the programmes are slow. Ours: the item table is what is flattened, everybody of the cohort gets a mix, local
    training is FedMF's (Adam, fresh in every round; the public code has SGD with momentum 0.9). The term of the local
    loss in the likeness of a table to its mix is left out: in the public code its sign drives the table away.
    """
    method = fedmf(federation, training, FedmfConfig())
    start_ID = method.init()[0][TABLE]

    def init() -> tuple[Tree, Tree]:
        return mixing.start_server(start_ID, federation.num_clients), method.init()[1]

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return mixing.send_personal(server, clients)

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        cohort = mixing.collect(server, uploads)
        if cohort is None:
            return server
        cohort = mixing.measured_from(cohort, start_ID.flatten())
        cosine_VV = cosines(mixing.gram_matrix(cohort.table_VF))
        weight_VV = graph_weights(cohort.share_V, cosine_VV, config.size_weight, config.same_above)
        return mixing.mixed_server(server, cohort, mixing.Mix(weight_VV))

    return method._replace(
        name="pfedgraph",
        init=init,
        broadcast=broadcast,
        server_aggregate=server_aggregate,
        variants=("mixed",),
        upload_like=lambda round, server: {TABLE: server[TABLE][0]},
        takes_mean=False,
    )


def graph_weights(share_V: Tensor, cosine_UV: Tensor, size_weight: float, same_above: float) -> Tensor:
    """(U, V) each row's nearest point on the simplex to ``p + c_u / (2 alpha)``; cosines above ``same_above`` are 1."""
    alike_UV = torch.where(cosine_UV > same_above, 1.0, cosine_UV)
    return project_on_simplex(share_V.to(alike_UV) + alike_UV / (2.0 * size_weight))


METHOD = Method(
    PfedgraphConfig,
    pfedgraph,
    DEFAULTS,
    GRID,
    SPACE,
    passing_tables=6,
    server_tables=two,
)
