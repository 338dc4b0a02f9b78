"""FeDecider (WWW 2026): share the directions of LoRA updates, let every client learn how to weigh them.

State. Server: one direction per client (K rows). Local, per client: ``alpha`` (K,) for the next training,
``upload_alpha`` (K,) as it was at the last upload, ``own.*`` the raw pair at that moment, ``peers.*`` the directions
that were in the model then. The last three make the model before the upload reproducible; only the pair leaves.

Shape legend: K clients of the run, C clients of a block, M modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.lora.adapters import (
    AdapterShape,
    adapter_shapes,
    factor_scalars,
    initial_adapters,
    stack_trees,
    with_prefix,
    without_prefix,
)
from fedecider.lora.directions import EPSILON, cosine_matrix, geometric_mean_norm, normalise, update_norms
from fedecider.lora.fusion import client_order, load_fusion, load_plain
from fedecider.methods.local_training import train_locally
from fedecider.methods.recommender import Recommender, client_positions

VIEWS = ("post_broadcast", "pre_upload")


@dataclass(frozen=True)
class FedeciderConfig:
    """Settings of FeDecider and of its ablations.

    Args:
        alpha_init: Start of every fusion weight, at the first round after a broadcast (paper: 2).
        alpha_learning_rate: Constant learning rate of the fusion weights (paper: 1e-3).
        train_alpha: False keeps the fusion weights where they started.
        own_slot: What a client's own slot holds after a broadcast: normalized (paper) the unit-norm pair; absorb the
            same with its geometric mean norm multiplied into the own weight; raw the client's own pair as trained.
        normalize_at: server (paper) or client; both give the same bits, but the server then never sees norms.
        balanced: Broadcast canonical factors that depend on the product only.
        ablation: none; wo_decomp broadcasts raw pairs; wo_per fixes all weights at 1/K; wo_sep combines factors first,
            (sum alpha B)(sum alpha A).
        sep_factors: Factors that wo_sep combines, raw (as printed) or normalized.
    """

    alpha_init: float = 2.0
    alpha_learning_rate: float = 1e-3
    train_alpha: bool = True
    own_slot: Literal["normalized", "absorb", "raw"] = "normalized"
    normalize_at: Literal["server", "client"] = "server"
    balanced: bool = False
    ablation: Literal["none", "wo_decomp", "wo_per", "wo_sep"] = "none"
    sep_factors: Literal["raw", "normalized"] = "raw"

    def __post_init__(self) -> None:
        choices = {
            "own_slot": ("normalized", "absorb", "raw"),
            "normalize_at": ("server", "client"),
            "ablation": ("none", "wo_decomp", "wo_per", "wo_sep"),
            "sep_factors": ("raw", "normalized"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"got {name} {getattr(self, name)}, expected one of {', '.join(allowed)}")
        if not self.alpha_learning_rate > 0.0:
            raise ValueError(
                f"got alpha_learning_rate {self.alpha_learning_rate}, expected a positive number; "
                "train_alpha false keeps the weights fixed"
            )
        if self.own_slot != "normalized" and not self.normalises:
            raise ValueError(
                f"got own_slot {self.own_slot} with {self.ablation}, where nothing is normalised; drop own_slot"
            )
        if self.own_slot == "absorb" and self.ablation == "wo_per":
            raise ValueError("got own_slot absorb with wo_per, which has no fusion weights; use raw or normalized")

    @property
    def normalises(self) -> bool:
        """Whether directions are broadcast, not raw pairs."""
        return self.ablation in ("none", "wo_per") or (self.ablation == "wo_sep" and self.sep_factors == "normalized")

    @property
    def learns_alpha(self) -> bool:
        return self.train_alpha and self.ablation != "wo_per"


def fedecider(recommender: Recommender, config: FedeciderConfig) -> FederatedMethod:
    """Round 1 trains plain LoRA; later rounds train own pair and weights over all clients' directions.

    ``dW_i = sum_j alpha_ij B_j A_j`` with ``||B_j A_j||_F = 1`` per module (section 3.1). Upload: the own pair only (P
    scalars). Download: K directions; in round 1 the common start. Views: ``post_broadcast`` (the paper's final model)
    and ``pre_upload``, the model as it was trained. Differs from the paper: untrained and non-finite updates are
    handled; with ``absorb`` and ``raw`` the own weight starts at 1, so that the first broadcast changes nothing there.
    """
    num_clients = recommender.num_clients
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)

    def init() -> tuple[Tree, Tree]:
        server = stack_trees([start] * num_clients)
        local = {"alpha": _initial_alpha(config, num_clients), "upload_alpha": torch.eye(num_clients)}
        local.update(with_prefix(server, "own"))
        local.update(with_prefix(stack_trees([server] * num_clients), "peers"))
        return server, local

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download(take_row(server, 0) if round == 1 else server)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        pairs, rows, logs = [], [], []
        for row, client in enumerate(block.clients.tolist()):
            pair, new_own, log = _update(recommender, config, round, download.shared, take_row(own, row), client)
            pairs.append(pair)
            rows.append(new_own)
            logs.append(log)
        weight_C = torch.tensor([float(recommender.num_examples(client)) for client in block.clients.tolist()])
        return Upload(block.clients, weight_C, stack_trees(pairs)), stack_trees(rows), logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        directions = {key: tensor.clone() for key, tensor in server.items()}
        for upload in uploads:
            kept_C = finite_clients(upload)  # the others keep their last direction
            if not kept_C.any():
                continue
            pairs = {key: tensor[kept_C] for key, tensor in upload.tensors.items()}
            if config.normalises and config.normalize_at == "server":
                pairs = normalise(pairs, balanced=config.balanced).tree
            for key, tensor in pairs.items():
                directions[key][upload.clients[kept_C]] = tensor
        return directions

    positions = client_positions(recommender, partial(load_view, recommender, config))
    return FederatedMethod("fedecider", init, broadcast, client_update, server_aggregate, positions, VIEWS)


def load_view(
    recommender: Recommender, config: FedeciderConfig, view: str, download: Download, own: Tree, client: int
) -> nn.Parameter:
    """Load client ``client``'s fusion and return its weights in slot order; ``own`` is its row of the local state.

    ``post_broadcast`` is also the model that the next round's training starts from.
    """
    assert view in VIEWS, view
    before = view == "pre_upload"
    return load_fusion(
        recommender.model,
        without_prefix(own, "peers") if before else download.shared,
        client,
        own["upload_alpha"] if before else own["alpha"],
        own_pair=without_prefix(own, "own") if before or config.own_slot == "raw" else None,
        train_alpha=config.learns_alpha,
        separate=config.ablation != "wo_sep",
    )


def scalars(shapes: Mapping[str, AdapterShape], num_clients: int, round: int) -> tuple[int, int]:
    """P up; down the common start in round 1 and K directions later: K P."""
    num_scalars = sum(factor_scalars(shapes).values())
    return (1 if round == 1 else num_clients) * num_scalars, num_scalars


def _update(
    recommender: Recommender, config: FedeciderConfig, round: int, shared: Tree, own: Tree, client: int
) -> tuple[Tree, Tree, dict[str, Any]]:
    """Train one client -> the pair to upload, its new local row, its log."""
    if round == 1:
        load_plain(recommender.model, shared)
        alpha = None
    else:
        alpha = load_view(recommender, config, "post_broadcast", Download(shared), own, client)
    trained = train_locally(recommender, client, round, alpha=alpha, alpha_learning_rate=config.alpha_learning_rate)
    if not trained.log["finite"]:
        return trained.adapters, own, {**trained.log, "alpha": own["alpha"].tolist()}
    alpha_K = own["alpha"] if alpha is None else client_order(alpha.detach().cpu(), client)
    stacked = stack_trees([trained.adapters])
    norm_M = update_norms(stacked)[0]
    next_alpha_K = alpha_K.clone()
    if config.own_slot == "absorb":
        next_alpha_K[client] *= geometric_mean_norm(norm_M)
    new_own = {
        "alpha": next_alpha_K,
        "upload_alpha": own["upload_alpha"] if alpha is None else alpha_K,
        **with_prefix(trained.adapters, "own"),
        **with_prefix(without_prefix(own, "peers") if alpha is None else shared, "peers"),
    }
    pair = trained.adapters
    if config.normalises and config.normalize_at == "client":
        pair = take_row(normalise(stacked, balanced=config.balanced).tree, 0)
    cosine_K = None if round == 1 else cosine_matrix(stacked, shared)[0].tolist()
    weights = {"alpha": next_alpha_K.tolist(), "trained_alpha": alpha_K.tolist()}  # they differ under absorb only
    return pair, new_own, {**trained.log, **weights, "cosine": cosine_K, **_norm_log(norm_M)}


def _initial_alpha(config: FedeciderConfig, num_clients: int) -> Tensor:
    """(K, K): ``alpha_init``, 1/K without personal weights; own weights 1 where the own pair keeps its size."""
    if config.ablation == "wo_per":
        return torch.full((num_clients, num_clients), 1.0 / num_clients)
    alpha_KK = torch.full((num_clients, num_clients), config.alpha_init)
    if config.own_slot != "normalized":
        alpha_KK.fill_diagonal_(1.0)
    return alpha_KK


def _norm_log(norm_M: Tensor) -> dict[str, Any]:
    return {
        "norm_min": float(norm_M.min()),
        "norm_median": float(norm_M.median()),
        "norm_max": float(norm_M.max()),
        "norm_geometric_mean": geometric_mean_norm(norm_M),
        "num_untrained": int((norm_M < EPSILON).sum()),
    }
