"""Start values of tables from named streams, and tables that each client has for itself.

Shape legend: N clients of the run, I items, D dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from fedecider.federation.state import mapped_like
from fedecider.federation.streams import stream


def normal(federation: Federation, training: EmbeddingTraining, purpose: str, *shape: int) -> Tensor:
    """(*shape, D) normal start values with ``init_std``; the same for the same seed and purpose."""
    size = (*shape, training.embedding_size)
    value = torch.randn(size, generator=stream(federation.seed, "init", purpose), dtype=torch.float64)
    return (value * training.init_std).to(torch.get_default_dtype()).to(federation.device)


def personal_table(start_ID: Tensor, num_clients: int, max_bytes: int) -> Tensor:
    """(N, I, D) one item table per client, all of them ``start_ID`` at first, for the local state.

    Above ``max_bytes`` it is kept in a file (on the CPU, whatever the device of ``start_ID``), else it is a variant
    that takes memory only when it is copied; numbers are the same either way.
    """
    if _fits(start_ID, num_clients, max_bytes):
        return start_ID.expand(num_clients, *start_ID.shape)
    return personal_rows(start_ID, num_clients, max_bytes).copy_(start_ID)


def personal_rows(like: Tensor, num_clients: int, max_bytes: int) -> Tensor:
    """(N, ...) room for a tensor like this of each client, uninitialised; above ``max_bytes`` in a file, on the CPU."""
    shape = (num_clients, *like.shape)
    return like.new_empty(shape) if _fits(like, num_clients, max_bytes) else mapped_like(like.cpu(), shape)


def _fits(like: Tensor, num_clients: int, max_bytes: int) -> bool:
    return num_clients * like.numel() * like.element_size() <= max_bytes
