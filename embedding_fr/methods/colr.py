"""CoLR: clients train one low-rank correction of the item table, and only its first factor travels (WWW 2024).

Shape legend: N clients of the run, C clients of a block, A active clients of a step, I items, D dims, K = ``rank``,
B examples, R touched rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from embedding_fr.averaged import send_server
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import ExampleBatch, round_examples
from embedding_fr.local_training import Gradients, Objective, dot_logits, train_epochs
from embedding_fr.methods.entry import Method, always
from embedding_fr.optimisers import Optimiser
from embedding_fr.stacked import check_finite, inner_products, received, received_rows, row_slopes, take, weighted_sum
from embedding_fr.tables import normal
from fedecider.bounds import WIDEST, Int, dataclass
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.search_space import Space, Whole


@dataclass(frozen=True)
class ColrConfig:
    """Settings of CoLR.

    Args:
        rank: The rank of a round's correction, at most embedding_size, which is a correction of full rank.
        mean: What a row's factor is divided by: touchers, the number of clients whose examples touch the item, or
            clients, that of all clients of the cohort (with noise on uploads, which makes numbers of touchers useless).
    """

    rank: Annotated[Int, Field(ge=1, le=WIDEST)] = 4
    mean: Literal["touchers", "clients"] = "touchers"


DEFAULTS: dict[str, Any] = {"learning_rate": 0.5, "local_epochs": 2, "weight_decay": 0.001, "init_std": 0.25}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"learning_rate": 1.0},
    {"learning_rate": 2.0},
    {"learning_rate": 1.0, "rank": 8},
    {"rank": 16},
)
SPACE: Space = {**TRAINING_SPACE, "rank": Whole(1, 16)}


def colr(federation: Federation, training: EmbeddingTraining, config: ColrConfig) -> FederatedMethod:
    """``Q <- Q + A B`` once a round: B (K, D) random, alike for all and frozen, A (I, K) the mean of the clients' A_u.

    B is drawn anew for each round: ``B = U V^T (D / K)^1/2`` of a Gaussian matrix with the singular vectors U, V, so
    that its rows are orthogonal and of length (D / K)^1/2. A client scores ``p_u . (Q_i + A_u,i B)``, starts from
    A_u = 0, trains p_u, which it keeps, and A_u by SGD, and uploads A_u and marks of the items that its examples touch:
    4 I K + I / 8 bytes in the place of FedMF's 4 I D. ``A_i = sum_u A_u,i / max(1, touchers of i)``, client sizes are
    ignored. Both are plain sums, so ``--secure_sum`` applies. B comes from the seed of the run, which all know; the
    download is Q, 4 I D bytes, for a client that keeps nothing between rounds but p_u.

    Every row moves by learning rate x the mean gradient of its own examples in the batch, p_u by that of all, and
    gradients of A_u are multiplied by (K / D)^1/2. ``weight_decay`` w adds ``w / 2 (||p_u||^2 + ||q_i||^2)`` to the
    loss of every example, q_i with its correction. One step then moves a row by the projection of its gradient on the
    rows of B times (D / K)^1/2: on average over B (K / D)^1/2 of the step of FedMF, so small ranks want larger rates.
    With K = D it is FedMF with SGD and means over touchers. Variant ``global``.

    Differs from the paper, whose text was not at hand (its abstract and its public code were): the public code samples
    60 of 6,040 clients a round for 1,000 rounds; here ``participation`` 1 is the default. It counts A alone as
    download, which holds for a client that keeps Q and never misses a round. Smaller ranks for slow clients (SCoLR) are
    left out.

    Raises:
        ValueError: ``rank`` above ``embedding_size``; training diverged, with the client, the round and the tensor.
    """
    if config.rank > training.embedding_size:
        raise ValueError(
            f"got rank {config.rank} with embedding_size {training.embedding_size}, expected at most the latter, which "
            "is full rank"
        )
    rates = {"user": training.learning_rate, "factor": training.item_rate}
    zeros = {
        "factor": torch.zeros(federation.num_items, config.rank, device=federation.device),
        "touched": torch.zeros(federation.num_items, device=federation.device),
    }
    zeros = zeros if config.mean == "touchers" else {"factor": zeros["factor"]}

    def basis(round: int) -> Tensor:
        return random_basis(federation.seed, round, config.rank, training.embedding_size).to(federation.device)

    def init() -> tuple[Tree, Tree]:
        table_ID = normal(federation, training, "item_table", federation.num_items)
        return {"item_table": table_ID}, {"user": normal(federation, training, "user", federation.num_clients)}

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        drawn = round_examples(federation, training, block, round)
        params = {
            "user": own["user"].clone(),
            "item_table": received_rows(download, "item_table", drawn.row_CR),
            "factor": zeros["factor"].new_zeros(*drawn.row_CR.shape, config.rank),
        }
        gradients = low_rank_gradients(basis(round), training.weight_decay)
        objective = Objective(dot_logits, gradients=gradients)
        loss_C = train_epochs(objective, params, drawn, training, Optimiser("sgd", rates))
        check_finite(params, loss_C, block.clients, round)
        sent = {"factor": params["factor"], "touched": (drawn.row_CR >= 0).to(loss_C.dtype)}
        upload = Upload(
            block.clients,
            torch.ones_like(loss_C),
            {name: sent[name] for name in zeros},
            rows=dict.fromkeys(zeros, drawn.row_CR),
            num_rows=dict.fromkeys(zeros, federation.num_items),
            payload=dict.fromkeys(
                zeros.keys() - {"factor"}, torch.full_like(block.clients, mark_bytes(len(zeros["factor"])))
            ),
        )
        return upload, {"user": params["user"]}, [{"loss": loss} for loss in loss_C.tolist()]

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        mean = weighted_mean(uploads, fallback=zeros, uniform=True)
        factor_IK = mean["factor"]
        if config.mean == "touchers":  # a row that anybody touches is touched by a share of 1 / N at least
            factor_IK = factor_IK / mean["touched"].clamp(min=1.0 / federation.num_clients)[:, None]
        return {"item_table": server["item_table"] + factor_IK @ basis(round)}

    def alone(round: int, kept: Tree, upload: Upload) -> NewRows:
        row_CR = upload.rows["factor"]
        start_CRD = take(kept["item_table"], row_CR.clamp(min=0))
        return {"item_table": RowUpdate(row_CR, start_CRD + upload.tensors["factor"] @ basis(round))}

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        if "item_table" in download.shared:
            score_CI = own["user"] @ download.shared["item_table"].T
        else:
            score_CI = inner_products(received(download, "item_table", len(block.clients)), own["user"])
        return rank_users(score_CI, block.data, split, federation.protocol)

    return FederatedMethod(
        "colr",
        init,
        send_server,
        client_update,
        server_aggregate,
        positions,
        ("global",),
        upload_like=lambda round, server: dict(zeros),
        takes_mean=True,
        alone=alone,
    )


def mark_bytes(num_items: int) -> int:
    """One bit an item."""
    return (num_items + 7) // 8


def random_basis(seed: int, round: int, rank: int, size: int) -> Tensor:
    """(K, D) B of a round: orthogonal rows of length (D / K)^1/2."""
    noise_KD = torch.randn(rank, size, generator=stream(seed, "basis", round), dtype=torch.float64)
    left_KK, _, right_KD = torch.linalg.svd(noise_KD, full_matrices=False)
    return (left_KK @ right_KD * math.sqrt(size / rank)).to(torch.get_default_dtype())


def low_rank_gradients(basis_KD: Tensor, weight_decay: float) -> Gradients:
    """Of ``user`` and ``factor``, by which ``item_table`` + ``factor`` B is meant; what a step of SGD is to follow.

    With r the residual sigmoid(p . q_i) - y of an example and w the weight decay: for p the mean of ``r q_i`` over the
    batch plus w p; for the row i of A ``(K / D)^1/2 B g``, g the mean of ``r p`` over the examples of item i plus
    w q_i. A row without an example stays.
    """
    rank, size = basis_KD.shape
    shrink = math.sqrt(rank / size)

    def gradients(objective: Objective, params: Tree, names: Sequence[str], batch: ExampleBatch) -> tuple[Tree, Tensor]:
        user_AD, table_ARD, factor_ARK = (params[name][: batch.active] for name in ("user", "item_table", "factor"))
        row_ARD = table_ARD + factor_ARK @ basis_KD
        slope_AR, logit_AB = row_slopes(inner_products(row_ARD, user_AD), batch)
        share_AR = torch.zeros_like(slope_AR).scatter_add_(1, batch.item_AB, batch.weight_AB)
        mean_AR = slope_AR / share_AR.clamp(min=torch.finfo(share_AR.dtype).tiny)
        decay_AR = weight_decay * (share_AR > 0.0)
        step_ARD = mean_AR[:, :, None] * user_AD[:, None] + decay_AR[:, :, None] * row_ARD
        user_gradient = weighted_sum(slope_AR, row_ARD) + weight_decay * user_AD
        return {"user": user_gradient, "factor": shrink * (step_ARD @ basis_KD.T)}, logit_AB

    return gradients


METHOD = Method(
    ColrConfig,
    colr,
    DEFAULTS,
    GRID,
    SPACE,
    equal_weights=always,
    item_tables=("item_table", "factor"),
)
