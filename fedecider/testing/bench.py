"""What the contracts of all tracks work with: a method in a tiny setting, and how two results are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedecider.federation.method import Block, Download, FederatedMethod, Tree
from fedecider.federation.state import RunState
from fedecider.search_space import Space

Ran = tuple[RunState, list[dict]]
"""The final state of a run and the records of its rounds."""


class Entry(Protocol):
    """What the entry of a method has in every track, as `fedecider.methods.Method` does."""

    @property
    def config(self) -> type: ...

    @property
    def grid(self) -> tuple[dict[str, Any], ...]: ...

    @property
    def space(self) -> Space: ...


class Bench:
    """A method with its settings, ready to be built and run as often as a contract wants.

    Args:
        entry: The method.
        config: Its settings; None takes the defaults.
    """

    num_clients: int
    tolerance: float
    """Largest difference of what should be equal; 0 asks for equal bits."""
    trains_on_draws: bool
    """Whether another seed must give other results."""
    needs_everyone = False
    """Whether the method cannot go on when a client is absent."""
    random: Mapping[str, Any] = {}
    """Changes of the setting with which training draws as much as it can."""

    def __init__(self, entry: Any, config: Any = None):
        self.entry: Any = entry
        self.config = entry.config() if config is None else config
        self.reference = cache(self._reference)

    def build(self, **changes: Any) -> FederatedMethod:
        """The method, built anew; ``changes`` are those of the setting, such as ``seed``."""
        raise NotImplementedError

    def run(self, method: FederatedMethod, rounds: int, *, block_size: int = 1, **options: Any) -> Ran:
        """The real loop over all clients."""
        raise NotImplementedError

    def blocks(self, size: int) -> Sequence[Block]:
        """All clients in blocks of ``size``."""
        raise NotImplementedError

    def by_rows(self) -> tuple[FederatedMethod, Sequence[Block]] | None:
        """The method where clients send rows of a table each, and blocks of one client; None where nobody does."""
        return None

    def num_places(self, client: int) -> int:
        """How many held-out items a client has in each split."""
        raise NotImplementedError

    def common_settings(self) -> tuple[type, ...]:
        """Dataclasses of the settings of a run that are not the method's own."""
        raise NotImplementedError

    def precision(self) -> AbstractContextManager[Any]:
        """In which results are compared."""
        return nullcontext()

    def _reference(self, rounds: int) -> Ran:
        """A run that many contracts compare with; nobody may change it."""
        return self.run(self.build(), rounds)

    def trained(self) -> RunState:
        """The state after one round of the real loop in which nobody was ranked: the places are made up."""

        def places(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
            return [torch.zeros(self.num_places(client), dtype=torch.int64) for client in block.clients.tolist()]

        return self.run(self.build()._replace(positions=places), 1)[0]

    def update(self, round: int, block: Block, state: RunState) -> tuple[Download, Any, Mapping[str, Any], list[dict]]:
        """Download, upload, new own rows and logs of a block that trains in ``round`` from ``state``."""
        return updated(self.build(), round, block, state.server, state.local)


def updated(
    method: FederatedMethod, round: int, block: Block, server: Tree, local: Tree
) -> tuple[Download, Any, Mapping[str, Any], list[dict]]:
    """What the loop asks of a block: download, upload, new own rows, logs."""
    download = method.broadcast(round, server, block.clients)
    own = {name: tensor[block.clients] for name, tensor in local.items() if name not in method.unread}
    return (download, *method.client_update(round, download, own, block))


def require(holds: bool, sentence: str) -> None:
    """An ``AssertionError`` with this sentence unless ``holds``."""
    if not holds:
        raise AssertionError(sentence)


def differing(left: Mapping[str, Tensor], right: Mapping[str, Tensor], tolerance: float = 0.0) -> list[str]:
    """Names whose tensors differ, or that only one of both has."""
    return sorted(
        name
        for name in {*left, *right}
        if name not in left or name not in right or not alike(left[name], right[name], tolerance)
    )


def alike(left: Tensor, right: Tensor, tolerance: float = 0.0) -> bool:
    """Whether two tensors are equal, to ``tolerance`` if that is not 0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if tolerance and left.is_floating_point():
        return torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
    return torch.equal(left, right)


def require_same(left: RunState, right: RunState, sentence: str, tolerance: float = 0.0) -> None:
    """The server's and the clients' tensors of two states must be equal; the sentence gets the names that differ."""
    found = [f"server {name}" for name in differing(left.server, right.server, tolerance)]
    found += [f"local {name}" for name in differing(left.local, right.local, tolerance)]
    require(not found, f"{sentence} (it differs in {', '.join(found)})")


@contextmanager
def global_generators(seed: int) -> Iterator[Callable[[], list[str]]]:
    """Global generators of torch, NumPy and Python at ``seed``, restored afterwards.

    Gives a function that tells which of them were drawn from since it was last called.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (it is the global one that is looked at)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            states: dict[str, bytes] = {}

            def drawn() -> list[str]:
                before, now = dict(states), _global_states()
                states.update(now)
                return [name for name, state in now.items() if before.get(name, state) != state]

            yield drawn
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _global_states() -> dict[str, bytes]:
    numpy: Any = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": numpy[1].tobytes() + bytes(str(numpy[2]), "ascii"),
        "Python": repr(random.getstate()).encode(),
    }
