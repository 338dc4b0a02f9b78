"""FFA-LoRA (Sun et al., ICLR 2024): one common random A that nobody trains, so that averaging B is exact."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fedecider.federation.method import Download, FederatedMethod, Tree
from fedecider.methods.averaged import averaged
from fedecider.methods.config import WeightingConfig
from fedecider.methods.entries import Method
from fedecider.methods.local_training import train_locally
from fedecider.methods.recommender import ClientModels
from fedecider.models.adapters import (
    Shapes,
    adapter_shapes,
    factor_scalars,
    initial_adapters,
    load_plain,
    stack_trees,
    with_prefix,
    without_prefix,
)

VARIANTS = ("global", "local")


def ffa_lora(recommender: ClientModels, config: WeightingConfig) -> FederatedMethod:
    """``B <- sum_i p_i B_i`` with A as it was drawn: ``sum_i p_i B_i A = (sum_i p_i B_i) A``, without cross terms.

    A follows from the seed of the run, which all parties know: it is never sent, and neither server nor local state
    holds it. Variants: ``global`` (after aggregation, reported) and ``local`` (the client's model before the upload).
    Differs from the paper: AdamW for some epochs a round where it takes steps of SGD; with ``user_privacy`` bounds are
    those of a user, not of a sample.
    """
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)
    start_b = _only_b(start)

    def init() -> tuple[Tree, Tree]:
        return start_b, with_prefix(stack_trees([start_b] * recommender.num_clients), "own")

    def update(round: int, shared: Tree, own: Tree, client: int) -> tuple[Tree, Tree, dict[str, Any]]:
        load_plain(recommender.model, {**start, **shared})
        trained = train_locally(recommender, client, round, factors=("lora_b",))
        trained_b = _only_b(trained.adapters)
        return trained_b, with_prefix(trained_b, "own") if trained.log["finite"] else own, trained.log

    load = partial(load_variant, recommender, config)
    return averaged(recommender, "ffa_lora", VARIANTS, update, load, config.weighting)._replace(init=init)


def load_variant(
    recommender: ClientModels, config: WeightingConfig, variant: str, download: Download, own: Tree, client: int
) -> None:
    """Load the global B, or the client's before its upload, beside the common A."""
    assert variant in VARIANTS, variant
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)
    load_plain(recommender.model, {**start, **(download.shared if variant == "global" else without_prefix(own, "own"))})


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """All B both ways, about P/2."""
    num_scalars = factor_scalars(shapes)["lora_b"]
    return num_scalars, num_scalars


def _only_b(adapters: Tree) -> Tree:
    return {key: tensor for key, tensor in adapters.items() if key.endswith(".lora_b")}


METHOD = Method(WeightingConfig, ffa_lora, load_variant, scalars)
