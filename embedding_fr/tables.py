"""Start values of tables, from named streams."""

from __future__ import annotations

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import TrainingConfig
from fedecider.federation.streams import stream


def normal(federation: Federation, training: TrainingConfig, purpose: str, *shape: int) -> Tensor:
    """(*shape, D) normal start values with ``init_std``; the same for the same seed and purpose."""
    size = (*shape, training.embedding_size)
    value = torch.randn(size, generator=stream(federation.seed, "init", purpose), dtype=torch.float64)
    return (value * training.init_std).to(torch.get_default_dtype()).to(federation.device)
