"""One training loop for backbone, ID generator and student, and the choice of the step whose weights stay."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from idgen.backbones.families import unwrap
from idgen.backbones.family import (
    TokenBatch,
    evaluating,
    num_samples_of,
)
from idgen.checkpoints import Best, Checkpoint, Position, parameters_of
from idgen.config import TrainConfig
from idgen.loss_guard import LossGuard
from idgen.optimizer import (
    CLIP_NORM,
    Course,
    clip_gradients,
    learning_rate_factor,
    make_optimizer,
    set_rates,
)
from idgen.precision import autocast

LossFn = Callable[[TokenBatch], Tensor]
OnStep = Callable[[int, int, str], None]
"""done, total, note: called after every step."""
NOTE_EVERY = 20
"""Steps between two readings of the loss, which make an accelerator wait, and between places to go on from."""


class Optimisation(NamedTuple):
    """What the optimiser does in a training."""

    config: TrainConfig
    course: Course
    total_steps: int
    clip_each_group: bool = False
    """Whether the gradient norm of every parameter group is held below `CLIP_NORM` by itself."""


class Execution(NamedTuple):
    """How a training runs, whatever it learns."""

    seed: int
    device: torch.device = torch.device("cpu")
    on_step: OnStep | None = None
    checkpoint: Checkpoint | None = None
    """Where to keep how far it is, and to go on from; weights are those of a training that never stopped."""
    recomputes: bool = False
    """Whether activations are computed again in the backward pass (`checkpointed`)."""


NEGATIVES = 1
"""A purpose of `epoch_generator`."""


def epoch_generator(seed: int, epoch: int, *purpose: int) -> torch.Generator:
    """A random stream of its own for every epoch, and for every purpose but the samples and their order."""
    word = int(np.random.SeedSequence([seed, epoch, *purpose]).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(word >> 1)


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set every dropout of a model: the layers and the number inside each attention."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, probability)


@contextmanager
def checkpointed(model: Any, wanted: bool) -> Iterator[None]:
    """Inside, layers of ``model`` keep their inputs alone where ``wanted``, and are computed again backwards."""
    if not wanted:
        yield
        return
    base = unwrap(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # a newer name is not there in all our versions
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.disable_input_require_grads()  # needed by the other kind of checkpoints alone
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            base.gradient_checkpointing_disable()


def train_steps(
    optimizer: torch.optim.AdamW,
    batches: Iterable[TokenBatch],
    loss_fn: LossFn,
    optimisation: Optimisation,
    execution: Execution,
    first_step: int,
    guard: LossGuard,
) -> tuple[int, float, int]:
    """One optimiser step per batch until the batches or all steps end: (steps done, mean loss, samples).

    Errors: `Diverged`, as of `LossGuard`.
    """
    total_steps, device = optimisation.total_steps, execution.device
    clipped = [group["params"] for group in optimizer.param_groups]
    if not optimisation.clip_each_group:
        clipped = [[parameter for group in clipped for parameter in group]]
    loss_sum = torch.zeros((), device=device)
    step, samples, note = first_step, 0, ""
    for batch in batches:
        if step >= total_steps:
            break
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        set_rates(optimizer, learning_rate_factor(step, total_steps, optimisation.course))
        with autocast(device, optimisation.config.precision):
            loss = loss_fn(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for parameters in clipped:
            clip_gradients(parameters, CLIP_NORM)
        optimizer.step()
        loss_sum += loss.detach()
        step += 1
        samples += num_samples_of(batch)
        guard.step(loss.detach(), step, step == total_steps, optimizer.param_groups[0]["full_lr"])
        if step % NOTE_EVERY == 0 or step == total_steps:
            note = f"loss {float(loss_sum / (step - first_step)):.3f}"
        if execution.on_step is not None:
            execution.on_step(step, total_steps, note)
    done = step - first_step
    return done, float(loss_sum / max(1, done)), samples


def train_model(
    model: nn.Module,
    batches_of_epoch: Callable[[int], Iterable[TokenBatch]],
    loss_fn: LossFn,
    groups: Sequence[dict[str, Any]],
    optimisation: Optimisation,
    execution: Execution,
    validate: Validate | None = None,
) -> list[dict[str, Any]]:
    """Train ``groups`` of the parameters of ``model`` in place and return one log per epoch.

    ``batches_of_epoch(epoch)``: the batches of epoch 0, 1, ... ``groups``: as AdamW reads them, see `parameter_groups`.
    ``validate``: what the model gains with each of the users of validation; called before the first step and after
    every fifth of them, and the weights of the best step stay.
    A log holds epoch, step, loss, samples, samples_per_s, learning_rate; the last one "validation" too: the mean gain
    by step, "kept" and "num_users".
    Dropout draws from the seed; the global random state is left as it was. The model ends in evaluation mode.
    Errors: `Diverged` when the loss is not finite any more, or far above its start.
    """
    config, course, total_steps, _ = optimisation
    device, on_step, checkpoint = execution.device, execution.on_step, execution.checkpoint
    optimizer = make_optimizer(groups, config.learning_rate, course)
    if course.dropout is not None:
        set_dropout(model, course.dropout)
    forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with forked, checkpointed(model, execution.recomputes):
        torch.manual_seed(execution.seed)
        at, best = (Position(), None) if checkpoint is None else checkpoint.read(optimizer, device)
        best = _validated(validate, model, optimizer, at, best, total_steps)
        guard = LossGuard(at.first_loss)
        if at.step and on_step is not None:
            on_step(at.step, total_steps, "goes on")
        while at.step < total_steps:
            before = at.step
            model.train()
            started = time.perf_counter() - at.seconds
            left = islice(batches_of_epoch(at.epoch), at.batches, None)
            while (batches := _next(left, _piece(at.step, total_steps, validate is not None))) is not None:
                at.seconds = time.perf_counter() - started
                if checkpoint is not None:
                    checkpoint.write_if_due(at, optimizer, device, best)
                done, loss, samples = train_steps(optimizer, batches, loss_fn, optimisation, execution, at.step, guard)
                at.first_loss = guard.first
                at.step, at.batches = at.step + done, at.batches + done
                at.loss, at.samples = at.loss + loss * done, at.samples + samples
                best = _validated(validate, model, optimizer, at, best, total_steps)
                if at.step >= total_steps:
                    break
            if at.step == before and at.batches == 0:
                raise ValueError(f"epoch {at.epoch} has no batches; expected training samples. Check the prepared data")
            log = {
                "epoch": at.epoch,
                "step": at.step,
                "loss": at.loss / at.batches,
                "samples": at.samples,
                "samples_per_s": at.samples / max(time.perf_counter() - started, 1e-9),
                "learning_rate": optimizer.param_groups[0]["lr"],
            }
            at.logs.append(log)
            at.loss, at.samples, at.seconds = 0.0, 0, 0.0
            at.epoch, at.batches = at.epoch + 1, 0
        if checkpoint is not None:
            checkpoint.write_if_due(at, optimizer, device, best)
    model.eval()
    if best is not None and at.logs:
        _keep(best, optimizer)
        at.logs[-1] |= {"validation": {"ndcg@10": at.scores, "kept": best.step, "num_users": len(best.gain_U)}}
    return at.logs


def _next(batches: Iterator[TokenBatch], size: int) -> Iterable[TokenBatch] | None:
    """The next ``size`` batches; None where there are none any more."""
    first = next(batches, None)
    return None if first is None else chain([first], islice(batches, size - 1))


Validate = Callable[[], Tensor]
"""(U,) float64: what the model gains with each user of validation."""
NUM_VALIDATIONS = 5
"""Beside the one before the first step."""


def validation_steps(total_steps: int) -> list[int]:
    """Those before the first step and after every fifth of all; the last one is ``total_steps``."""
    return sorted({round(total_steps * i / NUM_VALIDATIONS) for i in range(NUM_VALIDATIONS + 1)})


def _piece(step: int, total_steps: int, validates: bool) -> int:
    """Steps until the next reading of the loss, or of validation."""
    marks = validation_steps(total_steps) if validates else []
    return min([NOTE_EVERY, *(mark - step for mark in marks if mark > step)])


def _validated(
    validate: Validate | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    at: Position,
    best: Best | None,
    total_steps: int,
) -> Best | None:
    """The best step so far, with the one that the training is at.

    The last step stays unless an earlier one is ahead of it by more than one standard error of the paired difference:
    a decayed learning rate makes the end the best of most trainings, and few users cannot tell near steps apart.
    """
    if validate is None or str(at.step) in at.scores or at.step not in validation_steps(total_steps):
        return best
    with evaluating(model):
        gain_U = validate()
    at.scores[str(at.step)] = float(gain_U.mean())
    if best is not None:
        lead_U = best.gain_U - gain_U
        margin = lead_U.std() / math.sqrt(len(lead_U)) if at.step == total_steps else 0.0
        if lead_U.mean() > margin:
            return best
    copies = [one.detach().to("cpu", copy=True) for one in parameters_of(optimizer)]
    return Best(at.step, gain_U, copies)


def _keep(best: Best, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter, one in zip(parameters_of(optimizer), best.parameters, strict=True):
            parameter.copy_(one)
