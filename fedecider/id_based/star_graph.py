"""The model of FedGCDR: a user attends to itself, to its items and to friends, layer by layer.

Shape legend: B users of a batch, V neighbours (padded), S friends, L layers, D dims.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedecider.federation.method import Tree


def user_layers(
    user_BD: Tensor,
    item_BVD: Tensor,
    is_item_BV: Tensor,
    attention_LD: Tensor,
    friend_BLSD: Tensor | None = None,
    is_friend_BS: Tensor | None = None,
) -> Tensor:
    """Vectors of the users after each layer (B, L, D).

    ``e_u <- sum_v a_v e_v`` over v in {u, items of u, friends}, ``a = softmax_v(a . e_v)``. The paper's logit is
    ``a_1 . e_u + a_2 . e_v``; the first term is the same for all v and cancels, so that it is left out.
    """
    state_BD, found = user_BD, []
    for layer, query_D in enumerate(attention_LD):
        parts, known = [state_BD[:, None], item_BVD], [is_item_BV.new_ones(len(user_BD), 1), is_item_BV]
        if friend_BLSD is not None and is_friend_BS is not None:
            parts, known = [*parts, friend_BLSD[:, layer]], [*known, is_friend_BS]
        neighbour_BVD = torch.cat(parts, 1)
        logit_BV = (neighbour_BVD @ query_D).masked_fill(~torch.cat(known, 1), -torch.inf)
        weight_BV = logit_BV.softmax(1)
        state_BD = (weight_BV[:, :, None] * neighbour_BVD).sum(1)
        found.append(state_BD)
    return torch.stack(found, 1)


def mapped(mlp: Tree, friend_BLSD: Tensor) -> Tensor:
    """``MLP_S`` of every source S, d -> 2 d -> d / 2 -> d with tanh in between; same shape."""
    state = friend_BLSD
    for number in (1, 2, 3):
        state = torch.einsum("blsd,sde->blse", state, mlp[f"weight_{number}"]) + mlp[f"bias_{number}"]
        state = state.tanh() if number < 3 else state
    return state


def mapping_loss(target_BLD: Tensor, mapped_BLSD: Tensor, is_friend_BS: Tensor) -> Tensor:
    """``l_m``, the mean over users of ``sum_{S, l} |x_T^l - MLP_S(x_S^l)|^2``; a user's friends are its sources."""
    square_BLS = (target_BLD[:, :, None] - mapped_BLSD).square().sum(-1)
    return (square_BLS * is_friend_BS[:, None]).sum((1, 2)).mean()


def similarity_loss(target_BLD: Tensor, mapped_BLSD: Tensor, is_friend_BS: Tensor) -> Tensor:
    """``l_s``, the mean over users of ``sum_l |x_T^l - sum_S sim_S m_S^l / sum_S sim_S|^2`` with ``m_S = MLP_S(x_S)``.

    ``sim_S`` is the cosine of ``x_T`` and ``m_S``, a constant; those below 0 count as 0, and a user without a source of
    positive cosine has no such term.
    """
    cosine_BLS = functional.cosine_similarity(target_BLD[:, :, None], mapped_BLSD, dim=-1).detach()
    weight_BLS = cosine_BLS.clamp(min=0.0) * is_friend_BS[:, None]
    total_BL = weight_BLS.sum(-1)
    mean_BLD = (weight_BLS[..., None] * mapped_BLSD).sum(2) / total_BL.clamp(min=1e-8)[..., None]
    return ((target_BLD - mean_BLD).square().sum(-1) * (total_BL > 1e-8)).sum(1).mean()
