"""Adam's moments of a client, kept in its local state from round to round."""

from __future__ import annotations

import torch
from torch import nn

from fedecider.federation.method import Tree


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
