"""GPFedRec: graph-guided personalisation (Zhang et al., 2024).

Shape legend: N clients of the run, V clients of the cohort (U the ones whose neighbours are meant), C clients of a
block, A active clients of a step, I items, D dims, R touched rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from embedding_fr.averaged import Model, score_all
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import round_examples
from embedding_fr.local_training import proximal, train_epochs
from embedding_fr.methods.entry import Method, two
from embedding_fr.methods.fedncf import ncf_model
from embedding_fr.methods.pfedrec import ITEM_FACTOR, code_item_rate
from embedding_fr.mixing import Cohort, collect, gram_matrix, mixed_table, next_tables, shared_mix
from embedding_fr.mlp import layer_sizes
from embedding_fr.optimisers import Optimiser
from embedding_fr.personal_variant import with_personal_variant
from embedding_fr.similarity import cosines
from embedding_fr.stacked import check_finite, received, received_rows, set_rows
from fedecider.bounds import NotNegative, ZeroOrMore, dataclass
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.search_space import Real, Space, Whole

SHORT = 100.0
"""Tables whose squared length is below this many rounding errors of the mean table's have no direction."""


@dataclass(frozen=True)
class GpfedrecConfig:
    """Settings of GPFedRec.

    Args:
        hidden_sizes: The widths of the hidden layers between [p_u, q_i] and the logit, with commas.
        threshold: Neighbours are the clients with a similarity above threshold x mean similarity.
        num_neighbours: If above 0, the neighbours are that many most similar clients, oneself among them, and
            threshold is not used.
        graph_weight: The weight of the regulariser that draws the local table to that of the neighbourhood.
        variant: The variant: paper takes similar clients; code takes those with a large cosine DISTANCE, as the public
            code does.
    """

    hidden_sizes: str = "16,8"
    threshold: NotNegative = 1.0
    num_neighbours: ZeroOrMore = 0
    graph_weight: NotNegative = 1.0
    variant: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        layer_sizes(self.hidden_sizes)


DEFAULTS: dict[str, Any] = {"learning_rate": 0.1, "local_epochs": 1, "init_std": 1.0}
CODE: dict[str, Any] = {"variant": "code", "embedding_size": 32, "hidden_sizes": "32,16,8"}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"init_std": 0.1},
    {"init_std": 0.1, "learning_rate": 0.03, "local_epochs": 2},
    {"init_std": 0.1, "learning_rate": 0.03},
)
SPACE: Space = {**TRAINING_SPACE, "local_epochs": Whole(1, 3), "graph_weight": Real(0.01, 10.0, log=True)}


def gpfedrec(federation: Federation, training: EmbeddingTraining, config: GpfedrecConfig) -> FederatedMethod:
    """Score ``mlp([p_u, q_i])``: p_u and the network stay. The server joins clients whose item tables are similar
    (:func:`user_graph`), ``R = A Q`` over the uploaded tables gives each client the table r_u of its
    neighbourhood, and ``q = mean_u r_u`` is what all start from. Loss: BCE + graph_weight mean((q_u - r_u)^2).

    Download: q and r_u - q (what the neighbourhood adds), two tables; upload: one table, in full, since the regulariser
    moves every row. Rows without examples are moved in closed form (:func:`tables_by_regulariser`). The similarity
    needs all uploads at once: the server holds one table per client, N I D numbers (4 N I D bytes: 100 MB for 943
    clients, 1,682 items and 16 dims; 1.4 GB for 6,040 clients and 3,706 items), and as many again while it makes the
    next ones in the place of the uploads. An absent client keeps its r_u.

    Variants: ``personal`` scores with the client's own last table, as the public code does (another N I D numbers, at
    the clients); ``global`` with q; ``graph`` with r_u.

    Differs from the paper: its text was not at hand; model, plain SGD with the rates of the public code (network:
    learning_rate, user: x 79, table: x (80 items - 1) unless item_learning_rate is given), start values N(0, 1) and the
    mean over all pairs in the threshold are those of the public code. That takes neighbours above the mean cosine
    distance, hence the least similar clients: here only in ``variant="code"``. A regulariser that would jump beyond
    r_u is lowered to the weight that lands on it in one step.
    """
    model = ncf_model(federation, training, config.hidden_sizes)
    scorer = {name: tensor for name, tensor in model.shared.items() if name != "item_table"}
    optimiser = plain_sgd(federation, training, [*scorer, "user"])
    weight = landing_weight(config.graph_weight, federation, training, optimiser.learning_rate["item_table"])
    strength = 2.0 * weight / (federation.num_items * training.embedding_size)

    def init() -> tuple[Tree, Tree]:
        table_ID = model.shared["item_table"]
        server = {"item_table": table_ID, "graph_table": repeated(table_ID, federation.num_clients)}
        return server, {
            **model.private,
            **{name: repeated(start, federation.num_clients) for name, start in scorer.items()},
        }

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        table_ID = server["item_table"]
        return Download({"item_table": table_ID}, {"graph_offset": server["graph_table"][clients] - table_ID})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        drawn = round_examples(federation, training, block, round)
        start_CRD = received_rows(download, "item_table", drawn.row_CR)
        goal_CRD = start_CRD + received_rows(download, "graph_offset", drawn.row_CR)
        params = {**{name: tensor.clone() for name, tensor in own.items()}, "item_table": start_CRD}
        objective = model.objective._replace(penalty=proximal(goal_CRD, strength))
        loss_C = train_epochs(objective, params, drawn, training, optimiser)
        check_finite(params, loss_C, block.clients, round)
        steps_C = training.local_epochs * -(-drawn.examples.count_C // training.batch_size)
        table_CID = tables_by_regulariser(download, steps_C, optimiser.learning_rate["item_table"] * strength)
        set_rows(table_CID, drawn.row_CR, params["item_table"])
        upload = Upload(block.clients, block.data.num_train_C.to(loss_C.dtype), {"item_table": table_CID})
        return upload, {name: params[name] for name in own}, [{"loss": loss} for loss in loss_C.tolist()]

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        cohort = collect(server, uploads, "graph_table")
        if cohort is None:
            return server
        graph_VV = user_graph(cosine_similarities(cohort), config)
        mean_ID = mixed_table(cohort, graph_VV.mean(0)).view(server["item_table"].shape)
        return {"item_table": mean_ID, "graph_table": next_tables(server["graph_table"], cohort, shared_mix(graph_VV))}

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        if variant == "graph":
            table_CID = received(download, "item_table", len(block.clients)) + download.per_client["graph_offset"]
            download = Download({}, {"item_table": table_CID})
        scored = Model({"item_table": model.shared["item_table"]}, {}, model.logits)
        return rank_users(score_all(scored, download, own), block.data, split, federation.protocol)

    variants = ("global", "graph")
    method = FederatedMethod(
        "gpfedrec",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        variants,
        upload_like=lambda round, server: {"item_table": server["item_table"]},
    )
    return with_personal_variant(method, federation)


def user_graph(similarity_UU: Tensor, config: GpfedrecConfig) -> Tensor:
    """(U, U) A: rows of weights 1 / neighbours that sum to 1; a client without neighbours has itself."""
    affinity_UU = 1.0 - similarity_UU if config.variant == "code" else similarity_UU
    if config.num_neighbours:
        near_UK = affinity_UU.topk(min(config.num_neighbours, len(affinity_UU)), dim=1).indices
        linked_UU = torch.zeros_like(affinity_UU).scatter_(1, near_UK, 1.0)
    else:
        linked_UU = (affinity_UU > config.threshold * affinity_UU.mean()).to(affinity_UU)
    alone_U = linked_UU.sum(1) == 0
    linked_UU[alone_U, alone_U] = 1.0
    return linked_UU / linked_UU.sum(1, keepdim=True)


def cosine_similarities(cohort: Cohort) -> Tensor:
    """(V, V) float64 ``<Q_u, Q_v> / (||Q_u|| ||Q_v||)`` of the tables laid flat; 1 on the diagonal.

    With d_u the difference from the mean m it is ``<d_u, d_v> + a_u + a_v + ||m||^2``, where ``a_u = <d_u, m>``, over
    its square roots on the diagonal. Only the first two products have the rounding of the tables' type, so the distance
    1 - cos of tables that have moved little keeps its digits. 0 beside a table that is zero but for rounding.
    """
    mean_square = cohort.mean_F.double().square().sum()
    along_V = torch.mv(cohort.table_VF, cohort.mean_F).double()
    inner_VV = gram_matrix(cohort.table_VF).add_(along_V[:, None] + mean_square).add_(along_V)
    short_V = inner_VV.diagonal() <= SHORT * torch.finfo(cohort.mean_F.dtype).eps * mean_square
    inner_VV[short_V] = 0.0
    inner_VV[:, short_V] = 0.0
    return cosines(inner_VV).clamp_(max=1.0).fill_diagonal_(1.0)


def tables_by_regulariser(download: Download, steps_C: Tensor, rate: float) -> Tensor:
    """(C, I, D) tables after ``steps`` steps of the regulariser alone: ``q - r <- (1 - rate) (q - r)`` from q to r."""
    offset_CID = download.per_client["graph_offset"]
    share_C = 1.0 - (1.0 - rate) ** steps_C.to(offset_CID)
    return received(download, "item_table", len(offset_CID)) + share_C[:, None, None] * offset_CID


def landing_weight(graph_weight: float, federation: Federation, training: EmbeddingTraining, item_rate: float) -> float:
    """The regulariser's weight, at most that with which one step lands on its goal: ``2 rate weight / (I D) = 1``."""
    return min(graph_weight, federation.num_items * training.embedding_size / (2.0 * item_rate))


def plain_sgd(federation: Federation, training: EmbeddingTraining, names: list[str]) -> Optimiser:
    """SGD with the public code's rates: those of user embedding and table make up for the mean over many clients."""
    rate = training.learning_rate
    item_rate = training.item_learning_rate or code_item_rate(federation, training) - rate
    rates = {**dict.fromkeys(names, rate), "user": rate * ITEM_FACTOR - rate, "item_table": item_rate}
    return Optimiser("sgd", rates, training.weight_decay)


def repeated(tensor: Tensor, num_clients: int) -> Tensor:
    """(N, ...) a copy for each client."""
    return tensor.expand(num_clients, *tensor.shape).clone()


METHOD = Method(
    GpfedrecConfig,
    gpfedrec,
    DEFAULTS,
    GRID,
    SPACE,
    passing_tables=4,
    server_tables=two,
    code=CODE,
)
