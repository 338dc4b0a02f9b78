"""Sharpness-aware minimisation (Foret et al., 2021) of any method: a wrapper of its gradients.

Shape legend: A active clients of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from embedding_fr.examples import ExampleBatch
from embedding_fr.local_training import Gradients, Objective, plain_gradients
from fedecider.federation.method import Tree

_TINY = 1e-12
"""Keeps the step defined where a gradient is zero."""


def sharpness_aware(radius: Mapping[tuple[str, ...], float]) -> Gradients:
    """Gradients at the worst point of a ball: ``g(x_G + rho g_G / ||g_G||)`` for every group G of tensors.

    ``radius`` maps disjoint groups of tensor names to rho; the norm runs over all tensors of the group, per client.
    Each group is moved alone, the others stay, and all of them start from the same plain gradient, so a group costs
    one more pass. Tensors of no group and groups of radius 0 have the plain gradient, bit for bit; with all tensors in
    one group this is the original method. Of a group, only the tensors that are asked for take part, where a method
    updates tensors one after the other. The logits are those of the unmoved point.

    Equations 11, 12, 14 and 15 of FedRecGEL (Yu et al., 2026).
    """

    def gradients(objective: Objective, params: Tree, names: Sequence[str], batch: ExampleBatch) -> tuple[Tree, Tensor]:
        plain, logit_AB = plain_gradients(objective, params, names, batch)
        sharp = dict(plain)
        for group, rho in radius.items():
            present = [name for name in names if name in group]
            if rho and present:
                moved = {**params, **perturbed(params, plain, present, rho)}
                sharp.update(plain_gradients(objective, moved, present, batch)[0])
        return sharp, logit_AB

    return gradients


def perturbed(params: Tree, gradient: Tree, names: Sequence[str], rho: float) -> Tree:
    """``x + rho g / ||g||`` for the tensors ``names`` of the A clients that the gradients hold."""
    scale_A = rho / (client_norms(gradient[name] for name in names) + _TINY)
    return {
        name: params[name][: len(scale_A)] + gradient[name] * scale_A.view(-1, *[1] * (gradient[name].dim() - 1))
        for name in names
    }


def client_norms(tensors: Iterable[Tensor]) -> Tensor:
    """(A,) Euclidean norm over all tensors (A, ...) of a client."""
    return torch.stack([tensor.reshape(len(tensor), -1).square().sum(1) for tensor in tensors]).sum(0).sqrt()
