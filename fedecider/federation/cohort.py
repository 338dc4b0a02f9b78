"""The clients that take part in a round."""

from __future__ import annotations

import math

import torch

from fedecider.federation.method import FederatedMethod, Tree
from fedecider.federation.streams import stream


def sample_cohort(num_clients: int, participation: float, seed: int, round: int) -> set[int]:
    """The clients of this round: ``ceil(participation * num_clients)`` of them, without replacement."""
    if participation >= 1.0:
        return set(range(num_clients))
    order = torch.randperm(num_clients, generator=stream(seed, "cohort", round))
    return set(order[: cohort_size(num_clients, participation)].tolist())


def cohort_size(num_clients: int, participation: float) -> int:
    """``ceil(participation * num_clients)``, at least one."""
    return max(1, math.ceil(participation * num_clients - 1e-9))  # 0.07 * 100 is a little more than 7


def hidden_share(num_clients: int, participation: float, seen: bool) -> float:
    """The share of clients in a cohort, as far as an epsilon may count on it: 1 where cohorts are ``seen``."""
    return 1.0 if seen else cohort_size(num_clients, participation) / num_clients


def choose_cohort(
    method: FederatedMethod, server: Tree, num_clients: int, participation: float, seed: int, round: int
) -> set[int]:
    """The clients of this round: as ``method`` chooses them, or drawn alike (:func:`sample_cohort`)."""
    if method.cohort is None or participation >= 1.0:
        return sample_cohort(num_clients, participation, seed, round)
    size = cohort_size(num_clients, participation)
    chosen = method.cohort(round, server, size)
    assert len(chosen) == size, f"a cohort of {len(chosen)} clients, {size} were asked for"
    assert chosen <= set(range(num_clients)), "a cohort of clients that there are not"
    return chosen
