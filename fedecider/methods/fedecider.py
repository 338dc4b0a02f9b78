"""FeDecider (WWW 2026): share the directions of LoRA updates, let every client learn how to weigh them.

State of the server: one direction per client (K rows). State of a client, which stays with it:

- ``alpha`` (K,): its fusion weights;
- ``met`` (): whether alpha has been started from the directions of the others;
- ``norm`` (M,): norms of its own pair, 0 before it has trained;
- ``own.*``: its raw pair at the last upload, which alone leaves it;
- ``whole.*``: all that its model added to the student then, peers included, as one pair per layer of the least rank
  that holds it (`compact`).

Shape legend: K clients of the run, M modules (sorted by path), C clients of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.methods.client_models import ClientModels, Update, client_positions, client_updates, own_state
from fedecider.methods.config import AUTO, FedeciderConfig
from fedecider.methods.entries import Method
from fedecider.methods.local_training import train_locally
from fedecider.models import adapters
from fedecider.models.adapters import fusion
from fedecider.models.client_model import ClientModel
from fedecider.models.directions import (
    EPSILON,
    compact,
    cosine_matrix,
    filled_rows,
    geometric_mean_norm,
    least_rank,
    normalise,
    of_factors,
    update_norms,
)
from fedecider.search_space import OneOf, Real, Space

OWN_SIGNAL = 0.2
"""Least share of its own direction that a client takes to hold for others: where directions have little in common,
as those of other domains, it counts more than they do."""

GRID: tuple[dict[str, Any], ...] = ({}, {"alpha_init": 2.0})
"""What to choose from on validation: the defaults, the paper's literal start."""
SPACE: Space = {
    "alpha_init": OneOf((AUTO, 0.1, 0.4, 1.0, 2.0, 5.0)),
    "alpha_learning_rate": Real(0.0001, 1.0, log=True),
}


def fedecider(models: ClientModels, config: FedeciderConfig) -> FederatedMethod:
    """Round 1 trains plain LoRA; later rounds train own pair and weights over all clients' directions.

    ``dW_i = sum_j alpha_ij B_j A_j`` with ``||B_j A_j||_F = 1`` per module (section 3.1). Upload: the own pair only (P
    scalars). Download: K directions, of tables only rows of the own catalogue; in round 1 the common start. Variants:
    ``fused`` (the paper's final model) and ``local``, the model as it was trained. Uploads are bounded
    around the common start. Differs from the paper: untrained and non-finite updates are handled, and with ``alpha_init
    auto`` (a number is the paper's)

    - ``||B_j A_j||_F`` is that of the client's own pair in this module, not 1: the own part goes on as it was trained,
      and a weight says the same in every layer and for every backbone (`_scaled`);
    - alpha starts from the cosines of the directions (`start_weights`); there is no other use of them;
    - a client's first training is plain LoRA also where it comes in a later round; until then it has the student.
    """
    num_clients, start = models.num_clients, models.start

    def init() -> tuple[Tree, Tree]:
        local = {
            "alpha": initial_alpha(config, num_clients),
            "met": torch.zeros(num_clients, dtype=torch.bool),
            "norm": torch.zeros(num_clients, len(adapters.module_names(start))),
        }
        whole_K = adapters.stack_trees([_whole(models, config, start)] * num_clients)
        local.update({**own_state(models, start), **adapters.with_prefix(whole_K, "whole")})
        return adapters.stack_trees([start] * num_clients), local

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download(take_row(server, 0) if round == 1 else server)

    def train(round: int, download: Download, own: Tree, client: int) -> Update:
        return _update(models, config, round, download.shared, own, client)

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        directions = {key: kept.clone() for key, kept in server.items()}  # who sends nothing keeps the last direction
        for upload in uploads:
            kept_C = finite_clients(upload)
            if not kept_C.any():
                continue
            pairs = {key: tensor[kept_C] for key, tensor in upload.tensors.items()}
            pairs = normalise(pairs).tree if config.normalises else pairs
            for key, tensor in pairs.items():
                directions[key][upload.clients[kept_C]] = tensor
        return directions

    return FederatedMethod(
        "fedecider",
        init,
        broadcast,
        client_updates(models, train),
        server_aggregate,
        client_positions(partial(client_model, models, config)),
        ("fused", "local"),
        upload_like=lambda round, server: start,
        bounded_from=lambda round: start,
        bounds_norms=not config.normalises,  # raw pairs reach others in the size that they have
    )


def initial_alpha(config: FedeciderConfig, num_clients: int) -> Tensor:
    """(K, K): ``alpha_init``; with ``auto`` the own update alone, until others' come; 1/K without personal weights."""
    if not config.learns_alpha:
        return torch.full((num_clients, num_clients), 1.0 / num_clients)
    if isinstance(config.alpha_init, str):
        return torch.eye(num_clients)
    return torch.full((num_clients, num_clients), config.alpha_init)


def client_model(
    models: ClientModels, config: FedeciderConfig, variant: str, download: Download, own: Tree, client: int
) -> ClientModel:
    """What client ``client`` recommends with; ``own`` is its row of the local state.

    ``fused`` is also the model that the next round's training starts from; ``local`` holds its own pair,
    the peers and the weights in one.
    """
    if variant == "local":
        whole = adapters.without_prefix(own, "whole")
        return models.model(client, of_factors(whole, next(iter(models.shapes.values())).rank))
    own = _started(config, download.shared, own, client)
    return models.model(client, _fused(config, download.shared, own, client))


def scalars(shapes: adapters.Shapes, peers: Sequence[adapters.Shapes], round: int) -> tuple[int, int]:
    """P up; down the common start in round 1 and K directions later.

    Of a direction travels what its client and the receiver both have rows of.
    """
    num_scalars = sum(adapters.factor_scalars(shapes).values())
    return num_scalars if round == 1 else sum(
        sum(adapters.factor_scalars(peer).values()) for peer in peers
    ), num_scalars


def _fused(config: FedeciderConfig, directions: Tree, own: Tree, client: int) -> adapters.Adapters:
    """Client ``client``'s fusion of what the server sent."""
    if config.alpha_init == AUTO and config.normalises:
        directions = _scaled(directions, own["norm"])
    return fusion(directions, client, own["alpha"], learns=config.learns_alpha, separate=config.ablation != "wo_sep")


def _scaled(directions: Tree, norm_M: Tensor) -> Tree:
    """Unit directions as large as the own pair in every module; in one it has not trained, as its geometric mean."""
    size_M = torch.where(norm_M < EPSILON, geometric_mean_norm(norm_M), norm_M) if norm_M.any() else norm_M
    root_M = dict(zip(adapters.module_names(directions), size_M.sqrt().tolist(), strict=True))
    return {key: root_M[key.rpartition(".")[0]] * tensor for key, tensor in directions.items()}


def _started(config: FedeciderConfig, directions: Tree, own: Tree, client: int) -> Tree:
    """The local row with its weights as they start with ``auto``, once: when the server first has the client's own
    direction and those of others. They are `start_weights` times ``alpha_ii``, 1 or what the client has learnt alone;
    the cosines are means over the modules that both have trained. Of a table only rows that the own direction has
    count, whatever else was sent.
    """
    norm_M, names, num_clients = own["norm"], adapters.module_names(directions), len(own["alpha"])
    if config.alpha_init != AUTO or not config.learns_alpha or own["met"] or not norm_M.any():
        return own
    others = [other for other in range(num_clients) if other != client]
    if not all(any(bool(directions[f"{name}.lora_b"][some].any()) for name in names) for some in ([client], others)):
        return own
    factors_b = {key: tensor for key, tensor in directions.items() if key.endswith(adapters.FACTORS[1])}
    known = {key: tensor * filled_rows(tensor[client])[:, None] for key, tensor in factors_b.items()}
    shown = {**directions, **known}
    start_K = start_weights(cosine_matrix(shown), client).to(own["alpha"])
    return {**own, "alpha": own["alpha"][client] * start_K, "met": torch.tensor(True)}


def start_weights(cosine_KK: Tensor, client: int) -> Tensor:
    """(K,) the best linear guess, from all directions, of the part of client i's that holds for users it has not seen.

    A direction is a signal and the noise of its own training data, ``d_j = s_j + n_j``, so that of d_i all but its own
    noise shows in others: ``<s_i, d_j> = c_ij``, the cosine, none below 0. Least squares give ``alpha_i = C^-1 q``, q_j
    = c_ij and ``q_i = |s_i|^2``, with none below 0. Own cosines would say 1, as if everything a client has learnt of
    its users held for others. ``|s_i|^2`` is taken as ``sum c_ij c_ik / sum c_jk`` over pairs of others (the
    communality of one common factor, Spearman, 1904), as c_ij of the most alike, or as `OWN_SIGNAL`, whichever is most.
    The weights are scaled so that along the own direction the fusion is as large as that: directions that have nothing
    in common leave the own one alone, K equal ones get 1 / K each, K of one kind equal weights, and those of another
    kind less. It is the start alone: weights that learn do so on what the own direction has been trained on.
    """
    cosine_KK = cosine_KK.clamp(min=0.0).fill_diagonal_(1.0)
    other_J = torch.arange(len(cosine_KK)) != client
    wanted_K = cosine_KK[client].clone()
    cosine_J, others_JJ = wanted_K[other_J], cosine_KK[other_J][:, other_J]
    common = torch.outer(cosine_J, cosine_J).triu(1).sum() / others_JJ.triu(1).sum().clamp(min=EPSILON)
    wanted_K[client] = torch.stack([common, cosine_J.max()]).max().clamp(min=OWN_SIGNAL, max=1.0)
    weight_K = (torch.linalg.pinv(cosine_KK, hermitian=True) @ wanted_K).clamp(min=0.0)
    return weight_K / (weight_K @ cosine_KK[client])


def _whole(models: ClientModels, config: FedeciderConfig, factors: Tree) -> Tree:
    """``factors`` in the shapes that the local state has for a whole update, whatever the round."""
    num_slots = 1 if config.ablation == "wo_sep" else models.num_clients
    return compact(factors, least_rank(models.shapes, num_slots))


def _update(
    models: ClientModels, config: FedeciderConfig, round: int, directions: Tree, own: Tree, client: int
) -> Update:
    given = own
    if round == 1:
        begun = adapters.Adapters(directions)
    elif config.alpha_init == AUTO and not own["norm"].any():
        begun = adapters.Adapters(adapters.without_prefix(own, "own"))
    else:
        own = _started(config, directions, own, client)
        begun = _fused(config, directions, own, client)
    trained = train_locally(models, client, round, begun, alpha_learning_rate=config.alpha_learning_rate)
    if not trained.finite:
        return trained.pair, given, {**trained.log, "alpha": given["alpha"].tolist()}
    stacked, peers = adapters.stack_trees([trained.pair]), trained.adapters.peers
    norm_M = update_norms(stacked)[0]
    new_own = {
        "alpha": own["alpha"] if peers is None else peers.alpha,
        "met": own["met"],
        "norm": norm_M.float(),
        **adapters.with_prefix(trained.pair, "own"),
        **adapters.with_prefix(_whole(models, config, trained.adapters.factors()), "whole"),
    }
    cosine_K = None if round == 1 else cosine_matrix(stacked, directions)[0].tolist()
    log = {**trained.log, "alpha": new_own["alpha"].tolist(), "cosine": cosine_K, **_norm_log(norm_M)}
    return trained.pair, new_own, log


def _norm_log(norm_M: Tensor) -> dict[str, Any]:
    return {
        "norms": norm_M.tolist(),  # modules sorted by path
        "norm_min": float(norm_M.min()),
        "norm_median": float(norm_M.median()),
        "norm_max": float(norm_M.max()),
        "norm_geometric_mean": geometric_mean_norm(norm_M),
        "num_untrained": int((norm_M < EPSILON).sum()),
    }


METHOD = Method(
    FedeciderConfig,
    fedecider,
    client_model,
    scalars,
    GRID,
    SPACE,
    fusion_weights="alpha",
    takes_mean=False,
)
