"""Optimisers on stacked parameters: row c of every tensor belongs to client c, and clients step independently.

State is a Tree like the parameters, so that it can be reset in every round or kept in the local state.

Shape legend: A active clients of a step (the first A of the block).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from fedecider.federation.method import Tree


class Optimiser(NamedTuple):
    """SGD or Adam (Kingma and Ba, 2015) with one learning rate per tensor."""

    kind: Literal["adam", "sgd"]
    learning_rate: Mapping[str, float]
    weight_decay: float = 0.0
    groups: Sequence[Sequence[str]] = ()
    """Names of tensors that step together, one group after the other on every batch; none: everything at once."""

    @property
    def turns(self) -> Sequence[Sequence[str]]:
        """The groups of a batch."""
        return self.groups or (tuple(self.learning_rate),)


def fresh_state(optimiser: Optimiser, params: Tree) -> Tree:
    """State before the first step, for the tensors of ``params`` that the optimiser has a rate for."""
    state: Tree = {}
    if optimiser.kind == "adam":
        for name in optimiser.learning_rate:
            state[f"{name}.mean"] = torch.zeros_like(params[name])
            state[f"{name}.square"] = torch.zeros_like(params[name])
            state[f"{name}.steps"] = torch.zeros(len(params[name]))
    return state


def apply_step(optimiser: Optimiser, params: Tree, gradients: Tree, state: Tree) -> None:
    """One step of the first A clients, in place; A is the leading size of the gradients.

    Rows without gradient in a fresh table have zero moments and stay where they are; a row with moments moves on, as in
    the plain optimiser. With ``weight_decay`` every row moves.
    """
    active = len(next(iter(gradients.values())))
    mine = {name: params[name][:active] for name in gradients}
    if optimiser.kind == "sgd":
        for name, param in mine.items():
            gradient = gradients[name]
            if optimiser.weight_decay:
                gradient = gradient.add(param, alpha=optimiser.weight_decay)
            param.add_(gradient, alpha=-optimiser.learning_rate[name])
        return
    runs = _equal_runs(state[f"{next(iter(gradients))}.steps"][:active])
    for rate in dict.fromkeys(optimiser.learning_rate[name] for name in gradients):
        names = [name for name in gradients if optimiser.learning_rate[name] == rate]
        adam(
            _parts([mine[name] for name in names], runs),
            _parts([gradients[name].contiguous() for name in names], runs),  # the kernel reads on without a look
            _parts([state[f"{name}.mean"][:active] for name in names], runs),
            _parts([state[f"{name}.square"][:active] for name in names], runs),
            [],
            [state[f"{name}.steps"][run.start].to(mine[name].device, copy=True) for name in names for run in runs],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=rate,
            weight_decay=optimiser.weight_decay,
            eps=1e-8,
            maximize=False,
        )
    for name in gradients:
        state[f"{name}.steps"][:active] += 1.0


def _parts(tensors: list[Tensor], runs: list[slice]) -> list[Tensor]:
    return tensors if len(runs) == 1 else [tensor[run] for tensor in tensors for run in runs]


def _equal_runs(steps_A: Tensor) -> list[slice]:
    """Slices of neighbouring clients that have done equally many steps: each is one call of the fused kernel."""
    runs, start = [], 0
    for _, members in groupby(steps_A.tolist()):
        end = start + sum(1 for _ in members)
        runs.append(slice(start, end))
        start = end
    return runs
