"""FellRec (Zhao et al., 2024), its aggregation: alike clients count more, and clients that learn badly listen less.

Shape legend: K clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedecider.federation.method import FederatedMethod, Tree
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import FellrecConfig
from fedecider.methods.entries import Method
from fedecider.methods.personal_average import (
    LOSS,
    client_model,
    cosines,
    exact_sum,
    module_products,
    personal_average,
)
from fedecider.models.adapters import Shapes, factor_scalars
from fedecider.search_space import Real, Space

GRID: tuple[dict[str, Any], ...] = ({}, {"a": 0.5, "beta": 5.0}, {"a": 0.3}, {"a": 0.1}, {"temperature": 0.5})
SPACE: Space = {
    "a": Real(0.05, 1.0, log=True),
    "beta": Real(0.5, 5.0, log=True),
    "temperature": Real(0.01, 1.0, log=True),
}


def fellrec(models: ClientModels, config: FellrecConfig) -> FederatedMethod:
    """Personal averages of all adapters by :func:`mixing_weights`, with the cosine of all factors laid flat.

    Every client uploads its adapters and its last training loss. Variants: ``aggregated`` (reported) and ``local``.
    Differs from the paper: the whole adapter is trained by the client and sent, while the paper leaves middle layers to
    the server, which changes who computes and what travels, not the result. Differs from the public code: all averages
    come from the uploads, while the code overwrites clients that later ones still read; and the warm-up is used at
    beta 1, too.
    """

    def weigh(round: int, rows: Tree) -> Tensor:
        product_KK = exact_sum(module_products(rows).movedim(0, -1))
        return mixing_weights(cosines(product_KK), rows[LOSS], round, config)

    return personal_average("fellrec", models, weigh, sends_loss=True)


def mixing_weights(cosine_KK: Tensor, loss_K: Tensor, round: int, config: FellrecConfig) -> Tensor:
    """(K, K) float64 weights, ``S_ii`` and ``w_i S_ij`` over their row's sum, ``S = (cosine + 1) / 2``.

    ``w_i = tanh(a / L_i^e)`` with L the softmax of ``loss / temperature`` over the clients and e the exponent of the
    settings, which grows with the round (FellRec, its dynamic balance strategy): with the rounds all but the worst
    client come to listen fully.
    """
    scaled_K = loss_K.double() / config.temperature
    shifted_K = scaled_K - scaled_K.max()
    log_share_K = shifted_K - exact_sum(shifted_K.exp()).log()
    exponent = round / config.beta if config.exponent == "paper" else round - 1 + 1.0 / config.beta
    warm_K = torch.tanh(config.a * (-exponent * log_share_K).clamp(max=700.0).exp())  # finite, so that a = 0 gives 0
    similarity_KK = (cosine_KK + 1.0) / 2.0
    own_KK = torch.eye(len(loss_K), dtype=torch.bool)
    weight_KK = torch.where(own_KK, similarity_KK, warm_K[:, None] * similarity_KK)
    return weight_KK / exact_sum(weight_KK)[:, None]


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """P down, P and the loss up."""
    num_scalars = sum(factor_scalars(shapes).values())
    return num_scalars, num_scalars + 1


METHOD = Method(
    FellrecConfig,
    fellrec,
    client_model,
    scalars,
    GRID,
    SPACE,
    beside_training="the training loss is uploaded",
    takes_mean=False,
)
