"""Where a method with fusion weights keeps them: all that results and reports know about them.

State. Server: one direction per client (K rows). Local, per client: ``alpha`` (K,) for the next training, ``own.*`` the
raw pair at the last upload, ``whole.*`` everything that the model added to the student then, peers included, as one
pair per layer of the least rank that holds it (`compact`). That is the model before the upload; only the own pair
leaves. With ``alpha_per module`` the weights are (M, K). With a ``initial_fusion`` other than sum ``fitted`` () is the
number of the entry that a client has taken, -1 before. With ``merge`` every client keeps ``merged.*``, what its model
holds below the own pair and the directions, as one pair per layer, and the server ``norms`` (K, M), what its directions
were divided by.

Shape legend: K clients, M modules, K clients of the run, C clients of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedecider.bounds import OneOf, Real, Space
from fedecider.evaluation.metrics import user_metrics
from fedecider.evaluation.statistics import first_not_beaten
from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.methods.config import SUM, FedeciderConfig
from fedecider.methods.local_training import train_locally
from fedecider.methods.recommender import ClientModels, client_positions
from fedecider.models.adapters import (
    Shapes,
    adapter_shapes,
    client_order,
    factor_scalars,
    frozen_factors,
    fused_factors,
    initial_adapters,
    joined,
    load_fusion,
    load_plain,
    module_names,
    stack_trees,
    with_prefix,
    without_prefix,
)
from fedecider.models.directions import (
    EPSILON,
    compact,
    cosine_matrix,
    geometric_mean_norm,
    hold_anything,
    least_rank,
    load_factors,
    normalise,
    projection_weights,
    update_norms,
)

# Where a method with fusion weights keeps them: all that results and reports know about them.


class FusionWeights(NamedTuple):
    """How much every client weights the direction of each of K clients."""

    read: Callable[[Tree], Tensor]
    """(local tree, or a client's row of it) -> (..., K) weights in use, or (..., M, K) with a row for each layer."""
    log: str
    """Field of a client's log record with its K weights after the round, mean over layers."""
    log_per_layer: str
    """The same for each layer, (M, K), where there is one row per layer."""


# Settings of FeDecider, of its ablations and of the options that the paper does not have.


# Where FeDecider's fusion weights start: before a first training, from the own norm, with the others' directions.


def initial_alpha(config: FedeciderConfig, num_clients: int) -> Tensor:
    """(K, K): ``alpha_init``, 1/K without personal weights; own weights 1 where the own pair keeps its size.

    With ``auto`` the own pair alone, until the client has trained.
    """
    if config.ablation == "wo_per":
        return torch.full((num_clients, num_clients), 1.0 / num_clients)
    if isinstance(config.alpha_init, str):
        return torch.eye(num_clients)
    alpha_KK = torch.full((num_clients, num_clients), config.alpha_init)
    if config.self_term != "normalized":
        alpha_KK.fill_diagonal_(1.0)
    return alpha_KK


def started(
    config: FedeciderConfig, alpha: Tensor, norm_M: Tensor, client: int, norm_KM: Tensor | None = None
) -> Tensor:
    """Weights like ``alpha`` as they start with ``auto``: the own one ``g``, the others ``alpha_peers g``.

    ``g`` is the geometric mean of the own norms, or with weights per layer each layer's own norm (that mean where a
    layer is untrained): the own direction times ``g`` is the own update again, exactly so per layer. With ``self_term
    raw`` the own slot keeps its size by itself, so its weight is 1. With ``norm_KM``, the norms of all, each of the
    others' is its own ``g``.
    """
    size_M = _sizes(alpha, norm_M)
    size_KM = size_M.expand(alpha.shape[-1], *size_M.shape)
    if norm_KM is not None:
        size_KM = torch.stack([_sizes(alpha, one_M) for one_M in norm_KM])
    started = config.alpha_peers * size_KM.movedim(0, -1)
    started[..., client] = 1.0 if config.self_term == "raw" else size_M
    return started


def _sizes(alpha: Tensor, norm_M: Tensor) -> Tensor:
    """() or (M,): the geometric mean of one client's norms, or with weights per layer each (the mean if untrained)."""
    mean = geometric_mean_norm(norm_M)
    return torch.tensor(mean).to(alpha) if alpha.dim() == 1 else torch.where(norm_M < EPSILON, mean, norm_M).to(alpha)


def fused_start(config: FedeciderConfig, own: Tree, received: Tree, client: int, fusion: float | str) -> Tree:
    """The local row ``own`` as `started` made it, with weights that are an entry of ``initial_fusion``.

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
    if config.self_term == "raw":
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


# FeDecider (WWW 2026): share the directions of LoRA updates, let every client learn how to weigh them.

VARIANTS = ("post_broadcast", "pre_upload")
NORMS = "norms"
"""With ``merge``, at the server and in a download: (K, M) what the directions were divided by; float32."""
GRID: tuple[dict[str, Any], ...] = ({}, {"alpha_init": "auto"}, {"alpha_init": "auto", "alpha_peers": 0.3})
"""What to choose from on validation, the paper's settings first: the start of the weights decides how far the first
fusion moves the model (``docs/papers.md``)."""
SPACE: Space = {
    "alpha_init": OneOf(("auto", 0.1, 0.4, 1.0, 2.0, 5.0)),
    "alpha_learning_rate": Real(0.0001, 1.0, log=True),
}


def fedecider(recommender: ClientModels, config: FedeciderConfig) -> FederatedMethod:
    """Round 1 trains plain LoRA; later rounds train own pair and weights over all clients' directions.

    ``dW_i = sum_j alpha_ij B_j A_j`` with ``||B_j A_j||_F = 1`` per module (section 3.1). Upload: the own pair only (P
    scalars). Download: K directions, of tables only rows of the own catalogue; in round 1 the common start. Variants:
    ``post_broadcast`` (the paper's final model) and ``pre_upload``, the model as it was trained. Differs from the
    paper: untrained and non-finite updates are handled; with ``absorb`` and ``raw`` the own weight starts at 1, so that
    the first broadcast changes nothing there; ``alpha_init auto``, ``initial_fusion``, ``merge`` and ``alpha_per`` are
    ours. With ``auto`` the first training of every client is plain LoRA, also where it comes in a later round; after it
    the client sets its weights from the norms of its own update (`started`), for which nothing is sent. Until then its
    model is the shared student. Uploads are bounded around the common start.
    """
    num_clients = recommender.num_clients
    start = initial_adapters(adapter_shapes(recommender.model), recommender.seed)

    def init() -> tuple[Tree, Tree]:
        server = stack_trees([start] * num_clients)
        local = {"alpha": initial_alpha(config, num_clients)}
        if config.alpha_per == "module":
            local["alpha"] = local["alpha"][:, None].repeat(1, len(module_names(start)), 1)
        local.update(with_prefix(server, "own"))
        local.update(with_prefix(stack_trees([_whole(recommender, config, start)] * num_clients), "whole"))
        if config.first_fusions != [SUM]:
            local["fitted"] = torch.full((num_clients,), -1)
        if config.merge:
            local.update(with_prefix(stack_trees([_whole(recommender, config, start)] * num_clients), "merged"))
            server[NORMS] = torch.zeros(num_clients, len(module_names(start)))
        return server, local

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download(take_row({key: server[key] for key in start}, 0) if round == 1 else server)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        pairs, rows, logs = [], [], []
        for row, client in enumerate(block.clients.tolist()):
            pair, new_own, log = _update(recommender, config, round, download, take_row(own, row), client)
            pairs.append(pair)
            rows.append(new_own)
            logs.append(log)
        return Upload(block.clients, torch.ones(len(rows)), stack_trees(pairs)), stack_trees(rows), logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        # who sends nothing keeps the last direction, but what everybody has merged may not come twice
        directions = {key: torch.zeros_like(one) if config.merge else one.clone() for key, one in server.items()}
        for upload in uploads:
            kept_C = finite_clients(upload)
            if not kept_C.any():
                continue
            pairs = {key: tensor[kept_C] for key, tensor in upload.tensors.items()}
            if config.normalises:
                found = normalise(pairs)
                pairs = {**found.tree, **({NORMS: found.norm_CM.to(directions[NORMS])} if config.merge else {})}
            for key, tensor in pairs.items():
                directions[key][upload.clients[kept_C]] = tensor
        return directions

    positions = client_positions(recommender, partial(load_variant, recommender, config))
    return FederatedMethod(
        "fedecider",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        VARIANTS,
        upload_like=lambda round, server: start,
        bounded_from=lambda round: start,
        passes_norms=config.merge,
    )


def load_variant(
    recommender: ClientModels, config: FedeciderConfig, variant: str, download: Download, own: Tree, client: int
) -> Tree:
    """Load what client ``client`` recommends with; ``own`` is its row of the local state.

    ``post_broadcast`` is also the model that the next round's training starts from; ``pre_upload`` holds its own pair,
    the peers and the weights in one. Returns the row with the weights that were loaded: those that ``merge`` and
    ``initial_fusion`` make for what was received.
    """
    assert variant in VARIANTS, variant
    if variant == "pre_upload":
        load_factors(recommender.model, without_prefix(own, "whole"))
    else:
        own = _fitted(recommender, config, download, own, client)
        _load_broadcast(recommender, config, download, own, client)
    return own


def _load_broadcast(
    recommender: ClientModels, config: FedeciderConfig, download: Download, own: Tree, client: int
) -> nn.Parameter:
    """Load client ``client``'s fusion of what the server sent and return its weights in slot order."""
    own_pair, merged = without_prefix(own, "own") if config.self_term == "raw" else None, None
    if config.merge:  # the own pair too, below a new one
        merged = joined(without_prefix(own, "merged"), without_prefix(own, "own"))
        own_pair = initial_adapters(adapter_shapes(recommender.model), recommender.seed)
    return load_fusion(
        recommender.model,
        _directions(download),
        client,
        own["alpha"],
        own_pair=own_pair,
        merged=merged,
        train_alpha=config.learns_alpha,
        separate=config.ablation != "wo_sep",
    )


def _whole(recommender: ClientModels, config: FedeciderConfig, factors: Tree) -> Tree:
    """``factors`` in the shapes that the local state has for a whole update, whatever the round."""
    shapes = adapter_shapes(recommender.model)
    num_slots = 1 if config.ablation == "wo_sep" else recommender.num_clients
    return compact(factors, least_rank(shapes, sys.maxsize if config.merge else num_slots))


FUSION_WEIGHTS = FusionWeights(itemgetter("alpha"), log="alpha", log_per_layer="alpha_modules")


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """P up; down the common start in round 1 and K directions later, without the norms that ``merge`` adds.

    Of a direction travels what its client and the receiver both have rows of.
    """
    num_scalars = sum(factor_scalars(shapes).values())
    return num_scalars if round == 1 else sum(sum(factor_scalars(peer).values()) for peer in peers), num_scalars


def _update(
    recommender: ClientModels, config: FedeciderConfig, round: int, download: Download, own: Tree, client: int
) -> tuple[Tree, Tree, dict[str, Any]]:
    """Train one client -> what to upload, its new local row, its log."""
    directions, alpha = _directions(download), None
    given = own
    starts = config.starts_from_norms and not _has_trained(own)
    if round == 1:
        load_plain(recommender.model, directions)
    elif starts:
        load_plain(recommender.model, without_prefix(own, "own"))
    else:
        own = _fitted(recommender, config, download, own, client)
        alpha = _load_broadcast(recommender, config, download, own, client)
    trained = train_locally(recommender, client, round, alpha=alpha, alpha_learning_rate=config.alpha_learning_rate)
    if not trained.log["finite"]:
        return trained.adapters, given, {**trained.log, **_weight_log("alpha", given["alpha"])}
    trained_alpha = own["alpha"] if alpha is None else client_order(alpha.detach().cpu(), client)
    pair = trained.adapters
    if config.merge:  # the own weight starts anew as well, so the pair takes up what it has become
        pair = times(pair, trained_alpha[..., client])
    stacked = stack_trees([pair])
    norm_M = update_norms(stacked)[0]
    next_alpha = trained_alpha.clone()
    if starts and not config.merge:
        next_alpha = started(config, trained_alpha, norm_M, client)
    elif config.self_term == "absorb":
        next_alpha = absorbed(trained_alpha, norm_M, client)
    new_own = {
        "alpha": next_alpha,
        **with_prefix(pair, "own"),
        **with_prefix(_whole(recommender, config, fused_factors(recommender.model)), "whole"),
    }
    if config.merge:
        before = without_prefix(own, "merged") if alpha is None else frozen_factors(recommender.model)
        new_own.update(with_prefix(_whole(recommender, config, before), "merged"))
    if "fitted" in own:
        new_own["fitted"] = own["fitted"]
    cosine_K = None if round == 1 else cosine_matrix(stacked, directions)[0].tolist()
    # the two kinds of weights differ under absorb, and where auto has just set them
    weights = {**_weight_log("alpha", next_alpha), **_weight_log("trained_alpha", trained_alpha)}
    return pair, new_own, {**trained.log, **weights, "cosine": cosine_K, **_norm_log(norm_M)}


def _directions(download: Download) -> Tree:
    """What came, without the norms."""
    return {key: tensor for key, tensor in download.shared.items() if key != NORMS}


def _has_trained(own: Tree) -> bool:
    """Whether a client has an update of its own: until then it holds the common start, whose B is zero."""
    return any(bool(tensor.any()) for key, tensor in without_prefix(own, "own").items() if key.endswith(".lora_b"))


def _fitted(recommender: ClientModels, config: FedeciderConfig, download: Download, own: Tree, client: int) -> Tree:
    """The local row as the first entry of ``initial_fusion`` makes it, or the one to which it gives way on the client's
    validation items (`first_not_beaten`).

    Chosen once, when there is a first update of another client; with ``merge``, where weights start anew with every
    round's directions, at every broadcast that brings one, and the entry taken last stands first then. Directions of
    the same rows and layers add up to more than any of them meant: four companies of one catalogue with many events a
    user leave nothing of a model that takes each at the size of the own update.
    """
    if not config.merge and ("fitted" not in own or own["fitted"] >= 0):
        return own
    received = _directions(download)
    came_KM = hold_anything(received)
    if config.merge and _has_trained(own):
        norm_M = update_norms(stack_trees([without_prefix(own, "own")]))[0]
        alpha = started(config, own["alpha"], norm_M, client, download.shared.get(NORMS))
        came_KM[client] = True
        came = came_KM.T if alpha.dim() == 2 else came_KM.any(1)
        own = {**own, "alpha": torch.where(came, alpha, 0.0)}  # what brought nothing has no weight
    if "fitted" not in own or not came_KM[torch.arange(recommender.num_clients) != client].any():
        return own
    places = sorted(range(len(config.first_fusions)), key=lambda place: (place != own["fitted"], place))
    starts = [
        {**fused_start(config, own, received, client, config.first_fusions[place]), "fitted": torch.tensor(place)}
        for place in places
    ]
    gains = []
    for start in starts if len(starts) > 1 else []:
        _load_broadcast(recommender, config, download, start, client)
        gains.append([user_metrics(recommender.positions(client, "valid"))["ndcg@10"].numpy()])
    return starts[first_not_beaten(gains)]


def _weight_log(name: str, alpha: Tensor) -> dict[str, Any]:
    """K weights under ``name``; with weights per layer their mean, and all (M, K) under ``name_modules``."""
    if alpha.dim() == 1:
        return {name: alpha.tolist()}
    return {name: alpha.mean(0).tolist(), f"{name}_modules": alpha.tolist()}


def _norm_log(norm_M: Tensor) -> dict[str, Any]:
    return {
        "norms": norm_M.tolist(),  # modules sorted by path
        "norm_min": float(norm_M.min()),
        "norm_median": float(norm_M.median()),
        "norm_max": float(norm_M.max()),
        "norm_geometric_mean": geometric_mean_norm(norm_M),
        "num_untrained": int((norm_M < EPSILON).sum()),
    }
