"""Local training of a block: gradients per client, passes over the examples, what a client starts from.

Parameters are stacked Trees: every tensor leads with C, and row c is client c's. Item tables among them hold only
the rows that a client touches in this round (:func:`embedding_fr.examples.touched_rows`).

Shape legend: C clients of a block, A active clients of a step, B examples, I items, R touched rows, D dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from embedding_fr.config import EmbeddingTraining
from embedding_fr.examples import ExampleBatch, RoundExamples, epoch_batches
from embedding_fr.kernels import Kernel, train_compiled
from embedding_fr.optimisers import Optimiser, apply_step, fresh_state
from embedding_fr.stacked import inner_products, take
from fedecider.federation.method import Tree

Logits = Callable[[Tree, Tensor | None], Tensor]
"""Stacked parameters, rows (C, B) of the item tables (None: all rows in order) -> logits (C, B)."""
Penalty = Callable[[Tree], Tensor]
"""Stacked parameters of the active clients -> (A,) regulariser of each client's loss."""
Gradients = Callable[["Objective", Tree, Sequence[str], ExampleBatch], tuple[Tree, Tensor]]
"""objective, all parameters, names to differentiate, batch -> gradients (A, ...) by name, logits (A, B)."""


def plain_gradients(
    objective: Objective, params: Tree, names: Sequence[str], batch: ExampleBatch
) -> tuple[Tree, Tensor]:
    """Each client's gradient of its own mean loss.

    The loss of a logit z with label y has the gradient sigmoid(z) - y, so only the graph of the logits is walked.
    ``by_row``: every touched row is scored once, and only its scores are gathered and scattered, not rows of a table.
    """
    leaves = {name: params[name][: batch.active].detach().requires_grad_() for name in names}
    seen = {**{name: tensor[: batch.active] for name, tensor in params.items()}, **leaves}
    if objective.by_row:
        logit_AB = objective.logits(seen, None).gather(1, batch.item_AB)
    else:
        logit_AB = objective.logits(seen, batch.item_AB)
    outputs, seeds = [logit_AB], [(torch.sigmoid(logit_AB.detach()) - batch.label_AB) * batch.weight_AB]
    if objective.penalty is not None:
        value_A = objective.penalty(seen)
        if value_A.requires_grad:  # it may know none of the tensors of this turn
            outputs.append(value_A)
            seeds.append(torch.ones_like(value_A))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds, materialize_grads=True)
    return dict(zip(names, gradients, strict=True)), logit_AB.detach()


class Objective(NamedTuple):
    """Binary cross-entropy of ``logits``, mean over a batch, plus an optional regulariser; and its derivatives."""

    logits: Logits
    penalty: Penalty | None = None
    by_row: bool = False
    """Whether a score costs a few products, so that scoring every touched row once is the fast way."""
    gradients: Gradients = plain_gradients
    kernel: Kernel | None = None
    """The compiled form of local training without a penalty; none takes the stacked one everywhere."""


def train_epochs(
    objective: Objective,
    params: Tree,
    drawn: RoundExamples,
    training: EmbeddingTraining,
    optimiser: Optimiser,
    first_epoch: int = 0,
) -> Tensor:
    """:func:`train_batches` over the shuffled local epochs from ``first_epoch`` on, with a fresh optimiser. -> (C,)

    On a CPU the objective's kernel takes them, if it has one and no penalty.
    """
    kernel = objective.kernel
    if kernel is not None and objective.penalty is None and kernel.runs(params):
        assert objective.gradients is plain_gradients, "the compiled function stands for plain gradients"
        return train_compiled(kernel, params, drawn, training, optimiser, first_epoch)
    epochs = range(first_epoch, first_epoch + training.local_epochs)
    batches = epoch_batches(drawn.examples, drawn.place_CB, training.batch_size, epochs)
    return train_batches(objective, params, batches, optimiser, fresh_state(optimiser, params))


def train_batches(
    objective: Objective,
    params: Tree,
    batches: Iterable[ExampleBatch],
    optimiser: Optimiser,
    state: Tree,
    measure: bool = True,
) -> Tensor:
    """Every batch updates the optimiser's groups of tensors one after the other, in place. -> (C,) mean loss of each.

    The loss is that of the batches of a client's last epoch as they came, before their step, without the regulariser;
    without ``measure``, or for a client without such a batch, it is zero.
    """
    first = next(iter(params.values()))
    loss_C, batches_C = first.new_zeros(len(first)), first.new_zeros(len(first))
    for batch in batches:
        for number, names in enumerate(optimiser.turns):
            gradient, logit_AB = objective.gradients(objective, params, names, batch)
            if measure and number == 0 and batch.last_A is not None:
                loss_C[: batch.active] += batch_loss(logit_AB, batch) * batch.last_A
                batches_C[: batch.active] += batch.last_A
            apply_step(optimiser, params, gradient, state)
    return loss_C / batches_C.clamp(min=1.0)


def batch_loss(logit_AB: Tensor, batch: ExampleBatch) -> Tensor:
    """(A,) weighted sum of the cross-entropies: with the weights of a batch each client's mean."""
    return ((softplus(logit_AB) - batch.label_AB * logit_AB) * batch.weight_AB).sum(1)


def dot_logits(params: Tree, item: Tensor | None) -> Tensor:
    """(C, B) inner products of ``user`` (C, D) and rows of ``item_table`` (C, R, D)."""
    return inner_products(take(params["item_table"], item), params["user"])


def proximal(goal_CRD: Tensor, strength: float) -> Penalty:
    """``strength / 2 ||q - goal||^2`` over all rows of the item table."""

    def penalty(params: Tree) -> Tensor:
        table_ARD = params["item_table"]
        return 0.5 * strength * (table_ARD - goal_CRD[: len(table_ARD)]).square().sum((1, 2))

    return penalty
