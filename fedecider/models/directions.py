"""Updates of unit Frobenius norm, and the least rank that holds them.

Functions over clients take stacked trees and treat each client by itself.

Shape legend: C clients, M modules (sorted by path), R rank, I in features, O out features, T common rank of
all layers, r rank of the model's own pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedecider.federation.method import Tree
from fedecider.federation.wire import rows_with_anything
from fedecider.models.adapters import Adapters, Shapes, fusion, module_names

# Update directions: LoRA updates over their Frobenius norm, per client and module, kept as factors.

EPSILON = 1e-8
"""Norms below it count as zero: an untrained module."""
MAX_SCALE = 100.0
"""Largest factor that is multiplied onto A and B; rarer, smaller updates get balanced factors instead."""


class Directions(NamedTuple):
    """Unit-norm factors and what was taken away."""

    tree: Tree
    """Stacked factors; ``||B A||_F = 1``, or 0 where ``zero_CM``."""
    norm_CM: Tensor
    """float64 magnitudes of the updates before normalisation."""
    zero_CM: Tensor
    """bool: the module was untrained, its direction is exactly zero (B = 0, A kept so that it can still learn)."""


def update_norms(adapters: Tree) -> Tensor:
    """(C, M) float64 Frobenius norms of ``B A`` without forming it.

    ``||B A||_F^2 = tr((A A^T)(B^T B))``, in float64 since nearly cancelling columns lose everything in float32;
    clamped at 0. Cost ``R^2 (I + O)`` per module.
    """
    names = module_names(adapters)
    clients = len(adapters[f"{names[0]}.lora_a"])
    norms = [
        [_norm(adapters[f"{name}.lora_a"][client], adapters[f"{name}.lora_b"][client]) for name in names]
        for client in range(clients)
    ]
    return torch.tensor(norms, dtype=torch.float64)


def normalise(adapters: Tree, *, epsilon: float = EPSILON) -> Directions:
    """Split stacked updates into directions and magnitudes.

    ``A <- s A, B <- s B`` with ``s = ||B A||_F^(-1/2)`` (FeDecider, section 3.1). Differs from the paper: the zero
    case, and the canonical factors ``U S^(1/2), S^(1/2) V^T`` of the product where ``s`` would exceed ``MAX_SCALE``.

    Raises:
        ValueError: a factor is not finite; the caller decides what stands in for that client.
    """
    norm_CM = update_norms(adapters)
    if not torch.isfinite(norm_CM).all():
        bad = sorted({int(client) for client in (~torch.isfinite(norm_CM)).any(1).nonzero().flatten()})
        raise ValueError(f"got non-finite adapters from clients {bad}, expected finite ones; lower the learning rate")
    tree: Tree = {key: torch.empty_like(tensor) for key, tensor in adapters.items()}
    for module, name in enumerate(module_names(adapters)):
        key_a, key_b = f"{name}.lora_a", f"{name}.lora_b"
        for client in range(len(norm_CM)):
            pair = adapters[key_a][client], adapters[key_b][client]
            unit_a, unit_b = _unit_pair(*pair, float(norm_CM[client, module]), epsilon)
            tree[key_a][client], tree[key_b][client] = unit_a, unit_b
    return Directions(tree, norm_CM, norm_CM < epsilon)


def geometric_mean_norm(norm_M: Tensor, epsilon: float = EPSILON) -> float:
    """Geometric mean of the norms (M,) of trained modules, those of ``epsilon`` or more; 1 when none was trained."""
    trained = norm_M[norm_M >= epsilon].double()
    return float(trained.log().mean().exp()) if len(trained) else 1.0


def cosine_matrix(adapters: Tree, others: Tree | None = None) -> Tensor:
    """(C, C') float64 cosines between the updates of ``adapters`` and ``others`` (default: themselves).

    Modules are normalised first, so each trained module counts alike: the mean over modules of
    ``<D_i, D_j> = sum((A_i A_j^T) * (B_i^T B_j))``. Pairs without a commonly trained module get 0.
    """
    others = adapters if others is None else others
    inner_MCC = torch.stack([_inner_products(adapters, others, name) for name in module_names(adapters)])
    if others is adapters:
        norm_MC = others_MC = inner_MCC.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt()
    else:
        norm_MC, others_MC = update_norms(adapters).T, update_norms(others).T
    both_MCC = (norm_MC >= EPSILON)[:, :, None] & (others_MC >= EPSILON)[:, None, :]
    cosine_MCC = inner_MCC / (norm_MC[:, :, None] * others_MC[:, None, :]).clamp(min=EPSILON**2)
    return torch.where(both_MCC, cosine_MCC, 0.0).sum(0) / both_MCC.sum(0).clamp(min=1)


def thin_svd(factor_a: Tensor, factor_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``B A = U diag(s) V^T`` from the factors: U (O, k), s (k,), V^T (k, I) in float64, k = min(R, I, O).

    SVD of the core ``R_b R_a^T`` of two QR decompositions, so the (O, I) product is never formed. The entry of largest
    absolute value in every column of U is positive. Equal singular values leave a rotation open; that does not happen
    for trained updates.
    """
    q_b, r_b = torch.linalg.qr(factor_b.double())
    q_a, r_a = torch.linalg.qr(factor_a.double().T)
    left, value, right_t = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    left, right_t = q_b @ left, right_t @ q_a.T
    peak = left.gather(0, left.abs().argmax(0, keepdim=True)).squeeze(0)
    sign = torch.where(peak < 0, -1.0, 1.0).double()
    return left * sign, value, sign[:, None] * right_t


def filled_rows(factor_b: Tensor) -> Tensor:
    """(O,) bool: the rows of a factor (O, R) that hold a number that is not 0; of a table most are of other catalogues.
    NaN is one."""
    return (factor_b.amax(1) != 0) | (factor_b.amin(1) != 0)


def _norm(factor_a: Tensor, factor_b: Tensor) -> float:
    if not rows_with_anything(factor_b[None]).any() and torch.isfinite(factor_a).all():
        return 0.0  # at once: most rows of others are in no catalogue of this client
    factor_b = factor_b[filled_rows(factor_b)]
    a, b = factor_a.detach().cpu().double().contiguous(), factor_b.detach().cpu().double().contiguous()
    square = float(((a @ a.T) * (b.T @ b)).sum())
    return math.sqrt(max(square, 0.0)) if math.isfinite(square) else math.nan


def _inner_products(adapters: Tree, others: Tree, name: str) -> Tensor:
    """(C, C') float64 ``<B_c A_c, B_d A_d>`` of a module: as ``tr((A_c A_d^T)(B_d^T B_c))``, or of the (O, I) products
    where that is less work, as it is for ranks near the width of a layer. Clients whose B is 0 cost nothing, nor do
    rows that are 0 on one side."""
    inner = torch.zeros(len(adapters[f"{name}.lora_b"]), len(others[f"{name}.lora_b"]), dtype=torch.float64)
    left_C, left_a, left_b, left_O = _nonzero(adapters, name)
    right_C, right_a, right_b, right_O = (
        (left_C, left_a, left_b, left_O) if others is adapters else _nonzero(others, name)
    )
    left_b, right_b = (factor_b[:, left_O & right_O].double() for factor_b in (left_b, right_b))
    rank, in_features, size = left_a.shape[1], left_a.shape[2], left_a.shape[2] * left_b.shape[1]
    num_pairs, ranks = len(left_C) * len(right_C), len(left_C) * rank + len(right_C) * right_a.shape[1]
    if num_pairs * rank * right_a.shape[1] * (in_features + left_b.shape[1]) > size * (ranks + num_pairs):
        left = (left_b @ left_a).flatten(1)
        found = left @ (left if others is adapters else (right_b @ right_a).flatten(1)).T
    else:
        of_a, of_b = torch.einsum("cri,dsi->cdrs", left_a, right_a), torch.einsum("cor,dos->cdrs", left_b, right_b)
        found = (of_a * of_b).sum((2, 3))
    inner[left_C[:, None], right_C] = found
    return inner


def _nonzero(adapters: Tree, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which clients have a B that is not 0, their factors, A in float64, and the rows where any of these B is not 0."""
    factor_a, factor_b = adapters[f"{name}.lora_a"], adapters[f"{name}.lora_b"]
    kept_C = rows_with_anything(factor_b).nonzero().flatten()
    kept_b = factor_b[kept_C].cpu()
    filled_O = torch.zeros(kept_b.shape[1], dtype=torch.bool)
    for one_b in kept_b:
        filled_O |= filled_rows(one_b)
    return kept_C.cpu(), factor_a[kept_C].cpu().double(), kept_b, filled_O


def _unit_pair(factor_a: Tensor, factor_b: Tensor, norm: float, epsilon: float) -> tuple[Tensor, Tensor]:
    if norm < epsilon:
        return factor_a, torch.zeros_like(factor_b)
    scale = norm**-0.5
    if scale > MAX_SCALE:
        return _balanced_pair(factor_a, factor_b)
    return (scale * factor_a.double()).to(factor_a.dtype), (scale * factor_b.double()).to(factor_b.dtype)


def _balanced_pair(factor_a: Tensor, factor_b: Tensor) -> tuple[Tensor, Tensor]:
    """Canonical unit-norm factors ``S^(1/2) V^T`` and ``U S^(1/2)``, S over its norm, in float64."""
    left, value, right_t = thin_svd(factor_a, factor_b)
    root = (value / value.square().sum().sqrt()).sqrt()
    unit_a, unit_b = torch.zeros_like(factor_a), torch.zeros_like(factor_b)
    unit_a[: len(root)] = (root[:, None] * right_t).to(factor_a.dtype)
    unit_b[:, : len(root)] = (left * root).to(factor_b.dtype)
    return unit_a, unit_b


# A fused adapter of rank K*r in a smaller one that holds the same update.


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
            update = factor_a.new_zeros(num_outputs, num_inputs)
            add_product(update, factor_a, factor_b)
            factor_a, factor_b = _pair_of(update)
        missing = rank - len(factor_a)
        tree[f"{name}.lora_a"] = nn.functional.pad(factor_a, (0, 0, 0, missing))
        tree[f"{name}.lora_b"] = nn.functional.pad(factor_b, (0, missing))
    return tree


def mean_update(updates: Sequence[Tree]) -> Tree:
    """The mean of several updates, of any ranks each, as one pair per layer: exact, as their products beside each other
    are, and no larger than it must be (`compact`)."""
    tree: Tree = {}
    for name in module_names(updates[0]):
        tree[f"{name}.lora_a"] = torch.cat([one[f"{name}.lora_a"] for one in updates])
        tree[f"{name}.lora_b"] = torch.cat([one[f"{name}.lora_b"] / len(updates) for one in updates], 1)
    return compact(tree)


def add_product(total: Tensor, factor_a: Tensor, factor_b: Tensor) -> None:
    """``total += B A``, (O, I), by a product in float64; rows where B is 0 cost nothing."""
    filled_O = filled_rows(factor_b)
    total[filled_O] += (factor_b[filled_O].double() @ factor_a.double()).to(total.dtype)


def _pair_of(update: Tensor) -> tuple[Tensor, Tensor]:
    """An update (O, I) as the longer factor of a pair, beside an identity."""
    square = torch.eye(min(update.shape), dtype=update.dtype)
    return (square, update) if update.shape[1] <= update.shape[0] else (update, square)


def slots_of_rank(rank: int, factor_a: Tensor, factor_b: Tensor) -> tuple[Tensor, Tensor]:
    """A pair of any rank T, (T, I) and (O, T), as S = ceil(T / R) slots of rank R with zeros: (S, R, I), (S, O, R)."""
    missing = -len(factor_a) % rank
    padded_a, padded_bt = (nn.functional.pad(factor, (0, 0, 0, missing)) for factor in (factor_a, factor_b.t()))
    return padded_a.unflatten(0, (-1, rank)), padded_bt.unflatten(0, (-1, rank)).transpose(1, 2)


def above(pair: Tree, updates: Tree) -> Adapters:
    """One trainable pair per layer above ``X.update`` (O, I) of every layer X, which is frozen."""
    slots: Tree = {}
    below = {}
    for name in module_names(pair):
        rank = len(pair[f"{name}.lora_a"])
        below[name] = slots_of_rank(rank, *_pair_of(updates[f"{name}.update"]))
    num_slots = max(len(slot_a) for slot_a, _ in below.values())
    for name, factors in below.items():
        for key, factor in zip((f"{name}.lora_a", f"{name}.lora_b"), factors, strict=True):
            empty = factor.new_zeros(num_slots - len(factor), *factor.shape[1:])
            slots[key] = torch.cat([pair[key][None], factor, empty])
    return fusion(slots, 0, torch.ones(1 + num_slots), learns=False)


def of_factors(factors: Tree, rank: int) -> Adapters:
    """One pair per layer of any common rank T as adapters of rank R: ``ceil(T / R)`` slots of weight 1, with zeros."""
    slots: Tree = {}
    for name in module_names(factors):
        pair = slots_of_rank(rank, factors[f"{name}.lora_a"], factors[f"{name}.lora_b"])
        slots[f"{name}.lora_a"], slots[f"{name}.lora_b"] = pair
    num_slots = len(next(iter(slots.values())))
    return fusion(slots, 0, torch.ones(num_slots), learns=False)
