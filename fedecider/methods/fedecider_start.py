"""Where FeDecider's fusion weights start: before a first training, from the own norm, with the others' directions.

Shape legend: K clients, M modules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedecider.federation.method import Tree
from fedecider.lora.adapters import module_names, with_prefix, without_prefix
from fedecider.lora.directions import EPSILON, geometric_mean_norm, hold_anything, projection_weights
from fedecider.methods.fedecider_config import SUM, FedeciderConfig


def initial_alpha(config: FedeciderConfig, num_clients: int) -> Tensor:
    """(K, K): ``alpha_init``, 1/K without personal weights; own weights 1 where the own pair keeps its size.

    With ``auto`` the own pair alone, until the client has trained.
    """
    if config.ablation == "wo_per":
        return torch.full((num_clients, num_clients), 1.0 / num_clients)
    if isinstance(config.alpha_init, str):
        return torch.eye(num_clients)
    alpha_KK = torch.full((num_clients, num_clients), config.alpha_init)
    if config.own_slot != "normalized":
        alpha_KK.fill_diagonal_(1.0)
    return alpha_KK


def started(
    config: FedeciderConfig, alpha: Tensor, norm_M: Tensor, client: int, norm_KM: Tensor | None = None
) -> Tensor:
    """Weights like ``alpha`` as they start with ``auto``: the own one ``g``, the others ``alpha_peers g``.

    ``g`` is the geometric mean of the own norms, or with weights per layer each layer's own norm (that mean where a
    layer is untrained): the own direction times ``g`` is the own update again, exactly so per layer. With ``own_slot
    raw`` the own slot keeps its size by itself, so its weight is 1. With ``norm_KM``, the norms of all, each of the
    others' is its own ``g``.
    """
    size_M = _sizes(alpha, norm_M)
    size_KM = size_M.expand(alpha.shape[-1], *size_M.shape)
    if norm_KM is not None:
        size_KM = torch.stack([_sizes(alpha, one_M) for one_M in norm_KM])
    started = config.alpha_peers * size_KM.movedim(0, -1)
    started[..., client] = 1.0 if config.own_slot == "raw" else size_M
    return started


def _sizes(alpha: Tensor, norm_M: Tensor) -> Tensor:
    """() or (M,): the geometric mean of one client's norms, or with weights per layer each (the mean if untrained)."""
    mean = geometric_mean_norm(norm_M)
    return torch.tensor(mean).to(alpha) if alpha.dim() == 1 else torch.where(norm_M < EPSILON, mean, norm_M).to(alpha)


def fused_start(config: FedeciderConfig, own: Tree, received: Tree, client: int, fusion: float | str) -> Tree:
    """The local row ``own`` as `started` made it, with weights that are an entry of ``first_fusion``.

    A mean is over the directions that hold anything in a layer: in a table, of the clients that share items. The own
    part is smaller then. Of a raw pair B is, so that it goes on learning at full rate; else its weight. With one weight
    a client a peer has the mean of its shares in the layers where its direction holds anything.
    """
    if fusion == SUM:
        return own
    alpha, pair = own["alpha"], without_prefix(own, "own")
    came_KM = hold_anything(received)
    came_KM[client] = True
    if isinstance(fusion, str):
        pairs_K = {
            key: torch.cat([all_K[:client], pair[key][None], all_K[client + 1 :]]) for key, all_K in received.items()
        }
        share_MK = projection_weights(pairs_K).to(alpha)
    else:
        num_M = came_KM.sum(0).to(alpha)
        share_MK = (fusion / num_M)[:, None].repeat(1, len(came_KM))
        share_MK[:, client] = 1.0 - fusion * (num_M - 1) / num_M
    own_M = share_MK[:, client]
    if alpha.dim() == 1:
        share_MK = _mean_where(share_MK, came_KM.T).expand_as(share_MK)
    factor_MK = share_MK / config.alpha_peers
    factor_MK[:, client] = share_MK[:, client]
    if config.own_slot == "raw":
        factor_MK[:, client], pair = 1.0, times(pair, own_M)
    alpha = alpha * (factor_MK[0] if alpha.dim() == 1 else factor_MK)
    return {**own, **with_prefix(pair, "own"), "alpha": alpha}


def _mean_where(value_MK: Tensor, holds_MK: Tensor) -> Tensor:
    """(K,) means over the layers where ``holds_MK``; over all of them where it never does."""
    counted_MK = (holds_MK | ~holds_MK.any(0)).to(value_MK)
    return (value_MK * counted_MK).sum(0) / counted_MK.sum(0)


def times(pair: Tree, factor: Tensor) -> Tree:
    """One client's ``pair`` with every layer's update times a number, () or (M,)."""
    names = module_names(pair)
    scaled = zip(names, factor.expand(len(names)), strict=True)
    return {**pair, **{f"{name}.lora_b": pair[f"{name}.lora_b"] * by for name, by in scaled}}


def absorbed(alpha: Tensor, norm_M: Tensor, client: int) -> Tensor:
    """``alpha`` with the norms that normalising takes from the own pair: their geometric mean, or each layer's own."""
    next_alpha = alpha.clone()
    if alpha.dim() == 1:
        next_alpha[client] *= geometric_mean_norm(norm_M)
    else:
        next_alpha[:, client] *= torch.where(norm_M < EPSILON, 1.0, norm_M).to(alpha)
    return next_alpha
