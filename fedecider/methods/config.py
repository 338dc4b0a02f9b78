"""Settings of local training and of every built-in method. They import no model:
a command line costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from fedecider.bounds import (
    NotNegative,
    OneOrMore,
    Positive,
    PositiveOrInfinite,
    ShareAbove0,
    ShareBelow1,
    at_least,
    check,
    shares_of,
)
from idgen.config import TrainConfig


@dataclass(frozen=True)
class UserPrivacy:
    """Training that hides each single user of a client (`fedecider.methods.local_training`).

    Args:
        clip: The largest norm of one user's gradient in a step, over all tensors together; inf bounds nothing. If it is
            not given, training is by samples and hides nobody.
        noise_scale: The standard deviation of the noise on the sum over the users of a step, divided by clip; 0 adds
            none.
    """

    clip: PositiveOrInfinite | None = None
    noise_scale: NotNegative = 0.0

    def __post_init__(self) -> None:
        check(self)
        if self.noise_scale > 0.0 and (self.clip is None or self.clip == math.inf):
            raise ValueError(
                f"got user_privacy.noise_scale {self.noise_scale} without a clip, expected both: noise hides nobody "
                "unless one user's gradient is bounded; set user_privacy.clip"
            )

    @property
    def on(self) -> bool:
        """Whether training goes user by user."""
        return self.clip is not None


@dataclass(frozen=True)
class LocalTraining(TrainConfig):
    """Local training, alike for every method, whose AdamW starts anew in every round.

    Else comparisons would not be fair (FeDecider, section 4.1).

    Args:
        learning_rate: The learning rate of the LoRA factors.
        local_epochs: The number of passes over a client's training samples in a round.
        schedule: The course of every learning rate in a round's local training: constant, or cosine down to zero. What
            is sent has then settled.
        lr_decay_per_round: The factor on every learning rate from one round to the next. Below 1 the first rounds may
            take large steps and late ones still settle, which takes fewer rounds, so less is sent.
        output_lr_multiplier: The factor on the learning rate of B in the adapter of the output or the table. Its rows
            say what items mean: they may have to move much further than layers that start well (A is shared by all).
        user_privacy: Bounded gradients and noise that hide each single user of a client.
    """

    local_epochs: OneOrMore = 5
    schedule: Literal["constant", "cosine"] = "constant"
    lr_decay_per_round: ShareAbove0 = 1.0
    output_lr_multiplier: Positive = 1.0
    user_privacy: UserPrivacy = field(default_factory=UserPrivacy)

    @property
    def adam_epsilon(self) -> float:
        """What AdamW adds to the root of the squared gradients. At its own 1e-8 a number moves as fast on a faint
        gradient as on a strong one: in a table of items that moves fast, rows that nobody has bought as far as any.
        With user_privacy anything else would put the size of a gradient, so the number of users, into the steps."""
        return 1e-4 if self.output_lr_multiplier > 1.0 and not self.user_privacy.on else 1e-8


Weighting = Literal["uniform", "examples"]

AUTO = "auto"
"""``alpha_init`` by which a client's weights start from the norm of its first own update."""

SUM = "sum"
"""``initial_fusion`` that leaves the start of the weights as it is."""

PROJECTED = "projected"
"""``initial_fusion`` by which the fusion is as large as the own update along each direction (`projection_weights`)"""


@dataclass(frozen=True)
class FedeciderConfig:
    """Settings of FeDecider and of its ablations.

    Args:
        alpha_init: Where the fusion weights start, at the first round after a broadcast: a number for every weight
            (paper: 2); auto: the own weight is the norm of the client's first own update, so that the first broadcast
            leaves the own part as large as it was, and the others are alpha_peers times that.
        alpha_peers: With alpha_init auto, the start of the weights of the other clients as a share of the own norm.
        initial_fusion: With alpha_init auto, the weights with which a client meets the others' directions when they
            first reach it. sum: those that alpha_init and alpha_peers give, on top of the own update. A number t from
            0 to 1: 1 - t (n - 1) / n of the own update and t / n of its norm for each of the others, so that 0 is the
            client alone and 1 the mean of the n directions that hold anything in a layer. projected: in every layer
            those that make the fusion as large as the own update along each direction, a sum of directions that have
            nothing in common and a mean of equal ones.
            Several, separated by commas, stand in order of preference: one gives way to a later one that ranks the
            client's own validation items better by a standard error.
        merge: If true, what a client has trained and taken in stays in its model with the weights that it had then, and
            every local training starts from a new pair: a direction is what one round brought, and the weights are
            those of that round (the restarts of ReLoRA, Lialin et al., 2024, and FLoRA, Wang et al., 2024).
            initial_fusion then holds for every broadcast. With every direction comes the norm that the server took from
            it, one number a layer, from which its weight starts: a mean of directions is then the mean of the updates,
            however unequal clients are in size. Wants alpha_init auto and self_term raw. A client that is absent from a
            round misses what the others brought in it.
        alpha_learning_rate: The constant learning rate of the fusion weights (paper: 1e-3).
        alpha_per: How many fusion weights there are: client (paper) learns one weight per pair of clients for all
            layers; module one per adapted layer.
        self_term: What a client's own slot holds after a broadcast: normalized (paper) the unit-norm pair; absorb the
            same with its geometric mean norm multiplied into the own weight, or each layer's own norm with alpha_per
            module; raw the client's own pair as trained.
        ablation: What is left out: none; wo_decomp broadcasts raw pairs; wo_per fixes all weights at 1/K; wo_sep
            combines the raw factors first, (sum alpha B)(sum alpha A), as printed.
    """

    alpha_init: float | Literal["auto"] = 2.0
    alpha_peers: NotNegative = 0.0
    initial_fusion: str = "sum"
    merge: bool = False
    alpha_learning_rate: Positive = 1e-3
    alpha_per: Literal["client", "module"] = "client"
    self_term: Literal["normalized", "absorb", "raw"] = "normalized"
    ablation: Literal["none", "wo_decomp", "wo_per", "wo_sep"] = "none"

    def __post_init__(self) -> None:
        check(self)
        if self.self_term != "normalized" and not self.normalises:
            raise ValueError(
                f"got self_term {self.self_term} with {self.ablation}, where nothing is normalised; drop self_term"
            )
        if self.self_term == "absorb" and self.ablation == "wo_per":
            raise ValueError("got self_term absorb with wo_per, which has no fusion weights; use raw or normalized")
        if self.alpha_per == "module" and self.ablation == "wo_per":
            raise ValueError("got alpha_per module with wo_per, which has no fusion weights; drop one of them")
        if self.starts_from_norms and self.ablation != "none":
            raise ValueError(
                f"got alpha_init auto with {self.ablation}, expected no ablation: only there a weight is the size of a "
                "direction of norm 1. Give alpha_init a number"
            )
        if self.alpha_peers and not self.starts_from_norms:
            raise ValueError(
                f"got alpha_peers {self.alpha_peers} with alpha_init {self.alpha_init}, which is the start of every "
                "weight; set alpha_init auto, or drop alpha_peers"
            )
        if self.first_fusions != [SUM] and not self.alpha_peers:
            raise ValueError(
                f"got initial_fusion {self.initial_fusion} with alpha_peers 0, expected alpha_init auto and "
                "alpha_peers above 0"
            )
        if self.merge and not (self.starts_from_norms and self.self_term == "raw"):
            raise ValueError(
                f"got merge with alpha_init {self.alpha_init} and self_term {self.self_term}, expected auto and raw: "
                "weights of a round start from that round's own update"
            )

    @property
    def normalises(self) -> bool:
        """Whether directions are broadcast, not raw pairs."""
        return self.ablation in ("none", "wo_per")

    @property
    def starts_from_norms(self) -> bool:
        """Whether every client sets its own start of the weights, after its first local training."""
        return self.alpha_init == AUTO

    @property
    def first_fusions(self) -> list[float | str]:
        """As they are tried: `SUM`, and numbers from 0 to 1."""
        words = [word.strip() for word in self.initial_fusion.split(",")]
        named = [word for word in words if word in (SUM, PROJECTED)]
        others = [word for word in words if word not in named]
        numbers = shares_of(",".join(others), "initial_fusion") if others else []
        if len(set(named)) < len(named):
            raise ValueError(f"got initial_fusion {self.initial_fusion!r}, expected different entries")
        return [word if word in named else numbers.pop(0) for word in words]

    @property
    def fits_peers(self) -> bool:
        """Whether a client looks at its validation items before it takes in the others' directions."""
        return len(self.first_fusions) > 1

    @property
    def learns_alpha(self) -> bool:
        return self.ablation != "wo_per"


@dataclass(frozen=True)
class LocalConfig:
    """Local training has no settings of its own."""


@dataclass(frozen=True)
class FedavgConfig:
    """Settings of FedAvg.

    Args:
        weighting: How clients weigh in the mean: uniform alike, examples by their training samples.
    """

    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class DittoConfig:
    """Settings of Ditto.

    Args:
        personal_pull: How strongly a personal adapter is drawn to the global one (the paper's lambda); 0 is local
            training.
        weighting: How clients weigh in the mean: uniform alike, examples by their training samples.
    """

    personal_pull: Annotated[float, at_least(0, hint="0 is local training")] = 1.0
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        check(self)


SIMPLEX = ((0.5, 0.5), (1.0, 0.5), (0.5, 1.0))
"""First three points of the search; scipy's own lie 5 % apart, which a short search cannot leave."""


@dataclass(frozen=True)
class FdloraConfig:
    """Settings of FDLoRA.

    Args:
        sync_every: After every so many rounds (H) the personal adapters become a copy of the client's theta_s.
        outer_learning_rate: The step of the server along the clients' mean change; 1 without momentum is FedAvg.
        outer_momentum: The Nesterov momentum of the server, below 1.
        l1_weight: The weight of |w1| + |w2| beside the token cross-entropy in the search.
        num_search_prompts: The number of training prompts that the search looks at.
        num_evaluations: The number of points (w1, w2) that the search may try, at least 3.
        weighting: How clients weigh in the mean: uniform alike, examples by their training samples.
    """

    sync_every: OneOrMore = 5
    outer_learning_rate: Positive = 0.7
    outer_momentum: ShareBelow1 = 0.9
    l1_weight: NotNegative = 0.05
    num_search_prompts: OneOrMore = 64
    num_evaluations: Annotated[int, at_least(len(SIMPLEX), hint="the search starts with so many")] = 30
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class FedproxConfig:
    """Settings of FedProx.

    Args:
        mu: The strength of the proximal term mu / 2 * ||theta - w||^2; 0 is FedAvg.
        weighting: How clients weigh in the mean: uniform alike, examples by their training samples.
    """

    mu: Annotated[float, at_least(0, hint="0 is FedAvg")] = 0.01
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class PfedavgConfig:
    """Settings of PFedAvg.

    Args:
        weighting: How clients weigh in the mean: uniform alike, examples by their training samples.
    """

    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class FfaLoraConfig:
    """Settings of FFA-LoRA.

    Args:
        weighting: How clients weigh in the mean: uniform alike, examples by their training samples.
    """

    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class RoloraConfig:
    """Settings of RoLoRA.

    Args:
        weighting: How clients weigh in the mean: uniform alike, examples by their training samples.
    """

    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class FellrecConfig:
    """Settings of FellRec.

    Args:
        a: How much clients listen to others, tanh(a) for the worst one and towards 1 for the rest; 0 is local training.
        beta: Larger values make the warm-up slower. The public code has a 0.7, beta 1 for LLaMA; 0.5, 5 for RecFormer.
        temperature: The temperature of the softmax over the clients' training losses.
        exponent: How the warm-up counts rounds: paper takes round / beta (t / beta, rounds from 1), code takes round -
            1 + 1 / beta (epoch + 1 / beta, epochs from 0); the same at beta 1.
    """

    a: Annotated[float, at_least(0, hint="at 0 nobody listens, which is local training")] = 0.7
    beta: Positive = 1.0
    temperature: Positive = 0.05
    exponent: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class LoraSimConfig:
    """Settings of LoRA-Sim.

    Args:
        similarity: How cosines become weights: shifted takes (cosine + 1) / 2, softmax exp(cosine / temperature), each
            divided by its row's sum.
        temperature: The temperature of softmax.
    """

    similarity: Literal["shifted", "softmax"] = "shifted"
    temperature: Positive = 0.1

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class CentralisedConfig:
    """Centralised training has no settings of its own."""


METHOD_CONFIGS: dict[str, type] = {
    "fedecider": FedeciderConfig,
    "local": LocalConfig,
    "fedavg": FedavgConfig,
    "ditto": DittoConfig,
    "fdlora": FdloraConfig,
    "fedprox": FedproxConfig,
    "pfedavg": PfedavgConfig,
    "ffa_lora": FfaLoraConfig,
    "rolora": RoloraConfig,
    "fellrec": FellrecConfig,
    "lora_sim": LoraSimConfig,
    "centralised": CentralisedConfig,
}
"""Built-in method -> its settings."""
TAKES_NO_MEAN = ("fedecider", "local", "fellrec", "lora_sim", "centralised")
"""Built-in methods whose server takes no mean over uploads (`fedecider.methods.Method.takes_mean`)."""
