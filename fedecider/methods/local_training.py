"""Local training through DeepSpeed's ZeRO, where ``accelerate launch --use_deepspeed`` asks for it.

One process: the clients of a run are shared out over its processes, so that a second one would train another client.
ZeRO-2 works on the model of the run. ZeRO-3 partitions every weight for good, which ranking could not read afterwards:
it works on a copy, and what was trained is gathered from there.

Adjacency, here and in every number of this module: one user of a client, with all training events, is there or is not,
and everything else is the same. Protected is what comes out of a client's local training, and so all that it ever sends
of it, against the server and the other clients. Not covered: losses in the logs, choices and figures made with held-out
items, the private part of the hybrid, and somebody who is a user of several clients (their epsilons add up).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, groupby
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fedecider.bounds import Diverged, Precision
from fedecider.federation.method import Tree
from fedecider.federation.privacy import PrivacyConfig, epsilon, normal_draws, secret_uniform
from fedecider.federation.streams import derive_seed, stream
from fedecider.federation.wire import only_rows
from fedecider.methods.config import UserPrivacy
from fedecider.methods.recommender import CLIP_NORM, ClientModels, LocalTraining
from fedecider.models.adapters import (
    FACTORS,
    ROLES,
    adapted_embeddings,
    adapter_shapes,
    check_adapters,
    named_factors,
    read_adapters,
)
from idgen.backbones.families import unwrap
from idgen.backbones.family import TokenBatch, every_nth_row, num_targets
from idgen.loss_guard import LossGuard
from idgen.losses import sequence_loss
from idgen.optimizer import RowAdamW, clip_gradients, decay, keep_full_rates, row_gradients, set_rates
from idgen.precision import autocast
from idgen.quantize import check_trainable, quantize_of
from idgen.training import checkpointed

# Local training through DeepSpeed's ZeRO, where ``accelerate launch --use_deepspeed`` asks for it.


class Objective(nn.Module):
    """The loss as a module that knows all that is trained: DeepSpeed wraps modules, and finds parameters in them."""

    def __init__(self, model: nn.Module, alpha: nn.Parameter | None, precision: Precision) -> None:
        super().__init__()
        self.model, self.alpha, self.precision = model, alpha, precision

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        with autocast(batch["input_ids"].device, self.precision):
            return sequence_loss(self.model, batch)


@contextmanager
def deepspeed_steps(
    accelerator: Accelerator,
    model: nn.Module,
    groups: list[dict[str, Any]],
    alpha: nn.Parameter | None,
    settings: LocalTraining,
) -> Iterator[Callable[[dict[str, Tensor], float], Tensor]]:
    """A function that takes one step of AdamW on a batch, at a factor on the learning rates, and returns its loss.

    ``model`` has the result at the end.

    ``groups``: AdamW's, of parameters of ``model`` and ``alpha``. Clipping and batch size of the DeepSpeed config are
    those of ``settings``.

    Raises:
        ValueError: a quantised base, or an adapter of a tied table, under ZeRO-3.
    """
    plugin, objective = accelerator.state.deepspeed_plugin, Objective(model, alpha, settings.precision)
    trained = [parameter for group in groups for parameter in group["params"]]
    copies: dict[int, Any] = {id(parameter): parameter for parameter in trained}
    if plugin.zero_stage == 3:
        if quantize_of(model) != "none":
            raise ValueError("got a quantised base with ZeRO-3, expected ZeRO-2: packed weights cannot be partitioned")
        if adapted_embeddings(unwrap(model)):
            raise ValueError(
                "got lora_targets table with ZeRO-3, expected ZeRO-2: embeddings cannot read the partitioned adapter "
                "of the output. Take the target output, or configs/deepspeed/zero2.json"
            )
        copies = {}
        objective = copy.deepcopy(objective, copies)
    groups = [{**group, "params": [copies[id(parameter)] for parameter in group["params"]]} for group in groups]
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = settings.batch_size
    plugin.deepspeed_config["gradient_clipping"] = CLIP_NORM
    optimizer = keep_full_rates(torch.optim.AdamW(groups, weight_decay=0.0))
    engine, sharded = accelerator.prepare(objective, optimizer)

    def step(batch: dict[str, Tensor], factor: float) -> Tensor:
        set_rates(sharded, factor)
        loss = engine(batch)
        accelerator.backward(loss)  # and a step, and gradients back to zero
        return loss.detach().float()

    try:
        yield step
        _gather(trained, [copies[id(parameter)] for parameter in trained], plugin.zero_stage)
    finally:
        engine.destroy()
        accelerator.free_memory()


def _gather(trained: list[nn.Parameter], copies: list[nn.Parameter], stage: int) -> None:
    """Whole values of partitioned copies into the model of the run: a partitioned parameter reads as an empty one."""
    if stage < 3:
        return
    from deepspeed import zero

    with zero.GatheredParameters(copies), torch.no_grad():
        for parameter, whole in zip(trained, copies, strict=True):
            parameter.copy_(whole)


# Local training that hides each single user of a client: one bounded gradient a user and step, then noise (DP-
# SGD).


SAMPLE_RATE = 0.25
"""The probability with which each user takes part in a step, in place of a batch size: few enough that noise on the sum
hides one, many enough that it does not drown the rest."""


def steps_per_epoch() -> int:
    """Steps after which a user has been drawn once or more on average; they do not depend on the number of users."""
    return math.ceil(1.0 / SAMPLE_RATE)


def user_epsilon(config: UserPrivacy, num_epochs: int, delta: float) -> float:
    """The epsilon of ``num_epochs`` epochs of one client, of all rounds together; inf where nothing is guaranteed.

    A step is a Gaussian mechanism on a sum to which every user adds at most ``clip``, with users drawn independently
    (Poisson): :func:`fedecider.federation.privacy.epsilon` over all steps.
    """
    noise = PrivacyConfig(config.clip, "gaussian", config.noise_scale, delta, "sum")
    return epsilon(noise, num_epochs * steps_per_epoch(), SAMPLE_RATE, "poisson")


def user_report(config: UserPrivacy, num_epochs: int, delta: float) -> str:
    """One line that says what is guaranteed to a user, what is not, and when nothing is."""
    value = user_epsilon(config, num_epochs, delta)
    if value == math.inf:
        return "no guarantee to users: clip and noise are needed, and one of them is missing"
    return (
        f"epsilon {value:.3g} at delta {delta:g}: one user of one client there or not, over "
        f"{num_epochs * steps_per_epoch()} steps in which each user takes part with probability "
        f"{SAMPLE_RATE:g} (clip {config.clip:g}, noise_scale {config.noise_scale:g}). Covered is what local "
        "training makes and sends; not covered: the choice of the round and of update_scales on validation items, the "
        "hybrid, losses in the logs, and every figure reported here"
    )


def draw_users(recommender: ClientModels, client: int, round: int, epoch: int) -> list[list[TokenBatch]]:
    """For every step of an epoch one batch for each of its users, who are drawn independently of each other."""
    assert recommender.users is not None, "a recommender that knows its users"
    name = recommender.names[client]
    users, drawn = recommender.users(client), []
    for step in range(steps_per_epoch()):
        asked = stream(recommender.seed, "users", name, round, epoch, step)
        chance_U = (
            secret_uniform((users.num_users,)) if recommender.secret else torch.rand(users.num_users, generator=asked)
        )
        numbers = (chance_U < SAMPLE_RATE).nonzero()[:, 0].tolist()
        drawn.append(list(users.batches(numbers, stream(recommender.seed, "samples", name, round, epoch, step))))
    return drawn


@contextmanager
def private_steps(
    recommender: ClientModels, client: int, round: int, groups: Sequence[dict], named: Mapping[str, nn.Parameter]
) -> Iterator[Callable[[list[TokenBatch], float], Tensor]]:
    """Steps of AdamW on batches of :func:`draw_users`: batches, factor on the learning rates -> mean loss of the users.

    ``g = (sum_u min(1, C / ||g_u||) g_u + n) / C``, ``n ~ N(0, (noise_scale C)^2)``, over all of ``named`` together,
    ``g_u`` the gradient of user u's mean loss (Abadi et al. 2016; per user: McMahan et al. 2018). Noise falls on every
    number that training may change, rows of other catalogues left out, whose places are public. Differs from the
    papers: AdamW, for which the size of g does not matter, so that no number of users enters it; a gradient that is
    not finite counts as zero; `CLIP_NORM` is not used.

    One backward pass for every user. Opacus 1.6 cannot do it: its ``GradSampleModule`` takes these models without a
    word and then gives no factor a ``grad_sample``, since `FusedLinear` reads the factors itself and calls none of the
    plain layers that have the hooks.
    """
    if recommender.deepspeed is not None:
        raise ValueError("got user_privacy under DeepSpeed, expected one without. Run it without --use_deepspeed")
    config, device, numbers = recommender.training.user_privacy, recommender.device, count()
    optimizer = keep_full_rates(torch.optim.AdamW(list(groups), weight_decay=0.0, fused=True))
    parameters = list(named.values())
    bound = math.inf if config.clip is None else config.clip

    def step(batches: list[TokenBatch], factor: float) -> Tensor:
        set_rates(optimizer, factor)
        total = [torch.zeros_like(parameter) for parameter in parameters]
        losses = torch.zeros((), device=device)
        for batch in batches:
            losses += _add_user(recommender, parameters, total, batch, bound)
        number = next(numbers)
        for name, gradient in zip(named, total, strict=True):
            if bound < math.inf:
                gradient /= bound
            if config.noise_scale > 0.0:
                labels = ("user noise", recommender.names[client], round, number, name)
                generator = None if recommender.secret else stream(recommender.seed, *labels)
                noise = config.noise_scale * normal_draws(gradient.shape, generator, torch.float32)
                mark = recommender.own_rows[name][client] if name in recommender.own_rows else None
                gradient += only_rows(noise, mark).to(gradient)
            named[name].grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses / max(len(batches), 1)

    yield step


def _add_user(
    recommender: ClientModels, parameters: list[nn.Parameter], total: list[Tensor], batch: TokenBatch, bound: float
) -> Tensor:
    """Add one user's bounded gradient to ``total``; returns the loss."""
    device, precision = recommender.device, recommender.training.precision
    inputs = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
    with autocast(device, precision):
        loss = sequence_loss(recommender.model, inputs)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    norms = [gradient.norm() for gradient in gradients if gradient is not None]
    norm = float(torch.stack(norms).norm()) if norms else 0.0
    if math.isfinite(norm):
        for one, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                one.add_(gradient, alpha=1.0 if norm <= bound else bound / norm)
    return loss.detach().float()


# Local training of the LoRA factors (and the fusion weights) that are loaded in the model; shared by all methods.


class Pull(NamedTuple):
    """A proximal term ``strength / 2 * ||theta - anchor||^2`` over all factors that are trained."""

    anchor: Tree
    """One client's adapters."""
    strength: float


class Trained(NamedTuple):
    """The own pair after local training, and what happened."""

    adapters: Tree
    log: dict[str, Any]
    """``loss`` (mean of the last epoch), ``first_loss`` (of the first epoch), ``steps``, ``seconds``, ``finite``; and
    ``diverged``, what happened, where it did."""


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
    """``local_epochs`` epochs of AdamW on what is loaded: fresh state, rates by ``schedule`` and times
    ``lr_decay_per_round ** (round - 1)``, no weight decay, global clipping.

    The loss is the model's token cross-entropy over labels that are not -100. Sample order, prompt templates and
    dropout draw from streams keyed by the domain's name, the round and the epoch. ``alpha`` trains beside the factors
    with its own rate when it requires gradients. Only ``factors`` of the pairs are trained. ``pull`` adds ``strength *
    (theta - anchor)`` to their gradients, before clipping; the logged loss is without it. ``adam_epsilon`` holds for
    the factors, fusion weights keep AdamW's own. With ``user_privacy`` steps go over users
    (`fedecider.methods.local_training`). Decay is 0 since it would pull weights and directions towards 0. Processes
    that share a client each take their rows of every batch and add up gradients, so that all of them take the step of
    the whole batch, to rounding; dropout is drawn by each. A training that diverges (`LossGuard`) ends there, and what
    it has trained becomes NaN, so that nobody takes it for a result; not with ``user_privacy``, which losses must not
    steer. Differs from the paper: it names learning rates, batch size and epochs only; the rest is ours.
    """
    settings, started = recommender.training, time.perf_counter()
    model, name = recommender.model, recommender.names[client]
    check_trainable(model)
    named = named_factors(model, factors)
    trained = list(named.values())
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in names], "lr": settings.learning_rate * rate, "eps": settings.adam_epsilon}
        for rate, names in groupby(named, lambda name: settings.output_lr_multiplier if _rows_of_output(name) else 1.0)
    ]
    if alpha is not None and alpha.requires_grad:
        groups.append({"params": [alpha], "lr": alpha_learning_rate})
        trained.append(alpha)
    losses, steps, shapes = [], 0, adapter_shapes(model)
    guard = None if settings.user_privacy.on else LossGuard()
    log: dict[str, Any] = {}
    model.train()
    others = recommender.processes
    seed = derive_seed(recommender.seed, "dropout", name, round, *([others.index] if others.index else []))
    try:
        with (
            _global_seed(seed, recommender.device),
            checkpointed(model, recommender.checkpointing),
            _stepping(recommender, client, round, groups, alpha, named, pull) as step,
        ):
            for epoch in range(settings.local_epochs):
                total = torch.zeros((), device=recommender.device)
                batches = _batches(recommender, client, round, epoch)
                for place, batch in enumerate(batches, 1):
                    if recommender.sample is not None and not settings.user_privacy.on:
                        drawn = stream(recommender.seed, "negatives", name, round, epoch, place - 1)
                        batch = recommender.sample(client, batch, drawn)
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
    by_rows = recommender.sample is not None and pull is None and recommender.processes.count == 1
    optimizer = keep_full_rates(RowAdamW(groups, weight_decay=0.0, fused=True))
    anchors = [] if pull is None else [pull.anchor[name].to(recommender.device) for name in named]

    def step(batch: dict[str, Tensor], factor: float) -> Tensor:
        set_rates(optimizer, factor)
        return _step(recommender, optimizer, trained, on_device(batch), anchors, pull.strength if pull else 0.0)

    with row_gradients(recommender.model, by_rows):
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
    clip_gradients(trained, CLIP_NORM)
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
