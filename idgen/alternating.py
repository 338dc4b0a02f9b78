"""Alternating training of ID generator and backbone: each learns while the other is frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from idgen.backbones.family import TokenBatch
from idgen.config import BackboneTraining, TrainConfig
from idgen.events import is_target
from idgen.loss_guard import LossGuard
from idgen.losses import sequence_loss
from idgen.optimizer import STAGE_ONE_COURSE, make_optimizer, parameter_groups
from idgen.samples import num_batches, train_batches
from idgen.soft_ids import SoftSource, soft_batches, soft_id_loss, soft_source
from idgen.tasks import Task
from idgen.training import Execution, LossFn, Optimisation, epoch_generator, train_steps

Ids = TypeVar("Ids")

EPOCHS_PER_TURN = 1000
"""Epoch numbers of a turn start at a multiple of this, so that no two epochs draw alike."""


class _Side(NamedTuple):
    """Training of one of the two models over all its turns."""

    optimizer: torch.optim.AdamW
    optimisation: Optimisation
    step: int
    guard: LossGuard
    """Of all turns: each of them has the start of the first one."""


GENERATOR_RATE = 1e-5
"""IDGenRec's 1e-8 is below the resolution of fp32 weights; the report says how many IDs change."""
GENERATOR_BATCH = 12
"""Samples of a step of the generator, one epoch of which is its turn: both as in IDGenRec."""


def phases(num_phases: int) -> list[str]:
    """The turns in order: "backbone" and "ids". The backbone begins, and has the last word on the final IDs."""
    return ["backbone"] + ["ids", "backbone"] * num_phases if num_phases else []


@dataclass(frozen=True)
class Writing(Generic[Ids]):
    """How IDs are written anew with the generator as it is, and what is trained on them."""

    assign_ids: Callable[[], Ids]
    make_tasks: Callable[[Ids], list[Task]]
    """The training tasks of these IDs, always in the same order."""
    item_texts: Sequence[Sequence[str]]
    """Of each task."""
    tokenizer: PreTrainedTokenizerBase


def alternate(
    backbone: nn.Module,
    generator: nn.Module,
    ids: Ids,
    writing: Writing[Ids],
    num_phases: int,
    train: BackboneTraining,
    execution: Execution,
) -> tuple[Ids, list[dict[str, Any]]]:
    """Train backbone and ID generator in turns, both in place; the final IDs and one log per turn.

    ``ids``: those that the backbone begins with. ``num_phases``: turns of the generator. ``train``: optimisation of
    the backbone, with the epochs of each of its turns; the generator has its own learning rate and batch size.
    Warm-up and decay span the steps of all turns of a model, whose optimiser lives as long. After each turn of the
    generator tasks are built anew, so that the backbone and the next turn of the generator see the new IDs, and the
    log says how many of them changed.
    Source: IDGenRec (SIGIR 2024). Differs from its released code, where the generator begins: as `soft_id_loss`, and
    the data of both models are rebuilt after every change of IDs.
    """
    tasks = writing.make_tasks(ids)
    order = phases(num_phases)
    positions = sum(
        int(is_target(task.train).sum()) for task in tasks
    )  # no synthetic histories: the generator has none
    rec_steps = order.count("backbone") * train.epochs * num_batches(tasks, train.batch_size)
    rec = _side(backbone, train, rec_steps, train.table_lr_multiplier)
    id_train = TrainConfig(GENERATOR_RATE, GENERATOR_BATCH, train.precision)
    gen_steps = num_phases * -(-positions // GENERATOR_BATCH)
    gen = _side(generator, id_train, gen_steps, train.table_lr_multiplier)
    logs: list[dict[str, Any]] = []
    with _seeded(execution.seed, execution.device):
        for turn, trained in enumerate(order):
            streams = (epoch_generator(execution.seed, EPOCHS_PER_TURN * turn + epoch) for epoch in count())
            if trained == "backbone":
                rec, losses = _train_backbone(backbone, rec, tasks, islice(streams, train.epochs), execution)
                logs.append({"turn": turn, "trained": trained, "loss": losses})
                continue
            source = soft_source(tasks, writing.item_texts, writing.tokenizer, len(_embeddings(backbone)))
            gen, losses = _train_generator(generator, backbone, gen, source, islice(streams, 1), execution)
            ids = writing.assign_ids()
            old, tasks = tasks, writing.make_tasks(ids)
            logs.append({"turn": turn, "trained": trained, "loss": losses, **changed_ids(old, tasks)})
    backbone.eval()
    generator.eval()
    return ids, logs


def changed_ids(old: Sequence[Task], new: Sequence[Task]) -> dict[str, Any]:
    """How many item IDs differ, in all and by task."""
    by_task = {
        after.name: sum(
            tokens != others for tokens, others in zip(before.item_ids.token_ids, after.item_ids.token_ids, strict=True)
        )
        for before, after in zip(old, new, strict=True)
    }
    return {
        "ids_changed": sum(by_task.values()),
        "num_ids": sum(len(task.trie) for task in new),
        "ids_changed_by_task": by_task,
    }


def _side(model: nn.Module, config: TrainConfig, total_steps: int, table_lr_multiplier: float = 1.0) -> _Side:
    groups = parameter_groups(model, config.learning_rate, STAGE_ONE_COURSE, table_lr_multiplier)
    optimizer = make_optimizer(groups, config.learning_rate, STAGE_ONE_COURSE)
    return _Side(optimizer, Optimisation(config, STAGE_ONE_COURSE, total_steps), 0, LossGuard())


def _train_backbone(
    backbone: Any, side: _Side, tasks: list[Task], streams: Iterable[torch.Generator], execution: Execution
) -> tuple[_Side, list[float]]:
    backbone.train()
    epochs = (train_batches(tasks, side.optimisation.config.batch_size, stream) for stream in streams)
    return _run(side, epochs, partial(sequence_loss, backbone), execution)


def _train_generator(
    generator: Any,
    backbone: Any,
    side: _Side,
    source: SoftSource,
    streams: Iterable[torch.Generator],
    execution: Execution,
) -> tuple[_Side, list[float]]:
    # Without dropout, so that the soft IDs belong to the greedy ones.
    generator.eval()
    backbone.eval()
    epochs = (soft_batches(source, side.optimisation.config.batch_size, stream) for stream in streams)
    with _frozen(backbone):
        return _run(side, epochs, partial(soft_id_loss, generator, backbone, source), execution)


def _run(
    side: _Side, epochs: Iterable[Iterable[TokenBatch]], loss_fn: LossFn, execution: Execution
) -> tuple[_Side, list[float]]:
    losses = []
    for batches in epochs:
        done, loss, _ = train_steps(
            side.optimizer, batches, loss_fn, side.optimisation, execution, side.step, side.guard
        )
        side = side._replace(step=side.step + done)
        losses.append(loss)
    return side, losses


def _embeddings(model: Any) -> Tensor:
    return model.get_input_embeddings().weight


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients for the parameters of ``model`` inside."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout draws from ``seed`` inside; the global random state is as before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
