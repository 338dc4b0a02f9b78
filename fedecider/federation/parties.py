"""Who takes part: cohorts of clients, blocks over processes, gathering in client order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from fedecider.federation.method import Block, FederatedMethod, Tree
from fedecider.federation.streams import stream

Placement = Literal["clients", "data"]


@dataclass(frozen=True)
class Processes:
    """This process among those of the run; ``Processes()`` is a run of one process."""

    index: int = 0
    count: int = 1
    placement: Placement = "clients"
    """What is shared out over them: clients, or every client's batches and users."""

    @property
    def within_a_client(self) -> bool:
        return self.count > 1 and self.placement == "data"

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every process, in process order, on every process."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values

    def add_up(self, value: Tensor) -> None:
        """The sum of ``value`` over the processes, in its place, with the same bits in all of them."""
        if self.count > 1:
            torch.distributed.all_reduce(value)


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


def in_client_order(
    blocks: Sequence[Block], work: Callable[[Block], Any], processes: Processes
) -> Iterator[tuple[Block, Any]]:
    """``(block, work(block))`` for every block in order, on every process; process p computes every P-th block.

    What one of them raises ends the work of all, or the next exchange would take something else for a result.
    Works in waves of one block per process, so that at most P results are in memory at once. Where processes share a
    client's data, all of them work on every block.
    """
    if processes.within_a_client:
        for block in blocks:
            yield block, work(block)
        return
    for start in range(0, len(blocks), processes.count):
        wave = blocks[start : start + processes.count]
        mine = wave[processes.index] if processes.index < len(wave) else None
        results = _of_all(processes, work, mine)
        yield from zip(wave, results[: len(wave)], strict=True)


class _Failed(NamedTuple):
    text: str
    bad_value: bool


def _of_all(processes: Processes, work: Callable[[Block], Any], mine: Block | None) -> list[Any]:
    """Every process's ``work(mine)``; where it fails in some, the others raise what the first of these said."""
    own: Exception | None = None
    try:
        found = None if mine is None else work(mine)
    except Exception as error:
        own, found = error, _Failed(str(error) or type(error).__name__, isinstance(error, ValueError))
    results = processes.gather(found)
    if own is not None:
        raise own
    failed = next((one for one in results if isinstance(one, _Failed)), None)
    if failed is not None:
        raise (ValueError if failed.bad_value else RuntimeError)(failed.text)
    return results
