"""Local training of the LoRA factors (and the fusion weights) that are loaded in the model; shared by all methods."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fedecider.federation.method import Tree
from fedecider.federation.streams import derive_seed, stream
from fedecider.lora.adapters import FACTORS, named_factors, read_adapters
from fedecider.methods.recommender import Recommender
from idgen.quantized import check_trainable
from idgen.training import sequence_loss


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
    recommender: Recommender,
    client: int,
    round: int,
    *,
    alpha: nn.Parameter | None = None,
    alpha_learning_rate: float = 0.0,
    factors: Collection[str] = FACTORS,
    pull: Pull | None = None,
) -> Trained:
    """``local_epochs`` epochs of AdamW on what is loaded: fresh state, constant rate, no decay, global clipping.

    The loss is the model's token cross-entropy over labels that are not -100. Sample order, prompt templates and
    dropout draw from streams keyed by the domain's name, the round and the epoch. ``alpha`` trains beside the factors
    with its own rate when it requires gradients. Only ``factors`` of the pairs are trained. ``pull`` adds ``strength *
    (theta - anchor)`` to their gradients, before clipping; the logged loss is without it. Decay is 0 since it would
    pull weights and directions towards 0. Differs from the paper: it names learning rates, batch size and epochs only;
    the rest is ours.
    """
    settings, started = recommender.training, time.perf_counter()
    model, name = recommender.model, recommender.names[client]
    check_trainable(model)
    named = named_factors(model, factors)
    trained = list(named.values())
    groups: list[dict[str, Any]] = [{"params": list(trained), "lr": settings.learning_rate}]
    if alpha is not None and alpha.requires_grad:
        groups.append({"params": [alpha], "lr": alpha_learning_rate})
        trained.append(alpha)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    losses, steps = [], 0
    anchors = [] if pull is None else [pull.anchor[name].to(recommender.device) for name in named]
    model.train()
    with _global_seed(derive_seed(recommender.seed, "dropout", name, round), recommender.device):
        for epoch in range(settings.local_epochs):
            total, count = torch.zeros((), device=recommender.device), 0
            for batch in recommender.batches(client, stream(recommender.seed, "batches", name, round, epoch)):
                total += _step(recommender, optimizer, trained, batch, anchors, pull.strength if pull else 0.0)
                count += 1
            losses.append(float(total) / max(count, 1))
            steps += count
    model.eval()
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in trained)
    log = {"loss": losses[-1], "first_loss": losses[0], "steps": steps, "finite": finite}
    return Trained(read_adapters(model), {**log, "seconds": time.perf_counter() - started})


def _step(
    recommender: Recommender,
    optimizer: torch.optim.Optimizer,
    trained: list[nn.Parameter],
    batch: dict[str, Any],
    anchors: list[torch.Tensor],
    strength: float,
) -> torch.Tensor:
    device, settings = recommender.device, recommender.training
    inputs = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
    with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
        loss = sequence_loss(recommender.model, inputs)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    for parameter, anchor in zip(trained, anchors, strict=False):  # alpha comes last and has no anchor
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - anchor, alpha=strength)
    nn.utils.clip_grad_norm_(trained, settings.clip_norm)
    optimizer.step()
    return loss.detach().float()


@contextmanager
def _global_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout knows torch's global generators only: seed them inside, restore them afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
