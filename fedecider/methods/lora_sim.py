"""LoRA-Sim (FeDecider, figure 2): clients average with each other by how alike their LoRA modules are.

Shape legend: K clients.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedecider.federation.method import FederatedMethod, Tree
from fedecider.methods.averaged import scalars_both_ways
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import LoraSimConfig
from fedecider.methods.entries import Method
from fedecider.methods.personal_average import (
    client_model,
    cosines,
    exact_sum,
    module_products,
    personal_average,
)
from fedecider.search_space import OneOf, Real, Space

scalars = scalars_both_ways

GRID: tuple[dict[str, Any], ...] = (
    {},
    {"similarity": "softmax"},
    {"similarity": "softmax", "temperature": 0.02},
    {"similarity": "softmax", "temperature": 0.5},
)
SPACE: Space = {"similarity": OneOf(("shifted", "softmax")), "temperature": Real(0.01, 1.0, log=True)}


def lora_sim(models: ClientModels, config: LoraSimConfig) -> FederatedMethod:
    """Personal averages of all adapters by :func:`mixing_weights`, with the mean over modules of the cosine of factors.

    Variants: ``aggregated`` (reported) and ``local``. Differs from the paper: it names layer-wise cosines and
    client-wise weights only; how one becomes the other is ours.
    """

    def weigh(round: int, rows: Tree) -> Tensor:
        cosine_KKM = cosines(module_products(rows)).movedim(0, -1)
        return mixing_weights(exact_sum(cosine_KKM) / cosine_KKM.shape[-1], config)

    return personal_average("lora_sim", models, weigh)


def mixing_weights(cosine_KK: Tensor, config: LoraSimConfig) -> Tensor:
    """(K, K) float64 weights, every row with sum 1."""
    if config.similarity == "shifted":
        weight_KK = (cosine_KK.double() + 1.0) / 2.0
    else:
        weight_KK = ((cosine_KK.double() - 1.0) / config.temperature).exp()  # a client's cosine with itself is 1
    return weight_KK / exact_sum(weight_KK)[:, None]


METHOD = Method(
    LoraSimConfig,
    lora_sim,
    client_model,
    scalars,
    GRID,
    SPACE,
    takes_mean=False,
)
