"""FedDAE: a variational auto-encoder with a shared and a personal encoder (Li et al., *Personalized Federated
Collaborative Filtering: A Variational AutoEncoder Approach*, AAAI 2025, arXiv 2408.08931).

Shape legend: N clients of the run, C clients of a block, I items, T train items, F features, D dims of the latent
vector, H units of the first layer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedding_fr.averaged import mean_over_clients, send_server
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.entry import Method, always
from embedding_fr.mlp import start_mlp
from embedding_fr.optimisers import Optimiser, apply_step, fresh_state
from embedding_fr.stacked import check_finite, received, received_rows, take
from embedding_fr.tables import personal_table
from fedecider.bounds import Depth, NotNegative, ShareBelow1, dataclass
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree, Upload
from fedecider.federation.streams import client_keys, counter_draws
from fedecider.search_space import OneOf, Real, Space, Whole

SHARED, OWN, GATE, DECODER = "encoder", "own_encoder", "gate", "decoder"
TABLE = f"{SHARED}.0.weight"
"""(I, H): the shared encoder's row of each item."""
BY_ITEM = (TABLE, f"{OWN}.0.weight", f"{GATE}.0.weight")
"""Tensors of which a client reads and trains the rows of its train items alone."""
RAMP = 10.0
"""Rounds over which the divergence comes in, as tanh."""


@dataclass(frozen=True)
class FeddaeConfig:
    """Settings of FedDAE.

    Args:
        num_layers: The number of layers of each encoder and of the decoder; layer l has l x embedding_size units.
        dropout: The share of a client's items, and of the gate's hidden units, that is left out in a local step.
        kl_weight: The weight of the divergence of the latent vector from a standard normal one, after the first rounds.
    """

    num_layers: Depth = 3
    dropout: ShareBelow1 = 0.5
    kl_weight: NotNegative = 1.0


DEFAULTS: dict[str, Any] = {"learning_rate": 0.001, "local_epochs": 5, "embedding_size": 32}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"learning_rate": 0.01, "kl_weight": 0.2},
    {"learning_rate": 0.003, "kl_weight": 0.0},
)
SPACE: Space = {
    "learning_rate": Real(0.0001, 0.1, log=True),
    "local_epochs": Whole(1, 10),
    "kl_weight": Real(0.0, 1.0),
    "dropout": OneOf((0.0, 0.2, 0.5)),
}


class Noise(NamedTuple):
    """What a local step draws, of each client by itself."""

    shared_CT: Tensor
    """1 / (1 - dropout) where the shared encoder sees an item, else 0."""
    own_CT: Tensor
    gate_CD: Tensor
    shared_CD: Tensor
    """Standard normal."""
    own_CD: Tensor


def feddae(federation: Federation, training: EmbeddingTraining, config: FeddaeConfig) -> FederatedMethod:
    """Scores are the logits of ``decoder(z)``, with ``z = w_1 z_g + w_2 z_l`` from a client's train items x: z_g by the
    shared encoder, z_l by its own one, and ``(w_1, w_2) = softmax(gate(x))``. Encoder, decoder: linear layers with tanh
    between; the encoders see x / ||x||.

    A step takes the gradient of ``-sum_(i in x) log softmax(logits)_i + beta KL(N(mu, sigma^2) || N(0, 1))`` with
    ``mu = w_1 mu_g + w_2 mu_l, sigma^2 = w_1^2 sigma_g^2 + w_2^2 sigma_l^2``; beta rises as ``kl_weight tanh((round -
    1) / 10)``. No negatives are drawn: every other item counts in the softmax, held-out ones like all. Shared encoder
    and decoder are averaged, clients alike; own encoder and gate stay. Rows of items that a client does not have stay
    at their start, so an upload tells which it has.

    Variant ``personal``. The local state has (H + D) numbers an item and client, in files where it is large (at
    ``embedding_size`` 256, the code's, 7 GB for ML-100K; ours is 32).

    Source: the supplement and the public code; the paper's text was not at hand. Differs from the code, whose server
    takes an Adam step along the gradients that clients have added up over their epochs; by equation A5 they are the
    uploads' differences, which a mean applies at rate 1. Not followed, since it contradicts the paper: there the own
    encoder is overwritten by a shared one and the gate by its start in every round, and beta is 0 from round 2 on.
    """
    num_items, size, layers = federation.num_items, training.embedding_size, config.num_layers
    encoder = (num_items, *(size * layer for layer in range(layers, 1, -1)), 2 * size)
    decoder = (*(size * layer for layer in range(1, layers + 1)), num_items)
    shared = {**start_mlp(federation, SHARED, encoder), **start_mlp(federation, DECODER, decoder)}
    private = {**start_mlp(federation, OWN, encoder), **start_mlp(federation, GATE, (num_items, size, 2))}
    rates = dict.fromkeys([*shared, *private], training.learning_rate)
    rates |= dict.fromkeys((TABLE, f"{DECODER}.{layers - 1}.weight"), training.item_rate)
    optimiser = Optimiser("adam", rates, training.weight_decay)

    def init() -> tuple[Tree, Tree]:
        local = {name: start.expand(federation.num_clients, *start.shape) for name, start in private.items()}
        for name in {*BY_ITEM} & {*private}:
            local[name] = personal_table(private[name], federation.num_clients, federation.table_bytes)
        return dict(shared), local

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        item_CT, num_C = block.data.train_CT, block.data.num_train_C
        real_CT = item_CT < num_items
        row_CT, client_C = torch.where(real_CT, item_CT, -1), block.clients.to(item_CT.device)
        params = read_rows(download, own, item_CT.clamp(max=num_items - 1))
        state, beta = fresh_state(optimiser, params), config.kl_weight * math.tanh((round - 1) / RAMP)
        loss_C = params[f"{GATE}.1.bias"].new_zeros(len(item_CT))
        for epoch in range(training.local_epochs):
            noise = draw_noise(federation.seed, round, epoch, client_C, item_CT.shape[1], size, config.dropout)
            leaves = {name: tensor.requires_grad_() for name, tensor in params.items()}
            loss_C = loss_of(leaves, item_CT, real_CT, num_C, noise, beta)
            gradients = torch.autograd.grad(loss_C.sum(), list(leaves.values()))
            params = {name: tensor.detach() for name, tensor in leaves.items()}
            apply_step(optimiser, params, dict(zip(params, gradients, strict=True)), state)
        loss_C = loss_C.detach()
        check_finite(params, loss_C, block.clients, round)
        sent = {name: params[name] for name in shared}
        upload = Upload(block.clients, torch.ones_like(loss_C), sent, rows={TABLE: row_CT})
        new: NewRows = {n: RowUpdate(row_CT, params[n]) if n in BY_ITEM else params[n] for n in private}
        return upload, new, [{"loss": loss} for loss in loss_C.tolist()]

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        item_CT = block.data.train_CT
        params = read_rows(download, own, item_CT.clamp(max=num_items - 1))
        with torch.no_grad():
            logit_CI = logits_of(params, item_CT < num_items, block.data.num_train_C)[0]
        return rank_users(logit_CI, block.data, split, federation.protocol)

    return FederatedMethod(
        "feddae",
        init,
        send_server,
        client_update,
        mean_over_clients(uniform=True),
        positions,
        ("personal",),
        upload_like=lambda round, server: dict(server),
        takes_mean=True,
    )


def read_rows(download: Download, own: Tree, item_CT: Tensor) -> Tree:
    """Copies of what a block trains: networks, of the first layers (C, T, H) the rows of the clients' items."""
    params = {TABLE: received_rows(download, TABLE, item_CT)}
    for name in ({**download.shared, **download.per_client}).keys() - {TABLE}:
        params[name] = received(download, name, len(item_CT)).clone()
    for name, tensor in own.items():
        kept = tensor.to(item_CT.device)
        params[name] = take(kept, item_CT) if name in BY_ITEM else kept.clone()
    return params


def loss_of(params: Tree, item_CT: Tensor, real_CT: Tensor, num_C: Tensor, noise: Noise | None, beta: float) -> Tensor:
    """(C,) negative multinomial log-likelihood of a client's items plus ``beta`` times the divergence."""
    logit_CI, mean_CD, variance_CD = logits_of(params, real_CT, num_C, noise)
    log_CI = torch.log_softmax(logit_CI, 1)
    likelihood_C = (log_CI.gather(1, item_CT.clamp(max=log_CI.shape[1] - 1)) * real_CT).sum(1)
    divergence_C = -0.5 * (1.0 + variance_CD.log() - mean_CD.square() - variance_CD).sum(1)
    return beta * divergence_C - likelihood_C


def logits_of(
    params: Tree, real_CT: Tensor, num_C: Tensor, noise: Noise | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(C, I) logits, (C, D) mean and variance of the latent vector; without noise the vector is its mean."""
    item_CT = real_CT.to(params[TABLE].dtype)
    unit_CT = item_CT / num_C.to(item_CT).sqrt()[:, None]
    gate_CD = torch.relu(layer(params, GATE, 0, item_CT))
    weight_C2 = torch.softmax(layer(params, GATE, 1, gate_CD * noise.gate_CD if noise else gate_CD), 1)
    latent, means, variances = [], [], []
    for place, name in enumerate((SHARED, OWN)):
        seen_CT = unit_CT * (noise.shared_CT, noise.own_CT)[place] if noise else unit_CT
        mean_CD, log_variance_CD = network(params, name, seen_CT).chunk(2, 1)
        weight_C1 = weight_C2[:, place : place + 1]
        spread_CD = (0.5 * log_variance_CD).exp() * (noise.shared_CD, noise.own_CD)[place] if noise else 0.0
        latent.append(weight_C1 * (mean_CD + spread_CD))
        means.append(weight_C1 * mean_CD)
        variances.append(weight_C1.square() * log_variance_CD.exp())
    return network(params, DECODER, latent[0] + latent[1]), means[0] + means[1], variances[0] + variances[1]


def network(params: Tree, name: str, value_CF: Tensor) -> Tensor:
    """Linear layers with tanh between them."""
    num_layers = sum(key.startswith(f"{name}.") and key.endswith(".weight") for key in params)
    for number in range(num_layers):
        value_CF = layer(params, name, number, torch.tanh(value_CF) if number else value_CF)
    return value_CF


def layer(params: Tree, name: str, number: int, value_CF: Tensor) -> Tensor:
    """One linear layer of each client."""
    return (value_CF[:, None] @ params[f"{name}.{number}.weight"])[:, 0] + params[f"{name}.{number}.bias"]


def draw_noise(seed: int, round: int, epoch: int, client_C: Tensor, num_columns: int, size: int, share: float) -> Noise:
    """The draws of each client's own streams, so that who shares the block changes nothing."""

    def uniform(purpose: str, count: int) -> Tensor:
        draw = counter_draws(client_keys(client_C, seed, purpose, round), count, epoch << 32)
        return (draw >> 10).double() / 2.0**53

    def kept(purpose: str, count: int) -> Tensor:
        return ((uniform(purpose, count) >= share) / (1.0 - share)).to(torch.get_default_dtype())

    def normal(purpose: str) -> Tensor:
        radius_CD = (-2.0 * torch.log1p(-uniform(f"{purpose} radius", size))).sqrt()
        angle_CD = 2.0 * math.pi * uniform(f"{purpose} angle", size)
        return (radius_CD * angle_CD.cos()).to(torch.get_default_dtype())

    items = kept("dropout", num_columns), kept("own dropout", num_columns)
    return Noise(*items, kept("gate dropout", size), normal("latent"), normal("own latent"))


def client_bytes(num_items: int, num_rows: int, training: EmbeddingTraining, config: FeddaeConfig) -> int:
    """Tables over the catalogue count once: a step goes over more than the caches hold whoever shares the block, and a
    dozen clients at a time take a third of the time of one or two. Rows and smaller layers: with gradient and moments.
    """
    size = training.embedding_size
    wide = size * config.num_layers
    catalogue = num_items * (wide + 2)
    return 4 * (catalogue + 5 * num_rows * (2 * wide + size) + 5 * config.num_layers * wide * wide)


METHOD = Method(
    FeddaeConfig,
    feddae,
    DEFAULTS,
    GRID,
    SPACE,
    client_bytes=client_bytes,
    negatives=False,
    equal_weights=always,
    item_tables=(TABLE,),
)
