"""Local training that hides each single user of a client: one bounded gradient a user and step, then noise (DP-SGD).

Adjacency, here and in every number of this module: one user of a client, with all training events, is there or is not,
and everything else is the same. Protected is what comes out of a client's local training, and so all that it ever sends
of it, against the server and the other clients. Not covered: losses in the logs, choices and figures made with held-out
items, the private part of the ensemble, and somebody who is a user of several clients (their epsilons add up).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor, nn

from fedecider.federation.config import PrivacyConfig
from fedecider.federation.privacy import epsilon, normal_draws, secret_uniform
from fedecider.federation.streams import stream
from fedecider.federation.wire import only_rows
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import UserPrivacy
from idgen.backbones.family import TokenBatch
from idgen.losses import sequence_loss
from idgen.optimizer import keep_full_rates, set_rates
from idgen.precision import autocast

SAMPLE_RATE = 0.25
"""The probability with which each user takes part in a step, in place of a batch size: few enough that noise on the sum
hides one, many enough that it does not drown the rest."""


def steps_per_epoch() -> int:
    """Steps after which a user has been drawn once or more on average; they do not depend on the number of users."""
    return math.ceil(1.0 / SAMPLE_RATE)


def user_epsilon(config: UserPrivacy, num_epochs: int, delta: float, num_sums: int = 0) -> float:
    """The epsilon of ``num_epochs`` epochs of one client, of all rounds together, and of ``num_sums`` sums of
    `fedecider.models.noised_events`; inf where nothing is guaranteed.

    A step is a Gaussian mechanism on a sum to which every user adds at most ``clip``, with users drawn independently
    (Poisson), a sum of events one of the same noise multiplier with all of them:
    :func:`fedecider.federation.privacy.epsilon` over all of these.
    """
    noise = PrivacyConfig(config.clip, config.noise_scale, delta, "sum")
    return epsilon(noise, num_epochs * steps_per_epoch(), SAMPLE_RATE, "poisson", num_sums)


def user_report(config: UserPrivacy, num_epochs: int, delta: float, num_sums: int = 0) -> str:
    """One line that says what is guaranteed to a user, what is not, and when nothing is."""
    value = user_epsilon(config, num_epochs, delta, num_sums)
    if value == math.inf:
        return "no guarantee to users: clip and noise are needed, and one of them is missing"
    return (
        f"epsilon {value:.3g} at delta {delta:g}: one user of one client there or not, over "
        f"{num_epochs * steps_per_epoch()} steps in which each user takes part with probability "
        f"{SAMPLE_RATE:g} (clip {config.clip:g}, noise_scale {config.noise_scale:g}) and {num_sums} sum(s) of "
        "events of items. Covered is what local training makes and sends, and what ensembles add "
        "up; not covered: the choice of the round and of update_scales on validation items, what a client's ensemble "
        "keeps to itself, losses in the logs, and every figure reported here"
    )


def draw_users(models: ClientModels, client: int, round: int, epoch: int) -> list[list[TokenBatch]]:
    """For every step of an epoch one batch for each of its users, who are drawn independently of each other."""
    of_client = models.clients[client]
    assert of_client.users is not None, "a client that knows its users"
    name, users, drawn = of_client.name, of_client.users(), []
    for step in range(steps_per_epoch()):
        draws = stream(models.seed, "users", name, round, epoch, step)
        chance_U = secret_uniform((users.num_users,)) if models.secret else torch.rand(users.num_users, generator=draws)
        numbers = (chance_U < SAMPLE_RATE).nonzero()[:, 0].tolist()
        drawn.append(list(users.batches(numbers, stream(models.seed, "samples", name, round, epoch, step))))
    return drawn


@contextmanager
def private_steps(
    models: ClientModels, client: int, round: int, groups: Sequence[dict], named: Mapping[str, nn.Parameter]
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
    if models.base.deepspeed is not None:
        raise ValueError("got user_privacy under DeepSpeed, expected one without. Run it without --use_deepspeed")
    config, device, numbers = models.training.user_privacy, models.base.device, count()
    optimizer = keep_full_rates(torch.optim.AdamW(list(groups), weight_decay=0.0, fused=True))
    parameters = list(named.values())
    bound = math.inf if config.clip is None else config.clip

    def step(batches: list[TokenBatch], factor: float) -> Tensor:
        set_rates(optimizer, factor)
        total = [torch.zeros_like(parameter) for parameter in parameters]
        losses = torch.zeros((), device=device)
        for batch in batches:
            losses += _add_user(models, parameters, total, batch, bound)
        number = next(numbers)
        for name, gradient in zip(named, total, strict=True):
            if bound < math.inf:
                gradient /= bound
            if config.noise_scale > 0.0:
                labels = ("user noise", models.clients[client].name, round, number, name)
                generator = None if models.secret else stream(models.seed, *labels)
                noise = config.noise_scale * normal_draws(gradient.shape, generator, torch.float32)
                mark = models.rows.own[name][client] if name in models.rows.own else None
                gradient += only_rows(noise, mark).to(gradient)
            named[name].grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses / max(len(batches), 1)

    yield step


def _add_user(
    models: ClientModels, parameters: list[nn.Parameter], total: list[Tensor], batch: TokenBatch, bound: float
) -> Tensor:
    """Add one user's bounded gradient to ``total``; returns the loss."""
    device, precision = models.base.device, models.training.precision
    inputs = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
    with autocast(device, precision):
        loss = sequence_loss(models.base.model, inputs)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    norms = [gradient.norm() for gradient in gradients if gradient is not None]
    norm = float(torch.stack(norms).norm()) if norms else 0.0
    if math.isfinite(norm):
        for sum_of_users, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                sum_of_users.add_(gradient, alpha=1.0 if norm <= bound else bound / norm)
    return loss.detach().float()
