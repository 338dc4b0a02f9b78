"""A fused adapter of rank K*r in a smaller one: the same update where it fits, else the best approximation of it.

Shape legend: M modules (sorted by path), R rank before, T rank after, r rank of the model's own pair, I in features,
O out features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedecider.federation.method import Tree
from fedecider.lora.adapters import Shapes, module_names
from fedecider.lora.directions import filled_rows, thin_svd
from fedecider.lora.fusion import fused_factors, fused_layers, load_fusion, slots_of_rank


class Truncated(NamedTuple):
    """Factors of rank T and what was lost."""

    tree: Tree
    """One pair per module, (T, I) and (O, T), with ``A A^T = B^T B`` diagonal."""
    error_M: Tensor
    """float64 ``||B A - B_T A_T||_F / ||B A||_F``; 0 for an update that is zero."""

    @property
    def rank(self) -> int:
        return next(tensor.shape[0] for name, tensor in self.tree.items() if name.endswith(".lora_a"))

    def summary(self) -> dict[str, float]:
        """For cards and result files."""
        largest, mean = float(self.error_M.max()), float(self.error_M.mean())
        return {"rank": self.rank, "largest_relative_error": largest, "mean_relative_error": mean}


def least_rank(shapes: Shapes, num_slots: int) -> int:
    """The least rank that holds every update of ``num_slots`` pairs in each of these layers."""
    return max(min(num_slots * shape.rank, shape.in_features, shape.out_features) for shape in shapes.values())


def compact(factors: Tree, rank: int = 0) -> Tree:
    """The same update in pairs of the least rank that holds any update of these layers, ``max_M min(R, I, O)``.

    K clients make rank ``K r``, soon above the shorter side of a layer. There the longer factor becomes the product
    ``B A`` itself and the shorter one an identity: (I, I) and (O, I), or (O, I) and (O, O). Exact but for the rounding
    of one product; zero rows and columns fill up smaller layers, since PEFT wants one rank for all, and all layers up
    to ``rank`` where that is more. Factors that are small enough come back as they are. Not in the FeDecider paper.
    """
    names = module_names(factors)
    sides = {name: (factors[f"{name}.lora_a"].shape[1], factors[f"{name}.lora_b"].shape[0]) for name in names}
    given = factors[f"{names[0]}.lora_a"].shape[0]
    least = max(min(given, *side) for side in sides.values())
    rank = max(rank, least)
    if rank == given:
        return factors
    tree: Tree = {}
    for name, (num_inputs, num_outputs) in sides.items():
        factor_a, factor_b = factors[f"{name}.lora_a"], factors[f"{name}.lora_b"]
        if least < given:  # in every layer: all are at most ``least`` wide
            update, filled_O = factor_a.new_zeros(num_outputs, num_inputs), filled_rows(factor_b)
            update[filled_O] = (factor_b[filled_O].double() @ factor_a.double()).to(factor_a.dtype)
            square = torch.eye(min(num_inputs, num_outputs), dtype=factor_a.dtype)
            factor_a, factor_b = (square, update) if num_inputs <= num_outputs else (update, square)
        missing = rank - len(factor_a)
        tree[f"{name}.lora_a"] = nn.functional.pad(factor_a, (0, 0, 0, missing))
        tree[f"{name}.lora_b"] = nn.functional.pad(factor_b, (0, missing))
    return tree


def truncate(factors: Tree, rank: int) -> Truncated:
    """The update of smallest Frobenius distance among those of rank ``rank``, per module (Eckart and Young, 1936).

    ``B_T = U_T S_T^(1/2)``, ``A_T = S_T^(1/2) V_T^T`` of the thin SVD of ``B A``; what is lost is ``sqrt(sum_{k > T}
    s_k^2)``. Cost ``R^2 (I + O + R)`` per module; the (O, I) product is never formed. A module whose update has a lower
    rank gets zero columns, since PEFT wants one rank for all. ``rank`` at or above R gives the factors back unchanged.
    Not in the FeDecider paper.

    Raises:
        ValueError: ``rank`` is below 1.
    """
    if rank < 1:
        raise ValueError(f"got rank {rank} for a truncated adapter, expected at least 1")
    names = module_names(factors)
    if rank >= factors[f"{names[0]}.lora_a"].shape[0]:
        return Truncated(factors, torch.zeros(len(names), dtype=torch.float64))
    tree: Tree = {}
    errors = []
    for name in names:
        factor_a, factor_b = factors[f"{name}.lora_a"], factors[f"{name}.lora_b"]
        left, value, right_t = thin_svd(factor_a, factor_b)
        root = value[:rank].sqrt()
        cut_a, cut_b = factor_a.new_zeros(rank, factor_a.shape[1]), factor_b.new_zeros(factor_b.shape[0], rank)
        cut_a[: len(root)] = (root[:, None] * right_t[:rank]).to(factor_a.dtype)
        cut_b[:, : len(root)] = (left[:, :rank] * root).to(factor_b.dtype)
        tree[f"{name}.lora_a"], tree[f"{name}.lora_b"] = cut_a, cut_b
        norm = float(value.norm())
        errors.append(float(value[rank:].norm()) / norm if norm else 0.0)
    return Truncated(tree, torch.tensor(errors, dtype=torch.float64))


def truncate_loaded(model: nn.Module, rank: int) -> Truncated | None:
    """Cut what ``model`` has loaded down to ``rank`` and load that instead; None when there is nothing to cut."""
    factors = compact(fused_factors(model))
    if rank >= next(tensor.shape[0] for name, tensor in factors.items() if name.endswith(".lora_a")):
        return None
    cut = truncate(factors, rank)
    load_factors(model, cut.tree)
    return cut


def load_factors(model: nn.Module, factors: Tree) -> None:
    """Put one pair per layer of any common rank T into ``model``: as ``ceil(T / r)`` slots of weight 1, zero-padded."""
    rank = next(iter(fused_layers(model).values())).own_pair()[0].shape[0]
    slots: Tree = {}
    for name in module_names(factors):
        pair = slots_of_rank(rank, factors[f"{name}.lora_a"], factors[f"{name}.lora_b"])
        slots[f"{name}.lora_a"], slots[f"{name}.lora_b"] = pair
    num_slots = len(next(iter(slots.values())))
    load_fusion(model, slots, 0, torch.ones(num_slots), train_alpha=False)
