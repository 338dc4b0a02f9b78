"""PFedRec: dual personalisation (Zhang et al., 2023).

Shape legend: N clients of the run, C clients of a block, I items, D dims, B examples.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from embedding_fr.averaged import Model, averaged
from embedding_fr.blocks import Federation
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.kernels import Kernel
from embedding_fr.methods.entry import Method, always
from embedding_fr.mlp import start_mlp
from embedding_fr.optimisers import Optimiser
from embedding_fr.personal_variant import with_personal_variant
from embedding_fr.stacked import inner_products, take
from embedding_fr.tables import normal
from fedecider.bounds import dataclass
from fedecider.federation.method import FederatedMethod, Tree
from fedecider.search_space import Space

IN_TURN = (("scorer.0.weight", "scorer.0.bias"), ("item_table",))
"""What takes a step one after the other, on every mini-batch."""
ITEM_FACTOR = 80
"""The public code multiplies the learning rate of item tables by the number of items and by this."""


@dataclass(frozen=True)
class PfedrecConfig:
    """Settings of PFedRec.

    Args:
        variant: The variant: paper trains with Adam; code trains with plain SGD and the public code's rate for item
            tables, learning_rate x items x 80, unless item_learning_rate is given.
    """

    variant: Literal["paper", "code"] = "paper"


DEFAULTS: dict[str, Any] = {"learning_rate": 0.1, "local_epochs": 1, "init_std": 1.0}
CODE: dict[str, Any] = {"variant": "code", "embedding_size": 32}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"init_std": 0.1},
    {"init_std": 0.1, "learning_rate": 0.03, "local_epochs": 2},
    {"init_std": 0.1, "learning_rate": 0.03},
)
SPACE: Space = TRAINING_SPACE


def pfedrec(federation: Federation, training: EmbeddingTraining, config: PfedrecConfig) -> FederatedMethod:
    """Score ``w_u . q_i + b_u``: the score function (w_u, b_u) stays; the item table is averaged, every client alike,
    and tuned by each client in the next round. On every mini-batch the score function takes a step, then the table.

    Variants: ``personal`` scores with the client's own table from before the averaging, as the public code does;
    ``global`` with the averaged one. For the first the local state holds whole tables, (N, I, D).

    Differs from the paper: its text was not at hand. Alternation, uniform mean and evaluation are those of the public
    code in both variants, and so are the learning rate 0.1, one local epoch and start values N(0, 1) (weights of
    the score function: uniform in +-1/sqrt(D), alike for all). Adam in ``paper`` is our choice: with one rate for
    everything SGD barely moves a table whose changes are averaged over all clients.
    """
    optimiser = Optimiser(
        "adam" if config.variant == "paper" else "sgd",
        {
            "scorer.0.weight": training.learning_rate,
            "scorer.0.bias": training.learning_rate,
            "item_table": training.item_rate if config.variant == "paper" else code_item_rate(federation, training),
        },
        training.weight_decay,
        IN_TURN,
    )
    model = linear_model(federation, training)
    method = averaged("pfedrec", model, federation, training, optimiser=optimiser, uniform=True)
    return with_personal_variant(method, federation)


def linear_model(federation: Federation, training: EmbeddingTraining) -> Model:
    """``item_table`` (I, D) normal with ``init_std``, and a linear layer D -> 1 for each client, alike at the start."""
    scorer = start_mlp(federation, "scorer", (training.embedding_size, 1))
    return Model(
        shared={"item_table": normal(federation, training, "item_table", federation.num_items)},
        private={name: tensor.expand(federation.num_clients, *tensor.shape) for name, tensor in scorer.items()},
        logits=linear_logits,
        by_row=True,
        kernel=linear_kernel(),
    )


def linear_kernel() -> Kernel:
    """The compiled local training of :func:`linear_model`."""
    from embedding_fr.compiled.training import train_linear  # Numba: half a second that only training needs

    return Kernel(train_linear, ("item_table",), IN_TURN[:1], alternates=True)


def linear_logits(params: Tree, item: Tensor | None) -> Tensor:
    """(C, B) outputs of ``scorer`` for q_i."""
    return (
        inner_products(take(params["item_table"], item), params["scorer.0.weight"][:, :, 0]) + params["scorer.0.bias"]
    )


def code_item_rate(federation: Federation, training: EmbeddingTraining) -> float:
    """The rate of item tables in the public code, which makes up for the mean over many clients."""
    return training.item_learning_rate or training.learning_rate * federation.num_items * ITEM_FACTOR


METHOD = Method(
    PfedrecConfig,
    pfedrec,
    DEFAULTS,
    GRID,
    SPACE,
    passing_tables=1,
    equal_weights=always,
    code=CODE,
)
