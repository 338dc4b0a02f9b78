"""Local training of the LoRA factors (and the fusion weights) that are loaded in the model; shared by all methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedecider.federation.method import Tree
from fedecider.federation.streams import derive_seed, stream
from fedecider.lora.adapters import FACTORS, ROLES, adapter_shapes, check_adapters, named_factors, read_adapters
from fedecider.methods.private_training import draw_users, private_steps
from fedecider.methods.recommender import ClientModels
from fedecider.methods.sharded import deepspeed_steps
from idgen.backbones.family import every_nth_row, num_targets
from idgen.precision import autocast
from idgen.quantized import check_trainable
from idgen.training import checkpointed, decay, keep_full_rates, sequence_loss, set_rates


class Pull(NamedTuple):
    """A proximal term ``strength / 2 * ||theta - anchor||^2`` over all factors that are trained."""

    anchor: Tree
    """One client's adapters."""
    strength: float


class Trained(NamedTuple):
    """The own pair after local training, and what happened."""

    adapters: Tree
    log: dict[str, Any]
    """``loss`` (mean of the last epoch), ``first_loss`` (of the first epoch), ``steps``, ``seconds``, ``finite``."""


def train_locally(
    recommender: ClientModels,
    client: int,
    round: int,
    *,
    alpha: nn.Parameter | None = None,
    alpha_learning_rate: float = 0.0,
    factors: Collection[str] = FACTORS,
    pull: Pull | None = None,
) -> Trained:
    """``local_epochs`` epochs of AdamW on what is loaded: fresh state, rates by ``schedule`` and times ``round_decay **
    (round - 1)``, no weight decay, global clipping.

    The loss is the model's token cross-entropy over labels that are not -100. Sample order, prompt templates and
    dropout draw from streams keyed by the domain's name, the round and the epoch. ``alpha`` trains beside the factors
    with its own rate when it requires gradients. Only ``factors`` of the pairs are trained. ``pull`` adds ``strength *
    (theta - anchor)`` to their gradients, before clipping; the logged loss is without it. ``adam_epsilon`` holds for
    the factors, fusion weights keep AdamW's own. With ``user_privacy`` steps go over users
    (`fedecider.methods.private_training`). Decay is 0 since it would pull weights and directions towards 0. Processes
    that share a client each take their rows of every batch and add up gradients, so that all of them take the step of
    the whole batch, to rounding; dropout is drawn by each. Differs from the paper: it names learning rates, batch size
    and epochs only; the rest is ours.
    """
    settings, started = recommender.training, time.perf_counter()
    model, name = recommender.model, recommender.names[client]
    check_trainable(model)
    named = named_factors(model, factors)
    trained = list(named.values())
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in names], "lr": settings.learning_rate * rate, "eps": settings.adam_epsilon}
        for rate, names in groupby(named, lambda name: settings.output_rate if _rows_of_output(name) else 1.0)
    ]
    if alpha is not None and alpha.requires_grad:
        groups.append({"params": [alpha], "lr": alpha_learning_rate})
        trained.append(alpha)
    losses, steps, shapes = [], 0, adapter_shapes(model)
    model.train()
    others = recommender.processes
    seed = derive_seed(recommender.seed, "dropout", name, round, *([others.index] if others.index else []))
    with (
        _global_seed(seed, recommender.device),
        checkpointed(model, settings.gradient_checkpointing),
        _stepping(recommender, client, round, groups, alpha, named, pull) as step,
    ):
        for epoch in range(settings.local_epochs):
            total = torch.zeros((), device=recommender.device)
            batches = _batches(recommender, client, round, epoch)
            for place, batch in enumerate(batches):
                factor = decay(settings.schedule, (epoch + place / len(batches)) / settings.local_epochs)
                total += step(batch, factor * settings.round_decay ** (round - 1))
            losses.append(float(total) / max(len(batches), 1))
            steps += len(batches)
    model.eval()
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in trained)
    log = {"loss": losses[-1], "first_loss": losses[0], "steps": steps, "finite": finite}
    adapters = read_adapters(model)
    check_adapters(adapters, shapes)  # partitioned ones would be empty
    return Trained(adapters, {**log, "seconds": time.perf_counter() - started})


def _batches(recommender: ClientModels, client: int, round: int, epoch: int) -> list[Any]:
    """What each step of an epoch takes: a batch, or batches of users."""
    if recommender.training.user_privacy.on:
        return draw_users(recommender, client, round, epoch)
    return list(
        recommender.batches(client, stream(recommender.seed, "batches", recommender.names[client], round, epoch))
    )


def _rows_of_output(name: str) -> bool:
    """Whether a factor holds a row for every token: B of an adapter of the output."""
    layer, factor = name.split(".")[-2:]
    return layer in ROLES["output"] and factor == FACTORS[1]


@contextmanager
def _stepping(
    recommender: ClientModels,
    client: int,
    round: int,
    groups: list[dict[str, Any]],
    alpha: nn.Parameter | None,
    named: dict[str, nn.Parameter],
    pull: Pull | None,
) -> Iterator[Callable[[Any, float], Tensor]]:
    """One step of AdamW on what `_batches` gives: batch, factor on the learning rates -> its loss."""

    def on_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor.to(recommender.device, non_blocking=True) for key, tensor in batch.items()}

    if recommender.training.user_privacy.on:
        assert pull is None, "methods that pull refuse user_privacy"
        weights = {"alpha": alpha} if alpha is not None and alpha.requires_grad else {}
        with private_steps(recommender, client, round, groups, {**named, **weights}) as private_step:
            yield private_step
        return
    if recommender.deepspeed is not None:
        if pull is not None:
            raise ValueError(
                "got a method with a proximal term under DeepSpeed, which keeps the gradients to itself, expected "
                "another method. Run it without --use_deepspeed"
            )
        training = recommender.training
        with deepspeed_steps(recommender.deepspeed, recommender.model, groups, alpha, training) as sharded_step:
            yield lambda batch, factor: sharded_step(on_device(batch), factor)
        return
    trained = [parameter for group in groups for parameter in group["params"]]
    optimizer = keep_full_rates(torch.optim.AdamW(groups, weight_decay=0.0, fused=True))
    anchors = [] if pull is None else [pull.anchor[name].to(recommender.device) for name in named]

    def step(batch: dict[str, Tensor], factor: float) -> Tensor:
        set_rates(optimizer, factor)
        return _step(recommender, optimizer, trained, on_device(batch), anchors, pull.strength if pull else 0.0)

    yield step


def _step(
    recommender: ClientModels,
    optimizer: torch.optim.Optimizer,
    trained: list[nn.Parameter],
    inputs: dict[str, Tensor],
    anchors: list[Tensor],
    strength: float,
) -> Tensor:
    device, settings = recommender.device, recommender.training
    optimizer.zero_grad(set_to_none=True)
    with autocast(device, settings.precision):
        loss = _gradients(recommender, trained, inputs)
    for parameter, anchor in zip(trained, anchors, strict=False):  # alpha comes last and has no anchor
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - anchor, alpha=strength)
    nn.utils.clip_grad_norm_(trained, settings.clip_norm)
    optimizer.step()
    return loss


def _gradients(recommender: ClientModels, trained: list[nn.Parameter], inputs: dict[str, Tensor]) -> Tensor:
    """The mean loss of a batch, its gradients in ``trained``; of several processes each computes those of its rows."""
    processes = recommender.processes
    if processes.count == 1:
        loss = sequence_loss(recommender.model, inputs)
        loss.backward()
        return loss.detach().float()
    mine = every_nth_row(inputs, processes.index, processes.count)
    total = torch.zeros((), device=recommender.device)
    if num_targets(mine):
        loss = sequence_loss(recommender.model, mine) * (num_targets(mine) / num_targets(inputs))
        loss.backward()
        total = loss.detach().float()
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
    flat = torch.cat([total.view(1), *(one.float().flatten() for one in gradients)])
    processes.add_up(flat)
    parts = flat[1:].split([one.numel() for one in trained])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
    return flat[0]


@contextmanager
def _global_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout knows torch's global generators only: seed them inside, restore them afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
