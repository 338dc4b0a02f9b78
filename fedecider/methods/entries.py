"""The entry of every built-in method, and the registry of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fedecider.bounds import Real, Space
from fedecider.federation.method import FederatedMethod
from fedecider.federation.registry import LLM_METHODS, Registry
from fedecider.methods import (
    centralised,
    ditto,
    fdlora,
    fedavg,
    fedecider,
    fedprox,
    fellrec,
    ffa_lora,
    flora,
    local,
    lora_sim,
    pfedavg,
    rolora,
)
from fedecider.methods.fedecider import FusionWeights
from fedecider.methods.recommender import ClientModels, sends_own_rows, travelling_rows
from fedecider.models.adapters import Shapes


class Method(NamedTuple):
    """How a method is configured, built and loaded."""

    config: type
    """Frozen dataclass of the method's own settings."""
    algorithm: Callable[..., FederatedMethod]
    """(recommender, config) -> the method, over whole adapters; :meth:`build` is what runs."""
    load_variant: Callable[..., Any]
    """(recommender, config, variant, download, own row, client): load the client's model into ``recommender.model``.
    ``download`` is what the client really has (`fedecider.federation.wire.received`). A method with fusion weights
    returns the own row with the weights that it loaded."""
    scalars: Callable[[Shapes, Sequence[Shapes], int], tuple[int, int]]
    """(shapes, peers, round) -> numbers that one client receives and sends, by the formula; tests compare it with the
    bytes that were sent. ``shapes`` are those of its own adapters, ``peers[j]`` those that it reads of client j.
    They differ where only rows of catalogues travel (`fedecider.methods.recommender.travelling_shapes`)."""
    grid: tuple[dict[str, Any], ...] = ({},)
    """Settings to try on validation, the default first: a search of N trials takes the first N, then ``RATES``."""
    space: Space = {}  # noqa: RUF012 (never written to)
    """What a search draws from after ``grid``, together with ``TRAINING_SPACE``."""
    pooled: bool = False
    """Whether all clients form one block, since nothing is federated."""
    beside_training: str = ""
    """Why ``user_privacy`` cannot hide single users: it bounds their gradients, and this method reads them elsewhere
    too. Empty: it can."""
    fusion_weights: FusionWeights | None = None
    """Where the fusion weights are; None for a method without."""
    takes_mean: bool = True
    """As `FederatedMethod.takes_mean`, known before anything is built: a run that asks for a robust mean or a secure
    sum is refused at once, not after hours of pre-training."""

    def build(self, recommender: ClientModels, config: Any) -> FederatedMethod:
        """The method. Of tables only rows of the own catalogue travel, where training changes no others."""
        method = self.algorithm(recommender, config)
        return method if self.pooled else sends_own_rows(method, travelling_rows(recommender, method.takes_mean))


RATES = ({"learning_rate": 3e-3}, {"learning_rate": 3e-4}, {"learning_rate": 1e-2})
"""Tried after a method's own grid, so that a method without settings has the same budget as one with many."""
TRAINING_SPACE: Space = {"learning_rate": Real(0.0001, 0.03, log=True)}
"""What a search may set for every method."""
PULL = "a proximal term asks for the mean gradient, which depends on the number of users"
BUILT_IN = {
    "fedecider": Method(
        fedecider.FedeciderConfig,
        fedecider.fedecider,
        fedecider.load_variant,
        fedecider.scalars,
        fedecider.GRID,
        fedecider.SPACE,
        fusion_weights=fedecider.FUSION_WEIGHTS,
        takes_mean=False,
    ),
    "local": Method(local.LocalConfig, local.local, local.load_variant, local.scalars, takes_mean=False),
    "fedavg": Method(fedavg.WeightingConfig, fedavg.fedavg, fedavg.load_variant, fedavg.scalars),
    "flora": Method(flora.WeightingConfig, flora.flora, flora.load_variant, flora.scalars, takes_mean=False),
    "ditto": Method(
        ditto.DittoConfig, ditto.ditto, ditto.load_variant, ditto.scalars, ditto.GRID, ditto.SPACE, beside_training=PULL
    ),
    "fdlora": Method(
        fdlora.FdloraConfig,
        fdlora.fdlora,
        fdlora.load_variant,
        fdlora.scalars,
        fdlora.GRID,
        fdlora.SPACE,
        beside_training="fusion weights are searched on training samples",
    ),
    "fedprox": Method(
        fedprox.FedproxConfig,
        fedprox.fedprox,
        fedprox.load_variant,
        fedprox.scalars,
        fedprox.GRID,
        fedprox.SPACE,
        beside_training=PULL,
    ),
    "pfedavg": Method(pfedavg.WeightingConfig, pfedavg.pfedavg, pfedavg.load_variant, pfedavg.scalars),
    "ffa_lora": Method(ffa_lora.WeightingConfig, ffa_lora.ffa_lora, ffa_lora.load_variant, ffa_lora.scalars),
    "rolora": Method(rolora.WeightingConfig, rolora.rolora, rolora.load_variant, rolora.scalars),
    "fellrec": Method(
        fellrec.FellrecConfig,
        fellrec.fellrec,
        fellrec.load_variant,
        fellrec.scalars,
        fellrec.GRID,
        fellrec.SPACE,
        beside_training="the training loss is uploaded",
        takes_mean=False,
    ),
    "lora_sim": Method(
        lora_sim.LoraSimConfig,
        lora_sim.lora_sim,
        lora_sim.load_variant,
        lora_sim.scalars,
        lora_sim.GRID,
        lora_sim.SPACE,
        takes_mean=False,
    ),
    "centralised": Method(
        centralised.CentralisedConfig,
        centralised.centralised,
        centralised.load_variant,
        centralised.scalars,
        pooled=True,
        beside_training="the data of all clients are pooled",
        takes_mean=False,
    ),
}
METHODS: Registry[Method] = Registry(LLM_METHODS, Method, BUILT_IN)
