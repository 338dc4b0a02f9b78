"""Optimisers on stacked parameters: row c of every tensor belongs to client c, and clients step independently.

State is a Tree like the parameters, so that it can be reset in every round or kept in the local state.

Every draw is a counter-based stream of (seed, purpose, round, client): nothing depends on who shares the block.

Parameters are stacked Trees: every tensor leads with C, and row c is client c's. Item tables among them hold only
the rows that a client touches in this round (:func:`embedding_fr.local_training.touched_rows`).

Shape legend: C clients of a block, A active clients of a step (the first A of the block), T train items, A avoided
items, B = T (1 + negatives) examples, R touched rows, B examples of a client, E epochs, D dims, A active clients of a
step, B examples, I items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.optim.adam import adam

from embedding_fr.blocks import Federation, UserData
from embedding_fr.config import EmbeddingTraining
from fedecider.bounds import Diverged
from fedecider.federation.method import Block, Download, Tree
from fedecider.federation.streams import below, client_keys, counter_draws

# Optimisers on stacked parameters: row c of every tensor belongs to client c, and clients step independently.


class Optimiser(NamedTuple):
    """SGD or Adam (Kingma and Ba, 2015) with one learning rate per tensor."""

    kind: Literal["adam", "sgd"]
    learning_rate: Mapping[str, float]
    weight_decay: float = 0.0


def fresh_state(optimiser: Optimiser, params: Tree) -> Tree:
    """State before the first step, for the tensors of ``params`` that the optimiser has a rate for."""
    state: Tree = {}
    if optimiser.kind == "adam":
        for name in optimiser.learning_rate:
            state[f"{name}.mean"] = torch.zeros_like(params[name])
            state[f"{name}.square"] = torch.zeros_like(params[name])
            state[f"{name}.steps"] = torch.zeros(len(params[name]))
    return state


def apply_step(optimiser: Optimiser, params: Tree, gradients: Tree, state: Tree) -> None:
    """One step of the first A clients, in place; A is the leading size of the gradients.

    Rows without gradient in a fresh table have zero moments and stay where they are; a row with moments moves on, as in
    the plain optimiser. With ``weight_decay`` every row moves.
    """
    active = len(next(iter(gradients.values())))
    mine = {name: params[name][:active] for name in gradients}
    if optimiser.kind == "sgd":
        for name, param in mine.items():
            gradient = gradients[name]
            if optimiser.weight_decay:
                gradient = gradient.add(param, alpha=optimiser.weight_decay)
            param.add_(gradient, alpha=-optimiser.learning_rate[name])
        return
    runs = _equal_runs(state[f"{next(iter(gradients))}.steps"][:active])
    for rate in dict.fromkeys(optimiser.learning_rate[name] for name in gradients):
        names = [name for name in gradients if optimiser.learning_rate[name] == rate]
        adam(
            _parts([mine[name] for name in names], runs),
            _parts([gradients[name].contiguous() for name in names], runs),  # the kernel reads on without a look
            _parts([state[f"{name}.mean"][:active] for name in names], runs),
            _parts([state[f"{name}.square"][:active] for name in names], runs),
            [],
            [state[f"{name}.steps"][run.start].to(mine[name].device, copy=True) for name in names for run in runs],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=rate,
            weight_decay=optimiser.weight_decay,
            eps=1e-8,
            maximize=False,
        )
    for name in gradients:
        state[f"{name}.steps"][:active] += 1.0


def _parts(tensors: list[Tensor], runs: list[slice]) -> list[Tensor]:
    return tensors if len(runs) == 1 else [tensor[run] for tensor in tensors for run in runs]


def _equal_runs(steps_A: Tensor) -> list[slice]:
    """Slices of neighbouring clients that have done equally many steps: each is one call of the fused kernel."""
    runs, start = [], 0
    for _, members in groupby(steps_A.tolist()):
        end = start + sum(1 for _ in members)
        runs.append(slice(start, end))
        start = end
    return runs


# Training examples of a block: positives, fresh negatives, the rows of the item table they touch, and their
# order.


class Examples(NamedTuple):
    """One round's examples: client c has ``num_positive_C[c]`` positives first, then its negatives, then padding."""

    item_CB: Tensor
    """(C, B) int64 item numbers; ``num_items`` where padded."""
    num_positive_C: Tensor
    count_C: Tensor
    """(C,) int64 real examples, falling."""
    key_C: Tensor
    """Streams of the shuffles."""


class ExampleBatch(NamedTuple):
    """One local step of the first ``active`` clients of a block; the others have no batch left."""

    active: int
    item_AB: Tensor
    """Row numbers in the clients' tables."""
    label_AB: Tensor
    weight_AB: Tensor
    """1 / (examples of the client in this batch), 0 where padded: weighted sums are means."""
    last_A: Tensor | None = None
    """(A,) bool: whose last epoch this batch belongs to; None where it is nobody's."""


def round_examples(
    federation: Federation, training: EmbeddingTraining, block: Block, round: int
) -> tuple[Examples, Tensor, Tensor]:
    """:func:`draw_examples` of a block and :func:`touched_rows`: examples, rows (C, R), the examples' places (C, B).

    Compiled on a CPU, unless ``training.compiled`` is off; the numbers are the same.
    """
    negatives, num_items = training.num_negatives, federation.num_items
    if training.compiled and block.data.train_CT.device.type == "cpu":
        return _compiled_examples(block, num_items, negatives, federation.seed, round)
    examples = draw_examples(block.data, block.clients, num_items, negatives, federation.seed, round)
    return examples, *touched_rows(examples.item_CB, num_items)


def _compiled_examples(
    block: Block, num_items: int, num_negatives: int, seed: int, round: int
) -> tuple[Examples, Tensor, Tensor]:
    from embedding_fr.compiled import training as draws  # Numba: half a second that only training needs

    data = block.data
    check_pool(data, block.clients, num_items, num_negatives)
    num_columns = data.train_CT.shape[1] * (1 + num_negatives)
    count_C, key_C = data.num_train_C * (1 + num_negatives), client_keys(block.clients, seed, "negatives", round)
    item_CB, row_CB, place_CB = torch.empty(3, len(count_C), num_columns, dtype=torch.int64)
    draws.draw_items(
        data.train_CT.numpy(),
        data.num_train_C.numpy(),
        data.avoid_CA.numpy(),
        data.num_avoid_C.numpy(),
        key_C.numpy(),
        count_C.numpy(),
        num_items,
        item_CB.numpy(),
    )
    key_CB = np.sort((item_CB.numpy() << 32) | np.arange(num_columns), axis=1)
    num_rows = draws.number_rows(key_CB, num_items, row_CB.numpy(), place_CB.numpy())
    examples = Examples(item_CB, data.num_train_C, count_C, client_keys(block.clients, seed, "order", round))
    return examples, row_CB[:, :num_rows].contiguous(), place_CB


def draw_examples(
    data: UserData, clients: Tensor, num_items: int, num_negatives: int, seed: int, round: int
) -> Examples:
    """Train items and ``num_negatives`` uniform negatives for each, outside ``data.avoid_CA``, redrawn per round.

    Raises ``ValueError`` when more negatives are asked for than there are items to draw from.
    """
    check_pool(data, clients, num_items, num_negatives)
    client_C, num_pool_C = clients.to(data.train_CT.device), num_items - data.num_avoid_C
    num_positive_C = data.num_train_C
    num_columns = data.train_CT.shape[1] * (1 + num_negatives)
    draw_CB = counter_draws(client_keys(client_C, seed, "negatives", round), num_columns)
    negative_CB = complement(data.avoid_CA, below(draw_CB, num_pool_C[:, None]))
    column_B = torch.arange(num_columns, device=client_C.device)
    train_CB = torch.nn.functional.pad(data.train_CT, (0, num_columns - data.train_CT.shape[1]), value=num_items)
    # Draw number b is the negative in column b, so that padding moves no draw.
    item_CB = torch.where(column_B < num_positive_C[:, None], train_CB, negative_CB)
    count_C = num_positive_C * (1 + num_negatives)
    item_CB = item_CB.masked_fill(column_B >= count_C[:, None], num_items)
    return Examples(item_CB, num_positive_C, count_C, client_keys(client_C, seed, "order", round))


def check_pool(data: UserData, clients: Tensor, num_items: int, num_negatives: int) -> None:
    """``ValueError`` when more negatives are asked for than a client has items to draw from."""
    num_pool_C = num_items - data.num_avoid_C
    if num_negatives > int(num_pool_C.min()):
        raise ValueError(
            f"got num_negatives {num_negatives}, expected at most {int(num_pool_C.min())}: client "
            f"{int(clients[int(num_pool_C.argmin())])} has no more items that may be negatives"
        )


def complement(avoid_CA: Tensor, draw_CB: Tensor) -> Tensor:
    """The ``draw``-th smallest item outside the avoided ones: uniform draws give uniform items of the complement.

    ``avoid_CA`` ascending, padded with numbers above every item; ``draw_CB`` in 0 .. (items - avoided) - 1. The j-th
    avoided item e_j has e_j - j allowed items below it, so draw r stands after all e_j with e_j - j <= r.
    """
    below_CA = avoid_CA - torch.arange(avoid_CA.shape[1], device=avoid_CA.device)
    # A padded entry could fall below a real draw after the subtraction, so padding is lifted out of reach.
    below_CA = torch.cummax(below_CA, 1).values
    return draw_CB + torch.searchsorted(below_CA, draw_CB, right=True)


def touched_rows(item_CB: Tensor, num_items: int) -> tuple[Tensor, Tensor]:
    """The distinct items of each client, (C, R) padded with -1, and each example's place among them, (C, B).

    A table of these rows is all that local steps can change: a row that no example touches has zero gradient, and with
    fresh moments Adam leaves it where it is.
    """
    place_B = torch.arange(item_CB.shape[1], device=item_CB.device)
    sorted_CB = sort_rows((item_CB << 32) | place_B)
    item_sorted, place = sorted_CB >> 32, sorted_CB & 0xFFFFFFFF
    is_new = torch.ones_like(item_sorted)
    is_new[:, 1:] = item_sorted[:, 1:] != item_sorted[:, :-1]
    row = is_new.cumsum(1) - 1
    row_CR = torch.full((len(item_CB), int(row.max()) + 1), -1, device=item_CB.device)
    row_CR.scatter_(1, row, torch.where(item_sorted == num_items, -1, item_sorted))
    return row_CR, torch.empty_like(place).scatter_(1, place, row)


def epoch_batches(examples: Examples, place_CB: Tensor, batch_size: int, epochs: range) -> Iterator[ExampleBatch]:
    """The shuffled batches of these epochs; ``place_CB`` says which table row each example uses.

    A client goes from one epoch to the next without waiting for those who have more batches, so clients that step
    together have done equally many steps. Legend here: E epochs, K steps of the largest client, B examples of a batch.
    """
    num_clients, num_columns = place_CB.shape
    num_epochs, device = len(epochs), place_CB.device
    item_CEX = place_CB.new_empty(num_clients, num_epochs, num_columns)
    label_CEX = torch.empty(item_CEX.shape, device=device)
    for number, epoch in enumerate(epochs):
        # Padded examples stand at the end of an order, and a short batch reads on into what comes next: the next epoch
        # or client. Both have weight 0, and their places are rows of every table of the block.
        order_CX = shuffled(examples, epoch)
        item_CEX[:, number] = place_CB.gather(1, order_CX)
        label_CEX[:, number] = order_CX < examples.num_positive_C[:, None]
    item_F, label_F = item_CEX.view(-1), label_CEX.view(-1)
    steps_C = -(-examples.count_C // batch_size)  # of one epoch
    step_K1 = torch.arange(int(steps_C[0]) * num_epochs, device=device)[:, None]
    epoch_KC, start_KC = (step_K1 // steps_C).clamp(max=num_epochs - 1), step_K1 % steps_C * batch_size
    left_KC1 = (examples.count_C - start_KC).clamp(max=batch_size)[:, :, None]
    first_C = torch.arange(num_clients, device=device) * num_epochs
    first_KC1 = ((first_C + epoch_KC) * num_columns + start_KC)[:, :, None]
    share_KC1 = 1.0 / left_KC1.to(label_F.dtype)
    last_KC = step_K1 >= steps_C * (num_epochs - 1)
    width_K = torch.where(step_K1 < steps_C * num_epochs, left_KC1[:, :, 0], 0).amax(1).tolist()
    column_X = torch.arange(num_columns, device=device)
    steps, active = steps_C.tolist(), num_clients
    for step in range(steps[0] * num_epochs):
        while steps[active - 1] * num_epochs <= step:
            active -= 1
        column_B = column_X[: width_K[step]]
        index_AB = (first_KC1[step, :active] + column_B).clamp_(max=len(item_F) - 1)
        yield ExampleBatch(
            active,
            item_F[index_AB],
            label_F[index_AB],
            (column_B < left_KC1[step, :active]) * share_KC1[step, :active],
            last_KC[step, :active] if step >= steps[active - 1] * (num_epochs - 1) else None,
        )


def sort_rows(value_CB: Tensor) -> Tensor:
    """Ascending values of each row; NumPy's vectorised sort is 15 times faster than torch's on a CPU."""
    if value_CB.device.type == "cpu":
        return torch.from_numpy(np.sort(value_CB.numpy(), axis=1))
    return value_CB.sort(1).values


def shuffled(examples: Examples, epoch: int) -> Tensor:
    """(C, B) a uniform order of the real examples of each client, padded ones last."""
    from embedding_fr.compiled import training as draws

    num_columns = examples.item_CB.shape[1]
    column_B = torch.arange(num_columns, device=examples.item_CB.device)
    key_CB = (counter_draws(examples.key_C, num_columns, epoch << 32) >> 1 & ~draws.COLUMN) | column_B
    padded_CB = column_B >= examples.count_C[:, None]
    return sort_rows(key_CB | (padded_CB.to(torch.int64) << 62)) & draws.COLUMN


# Local training of a block by a function of :mod:`embedding_fr.compiled.training`: which tensors it takes.


class Kernel(NamedTuple):
    """A compiled function of local training, ``train(*tables, *vectors, *constants, schedule) -> loss_C``, or (C, K)
    with more than the loss of each client.

    Built with keywords: which tensor goes where is all that it says.
    """

    train: Callable[..., np.ndarray]
    gradients: Callable
    """The stacked gradients that it stands for."""
    tables: tuple[str, ...]
    """Names of tensors (C, R, D)."""
    vectors: tuple[tuple[str, ...], ...]
    """Names of tensors that are handed over one after the other, as one vector per client: they step together, at one
    rate."""
    constants: tuple = ()
    regularised: bool = False
    """Whether it has the regulariser of the objective; else there must be none."""
    alternates: bool = False
    """Whether it knows groups of tensors that step one after the other."""

    def runs(self, params: Tree) -> bool:
        """Whether this is the way to train these parameters."""
        return compilable(params[self.tables[0]])


def pull_to(goal_CRD: Tensor | None = None, pull: float = 0.0) -> tuple[np.ndarray, float]:
    """Constants of a kernel that adds ``pull (q_i - goal_i)`` to the gradient of every row, or of one that does not."""
    goal = torch.empty(0, 0, 0) if goal_CRD is None else goal_CRD
    return goal.numpy(), float(pull)


def compilable(tensor: Tensor) -> bool:
    """Whether compiled functions take it: on the CPU, in one of the types they are compiled for."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def in_threads(work: Callable[[int, int], Any]) -> list[Any]:
    """``work(first, stride)`` for the share of clients of every thread."""
    stride = torch.get_num_threads()
    if stride == 1:
        return [work(0, 1)]
    with ThreadPoolExecutor(stride) as threads:
        return list(threads.map(lambda first: work(first, stride), range(stride)))


def train_compiled(
    kernel: Kernel,
    params: Tree,
    groups: Sequence[Sequence[str]],
    examples: Examples,
    place_CB: Tensor,
    training: EmbeddingTraining,
    optimiser: Optimiser,
    first_epoch: int,
) -> Tensor:
    """What :func:`embedding_fr.local_training.train_epochs` says, by ``kernel``; ``params`` are changed in place."""
    from embedding_fr.compiled.training import (  # Numba: half a second that only training needs
        COLUMN,
        Schedule,
        order_keys,
    )

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

    losses = in_threads(share)
    for names, vector in zip(kernel.vectors, vectors, strict=True):
        for name, part in zip(names, vector.split([params[name][0].numel() for name in names], 1), strict=True):
            params[name].copy_(part.view_as(params[name]))
    return torch.from_numpy(sum(losses))


# Local training of a block: gradients per client, passes over the examples, what a client starts from.

Logits = Callable[[Tree, Tensor | None], Tensor]
"""Stacked parameters, rows (C, B) of the item tables (None: all rows in order) -> logits (C, B)."""
Penalty = Callable[[Tree], Tensor]
"""Stacked parameters of the active clients -> (A,) regulariser of each client's loss."""


class Objective(NamedTuple):
    """Binary cross-entropy of ``logits``, mean over a batch, plus an optional regulariser."""

    logits: Logits
    penalty: Penalty | None = None


Gradients = Callable[[Objective, Tree, Sequence[str], ExampleBatch], tuple[Tree, Tensor]]
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


def train_epochs(
    objective: Objective,
    params: Tree,
    groups: Sequence[Sequence[str]],
    examples: Examples,
    place_CB: Tensor,
    training: EmbeddingTraining,
    optimiser: Optimiser,
    gradients: Gradients = plain_gradients,
    kernel: Kernel | None = None,
    first_epoch: int = 0,
) -> Tensor:
    """:func:`train_batches` over the shuffled local epochs from ``first_epoch`` on, with a fresh optimiser. -> (C,)

    ``kernel`` is the compiled function that says the same as objective and gradients; it is taken on a CPU unless
    ``training.compiled`` is off.
    """
    if kernel is not None and training.compiled and kernel.runs(params):
        assert kernel.gradients is gradients, "the compiled function stands for other gradients"
        assert kernel.regularised == (objective.penalty is not None), "the compiled function has another regulariser"
        return train_compiled(kernel, params, groups, examples, place_CB, training, optimiser, first_epoch)
    epochs = range(first_epoch, first_epoch + training.local_epochs)
    batches = epoch_batches(examples, place_CB, training.batch_size, epochs)
    return train_batches(objective, params, groups, batches, optimiser, fresh_state(optimiser, params), gradients)


def train_batches(
    objective: Objective,
    params: Tree,
    groups: Sequence[Sequence[str]],
    batches: Iterable[ExampleBatch],
    optimiser: Optimiser,
    state: Tree,
    gradients: Gradients = plain_gradients,
    measure: bool = True,
) -> Tensor:
    """Every batch updates the groups of tensors one after the other, in place. -> (C,) mean loss of each client.

    The loss is that of the batches of a client's last epoch as they came, before their step, without the regulariser;
    without ``measure``, or for a client without such a batch, it is zero.
    """
    first = next(iter(params.values()))
    loss_C, batches_C = first.new_zeros(len(first)), first.new_zeros(len(first))
    for batch in batches:
        for number, names in enumerate(groups):
            gradient, logit_AB = gradients(objective, params, names, batch)
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
