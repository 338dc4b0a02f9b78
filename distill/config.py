"""Settings of distillation. They import no model, so that a command line costs nothing."""

from __future__ import annotations

from fedecider.bounds import ZeroOrMore, dataclass
from idgen.config import TrainConfig


@dataclass(frozen=True)
class DistillConfig(TrainConfig):
    """Stage 2 (distill): a student of half depth, block by block.

    FeDecider, WWW 2026, appendix B.2; the optimisation is not in the paper.

    Args:
        epochs: The number of passes over the public data; 0 leaves the student as it starts.
    """

    epochs: ZeroOrMore = 3
