"""FeDecider (WWW 2026): share the directions of LoRA updates, let every client learn how to weigh them.

State. Server: one direction per client (K rows). Local, per client: ``alpha`` (K,) for the next training, ``own.*`` the
raw pair at the last upload, ``whole.*`` everything that the model added to the student then, peers included, as one
pair per layer of the least rank that holds it (`compact`). That is the model before the upload; only the own pair
leaves. With ``alpha_per module`` the weights are (M, K). With ``skip_below`` the server holds ``unwanted`` (K, K), row
i the flags that client i uploaded last, and each client the same flags as ``away`` (K,); with ``send_norms`` ``norms``
(K, M), what its directions were divided by. With a ``first_fusion`` other than sum ``fitted`` () is the number of the
entry that a client has taken, -1 before. With ``merge`` every client keeps ``merged.*``, what its model holds below the
own pair and the directions, as one pair per layer.

Shape legend: K clients of the run, C clients of a block, M modules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedecider.evaluation.metrics import user_metrics
from fedecider.evaluation.standard_error import first_not_beaten
from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import only_rows, take_row
from fedecider.lora.adapters import (
    Shapes,
    adapter_shapes,
    factor_scalars,
    initial_adapters,
    module_names,
    stack_trees,
    with_prefix,
    without_prefix,
)
from fedecider.lora.directions import (
    EPSILON,
    cosine_matrix,
    geometric_mean_norm,
    hold_anything,
    normalise,
    update_norms,
)
from fedecider.lora.fusion import client_order, frozen_factors, fused_factors, joined, load_fusion, load_plain
from fedecider.lora.truncation import compact, least_rank, load_factors
from fedecider.methods.fedecider_config import SUM, FedeciderConfig
from fedecider.methods.fedecider_start import absorbed, fused_start, initial_alpha, started, times
from fedecider.methods.fusion_weights import FusionWeights
from fedecider.methods.local_training import train_locally
from fedecider.methods.recommender import ClientModels, client_positions
from fedecider.tuning.space import OneOf, Real, Space

VIEWS = ("post_broadcast", "pre_upload")
UNWANTED = "unwanted"
"""Flags of the directions that a client does not download: in its upload (K,), at the server (K, K); uint8."""
NORMS = "norms"
"""With ``send_norms``, at the server and in a download: (K, M) what the directions were divided by; float32."""
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
    scalars). Download: K directions, of tables only rows of the own catalogue; in round 1 the common start. Views:
    ``post_broadcast`` (the paper's final model) and ``pre_upload``, the model as it was trained. Differs from the
    paper: untrained and non-finite updates are handled; with ``absorb`` and ``raw`` the own weight starts at 1, so that
    the first broadcast changes nothing there; ``alpha_init auto``, ``first_fusion``, ``merge``, ``alpha_per`` and
    ``skip_below`` are ours. With ``auto`` the first training of every client is plain LoRA, also where it comes in a
    later round; after it the client sets its weights from the norms of its own update (`started`), for which nothing is
    sent. Until then its model is the shared student. A skipped direction stays away for good: while it is absent its
    weight has no gradient, so nothing could tell that it is wanted again. Uploads are bounded around the common start;
    with noise on them a client normalises after it.
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
        if config.skip_below:
            local["away"] = torch.zeros(num_clients, num_clients, dtype=torch.bool)
            server[UNWANTED] = local["away"].to(torch.uint8)
        if config.send_norms:
            server[NORMS] = torch.zeros(num_clients, len(module_names(start)))
        return server, local

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        directions = {key: tensor for key, tensor in server.items() if key != UNWANTED}
        if round == 1:
            return Download(take_row({key: directions[key] for key in start}, 0))
        if UNWANTED not in server:
            return Download(directions)
        return Download(directions, sent_rows=dict.fromkeys(directions, server[UNWANTED][clients] == 0))

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
            flags = {UNWANTED: pairs.pop(UNWANTED)} if UNWANTED in pairs else {}
            if config.normalises and config.normalize_at == "server":
                found = normalise(pairs, balanced=config.balanced)
                pairs = found.tree
                if config.send_norms:
                    flags[NORMS] = found.norm_CM.to(directions[NORMS])
            for key, tensor in {**pairs, **flags}.items():
                directions[key][upload.clients[kept_C]] = tensor
        return directions

    positions = client_positions(recommender, partial(load_view, recommender, config))
    flags = {UNWANTED: torch.zeros(num_clients, dtype=torch.uint8)} if config.skip_below else {}
    like = {**start, **flags}
    normalises_last = recommender.protected and config.normalises and config.normalize_at == "client"
    return FederatedMethod(
        "fedecider",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        VIEWS,
        upload_like=lambda round, server: like,
        bounded_from=lambda round: start,
        finish_upload=partial(_normalised, config) if normalises_last else None,
    )


def load_view(
    recommender: ClientModels, config: FedeciderConfig, view: str, download: Download, own: Tree, client: int
) -> Tree:
    """Load what client ``client`` recommends with; ``own`` is its row of the local state.

    ``post_broadcast`` is also the model that the next round's training starts from; ``pre_upload`` holds its own pair,
    the peers and the weights in one. Returns the row with the weights that were loaded: those that ``merge`` and
    ``first_fusion`` make for what was received.
    """
    assert view in VIEWS, view
    if view == "pre_upload":
        load_factors(recommender.model, without_prefix(own, "whole"))
    else:
        own = _fitted(recommender, config, download, own, client)
        _load_broadcast(recommender, config, download, own, client)
    return own


def _load_broadcast(
    recommender: ClientModels, config: FedeciderConfig, download: Download, own: Tree, client: int
) -> nn.Parameter:
    """Load client ``client``'s fusion of what the server sent and return its weights in slot order."""
    own_pair, merged = without_prefix(own, "own") if config.own_slot == "raw" else None, None
    if config.merge:  # the own pair too, below a new one
        merged = joined(without_prefix(own, "merged"), without_prefix(own, "own"))
        own_pair = initial_adapters(adapter_shapes(recommender.model), recommender.seed)
    return load_fusion(
        recommender.model,
        _received(download.shared, own),
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


def fusion_weights(local: Tree) -> Tensor:
    """The weights in ``local``, all clients' or one client's row of it; zero for slots that are not downloaded."""
    alpha = local["alpha"]
    if "away" not in local:
        return alpha
    away = local["away"]
    return alpha.masked_fill(away if away.dim() == alpha.dim() else away.unsqueeze(-2), 0.0)


FUSION_WEIGHTS = FusionWeights(fusion_weights, log="alpha", log_per_layer="alpha_modules")


def scalars(shapes: Shapes, peers: Sequence[Shapes], round: int) -> tuple[int, int]:
    """P up; down the common start in round 1 and K directions later (an upper bound with ``skip_below``).

    Norms that ``send_norms`` adds are left out. Of a direction travels what its client and the receiver both have rows
    of.
    """
    num_scalars = sum(factor_scalars(shapes).values())
    return num_scalars if round == 1 else sum(sum(factor_scalars(peer).values()) for peer in peers), num_scalars


def _update(
    recommender: ClientModels, config: FedeciderConfig, round: int, download: Download, own: Tree, client: int
) -> tuple[Tree, Tree, dict[str, Any]]:
    """Train one client -> what to upload, its new local row, its log."""
    directions, alpha = download.shared if round == 1 else _received(download.shared, own), None
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
        return {**trained.adapters, **_flags(given)}, given, {**trained.log, **_weight_log("alpha", given["alpha"])}
    trained_alpha = own["alpha"] if alpha is None else client_order(alpha.detach().cpu(), client)
    pair = trained.adapters
    if config.merge:  # the own weight starts anew as well, so the pair takes up what it has become
        pair = times(pair, trained_alpha[..., client])
    stacked = stack_trees([pair])
    norm_M = update_norms(stacked)[0]
    next_alpha = trained_alpha.clone()
    if starts and not config.merge:
        next_alpha = started(config, trained_alpha, norm_M, client)
    elif config.own_slot == "absorb":
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
    if config.skip_below:
        new_own["away"] = own["away"] if alpha is None else _away(config, own, trained_alpha, directions, client)
    if config.normalises and config.normalize_at == "client" and not recommender.protected:
        pair = take_row(normalise(stacked, balanced=config.balanced).tree, 0)
    cosine_K = None if round == 1 else cosine_matrix(stacked, directions)[0].tolist()
    # the two kinds of weights differ under absorb, and where auto has just set them
    weights = {**_weight_log("alpha", fusion_weights(new_own)), **_weight_log("trained_alpha", trained_alpha)}
    skipped = {"skipped": new_own["away"].nonzero().flatten().tolist()} if config.skip_below else {}
    log = {**trained.log, **weights, "cosine": cosine_K, **_norm_log(norm_M), **skipped}
    return {**pair, **_flags(new_own)}, new_own, log


def _normalised(config: FedeciderConfig, upload: Upload) -> Upload:
    """Directions of the clients whose upload is finite, in the rows that they send; the others as they are."""
    kept_C = finite_clients(upload)
    if not kept_C.any():
        return upload
    unit = normalise({key: tensor[kept_C] for key, tensor in upload.tensors.items()}, balanced=config.balanced).tree
    tensors = {key: tensor.clone() for key, tensor in upload.tensors.items()}
    for key, tensor in unit.items():
        tensors[key][kept_C] = tensor
        tensors[key] = only_rows(tensors[key], upload.sent_rows.get(key))
    return upload._replace(tensors=tensors)


def _received(shared: Tree, own: Tree) -> Tree:
    """All K slots of a client: those that it did not ask for are empty, whatever the server holds there."""
    directions = {key: tensor for key, tensor in shared.items() if key != NORMS}
    if "away" not in own or not own["away"].any():
        return directions
    return {
        key: tensor.masked_fill(own["away"].to(tensor.device)[:, None, None], 0.0) for key, tensor in directions.items()
    }


def _away(config: FedeciderConfig, own: Tree, alpha: Tensor, directions: Tree, client: int) -> Tensor:
    """(K,) bool: peers that are not downloaded from now on; those that had no update yet get their chance later."""
    size_K = alpha.abs() if alpha.dim() == 1 else alpha.abs().amax(0)
    has_update_K = hold_anything(directions).any(1)
    away_K = own["away"] | ((size_K < config.skip_below) & has_update_K)
    away_K[client] = False
    return away_K


def _flags(own: Tree) -> Tree:
    return {UNWANTED: own["away"].to(torch.uint8)} if "away" in own else {}


def _has_trained(own: Tree) -> bool:
    """Whether a client has an update of its own: until then it holds the common start, whose B is zero."""
    return any(bool(tensor.any()) for key, tensor in without_prefix(own, "own").items() if key.endswith(".lora_b"))


def _fitted(recommender: ClientModels, config: FedeciderConfig, download: Download, own: Tree, client: int) -> Tree:
    """The local row as the first entry of ``first_fusion`` makes it, or the one to which it gives way on the client's
    validation items (`first_not_beaten`).

    Chosen once, when there is a first update of another client; with ``merge``, where weights start anew with every
    round's directions, at every broadcast that brings one, and the entry taken last stands first then. Directions of
    the same rows and layers add up to more than any of them meant: four companies of one catalogue with many events a
    user leave nothing of a model that takes each at the size of the own update.
    """
    if not config.merge and ("fitted" not in own or own["fitted"] >= 0):
        return own
    received = _received(download.shared, own)
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
