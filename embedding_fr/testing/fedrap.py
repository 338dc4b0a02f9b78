"""FedRAP and its variants, one user at a time: the losses as they are written, differentiated by autograd.

Shape legend: B examples of a batch, I items, D dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import l1_loss, mse_loss

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.fedrap import FedrapConfig, FedrapRound, fedrap_round
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters
from fedecider.federation.method import Tree


def fedrap(federation: Federation, training: EmbeddingTraining, config: FedrapConfig) -> Reference:
    """ClientUpdate of Algorithm 1; the server averages C over its clients."""
    loss = paper_loss if config.variant == "paper" else code_loss

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        now = fedrap_round(training, config, user.round)
        theta = parameters({**received, **{name: own[name] for name in own if name != "uploaded_table"}})
        optimiser = torch.optim.SGD(
            [
                {"params": [theta[name]], "lr": now.item_rate if name.endswith("_table") else now.user_rate}
                for name in theta
            ],
            weight_decay=training.weight_decay,
        )
        rates = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.95 if config.variant == "code" else 1.0)
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                optimiser.zero_grad()
                loss(theta, item_B, label_B, config, now).backward()
                if config.grad_clip is not None and "common_table" in theta:
                    clip(theta["common_table"], config.grad_clip)
                optimiser.step()
                rates.step()
                if config.variant == "paper" and config.sparsity == "l1" and "common_table" in theta:
                    shrink(theta["common_table"], now.item_rate * now.sparsity)
        upload = {name: theta[name] for name in theta if name == "common_table"}
        kept = {"uploaded_table": theta["common_table"]} if "uploaded_table" in own else {}
        return upload, {**{name: theta[name] for name in theta if name in own}, **kept}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        return mean_of(server, uploads, [1.0] * len(weights))

    return Reference(client, server)


def paper_loss(theta: Tree, item_B: Tensor, label_B: Tensor, config: FedrapConfig, now: FedrapRound) -> Tensor:
    """Eq. 3 for one client: sums; the L1 term is left to the soft-threshold (Eq. 13)."""
    total = len(item_B) * bce(predicted(theta, item_B), label_B)
    if "common_table" in theta and "personal_table" in theta:
        square_I = (theta["personal_table"] - theta["common_table"]).square().sum(1)
        total = total - now.distance * (square_I / (1 + square_I) if config.distance == "bounded" else square_I).sum()
    if config.sparsity == "l2" and "common_table" in theta:
        total = total + now.sparsity * theta["common_table"].square().sum()
    return total


def code_loss(theta: Tree, item_B: Tensor, label_B: Tensor, config: FedrapConfig, now: FedrapRound) -> Tensor:
    """The public code's: means, and only the rows of the batch are regularised."""
    total = bce(predicted(theta, item_B), label_B)
    common = theta["common_table"][item_B] if "common_table" in theta else None
    if common is not None and "personal_table" in theta:
        personal = theta["personal_table"][item_B]
        square_B = (personal - common).square().sum(1)
        bounded = (square_B / (1 + square_B)).sum() / common.numel()
        total = total - now.distance * (bounded if config.distance == "bounded" else mse_loss(personal, common))
    if common is not None and config.sparsity != "none":
        measure = mse_loss if config.sparsity == "l2" else l1_loss
        total = total + now.sparsity * measure(common, torch.zeros_like(common))
    return total


def predicted(theta: Tree, item_B: Tensor) -> Tensor:
    """Logits ``<u, C_j + D_j>``, plus the bias where there is one."""
    row_BD = torch.stack([theta[name][item_B] for name in theta if name.endswith("_table")]).sum(0)
    logit_B = row_BD @ theta["user"]
    return logit_B + theta["bias"] if "bias" in theta else logit_B


def clip(common: Tensor, bound: float) -> None:
    """Eq. 4: the gradient times min(1, bound / its Frobenius norm)."""
    assert common.grad is not None
    common.grad *= min(1.0, bound / float(common.grad.norm()))


@torch.no_grad()
def shrink(common: Tensor, theta: float) -> None:
    """S_theta(v) = max(v - theta, 0) - max(-v - theta, 0)."""
    common.copy_((common - theta).clamp(min=0.0) - (-common - theta).clamp(min=0.0))
