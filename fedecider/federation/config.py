"""Settings of what happens to uploads. They import no tensors, so that a command line costs nothing."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from fedecider.bounds import Float, NotNegative, PositiveOrInfinite, dataclass

RobustMean = Literal["mean", "median", "trimmed_mean", "norm_clip"]


@dataclass(frozen=True)
class PrivacyConfig:
    """How uploads are bounded and noised.

    Args:
        clip: The largest norm of what one client changes in a round (L2 for gaussian, L1 for laplace); if it is not
            given, or inf, nothing is bounded.
        noise_scale: The size of the noise divided by clip; 0 adds none.
        delta: The probability in (epsilon, delta) that gaussian noise leaves open, for uploads and for hidden users. It
            is usually below 1 / clients, and below 1 / users of a client.
        noise_on: Where the noise goes. "upload" gives every single upload the whole noise, so that epsilon holds
            against the server as well; "sum" gives each a share such that the sum over the cohort has it, which
            protects the sum only: add secure aggregation, or trust the server. A mean must then weigh all clients
            alike.
    """

    clip: PositiveOrInfinite | None = None
    noise_scale: NotNegative = 0.0
    delta: Annotated[Float, Field(gt=0, lt=1)] = 1e-5
    noise_on: Literal["upload", "sum"] = "upload"

    def __post_init__(self) -> None:
        if self.noise_scale > 0.0 and not self.clips and not self.noise_without_clip:
            raise ValueError(
                f"got noise_scale {self.noise_scale} without a clip, expected both: noise hides nothing unless one "
                "client's contribution is bounded; set clip"
            )

    @property
    def mechanism(self) -> Literal["gaussian", "laplace"]:
        """The kind of noise: with companies, whose uploads are long, nobody adds another one."""
        return "gaussian"

    @property
    def noise_without_clip(self) -> bool:
        """Noise without a bound guarantees nothing; simulations of the cross-device track alone take it."""
        return False

    @property
    def clips(self) -> bool:
        return self.clip is not None and self.clip < math.inf

    @property
    def noise_size(self) -> float:
        """Standard deviation of gaussian noise, scale of laplace."""
        return self.noise_scale * (self.clip if self.clip is not None and self.clips else 1.0)


@dataclass(frozen=True)
class DevicePrivacyConfig(PrivacyConfig):
    """How uploads of single users are bounded and noised, as papers of the cross-device track do it.

    Args:
        mechanism: The kind of noise: gaussian with standard deviation noise_scale * clip, or laplace with that scale.
        noise_without_clip: If true, the noise has the size noise_scale and nothing is bounded, as some papers do it.
            That guarantees nothing.
    """

    mechanism: Literal["gaussian", "laplace"] = "gaussian"
    noise_without_clip: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_without_clip and (self.clips or self.noise_scale == 0.0 or self.noise_on == "sum"):
            raise ValueError(
                f"got noise_without_clip with clip {self.clip}, noise_scale {self.noise_scale} and noise_on "
                f"{self.noise_on}, expected no clip, a noise_scale above 0 and upload"
            )
        if self.mechanism == "laplace" and self.noise_on == "sum":
            raise ValueError("got laplace noise on the sum, expected gaussian: a sum of Laplace shares is not Laplace")
