"""Settings of local training and of every built-in method. They import no model:
a command line costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from fedecider import bounds
from idgen.config import TrainConfig


@bounds.dataclass(frozen=True)
class UserPrivacy:
    """What hides each single user of a client, in training (`fedecider.methods.private_training`) and in what ensembles
    add up (`fedecider.models.noised_events`).

    Args:
        clip: The largest norm of one user's gradient in a step, over all tensors together; inf bounds nothing. If it is
            not given, training is by samples and hides nobody.
        noise_scale: The standard deviation of the noise on the sum over the users of a step, divided by clip, and of
            that on the events of items that ensembles add up, divided by their bound; 0 adds none.
    """

    clip: bounds.PositiveOrInfinite | None = None
    noise_scale: bounds.NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.noise_scale > 0.0 and (self.clip is None or self.clip == math.inf):
            raise ValueError(
                f"got user_privacy.noise_scale {self.noise_scale} without a clip, expected both: noise hides nobody "
                "unless one user's gradient is bounded; set user_privacy.clip"
            )

    @property
    def on(self) -> bool:
        """Whether training goes user by user."""
        return self.clip is not None


NOT_HIDDEN = UserPrivacy()


@bounds.dataclass(frozen=True)
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

    local_epochs: bounds.OneOrMore = 5
    schedule: Literal["constant", "cosine"] = "constant"
    lr_decay_per_round: bounds.ShareAbove0 = 1.0
    output_lr_multiplier: bounds.Positive = 1.0
    user_privacy: UserPrivacy = field(default_factory=UserPrivacy)

    @property
    def adam_epsilon(self) -> float:
        """AdamW's epsilon. At 1e-8 a step is as long for a faint gradient as for a strong one. In a table with a high
        learning rate, rows of items that nobody bought would then move as far as all others; 1e-4 keeps them still.
        With user_privacy it stays 1e-8: else steps would depend on the size of gradients, so on the number of users.
        """
        return 1e-4 if self.output_lr_multiplier > 1.0 and not self.user_privacy.on else 1e-8


CLIP_NORM = 1.0
"""The largest global norm of a step's gradient."""
Weighting = Literal["uniform", "examples"]

AUTO = "auto"
"""``alpha_init`` by which weights start from the directions, on the scale of the client's own update."""


@bounds.dataclass(frozen=True)
class FedeciderConfig:
    """Settings of FeDecider and of its ablations.

    Args:
        alpha_init: Where the fusion weights start: auto, or a number for directions of norm 1 (paper: 2). With auto
            directions are as large as the client's own update, and the weights start from what directions have in
            common, so that the first broadcast leaves the own update as large as it was.
        alpha_learning_rate: The constant learning rate of the fusion weights (paper: 1e-3).
        ablation: What is left out: none; wo_decomp broadcasts raw pairs; wo_per fixes all weights at 1/K; wo_sep
            combines the raw factors first, (sum alpha B)(sum alpha A), as printed.
    """

    alpha_init: float | Literal["auto"] = "auto"
    alpha_learning_rate: bounds.Positive = 1e-3
    ablation: Literal["none", "wo_decomp", "wo_per", "wo_sep"] = "none"

    @property
    def normalises(self) -> bool:
        """Whether directions are broadcast, not raw pairs."""
        return self.ablation in ("none", "wo_per")

    @property
    def learns_alpha(self) -> bool:
        return self.ablation != "wo_per"


@bounds.dataclass(frozen=True)
class LocalConfig:
    """Training alone has no settings of its own."""


LOCAL, COUNTS = "local", "counts"
"""Methods in which every client trains alone: nothing is exchanged at all, or counts and weights of ensembles alone."""


@bounds.dataclass(frozen=True)
class WeightingConfig:
    """Settings of methods whose server takes a mean: FedAvg, PFedAvg, FFA-LoRA, RoLoRA and FLoRA.

    Args:
        weighting: How clients weigh in the mean: uniform alike, examples by their training samples.
    """

    weighting: Weighting = "uniform"


@bounds.dataclass(frozen=True)
class DittoConfig:
    """Settings of Ditto.

    Args:
        personal_pull: How strongly a personal adapter is drawn to the global one (the paper's lambda); 0 is local
            training.
        weighting: How clients weigh in the mean: uniform alike, examples by their training samples.
    """

    personal_pull: Annotated[bounds.Float, Field(ge=0)] = 1.0
    weighting: Weighting = "uniform"


SIMPLEX = ((0.5, 0.5), (1.0, 0.5), (0.5, 1.0))
"""First three points of the search; scipy's own lie 5 % apart, which a short search cannot leave."""


@bounds.dataclass(frozen=True)
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

    sync_every: bounds.OneOrMore = 5
    outer_learning_rate: bounds.Positive = 0.7
    outer_momentum: bounds.ShareBelow1 = 0.9
    l1_weight: bounds.NotNegative = 0.05
    num_search_prompts: bounds.OneOrMore = 64
    num_evaluations: Annotated[bounds.Int, Field(ge=len(SIMPLEX))] = 30
    weighting: Weighting = "uniform"


@bounds.dataclass(frozen=True)
class FedproxConfig:
    """Settings of FedProx.

    Args:
        mu: The strength of the proximal term mu / 2 * ||theta - w||^2; 0 is FedAvg.
        weighting: How clients weigh in the mean: uniform alike, examples by their training samples.
    """

    mu: Annotated[bounds.Float, Field(ge=0)] = 0.01
    weighting: Weighting = "uniform"


@bounds.dataclass(frozen=True)
class FellrecConfig:
    """Settings of FellRec.

    Args:
        a: How much clients listen to others, tanh(a) for the worst one and towards 1 for the rest; 0 is local training.
        beta: Larger values make the warm-up slower. The public code has a 0.7, beta 1 for LLaMA; 0.5, 5 for RecFormer.
        temperature: The temperature of the softmax over the clients' training losses.
        exponent: How the warm-up counts rounds: paper takes round / beta (t / beta, rounds from 1), code takes round -
            1 + 1 / beta (epoch + 1 / beta, epochs from 0); the same at beta 1.
    """

    a: Annotated[bounds.Float, Field(ge=0)] = 0.7
    beta: bounds.Positive = 1.0
    temperature: bounds.Positive = 0.05
    exponent: Literal["paper", "code"] = "paper"


@bounds.dataclass(frozen=True)
class LoraSimConfig:
    """Settings of LoRA-Sim.

    Args:
        similarity: How cosines become weights: shifted takes (cosine + 1) / 2, softmax exp(cosine / temperature), each
            divided by its row's sum.
        temperature: The temperature of softmax.
    """

    similarity: Literal["shifted", "softmax"] = "shifted"
    temperature: bounds.Positive = 0.1


@bounds.dataclass(frozen=True)
class CentralisedConfig:
    """Centralised training has no settings of its own."""


METHOD_CONFIGS: dict[str, type] = {
    "fedecider": FedeciderConfig,
    LOCAL: LocalConfig,
    COUNTS: LocalConfig,
    "fedavg": WeightingConfig,
    "flora": WeightingConfig,
    "ditto": DittoConfig,
    "fdlora": FdloraConfig,
    "fedprox": FedproxConfig,
    "pfedavg": WeightingConfig,
    "ffa_lora": WeightingConfig,
    "rolora": WeightingConfig,
    "fellrec": FellrecConfig,
    "lora_sim": LoraSimConfig,
    "centralised": CentralisedConfig,
}
"""Built-in method -> its settings."""
TAKES_NO_MEAN = ("fedecider", LOCAL, COUNTS, "flora", "fellrec", "lora_sim", "centralised")
"""Built-in methods whose server takes no mean over uploads (`fedecider.methods.Method.takes_mean`)."""
