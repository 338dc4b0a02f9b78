"""AdamW as every training here uses it: parameter groups, learning rates over the steps, and tables read by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fedecider.bounds import Schedule
from idgen.backbones.families import unwrap

ADAM_EPSILON = 1e-6
"""Of stages 1 and 2, as in IDGenRec."""
CLIP_NORM = 1.0
"""The largest gradient norm: of everything together, or of each group by itself."""


class Course(NamedTuple):
    """What is no setting of a training of ``total_steps`` steps."""

    schedule: Schedule
    """Down to 0 at the end."""
    warmup: Callable[[int], int]
    """total steps -> those in which the learning rate rises from 0."""
    weight_decay: float
    """Decoupled; norms and biases have none."""
    beta2: float
    """AdamW's decay rate of the squared gradients."""
    dropout: float | None
    """None: the model's own."""


# beta2 0.98 adapts faster in short runs, and the short ones need a tenth of their steps to warm up.
STAGE_ONE_COURSE = Course(
    "cosine",
    lambda total: max(round(0.05 * total), min(12, round(0.1 * total))),
    weight_decay=0.01,
    beta2=0.98,
    dropout=None,
)
DISTILL_COURSE = Course("linear", lambda total: round(0.05 * total), weight_decay=0.0, beta2=0.999, dropout=0.0)
"""Dropout would only add noise to what a block is to return."""


def parameter_groups(
    model: nn.Module, learning_rate: float, course: Course, table_lr_multiplier: float = 1.0
) -> list[dict[str, Any]]:
    """Trainable parameters of ``model`` for AdamW: weights with decay; norms and biases, by class, without.

    Token embeddings are a group of their own where ``table_lr_multiplier`` is not 1.
    """
    table = model.get_input_embeddings().weight if table_lr_multiplier != 1.0 else None  # type: ignore[operator]
    kept_whole = {
        id(parameter)
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter is not table:
            whole = id(parameter) in kept_whole or name.endswith("bias")
            (kept if whole else decayed).append(parameter)
    tables = [table] if table is not None and table.requires_grad else []
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": course.weight_decay},
        {"params": kept, "weight_decay": 0.0},
        {"params": tables, "weight_decay": course.weight_decay, "lr": learning_rate * table_lr_multiplier},
    ]
    return [group for group in groups if group["params"]]


def learning_rate_factor(step: int, total_steps: int, course: Course) -> float:
    """Factor on the learning rate in step 0 .. ``total_steps - 1``."""
    warmup = course.warmup(total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return decay(course.schedule, (step - warmup) / max(1, total_steps - warmup))


def decay(schedule: Schedule, progress: float) -> float:
    """Factor on a learning rate after a share of the steps, from 1 at 0; at 1 it is 0 unless it is constant."""
    if schedule == "constant":
        return 1.0
    return 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


class RowAdamW(torch.optim.AdamW):
    """AdamW that moves, of a parameter whose gradient is one of rows, the rows that the step touched alone.

    Such a parameter has no first moment (beta1 is 0) and no weight decay: a row without a gradient then stands still,
    and what its second moment has lost meanwhile is made up when the row is touched next. So a step costs what it
    touches, and gives what AdamW with beta1 0 gives to the whole table.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    self._step_rows(parameter, group)
                    parameter.grad = None
        return super().step(closure)

    def _step_rows(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad.coalesce(), self.state[parameter]  # type: ignore[union-attr]
        row_T, gradient_TD = gradient.indices()[0], gradient.values()
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["row_step"] = torch.zeros(len(parameter), device=parameter.device)
        state["step"] += 1
        step, beta2 = state["step"], group["betas"][1]
        decayed_T = beta2 ** (step - state["row_step"][row_T])
        square_TD = state["exp_avg_sq"][row_T] * decayed_T[:, None]
        square_TD.addcmul_(gradient_TD, gradient_TD, value=1 - beta2)
        state["exp_avg_sq"][row_T], state["row_step"][row_T] = square_TD, step
        root_TD = square_TD.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        parameter.index_add_(0, row_T, gradient_TD / root_TD, alpha=-group["lr"])


@contextmanager
def row_gradients(model: Any, wanted: bool) -> Iterator[None]:
    """Inside, where ``wanted``, tables that are read by rows have gradients of these rows alone, for `RowAdamW`."""
    base = unwrap(model)
    tables = [base.get_input_embeddings(), base.get_output_embeddings()] if wanted else []
    for table in tables:
        table.sparse = True
    try:
        yield
    finally:
        for table in tables:
            table.sparse = False


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> None:
    """Scale all gradients together so that their norm is at most ``max_norm``; those of rows too."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad.values() if parameter.grad.is_sparse else parameter.grad)
    norm = nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def keep_full_rates(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    """``optimizer`` with the learning rate of every group noted in it as ``full_lr``."""
    for group in optimizer.param_groups:
        group["full_lr"] = group["lr"]
    return optimizer


def set_rates(optimizer: Any, factor: float) -> None:
    """Every group's learning rate becomes its ``full_lr`` times ``factor``."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * factor


def make_optimizer(groups: Sequence[dict[str, Any]], learning_rate: float, course: Course) -> torch.optim.AdamW:
    """AdamW; a group may bring its own ``lr`` and ``weight_decay``."""
    optimizer = RowAdamW(
        list(groups),
        lr=learning_rate,
        betas=(0.9, course.beta2),
        eps=ADAM_EPSILON,
        weight_decay=course.weight_decay,
        fused=True,
    )
    return keep_full_rates(optimizer)
