"""FFA-LoRA (Sun et al., ICLR 2024): one common random A that nobody trains, so that averaging B is exact."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fedecider.federation.method import Download, FederatedMethod, Tree
from fedecider.methods.averaged import averaged
from fedecider.methods.client_models import ClientModels, Update, own_state
from fedecider.methods.config import WeightingConfig
from fedecider.methods.entries import Method
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import Shapes, factor_scalars, only, with_prefix, without_prefix
from fedecider.models.client_model import ClientModel


def ffa_lora(models: ClientModels, config: WeightingConfig) -> FederatedMethod:
    """``B <- sum_i p_i B_i`` with A as it was drawn: ``sum_i p_i B_i A = (sum_i p_i B_i) A``, without cross terms.

    A follows from the seed of the run, which all parties know: it is never sent, and neither server nor local state
    holds it. Variants: ``global`` (after aggregation, reported) and ``local`` (the client's model before the upload).
    Differs from the paper: AdamW for some epochs a round where it takes steps of SGD; with ``user_privacy`` bounds are
    those of a user, not of a sample.
    """
    start = models.start
    start_b = only(start, "lora_b")

    def train(round: int, download: Download, own: Tree, client: int) -> Update:
        trained = train_locally(models, client, round, {**start, **download.shared}, factors=("lora_b",))
        trained_b = only(trained.pair, "lora_b")
        return trained_b, with_prefix(trained_b, "own") if trained.finite else own, trained.log

    made = partial(client_model, models, config)
    method = averaged(models, "ffa_lora", ("global", "local"), train, config.weighting, made)
    return method._replace(init=lambda: (start_b, own_state(models, start_b)))


def client_model(
    models: ClientModels, config: WeightingConfig, variant: str, download: Download, own: Tree, client: int
) -> ClientModel:
    """The client's model with the global B, or with its own before the upload, beside the common A."""
    factor_b = download.shared if variant == "global" else without_prefix(own, "own")
    return models.model(client, {**models.start, **factor_b})


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """All B both ways, about P/2."""
    num_scalars = factor_scalars(shapes)["lora_b"]
    return num_scalars, num_scalars


METHOD = Method(WeightingConfig, ffa_lora, client_model, scalars)
