"""FedMF: federated matrix factorisation (Chai et al., 2020), and FCF's weights (Ammad-ud-din et al., 2019)."""

from __future__ import annotations

from typing import Literal

from embedding_fr.averaged import Model, averaged
from embedding_fr.blocks import Federation
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.kernels import Kernel
from embedding_fr.local_training import dot_logits
from embedding_fr.methods.entry import Method
from embedding_fr.optimisers import Optimiser
from embedding_fr.tables import normal
from fedecider.bounds import dataclass
from fedecider.federation.method import FederatedMethod
from fedecider.search_space import Space


@dataclass(frozen=True)
class FedmfConfig:
    """Settings of FedMF.

    Args:
        weighting: How clients weigh in the mean: examples, by their train items (FedMF), or uniform, alike (FCF).
    """

    weighting: Literal["examples", "uniform"] = "examples"


DEFAULTS: dict[str, float] = {"learning_rate": 0.1}
GRID: tuple[dict, ...] = (
    {},
    {"local_epochs": 1},
    {"local_epochs": 1, "init_std": 0.1},
    {"local_epochs": 2, "learning_rate": 0.03, "init_std": 0.1},
    {"local_epochs": 1, "learning_rate": 0.3, "init_std": 0.1},
)
SPACE: Space = TRAINING_SPACE


def fedmf(federation: Federation, training: EmbeddingTraining, config: FedmfConfig) -> FederatedMethod:
    """Score ``p_u . q_i``: the user embedding p_u stays, the item table Q is averaged.

    Differs from the papers: gradients of a batch are means, uploads are plain (Chai et al. encrypt them, FCF uploads
    gradients).
    """
    model = mf_model(federation, training)
    return averaged(
        "fedmf",
        model,
        federation,
        training,
        optimiser=fedmf_optimiser(training),
        uniform=config.weighting == "uniform",
    )


def dot_kernel() -> Kernel:
    """The compiled local training of user embedding and item table under their inner products."""
    from embedding_fr.compiled.training import train_linear  # Numba: half a second that only training needs

    return Kernel(train_linear, ("item_table",), (("user",),))


def mf_model(federation: Federation, training: EmbeddingTraining) -> Model:
    """``item_table`` (I, D), ``user`` (N, D), both normal with ``init_std``."""
    return Model(
        shared={"item_table": normal(federation, training, "item_table", federation.num_items)},
        private={"user": normal(federation, training, "user", federation.num_clients)},
        logits=dot_logits,
        by_row=True,
        kernel=dot_kernel(),
    )


def fedmf_optimiser(training: EmbeddingTraining) -> Optimiser:
    """Adam with one rate for user embeddings and one for item tables."""
    rates = {"user": training.learning_rate, "item_table": training.item_rate}
    return Optimiser("adam", rates, training.weight_decay)


METHOD = Method(
    FedmfConfig,
    fedmf,
    DEFAULTS,
    GRID,
    SPACE,
    equal_weights=lambda config: config.weighting == "uniform",
)
