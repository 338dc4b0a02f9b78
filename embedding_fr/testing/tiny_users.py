"""A tiny setting of the cross-device track: seven clients of unequal size over 14 items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from embedding_fr.blocks import Federation, Population, block_packer, build_population
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.entry import Method
from fedecider.evaluation.metrics import metrics_over_clients
from fedecider.evaluation.protocols import STRICT, Protocol
from fedecider.federation.method import FederatedMethod
from fedecider.federation.rounds import Clients, RoundSettings
from fedecider.federation.state import RunState
from fedecider.testing.rounds import recorded_rounds

NUM_ITEMS = 14
SEQUENCES: Sequence[Sequence[int]] = [
    [3, 1, 4, 0, 5, 9, 2],
    [2, 7, 8],
    [6, 0, 13, 11, 3, 5, 1, 8, 12],
    [10, 2, 4, 12],
    [5, 6, 7, 8, 9],
    [13, 12, 11, 10, 0, 1],
    [4, 9, 1, 2, 6, 3, 7, 11, 0, 8],
]
"""The items of each client in their order; the last one is tested, the one before validated."""


def tiny_population(
    protocol: Protocol = STRICT,
    sequences: Sequence[Sequence[int]] = SEQUENCES,
    num_items: int = NUM_ITEMS,
    seed: int = 0,
) -> Population:
    """The private data of the clients."""
    return build_population(sequences, num_items, protocol, seed)


def tiny_federation(
    protocol: Protocol = STRICT, num_clients: int = 7, num_items: int = NUM_ITEMS, seed: int = 0
) -> Federation:
    """What a method may know of the run."""
    item_I = torch.arange(num_items, dtype=torch.float64)
    attribute_IA = torch.stack([item_I % 2, item_I / num_items, (item_I * 2.4).sin()], 1)
    return Federation(num_clients, num_items, seed, protocol, torch.device("cpu"), attribute_IA=attribute_IA)


def tiny_training(entry: Method, **changes: Any) -> EmbeddingTraining:
    """The method's own settings, made small: batches of 5, so that clients take unequal numbers of steps."""
    defaults = {key: value for key, value in entry.defaults.items() if key in EmbeddingTraining.__annotations__}
    small = {"embedding_size": 4, "batch_size": 5, "local_epochs": 2, "num_negatives": 2, "init_std": 0.3}
    return EmbeddingTraining(**{**defaults, **small, **changes})


def run(
    method: FederatedMethod,
    population: Population | None = None,
    rounds: int = 3,
    *,
    block_clients: int = 3,
    participation: float = 1.0,
    seed: int = 0,
    **options: Any,
) -> tuple[RunState, list[dict]]:
    """The final state after the real loop, and the records; ``block_clients`` clients share a block. ``options`` are
    those of `recorded_rounds`."""
    population = population or tiny_population()
    pack = block_packer(population, lambda num_train: 1, block_clients)
    clients = Clients(pack(range(population.num_clients)), metrics_over_clients, pack=pack)
    return recorded_rounds(method, clients, RoundSettings(rounds, seed, participation), **options)
