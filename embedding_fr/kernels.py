"""Local training of a block by a compiled function of :mod:`embedding_fr.compiled`: which tensors it takes.

Shape legend: C clients of a block, B examples of a client, E epochs, R touched rows, D dims.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedding_fr import compiled
from embedding_fr.config import EmbeddingTraining
from embedding_fr.examples import RoundExamples
from embedding_fr.optimisers import Optimiser
from fedecider.federation.method import Tree


class Kernel(NamedTuple):
    """A compiled function of local training, ``train(*tables, *vectors, *constants, schedule) -> loss_C``, or (C, K)
    with more than the loss of each client.

    Built with keywords: which tensor goes where is all that it says.
    """

    train: Callable[..., np.ndarray]
    tables: tuple[str, ...]
    """Names of tensors (C, R, D)."""
    vectors: tuple[tuple[str, ...], ...]
    """Names of tensors that are passed on one after the other, as one vector per client: they step together, at one
    rate."""
    constants: tuple = ()
    alternates: bool = False
    """Whether it knows groups of tensors that step one after the other."""

    def runs(self, params: Tree) -> bool:
        """Whether this is the way to train these parameters."""
        return compiled.takes(params[self.tables[0]])


def train_compiled(
    kernel: Kernel,
    params: Tree,
    drawn: RoundExamples,
    training: EmbeddingTraining,
    optimiser: Optimiser,
    first_epoch: int,
) -> Tensor:
    """What :func:`embedding_fr.local_training.train_epochs` says, by ``kernel``; ``params`` are changed in place."""
    from embedding_fr.compiled.draws import COLUMN, order_keys  # Numba: half a second that only training needs
    from embedding_fr.compiled.training import Schedule

    (examples, _, place_CB), groups = drawn, optimiser.turns
    tensors = [(name,) for name in kernel.tables] + list(kernel.vectors)
    assert kernel.alternates or len(groups) == 1, "this function steps all tensors at once"
    for names in tensors:
        assert len({optimiser.learning_rate.get(name) for name in names}) == 1, f"{names} step at one rate"
        assert all(len({name in group for name in names}) == 1 for group in groups), f"{names} step together"
    vectors = [torch.cat([params[name].flatten(1) for name in names], 1) for names in kernel.vectors]
    order_CEB = np.empty((len(place_CB), training.local_epochs, place_CB.shape[1]), np.int64)
    order_keys(examples.key_C.numpy(), examples.count_C.numpy(), first_epoch, order_CEB)
    order_CEB.sort(axis=2)
    order_CEB &= COLUMN
    schedule = Schedule(
        place_CB.numpy(),
        examples.num_positive_C.numpy(),
        examples.count_C.numpy(),
        order_CEB,
        training.batch_size,
        np.array([[names[0] in group for names in tensors] for group in groups]),
        np.array([optimiser.learning_rate.get(names[0], 0.0) for names in tensors]),
        optimiser.weight_decay,
        optimiser.kind == "adam",
        first=0,
        stride=1,
    )
    arrays = [*(params[name].numpy() for name in kernel.tables), *(vector.numpy() for vector in vectors)]

    def share(first: int, stride: int) -> np.ndarray:
        return kernel.train(*arrays, *kernel.constants, schedule._replace(first=first, stride=stride))

    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads) as threads:
        losses = list(threads.map(lambda first: share(first, num_threads), range(num_threads)))
    for names, vector in zip(kernel.vectors, vectors, strict=True):
        for name, part in zip(names, vector.split([params[name][0].numel() for name in names], 1), strict=True):
            params[name].copy_(part.view_as(params[name]))
    return torch.from_numpy(sum(losses))
