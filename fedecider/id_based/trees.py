"""Models, their tables and Adam's moments as trees of a client's local state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedecider.federation.method import Tree


def parameters_of(model: nn.Module) -> Tree:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def stacked(trees: Sequence[Tree]) -> Tree:
    """Trees of single clients as one with a client axis."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def moved(tree: Tree, device: torch.device) -> Tree:
    return {name: tensor.to(device) for name, tensor in tree.items()}


def padded_tables(tree: Tree, endings: tuple[str, ...], num_rows: int) -> Tree:
    """The tree with ``num_rows`` rows of each tensor whose name ends so, zeros at the end."""
    return {
        name: torch.cat([tensor, tensor.new_zeros(num_rows - len(tensor), *tensor.shape[1:])])
        if name.endswith(endings)
        else tensor
        for name, tensor in tree.items()
    }


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, own: Tree) -> None:
    """Go on with the moments in a client's own row; rows beyond those of a parameter are padding."""
    for name, parameter in model.named_parameters():
        first, second = (own[f"{moment}.{name}"][: len(parameter)].clone() for moment in ("first", "second"))
        optimizer.state[parameter] = {"step": own["steps"].clone(), "exp_avg": first, "exp_avg_sq": second}


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tree:
    """Adam's moments by the names of the local tree."""
    found: Tree = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        found |= {f"first.{name}": state["exp_avg"], f"second.{name}": state["exp_avg_sq"], "steps": state["step"]}
    return found
