"""Local training of a client's LoRA factors, and of its fusion weights; shared by all methods."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedecider.bounds import Diverged
from fedecider.federation.method import Tree
from fedecider.federation.streams import derive_seed, stream
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import CLIP_NORM
from fedecider.methods.deepspeed import deepspeed_steps
from fedecider.methods.private_training import draw_users, private_steps
from fedecider.models.adapters import (
    FACTORS,
    Adapters,
    adapter_shapes,
    check_adapters,
    client_order,
    named_factors,
    put,
    read_pair,
)
from fedecider.models.config import ROLES
from idgen.backbones.family import TokenBatch, every_nth_row, num_targets
from idgen.loss_guard import LossGuard
from idgen.losses import sequence_loss
from idgen.optimizer import RowAdamW, clip_gradients, decay, keep_full_rates, row_gradients, set_rates
from idgen.precision import autocast
from idgen.quantize import check_trainable
from idgen.training import checkpointed


class ProximalTerm(NamedTuple):
    """``strength / 2 * ||theta - anchor||^2`` over all factors that are trained."""

    anchor: Tree
    """One client's adapters."""
    strength: float


class Trained(NamedTuple):
    """The adapters after local training, and what happened."""

    adapters: Adapters
    log: dict[str, Any]
    """``loss`` (mean of the last epoch), ``first_loss`` (of the first epoch), ``steps``, ``seconds``, ``finite``; and
    ``diverged``, what happened, where it did."""

    @property
    def pair(self) -> Tree:
        """The own pair."""
        return self.adapters.pair

    @property
    def finite(self) -> bool:
        """Whether there is a result; one that is not finite must not be kept."""
        return bool(self.log["finite"])


def train_locally(
    models: ClientModels,
    client: int,
    round: int,
    start: Tree | Adapters,
    *,
    factors: Collection[str] = FACTORS,
    alpha_learning_rate: float = 0.0,
    proximal: ProximalTerm | None = None,
) -> Trained:
    """``local_epochs`` epochs of AdamW from ``start``: fresh state, rates by ``schedule`` and times
    ``lr_decay_per_round ** (round - 1)``, no weight decay, global clipping.

    The loss is the model's token cross-entropy over labels that are not -100. Sample order, prompt templates and
    dropout draw from streams keyed by the domain's name, the round and the epoch. Fusion weights that learn train
    beside the factors with their own rate. Only ``factors`` of the pairs are trained. ``proximal`` adds ``strength *
    (theta - anchor)`` to their gradients, before clipping; the logged loss is without it. ``adam_epsilon`` holds for
    the factors, fusion weights keep AdamW's own. With ``user_privacy`` steps go over users
    (`fedecider.methods.private_training`). Decay is 0 since it would pull weights and directions towards 0. Processes
    that share a client each take their rows of every batch and add up gradients, so that all of them take the step of
    the whole batch, to rounding; dropout is drawn by each. A training that diverges (`LossGuard`) ends there, and what
    it has trained becomes NaN, so that nobody takes it for a result; not with ``user_privacy``, which losses must not
    steer. Differs from the paper: it names learning rates, batch size and epochs only; the rest is ours.
    """
    settings, base, of_client, started = models.training, models.base, models.clients[client], time.perf_counter()
    model, name = base.model, of_client.name
    adapters = start if isinstance(start, Adapters) else Adapters(start)
    check_trainable(model)
    alpha = put(model, adapters)
    named = named_factors(model, factors)
    groups: list[dict[str, Any]] = [
        {"params": [named[key] for key in keys], "lr": settings.learning_rate * rate, "eps": settings.adam_epsilon}
        for rate, keys in groupby(named, lambda key: settings.output_lr_multiplier if _rows_of_output(key) else 1.0)
    ]
    if alpha is not None and alpha.requires_grad:
        groups.append({"params": [alpha], "lr": alpha_learning_rate})
    else:
        alpha = None
    trained = [parameter for group in groups for parameter in group["params"]]
    losses, steps = [], 0
    guard = None if settings.user_privacy.on else LossGuard()
    log: dict[str, Any] = {}
    model.train()
    index = base.processes.index
    seed = derive_seed(models.seed, "dropout", name, round, *([index] if index else []))
    try:
        with (
            _global_seed(seed, base.device),
            checkpointed(model, base.checkpointing),
            _stepping(models, client, round, _Parameters(named, alpha, groups), proximal) as step,
        ):
            for epoch in range(settings.local_epochs):
                total = torch.zeros((), device=base.device)
                batches = _batches(models, client, round, epoch)
                for place, batch in enumerate(batches, 1):
                    if of_client.sample is not None and not settings.user_privacy.on:
                        drawn = stream(models.seed, "negatives", name, round, epoch, place - 1)
                        batch = of_client.sample(batch, drawn)
                    factor = decay(settings.schedule, (epoch + (place - 1) / len(batches)) / settings.local_epochs)
                    loss = step(batch, factor * settings.lr_decay_per_round ** (round - 1))
                    total += loss
                    if guard is not None:
                        is_last = epoch + 1 == settings.local_epochs and place == len(batches)
                        guard.step(loss, steps + place, is_last, settings.learning_rate)
                losses.append(float(total) / max(len(batches), 1))
                steps += len(batches)
    except Diverged as error:
        log = {"diverged": str(error).removesuffix(". Lower the learning rate")}
        losses.append(float(total) / place)
        steps += place
        with torch.no_grad():
            for parameter in trained:
                parameter.fill_(math.nan)
    model.eval()
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in trained)
    log |= {"loss": losses[-1], "first_loss": losses[0], "steps": steps, "finite": finite}
    pair = read_pair(model)
    check_adapters(pair, adapter_shapes(model))  # partitioned ones would be empty
    peers = adapters.peers
    if peers is not None and alpha is not None:
        peers = peers._replace(alpha=client_order(alpha.detach().cpu(), peers.own))
    return Trained(Adapters(pair, peers), {**log, "seconds": time.perf_counter() - started})


class _Parameters(NamedTuple):
    """What is trained."""

    named: dict[str, nn.Parameter]
    """Factors by their names in a tree."""
    alpha: nn.Parameter | None
    """Fusion weights, where they learn."""
    groups: list[dict[str, Any]]
    """AdamW's; factors come first, in the order of ``named``."""

    @property
    def all(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group["params"]]


def _batches(models: ClientModels, client: int, round: int, epoch: int) -> list[Any]:
    """What each step of an epoch takes: a batch, or batches of users."""
    if models.training.user_privacy.on:
        return draw_users(models, client, round, epoch)
    of_client = models.clients[client]
    return list(of_client.batches(stream(models.seed, "batches", of_client.name, round, epoch)))


def _rows_of_output(name: str) -> bool:
    """Whether a factor holds a row for every token: B of an adapter of the output."""
    layer, factor = name.split(".")[-2:]
    return layer in ROLES["output"] and factor == FACTORS[1]


@contextmanager
def _stepping(
    models: ClientModels, client: int, round: int, trained: _Parameters, proximal: ProximalTerm | None
) -> Iterator[Callable[[Any, float], Tensor]]:
    """One step of AdamW on what `_batches` gives: batch, factor on the learning rates -> its loss."""
    base, training = models.base, models.training

    def on_device(batch: TokenBatch) -> TokenBatch:
        return {key: tensor.to(base.device, non_blocking=True) for key, tensor in batch.items()}

    if training.user_privacy.on:
        assert proximal is None, "methods with a proximal term refuse user_privacy"
        weights = {} if trained.alpha is None else {"alpha": trained.alpha}
        with private_steps(models, client, round, trained.groups, {**trained.named, **weights}) as private_step:
            yield private_step
        return
    if base.deepspeed is not None:
        if proximal is not None:
            raise ValueError(
                "got a method with a proximal term under DeepSpeed, which keeps the gradients to itself, expected "
                "another method. Run it without --use_deepspeed"
            )
        with deepspeed_steps(base.deepspeed, base.model, trained.groups, trained.alpha, training) as sharded_step:
            yield lambda batch, factor: sharded_step(on_device(batch), factor)
        return
    by_rows = models.clients[client].sample is not None and proximal is None and base.processes.count == 1
    optimizer = keep_full_rates(RowAdamW(trained.groups, weight_decay=0.0, fused=True))
    anchors = [] if proximal is None else [proximal.anchor[name].to(base.device) for name in trained.named]

    def step(batch: TokenBatch, factor: float) -> Tensor:
        set_rates(optimizer, factor)
        optimizer.zero_grad(set_to_none=True)
        with autocast(base.device, training.precision):
            loss = _gradients(models, trained.all, on_device(batch))
        for parameter, anchor in zip(trained.all, anchors, strict=False):  # alpha comes last and has no anchor
            if parameter.grad is not None and proximal is not None:
                parameter.grad.add_(parameter.detach() - anchor, alpha=proximal.strength)
        clip_gradients(trained.all, CLIP_NORM)
        optimizer.step()
        return loss

    with row_gradients(base.model, by_rows):
        yield step


def _gradients(models: ClientModels, trained: list[nn.Parameter], inputs: TokenBatch) -> Tensor:
    """The mean loss of a batch, its gradients in ``trained``; of several processes each computes those of its rows."""
    model, processes = models.base.model, models.base.processes
    if processes.count == 1:
        loss = sequence_loss(model, inputs)
        loss.backward()
        return loss.detach().float()
    mine = every_nth_row(inputs, processes.index, processes.count)
    total = torch.zeros((), device=models.base.device)
    if num_targets(mine):
        loss = sequence_loss(model, mine) * (num_targets(mine) / num_targets(inputs))
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
