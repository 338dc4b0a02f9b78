"""Blocks of clients over processes, with their results in client order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from fedecider.federation.method import Block

Placement = Literal["clients", "data"]


@dataclass(frozen=True)
class Processes:
    """This process among those of the run; ``Processes()`` is a run of one process."""

    index: int = 0
    count: int = 1
    placement: Placement = "clients"
    """What is split over them: clients, or every client's batches and users."""

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
