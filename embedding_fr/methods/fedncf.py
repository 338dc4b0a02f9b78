"""FedNCF: federated neural collaborative filtering (Perifanis and Efraimidis, 2022).

Shape legend: N clients of the run, C clients of a block, I items, D dims, B examples.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from embedding_fr.averaged import Model, averaged
from embedding_fr.blocks import Federation
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.methods.entry import Method
from embedding_fr.mlp import layer_sizes, mlp, mlp_of_catalogue, start_mlp
from embedding_fr.optimisers import Optimiser
from embedding_fr.stacked import take
from embedding_fr.tables import normal
from fedecider.bounds import dataclass
from fedecider.federation.method import FederatedMethod, Tree
from fedecider.search_space import Space


@dataclass(frozen=True)
class FedncfConfig:
    """Settings of FedNCF.

    Args:
        hidden_sizes: The widths of the hidden layers between [p_u, q_i] and the logit, with commas. With 16 dims the
            default is the network 32-16-8-1 that later papers compare with (client sizes in table 6 of PFedCLR).
    """

    hidden_sizes: str = "16,8"

    def __post_init__(self) -> None:
        layer_sizes(self.hidden_sizes)


DEFAULTS: dict[str, Any] = {"learning_rate": 0.001}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"local_epochs": 2, "learning_rate": 0.01, "init_std": 0.1},
    {"local_epochs": 1, "learning_rate": 0.03, "init_std": 0.1},
    {"learning_rate": 0.003, "init_std": 0.1},
)
SPACE: Space = TRAINING_SPACE


def fedncf(federation: Federation, training: EmbeddingTraining, config: FedncfConfig) -> FederatedMethod:
    """Score ``mlp([p_u, q_i])``: the user embedding p_u stays, item table and network are averaged by train items.

    Differs from the paper: only its first aggregation, the weighted mean of everything that is shared, is built, which
    is also what later papers call FedNCF; uploads are plain (the paper adds secure aggregation). Its settings were not
    at hand: the learning rate is that of a public re-implementation which says that it took the paper's.
    """
    model = ncf_model(federation, training, config.hidden_sizes)
    rates = dict.fromkeys((*model.shared, *model.private), training.learning_rate)
    optimiser = Optimiser("adam", {**rates, "item_table": training.item_rate}, training.weight_decay)
    return averaged("fedncf", model, federation, training, optimiser=optimiser)


def ncf_model(federation: Federation, training: EmbeddingTraining, hidden_sizes: str) -> Model:
    """``item_table`` (I, D), ``user`` (N, D), and the network ``scorer`` 2 D -> hidden sizes -> 1."""
    sizes = (2 * training.embedding_size, *layer_sizes(hidden_sizes), 1)
    return Model(
        shared={
            "item_table": normal(federation, training, "item_table", federation.num_items),
            **start_mlp(federation, "scorer", sizes),
        },
        private={"user": normal(federation, training, "user", federation.num_clients)},
        logits=ncf_logits,
        scores=ncf_scores,
    )


def ncf_logits(params: Tree, item: Tensor | None) -> Tensor:
    """(C, B) outputs of ``scorer`` for [p_u, q_i]."""
    return mlp(params, "scorer", take(params["item_table"], item), params["user"])[:, :, 0]


def ncf_scores(shared: Tree, own: Tree) -> Tensor:
    """(C, I) what :func:`ncf_logits` says of all items."""
    return mlp_of_catalogue(shared, "scorer", shared["item_table"], own["user"])[:, 0]


METHOD = Method(FedncfConfig, fedncf, DEFAULTS, GRID, SPACE)
