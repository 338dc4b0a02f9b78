"""The model of FedDCSR: two variational encoders of a history, one to be shared, one of a domain's own.

Shape legend: I items of a catalogue, B sequences of a batch, L events (right-padded), P pairs, K that differ,
D dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedecider.baselines.sasrec import Block, is_event

MARGIN = 0.3
"""Between the two outputs of the discriminator."""


class Shape(NamedTuple):
    """Sizes of the model, named as in :class:`fedecider.id_based.feddcsr.FeddcsrConfig`."""

    embedding_size: int
    num_layers: int
    num_heads: int
    max_length: int


class Gaussian(NamedTuple):
    """Independent normal distributions."""

    mean: Tensor
    log_variance: Tensor

    def drawn(self, sampled: bool) -> Tensor:
        """``mean + sigma eps`` from the global generator, or the mean."""
        if not sampled:
            return self.mean
        return self.mean + torch.exp(0.5 * self.log_variance) * torch.randn_like(self.mean)

    def at(self, index: Any) -> Gaussian:
        return Gaussian(self.mean[index], self.log_variance[index])


def divergence(one: Gaussian) -> Tensor:
    """KL from the standard normal distribution, ``sum (mu^2 + s^2 - 1 - ln s^2) / 2`` over the last dimension."""
    return 0.5 * (one.mean.square() + one.log_variance.exp() - 1.0 - one.log_variance).sum(-1)


def pull(near_B: Tensor, far_B: Tensor, has_B: Tensor) -> Tensor:
    """``mean relu(0.3 - sigmoid(near) + sigmoid(far))`` over the marked users; 0 where none is marked."""
    loss_B = (MARGIN - near_B.sigmoid() + far_B.sigmoid()).relu()
    return (loss_B * has_B).sum() / has_B.sum().clamp(min=1)


def contrast(one_BD: Tensor, other_BD: Tensor) -> Tensor:
    """``-log softmax`` of the cosine of a user's two views among those to the other users' second ones, the mean."""
    cosine_BB = functional.normalize(one_BD, dim=1) @ functional.normalize(other_BD, dim=1).T
    return functional.cross_entropy(cosine_BB, torch.arange(len(one_BD), device=one_BD.device))


class Stack(nn.Module):
    """Causal self-attention blocks, then a norm; those of SASRec."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.embedding_size
        self.blocks = nn.ModuleList(Block(size, shape.num_heads) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(size)

    def forward(self, state_BLD: Tensor, dropout: float) -> Tensor:
        for block in self.blocks:
            state_BLD = block(state_BLD, dropout)
        return self.norm(state_BLD)


class Encoder(nn.Module):
    """A distribution at each position of a history."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mean, self.log_variance = Stack(shape), Stack(shape)

    def forward(self, state_BLD: Tensor, dropout: float) -> Gaussian:
        return Gaussian(self.mean(state_BLD, dropout), self.log_variance(state_BLD, dropout))


class Input(nn.Module):
    """Item vectors after the graph layer, with positions counted from the newest event."""

    def __init__(self, num_items: int, shape: Shape) -> None:
        super().__init__()
        size = shape.embedding_size
        self.item_ID = nn.Parameter(0.02 * torch.randn(num_items, size))
        self.bias_D = nn.Parameter(torch.zeros(size))
        self.position_LD = nn.Parameter(0.02 * torch.randn(shape.max_length, size))
        self.norm = nn.LayerNorm(size)

    def forward(self, graph_II: Tensor, item_BL: Tensor, length_B: Tensor, dropout: float) -> Tensor:
        """``norm(sqrt(D) (x + (x + A x + b) / 2) + position)`` (B, L, D), ``A`` (I, I) sparse."""
        layer_ID = 0.5 * (self.item_ID + torch.sparse.mm(graph_II, self.item_ID) + self.bias_D)
        place_BL = (length_B[:, None] - 1 - torch.arange(item_BL.shape[1], device=item_BL.device)).clamp(min=0)
        vector_BLD = functional.embedding(item_BL, self.item_ID + layer_ID) * self.item_ID.shape[1] ** 0.5
        return functional.dropout(self.norm(vector_BLD + self.position_LD[place_BL]), dropout)


class Dcsr(nn.Module):
    """The model of one domain."""

    def __init__(self, num_items: int, shape: Shape) -> None:
        super().__init__()
        size = shape.embedding_size
        self.shared_encoder, self.exclusive_encoder = Encoder(shape), Encoder(shape)
        self.discriminator = nn.Sequential(nn.Linear(2 * size, size), nn.ReLU(), nn.Linear(size, 1))
        self.shared_input, self.exclusive_input = Input(num_items, shape), Input(num_items, shape)
        self.output = nn.Linear(size, num_items)

    def shared(self, graph_II: Tensor, item_BL: Tensor, length_B: Tensor, dropout: float = 0.0) -> Gaussian:
        return self.shared_encoder(self.shared_input(graph_II, item_BL, length_B, dropout), dropout)

    def exclusive(self, graph_II: Tensor, item_BL: Tensor, length_B: Tensor, dropout: float = 0.0) -> Gaussian:
        return self.exclusive_encoder(self.exclusive_input(graph_II, item_BL, length_B, dropout), dropout)

    def told_apart(self, one_BD: Tensor, reference_BD: Tensor) -> Tensor:
        """(B,) logits of the discriminator: whether a representation goes with a global one."""
        return self.discriminator(torch.cat([one_BD, reference_BD], 1))[:, 0]

    @torch.no_grad()
    def catalogue(self, graph_II: Tensor, item_BL: Tensor, length_B: Tensor) -> Tensor:
        """Logits (B, I) after the newest event from the means; 0 for all where the history is empty."""
        last = last_event(length_B)
        asked = (graph_II, item_BL, length_B)
        logit_BI = self.output(self.shared(*asked).mean[last] + self.exclusive(*asked).mean[last])
        return logit_BI * (length_B > 0)[:, None]


def last_event(length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the newest event of each history in (B, L, ...); of an empty one the first place."""
    return torch.arange(len(length_B), device=length_B.device), (length_B - 1).clamp(min=0)


def shuffled(item_BL: Tensor, length_B: Tensor) -> Tensor:
    """Each history in another order, from the global generator; padding stays at the end."""
    key_BL = torch.rand(item_BL.shape, device=item_BL.device).masked_fill(~is_event(item_BL, length_B), 2.0)
    return item_BL.gather(1, key_BL.argsort(1))


def successors(sequences: Sequence[Sequence[int]], num_items: int) -> Tensor:
    """(I, I) sparse: how often an item follows another one in ``sequences``, as shares of the rows that have any."""
    pairs = [pair for items in sequences for pair in pairwise(items)]
    place_2P = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T
    counted = torch.sparse_coo_tensor(place_2P, torch.ones(len(pairs)), (num_items, num_items), check_invariants=True)
    counted = counted.coalesce()
    row_K = counted.indices()[0]
    total_I = torch.zeros(num_items).index_add_(0, row_K, counted.values())
    return torch.sparse_coo_tensor(
        counted.indices(), counted.values() / total_I[row_K], counted.shape, is_coalesced=True, check_invariants=True
    )
