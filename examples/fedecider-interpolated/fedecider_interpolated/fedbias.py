"""FedMF with a bias for every item, which is averaged like the item table."""

from __future__ import annotations

import torch
from torch import Tensor

from embedding_fr.averaged import Model, averaged
from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.local_training import dot_logits
from embedding_fr.methods import Method
from embedding_fr.optimisers import Optimiser
from embedding_fr.stacked import take
from embedding_fr.tables import normal
from fedecider.bounds import NotNegative, dataclass
from fedecider.federation.method import FederatedMethod, Tree


@dataclass(frozen=True)
class FedbiasConfig:
    """Settings of FedMF with item biases.

    Args:
        bias_learning_rate: The learning rate of the biases; 0 leaves them at 0, which is FedMF.
    """

    bias_learning_rate: NotNegative = 0.1


def fedbias(federation: Federation, training: EmbeddingTraining, config: FedbiasConfig) -> FederatedMethod:
    """Score ``p_u . q_i + b_i``: the user embedding p_u stays, item table Q and biases b are averaged by train items.

    The score is that of Koren, Bell and Volinsky (2009). Differs from it: no bias of the user, and it is federated.
    """
    model = Model(
        shared={
            "item_table": normal(federation, training, "item_table", federation.num_items),
            "item_bias": torch.zeros(federation.num_items, 1, device=federation.device),
        },
        private={"user": normal(federation, training, "user", federation.num_clients)},
        logits=bias_logits,
        tables=("item_table", "item_bias"),
    )
    rates = {"user": training.learning_rate, "item_table": training.item_rate, "item_bias": config.bias_learning_rate}
    return averaged("fedbias", model, federation, training, optimiser=Optimiser("adam", rates, training.weight_decay))


def bias_logits(params: Tree, item: Tensor | None) -> Tensor:
    """(C, B) scores of the rows ``item`` (C, B) of each client's tables; None: of all rows."""
    return dot_logits(params, item) + take(params["item_bias"], item)[:, :, 0]


METHOD = Method(
    FedbiasConfig,
    fedbias,
    defaults={"learning_rate": 0.1},
    grid=({}, {"local_epochs": 1}, {"bias_learning_rate": 0.01}),
    published=False,
)
