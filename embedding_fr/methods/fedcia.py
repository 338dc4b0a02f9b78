"""FedCIA: similarities of items are averaged, not item tables (SIGIR 2025); its form without parameters.

Shape legend: C clients of a block, N clients of the run, I items, T train items of the largest client.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from embedding_fr.averaged import send_server
from embedding_fr.blocks import Federation, UserData, rank_users
from embedding_fr.config import EmbeddingTraining
from embedding_fr.gram import leading_eigenpairs
from embedding_fr.methods.entry import Method, always
from embedding_fr.methods.fednear import train_items
from fedecider.bounds import NotNegative, OneOrMore, dataclass
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.search_space import OneOf, Real, Space, Whole

RANK_TOLERANCE = 1e-6
"""Eigenvalues below this part of the largest one are rounding errors: their vectors are arbitrary."""

DEFAULTS: dict[str, Any] = {"num_rounds": 2}
"""Round 1 averages, round 2 delivers."""
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"low_pass": "server"},
    {"low_pass": "server", "low_pass_weight": 1.0},
    {"low_pass": "server", "num_vectors": 64},
    {"low_pass": "server", "num_vectors": 16},
    {"low_pass": "server", "low_pass_weight": 0.1, "num_vectors": 64},
)
SPACE: Space = {
    "low_pass": OneOf(("server", "client")),
    "low_pass_weight": Real(0.01, 2.0, log=True),
    "num_vectors": Whole(4, 256),
}


@dataclass(frozen=True)
class FedciaConfig:
    """Settings of FedCIA.

    Args:
        low_pass: Where the low-pass term is taken: client, from the client's own history, as published, or server, from
            the mean, which is ours.
        low_pass_weight: The weight w_p of the low-pass term; 0 leaves it out.
        num_vectors: The number s of leading singular vectors in the low-pass term, at most as many as there are; one
            user's history has one.
    """

    low_pass: Literal["client", "server"] = "client"
    low_pass_weight: NotNegative = 0.3
    num_vectors: OneOrMore = 32


def fedcia(federation: Federation, training: EmbeddingTraining, config: FedciaConfig) -> FederatedMethod:
    """``F = (1/N) sum_k F_k``, ``F_k = R~^T R~ + w_p D^-1/2 V V^T D^1/2``, score ``R_k F``.

    ``R~ = D_U^-1/2 R_k D^-1/2`` is the client's binary matrix over the roots of its own user and item degrees, V its s
    leading right singular vectors (0 where a degree is 0). With one user per client, history x, every own item has the
    degree 1, R~ = x^T / |x|^1/2 has the only singular vector x / |x|^1/2, and so ``F_k = (1 + w_p) x x^T / |x|``.
    ``low_pass server`` takes ``F_k = x x^T / |x|`` and delivers ``F + w_p V V^T``, V the s leading eigenvectors of F.

    Round 1 uploads, all later rounds upload nothing: run two rounds, so that the delivery of F is counted too. An
    upload is the matrix, 4 I^2 bytes, and so is the download. The server
    takes a plain mean, which ``--secure_sum`` hides; without it one upload tells the client's whole history. Nothing is
    drawn, and ``training`` is not used. No state stays with the clients but their history. Variant ``global``. With
    participation below 1 only the cohort of round 1 counts. Memory: I^2 numbers at the server, T I for a client (I^2
    under a secure sum, clip or noise).

    Differs from the paper, whose text was not at hand (its abstract and its public code were): the public code scores
    ``R_k (a F + F_k)``; the term of F_k reaches only items that the client has, which are never ranked, so a changes
    nothing and is left out. The code fills V to s columns, with one user per client by arbitrary vectors of the null
    space, which is left out too. Its Laplace noise of 0.001 without a bound guarantees nothing: ``--clip`` and
    ``--noise_scale`` are the common ones.
    """
    scale = 1.0 + (config.low_pass_weight if config.low_pass == "client" else 0.0)

    def init() -> tuple[Tree, Tree]:
        return {}, {}

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        weight_C, num_train_C = torch.ones(len(block.clients)), block.data.num_train_C
        if round > 1:
            return Upload(block.clients, weight_C, {}), {}, [{"num_counted": 0}] * len(block.clients)
        upload = Upload(
            block.clients,
            weight_C,
            {"similarity": own_similarity(block.data, federation.num_items, scale)},
            rows={"similarity": block.data.train_CT.masked_fill(block.data.train_CT == federation.num_items, -1)},
            num_rows={"similarity": federation.num_items},
        )
        return upload, {}, [{"num_counted": count} for count in num_train_C.tolist()]

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        if round > 1:
            return server
        zeros = torch.zeros(federation.num_items, federation.num_items, device=federation.device)
        mean = weighted_mean(uploads, fallback={"similarity": zeros}, uniform=True)
        if config.low_pass == "client" or not config.low_pass_weight:
            return mean
        return {"similarity": with_low_pass(mean["similarity"], config.low_pass_weight, config.num_vectors)}

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        similarity_II = download.shared["similarity"]
        history_CI = train_items(block.data, federation.num_items).to(similarity_II.dtype)
        return rank_users(history_CI @ similarity_II, block.data, split, federation.protocol)

    def upload_like(round: int, server: Tree) -> Tree:
        like = torch.zeros((), device=federation.device).expand(federation.num_items, federation.num_items)
        return {"similarity": like} if round == 1 else {}

    return FederatedMethod(
        "fedcia",
        init,
        send_server,
        client_update,
        server_aggregate,
        positions,
        ("global",),
        upload_like=upload_like,
        takes_mean=True,
    )


def needs_server(config: FedciaConfig) -> bool:
    """Always: a client's own similarities say nothing of an item that it does not have."""
    return True


def client_bytes(num_items: int, num_rows: int, training: EmbeddingTraining, config: FedciaConfig) -> int:
    """Memory that one client takes in a block: its upload, which is ranked with as much again."""
    return 4 * num_items * (num_rows + 2)


def own_similarity(data: UserData, num_items: int, scale: float) -> Tensor:
    """(C, T, I) each client's own rows of ``scale x x^T / |x|``, 0 where padded."""
    history_CI = train_items(data, num_items).to(torch.get_default_dtype())
    real_CT = data.train_CT != num_items
    return real_CT[:, :, None] * (history_CI * (scale / data.num_train_C)[:, None])[:, None]


def with_low_pass(similarity_II: Tensor, weight: float, num_vectors: int) -> Tensor:
    """``F + weight V V^T``, V the leading eigenvectors of the symmetric part of F, cut at its numerical rank."""
    symmetric_II = (similarity_II.double() + similarity_II.T.double()) / 2.0
    value_R, vector_IR = leading_eigenpairs(symmetric_II, num_vectors)
    vector_IR = vector_IR[:, value_R > RANK_TOLERANCE * value_R.max().clamp(min=torch.finfo(torch.float64).tiny)]
    return (similarity_II.double() + weight * vector_IR @ vector_IR.T).to(similarity_II.dtype)


METHOD = Method(
    FedciaConfig,
    fedcia,
    DEFAULTS,
    GRID,
    SPACE,
    item_tables=("similarity",),
    client_bytes=client_bytes,
    negatives=False,
    upload_rounds=1,
    needs_server=needs_server,
    equal_weights=always,
)
