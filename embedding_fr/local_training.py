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
from fedecider.bounds import Diverged
from fedecider.federation.method import Download, Tree

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
    """
    leaves = {name: params[name][: batch.active].detach().requires_grad_() for name in names}
    seen = {**{name: tensor[: batch.active] for name, tensor in params.items()}, **leaves}
    logit_AB = objective.logits(seen, batch.item_AB)
    outputs, seeds = [logit_AB], [(torch.sigmoid(logit_AB.detach()) - batch.label_AB) * batch.weight_AB]
    if objective.penalty is not None:
        value_A = objective.penalty(seen)
        outputs.append(value_A)
        seeds.append(torch.ones_like(value_A))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds, materialize_grads=True)
    return dict(zip(names, gradients, strict=True)), logit_AB.detach()


class Objective(NamedTuple):
    """Binary cross-entropy of ``logits``, mean over a batch, plus an optional regulariser; and its derivatives."""

    logits: Logits
    penalty: Penalty | None = None
    gradients: Gradients = plain_gradients
    kernel: Kernel | None = None
    """The compiled form of local training along these gradients; none takes the stacked one everywhere."""


def train_epochs(
    objective: Objective,
    params: Tree,
    drawn: RoundExamples,
    training: EmbeddingTraining,
    optimiser: Optimiser,
    first_epoch: int = 0,
) -> Tensor:
    """:func:`train_batches` over the shuffled local epochs from ``first_epoch`` on, with a fresh optimiser. -> (C,)

    On a CPU the objective's kernel takes them, if it has one.
    """
    kernel = objective.kernel
    if kernel is not None and kernel.runs(params):
        assert kernel.gradients is objective.gradients, "the compiled function stands for other gradients"
        assert objective.penalty is None, "no compiled function has a regulariser"
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


def inner_products(row_CBD: Tensor, vector_CD: Tensor) -> Tensor:
    """(C, B) products of each row with its client's vector; this order is several times faster than the other one."""
    return torch.bmm(vector_CD[:, None], row_CBD.mT)[:, 0]


def dot_gradients(objective: Objective, params: Tree, names: Sequence[str], batch: ExampleBatch) -> tuple[Tree, Tensor]:
    """:func:`plain_gradients` of :func:`dot_logits` in closed form, in a fraction of the time.

    With g_i = the sum of (sigmoid(p . q_i) - y) / batch size over the examples of item i: dL/dp = sum g_i q_i,
    dL/dq_i = g_i p.
    """
    assert objective.logits is dot_logits, "the closed form is that of an inner product"
    assert objective.penalty is None, "the closed form has no regulariser"
    table_ARD, user_AD = params["item_table"][: batch.active], params["user"][: batch.active]
    slope_AR, logit_AB = row_slopes(inner_products(table_ARD, user_AD), batch)
    gradients: Tree = {}
    for name in names:
        if name == "user":
            gradients[name] = weighted_sum(slope_AR, table_ARD)
        else:
            gradients[name] = slope_AR[:, :, None] * user_AD[:, None]
    return gradients, logit_AB


def proximal(base: Gradients, goal_CRD: Tensor, strength: float) -> Gradients:
    """``base`` with ``strength (q_i - goal_i)`` added to the gradient of every row of the item table."""

    def gradients(objective: Objective, params: Tree, names: Sequence[str], batch: ExampleBatch) -> tuple[Tree, Tensor]:
        by_name, logit_AB = base(objective, params, names, batch)
        if "item_table" in by_name:
            gap_ARD = params["item_table"][: batch.active] - goal_CRD[: batch.active]
            by_name["item_table"] = by_name["item_table"] + strength * gap_ARD
        return by_name, logit_AB

    return gradients


def row_slopes(score_AR: Tensor, batch: ExampleBatch) -> tuple[Tensor, Tensor]:
    """(A, R) derivative of each client's loss by the score of each of its rows, and the logits (A, B).

    For scores that depend on the item alone: then every row is scored once, in order, and only these numbers are
    gathered and scattered, not rows of a table.
    """
    logit_AB = score_AR.gather(1, batch.item_AB)
    residual_AB = torch.sigmoid(logit_AB).sub_(batch.label_AB).mul_(batch.weight_AB)
    return torch.zeros_like(score_AR).scatter_add_(1, batch.item_AB, residual_AB), logit_AB


def weighted_sum(weight_AR: Tensor, table_ARD: Tensor) -> Tensor:
    """(A, D) ``sum_r w_r q_r``."""
    return torch.bmm(weight_AR[:, None], table_ARD)[:, 0]


def add_rows(shape: Sequence[int], item_AB: Tensor, value_ABD: Tensor) -> Tensor:
    """(A, R, D) zeros with ``value[a, b]`` added to row ``item[a, b]`` of client a."""
    num_clients, num_rows, size = shape
    total = value_ABD.new_zeros(num_clients * num_rows, size)
    total.index_add_(0, _flat_rows(item_AB, num_rows), value_ABD.reshape(-1, size))
    return total.view(num_clients, num_rows, size)


def take(table: Tensor, item: Tensor | None) -> Tensor:
    """(C, B, D) rows ``item`` (C, B) of each client's table (C, R, D); None takes all rows."""
    if item is None:
        return table
    num_clients, num_rows, size = table.shape
    flat = table.reshape(num_clients * num_rows, size)
    return flat.index_select(0, _flat_rows(item, num_rows)).view(*item.shape, size)


def _flat_rows(item_CB: Tensor, num_rows: int) -> Tensor:
    """(C * B,) row numbers in the tables of all clients, one after the other."""
    first_C1 = torch.arange(len(item_CB), device=item_CB.device)[:, None] * num_rows
    return (item_CB + first_C1).reshape(-1)


def received(download: Download, name: str, num_clients: int) -> Tensor:
    """(C, ...) what every client got under ``name``; a shared tensor is expanded, not copied."""
    if name in download.per_client:
        return download.per_client[name]
    tensor = download.shared[name]
    return tensor.expand(num_clients, *tensor.shape)


def received_rows(download: Download, name: str, row_CR: Tensor) -> Tensor:
    """(C, R, D) a copy of the rows ``row_CR`` (-1 pads) of the table that every client got."""
    row = row_CR.clamp(min=0)
    if name in download.per_client:
        return take(download.per_client[name], row).clone()
    table = download.shared[name]
    return table.index_select(0, row.view(-1)).view(*row.shape, *table.shape[1:])


def check_finite(params: Tree, loss_C: Tensor, clients: Tensor, round: int) -> None:
    """``Diverged`` that names the first client, the round and the tensor when training has."""
    for name, tensor in {**params, "loss": loss_C}.items():
        finite_C = torch.isfinite(tensor.reshape(len(tensor), -1).sum(1))  # of a sum: twenty times faster
        if not bool(finite_C.all()):
            client = int(clients[int((~finite_C).int().argmax())])
            raise Diverged(
                f"got a non-finite {name} for client {client} in round {round}, "
                "expected numbers: the training diverged, lower learning_rate or item_learning_rate"
            )
