"""How the training loss changes around a trained model: plateaus and ravines, as FedRecGEL's figure shows them.

Shape legend: C clients of a block, B examples, R touched rows, G steps of a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from embedding_fr.averaged import Model
from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.local_training import ExampleBatch, Objective, epoch_batches, plain_gradients, round_examples
from fedecider.federation.method import Block, Tree
from fedecider.federation.streams import stream

MAGNITUDES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Half widths of the squares in table 4 of FedRecGEL."""


def mean_losses(
    loss: Callable[[Tree], float],
    point: Tree,
    directions: tuple[Tree, Tree],
    magnitudes: Sequence[float] = MAGNITUDES,
    num_steps: int = 5,
) -> dict[float, float]:
    """Magnitude -> mean loss over :func:`loss_grid`; flat around ``point`` where it hardly grows with the magnitude."""
    return {size: float(loss_grid(loss, point, directions, size, num_steps).mean()) for size in magnitudes}


def loss_grid(
    loss: Callable[[Tree], float], point: Tree, directions: tuple[Tree, Tree], magnitude: float, num_steps: int = 5
) -> Tensor:
    """(G, G) float64 losses at ``point + a first + b second``, a (rows) and b in equal steps over +-``magnitude``.

    Raises:
        ValueError: fewer than two steps, or a magnitude that is not positive.
    """
    if num_steps < 2 or not magnitude > 0.0:
        raise ValueError(f"got {num_steps} steps and magnitude {magnitude}, expected 2 or more and a positive number")
    first, second = directions
    step_G = torch.linspace(-magnitude, magnitude, num_steps, dtype=torch.float64).tolist()
    rows = [
        [loss({name: point[name] + a * first[name] + b * second[name] for name in point}) for b in step_G]
        for a in step_G
    ]
    return torch.tensor(rows, dtype=torch.float64)


def random_direction(like: Tree, seed: int, purpose: str) -> Tree:
    """Normal numbers in the shapes of ``like``, of length 1 over all tensors together."""
    return _unit(
        {
            name: torch.randn(tensor.shape, generator=stream(seed, "landscape", purpose, name)).to(tensor)
            for name, tensor in like.items()
        }
    )


def gradient_direction(
    model: Model,
    shared: Tree,
    local: Tree,
    blocks: Sequence[Block],
    federation: Federation,
    training: EmbeddingTraining,
    round: int = 1,
) -> Tree:
    """The gradient of :func:`training_loss` for the shared tensors, of length 1: where the loss rises fastest."""
    total = {name: torch.zeros_like(shared[name]) for name in model.shared}
    for params, row_CR, batch in _batches(model, shared, local, blocks, federation, training, round):
        gradient, _ = plain_gradients(Objective(model.logits), params, tuple(model.shared), batch)
        for name, value in gradient.items():
            if name in model.tables:
                total[name].index_add_(0, row_CR.clamp(min=0).reshape(-1), value.flatten(0, 1))
            else:
                total[name] += value.sum(0)
    return _unit(total)


def training_loss(
    model: Model,
    local: Tree,
    blocks: Sequence[Block],
    federation: Federation,
    training: EmbeddingTraining,
    round: int = 1,
) -> Callable[[Tree], float]:
    """Shared tensors -> mean cross-entropy over the training examples of ``round`` of all clients in ``blocks``."""

    def loss(shared: Tree) -> float:
        total = 0.0
        with torch.no_grad():
            for params, _, batch in _batches(model, shared, local, blocks, federation, training, round):
                logit_CB = model.logits(params, batch.item_AB)
                error_CB = softplus(logit_CB) - batch.label_AB * logit_CB
                total += float((error_CB * batch.weight_AB).sum(dtype=torch.float64))
        return total

    return loss


def _batches(
    model: Model,
    shared: Tree,
    local: Tree,
    blocks: Sequence[Block],
    federation: Federation,
    training: EmbeddingTraining,
    round: int,
) -> Iterator[tuple[Tree, Tensor, ExampleBatch]]:
    """Per block: parameters, the touched rows, and all examples, each of weight 1 / (examples of all blocks)."""
    num_examples = sum(int(block.data.num_train_C.sum()) for block in blocks) * (1 + training.num_negatives)
    for block in blocks:
        examples, row_CR, place_CB = round_examples(federation, training, block, round)
        (batch,) = epoch_batches(examples, place_CB, place_CB.shape[1], range(1))
        batch = batch._replace(weight_AB=(batch.weight_AB > 0.0).to(batch.weight_AB) / num_examples)
        params = {name: local[name][block.clients].to(federation.device) for name in model.private}
        for name in model.shared:
            tensor = shared[name]
            whole = name not in model.tables
            params[name] = tensor.expand(len(row_CR), *tensor.shape) if whole else tensor[row_CR.clamp(min=0)]
        yield params, row_CR, batch


def _unit(tree: Tree) -> Tree:
    norm = torch.stack([tensor.double().square().sum() for tensor in tree.values()]).sum().sqrt()
    return {name: (tensor / norm).to(tensor) for name, tensor in tree.items()}
