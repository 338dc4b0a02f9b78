"""FedCIA with parameters: clients fit their own item tables to the mean of all clients' similarities (SIGIR 2025).

Shape legend: N clients of the run, C clients of a block, A active clients of a step, I items, D dims, B examples,
R eigenvectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from embedding_fr.averaged import send_server
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import ExampleBatch, epoch_batches, round_examples
from embedding_fr.gram import leading_eigenpairs
from embedding_fr.local_training import Gradients, Objective, dot_logits, train_batches
from embedding_fr.methods.entry import Method, always
from embedding_fr.optimisers import Optimiser, fresh_state
from embedding_fr.stacked import check_finite, inner_products, row_slopes, weighted_sum
from embedding_fr.tables import normal, personal_table
from fedecider.bounds import NotNegative, ZeroOrMore, dataclass
from fedecider.federation.aggregate import finite_clients, weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.search_space import Real, Space, Whole

TABLE = "item_table"
Fit = Literal["square", "norm"]
ROUNDING = 64.0
"""A squared distance below so many units of rounding of the squared mean is none: its direction would be noise."""

DEFAULTS: dict[str, Any] = {"learning_rate": 0.01, "local_epochs": 1, "num_negatives": 1, "weight_decay": 0.001}
SHORT: dict[str, Any] = {"num_vectors": 64, "encoding": "factor", "init_std": 0.1, "num_negatives": 4}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {**SHORT, "learning_rate": 0.03},
    {**SHORT, "learning_rate": 0.1},
    {**SHORT, "learning_rate": 0.03, "fit_steps": 10},
    {**SHORT, "learning_rate": 0.03, "fit_learning_rate": 0.4},
)
SPACE: Space = {**TRAINING_SPACE, "fit_steps": Whole(1, 200), "fit_learning_rate": Real(0.01, 0.5, log=True)}
CODE: dict[str, Any] = {"variant": "code", "embedding_size": 256}


@dataclass(frozen=True)
class FedciaFittedConfig:
    """Settings of FedCIA with parameters.

    Args:
        variant: The losses: paper, the cross-entropy of inner products and the squared distance of similarities, or
            code, the public code's squared errors of each dim's product and the distance itself.
        fit_steps: The number of steps that draw a client's table to the mean similarity before its local training and
            its scoring; 0 never does, which is local training alone.
        fit_learning_rate: The learning rate of these steps.
        num_vectors: The number of leading eigenvectors of the mean that clients get; 0 takes all, which is the whole
            matrix.
        encoding: What a client sends: matrix, its item-item similarities, or factor, its table, which gives the same
            similarities in fewer numbers (not with secure_sum and robust_mean: the server takes no mean of tables).
    """

    variant: Literal["paper", "code"] = "paper"
    fit_steps: ZeroOrMore = 100
    fit_learning_rate: NotNegative = 0.1
    num_vectors: ZeroOrMore = 0
    encoding: Literal["matrix", "factor"] = "matrix"


def fedcia_fitted(federation: Federation, training: EmbeddingTraining, config: FedciaFittedConfig) -> FederatedMethod:
    """``S = (1/N) sum_k Q_k Q_k^T``; each client fits ``Q_k Q_k^T`` to S by gradient steps, then trains Q_k.

    A client keeps its user embedding p_k, an item table Q_k of its own and the state of Adam; tables are alike at first
    and are never averaged, only how items relate is. In a round it fits its table to the mean of the round before
    (:func:`fitted_tables`), trains p_k and Q_k on its examples and uploads ``Q_k Q_k^T``, 4 I^2 bytes, or Q_k itself,
    4 I D bytes, from which the server makes the same mean. The mean comes back as its ``num_vectors`` leading
    :func:`eigenpairs`, 4 R (I + 1) bytes; R = I is the whole matrix. Before the first mean nothing comes and nothing
    is fitted. Score ``p_k . q_i`` after the fit (variant ``global``). With federation off there is no fit, as a
    client's own similarities are those of its table.

    ``weight_decay`` w adds ``w / 2 (||p||^2 + ||q_i||^2)`` to the loss of every example. What is logged as loss is the
    cross-entropy under either variant.

    The state is three tables a client, 12 N I D bytes, and the best round's copy. The server needs I^2 numbers, and I^3
    operations a round where ``num_vectors`` is 0. An upload in the clear tells which items a client has: their rows
    are those that moved away from the fit. A mean, so ``--secure_sum`` hides it.

    Differs from the paper, whose text was not at hand (its abstract and its public code were): its local loss is not
    known, nor whether it squares the distance that the fit makes small. The square is the default here: steps along
    the gradient of a norm do not shrink, so that a table that is near circles around S, and rounding errors grow with
    every step. Differs from the public code: negatives are drawn anew in every round, not once; embeddings are 16
    wide, not 256; the local model is matrix factorisation alone, not LightGCN; no Laplace noise without a bound.

    Raises:
        ValueError: training diverged, with the client, the round and the tensor.
    """
    rates = {"user": training.learning_rate, TABLE: training.item_rate}
    optimiser = Optimiser("adam", rates)
    of_loss: Gradients = code_gradients if config.variant == "code" else entropy_gradients
    gradients = with_decay(of_loss, training.weight_decay)
    fit: Fit = "norm" if config.variant == "code" else "square"
    num_items = federation.num_items
    num_vectors = min(config.num_vectors or num_items, num_items)
    whole = config.encoding == "matrix"
    name, sent_size = ("similarity", num_items) if whole else ("factor", training.embedding_size)

    def init() -> tuple[Tree, Tree]:
        num_clients, table_bytes = federation.num_clients, federation.table_bytes
        table_ID = normal(federation, training, TABLE, num_items)
        start = {"user": normal(federation, training, "user", num_clients), TABLE: table_ID[None]}
        local = {
            key: personal_table(value[0], num_clients, table_bytes)
            if value.dim() == 3
            else value.expand(num_clients, *value.shape[1:])
            for key, value in {**start, **fresh_state(optimiser, start)}.items()
        }
        return {}, local

    def fitted(own: Tree, download: Download) -> Tensor:
        table_CID = own[TABLE].to(federation.device)
        if "axes" not in download.shared or not config.fit_steps:
            return table_CID.clone()
        mean = download.shared
        return fitted_tables(table_CID, mean["value"], mean["axes"], config.fit_steps, config.fit_learning_rate, fit)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        drawn = round_examples(federation, training, block, round).on_whole_tables(num_items)
        params = {"user": own["user"].clone(), TABLE: fitted(own, download)}
        state = {key: own[key].to(tensor.device, copy=True) for key, tensor in fresh_state(optimiser, params).items()}
        batches = epoch_batches(drawn.examples, drawn.place_CB, training.batch_size, range(training.local_epochs))
        loss_C = train_batches(Objective(dot_logits, gradients=gradients), params, batches, optimiser, state)
        check_finite(params, loss_C, block.clients, round)
        sent = params[TABLE] @ params[TABLE].mT if whole else params[TABLE]
        upload = Upload(block.clients, torch.ones_like(loss_C), {name: sent})
        return upload, {**params, **state}, [{"loss": loss} for loss in loss_C.tolist()]

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        mean_II = weighted_mean(uploads, {}, uniform=True).get(name) if whole else mean_of_factors(uploads)
        return server if mean_II is None else eigenpairs(mean_II, num_vectors)

    def upload_like(round: int, server: Tree) -> Tree:
        return {name: torch.zeros((), device=federation.device).expand(num_items, sent_size)}

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        score_CI = inner_products(fitted(own, download), own["user"])
        return rank_users(score_CI, block.data, split, federation.protocol)

    return FederatedMethod(
        "fedcia_fitted",
        init,
        send_server,
        client_update,
        server_aggregate,
        positions,
        ("global",),
        upload_like=upload_like,
        takes_mean=whole,
        alone=lambda round, kept, upload: {},
    )


def client_bytes(num_items: int, num_rows: int, training: EmbeddingTraining, config: FedciaFittedConfig) -> int:
    """Memory of one client in a block: its table before and after the fit and what a step makes of it, the moments and
    their copies, and its upload."""
    return 4 * (10 * num_items * training.embedding_size + num_items**2 * (config.encoding == "matrix"))


def fitted_tables(
    table_CID: Tensor, value_R: Tensor, axes_IR: Tensor, num_steps: int, rate: float, loss: Fit = "square"
) -> Tensor:
    """(C, I, D) tables after steps towards ``S = V diag(l) V^T``, as :func:`eigenpairs` has it.

    With ``G = Q^T Q`` the step is ``Q <- Q - s (Q G - S Q)``: a quarter of the gradient of ``||Q Q^T - S||_F^2``, and
    half of the norm's times that norm. For the ``square`` s is rate / max(l_1, ||G||_F), for the ``norm``
    2 rate / ||Q Q^T - S||_F.

    Of ``Q = V A + P``, P orthogonal to V, the step moves A by ``A G - l A`` and P by ``P G``, so that P stays
    ``P_0 M``, ``G = A^T A + M^T P_0^T P_0 M`` and ``||Q Q^T - S||^2 = ||G||^2 - 2 sum l A^2 + ||l||^2``. A step takes
    O(R D^2) operations whatever the number of items, and nothing is left out.
    """
    root_R = value_R.abs().sqrt()
    vector_IR = axes_IR / torch.where(root_R > 0.0, root_R, 1.0)
    inside_CRD = vector_IR.T @ table_CID
    outside_CID = table_CID - vector_IR @ inside_CRD
    outside_CDD = outside_CID.mT @ outside_CID
    mix_CDD = torch.eye(table_CID.shape[2], dtype=table_CID.dtype, device=table_CID.device).expand_as(outside_CDD)
    value_R1, energy, limits = value_R[:, None], value_R.square().sum(), torch.finfo(value_R.dtype)
    least = (ROUNDING * limits.eps * energy).clamp(min=limits.tiny)
    for _ in range(num_steps):
        gram_CDD = inside_CRD.mT @ inside_CRD + mix_CDD.mT @ outside_CDD @ mix_CDD
        shared_CRD = value_R1 * inside_CRD
        square_C = gram_CDD.square().sum((1, 2))
        if loss == "square":
            size_C = rate / torch.maximum(square_C.sqrt(), value_R[0]).clamp(min=limits.tiny)
        else:
            square_C = square_C - 2.0 * (shared_CRD * inside_CRD).sum((1, 2)) + energy
            size_C = torch.where(square_C > least, 2.0 * rate / square_C.clamp(min=least).sqrt(), 0.0)
        size_C11 = size_C[:, None, None]
        inside_CRD = inside_CRD - size_C11 * (inside_CRD @ gram_CDD - shared_CRD)
        mix_CDD = mix_CDD - size_C11 * (mix_CDD @ gram_CDD)
    return vector_IR @ inside_CRD + outside_CID @ mix_CDD


def eigenpairs(similarity_II: Tensor, num_vectors: int) -> Tree:
    """The largest eigenvalues ``value`` (R,), falling, and ``axes`` (I, R), their vectors times the root of their size.

    Values within rounding of zero, whose vectors are arbitrary, are zero, and so are their axes; the largest number of
    every other axis is positive.
    """
    value_R, vector_IR = leading_eigenpairs(similarity_II.double(), num_vectors)
    least = len(similarity_II) * torch.finfo(torch.float64).eps * value_R.abs().max()
    value_R = torch.where(value_R.abs() > least, value_R, 0.0)
    sign_1R = vector_IR.gather(0, vector_IR.abs().argmax(0, keepdim=True)).sign()
    axes_IR = vector_IR * sign_1R * value_R.abs().sqrt()
    return {"value": value_R.to(similarity_II.dtype), "axes": axes_IR.to(similarity_II.dtype)}


def mean_of_factors(uploads: Iterable[Upload]) -> Tensor | None:
    """(I, I) the mean of ``Q Q^T`` over the clients whose tables are finite; None where nobody's is."""
    total_II, count, dtype = None, 0, torch.get_default_dtype()
    for upload in uploads:
        table_CID = upload.tensors["factor"][finite_clients(upload).to(upload.tensors["factor"].device)]
        side_by_side = table_CID.transpose(0, 1).flatten(1)
        sum_II = (side_by_side @ side_by_side.T).double()
        total_II, count, dtype = (
            sum_II if total_II is None else total_II + sum_II,
            count + len(table_CID),
            table_CID.dtype,
        )
    return (total_II / count).to(dtype) if total_II is not None and count else None


def entropy_gradients(
    objective: Objective, params: Tree, names: Sequence[str], batch: ExampleBatch
) -> tuple[Tree, Tensor]:
    """Of each client's mean cross-entropy of inner products, over whole tables, and the logits (A, B)."""
    user_AD, table_AID = params["user"][: batch.active], params[TABLE][: batch.active]
    slope_AI, logit_AB = row_slopes(inner_products(table_AID, user_AD), batch)
    return {"user": weighted_sum(slope_AI, table_AID), TABLE: slope_AI[:, :, None] * user_AD[:, None]}, logit_AB


def code_gradients(
    objective: Objective, params: Tree, names: Sequence[str], batch: ExampleBatch
) -> tuple[Tree, Tensor]:
    """Of the public code's loss, the mean over examples and dims of ``(p_j q_ij - y)^2``, and the logits (A, B)."""
    user_AD, table_AID = params["user"][: batch.active], params[TABLE][: batch.active]
    share_AI, label_AI = (row_sums(table_AID, batch, value_AB) for value_AB in (None, batch.label_AB))
    product_AID = table_AID * user_AD[:, None]
    slope_AID = product_AID * share_AI[:, :, None] - label_AI[:, :, None]
    slope_AID *= 2.0 / table_AID.shape[2]
    by_name = {"user": (slope_AID * table_AID).sum(1), TABLE: slope_AID * user_AD[:, None]}
    return by_name, product_AID.sum(2).gather(1, batch.item_AB)


def with_decay(gradients: Gradients, weight_decay: float) -> Gradients:
    """With ``weight_decay / 2 (||p||^2 + ||q_i||^2)`` in the loss of every example."""
    if not weight_decay:
        return gradients

    def decayed(objective: Objective, params: Tree, names: Sequence[str], batch: ExampleBatch) -> tuple[Tree, Tensor]:
        by_name, logit_AB = gradients(objective, params, names, batch)
        table_AID = params[TABLE][: batch.active]
        share_AI1 = row_sums(table_AID, batch)[:, :, None]
        by_name["user"] = by_name["user"].add(params["user"][: batch.active], alpha=weight_decay)
        by_name[TABLE] = by_name[TABLE].addcmul(share_AI1, table_AID, value=weight_decay)
        return by_name, logit_AB

    return decayed


def row_sums(table_AID: Tensor, batch: ExampleBatch, value_AB: Tensor | None = None) -> Tensor:
    """(A, I) the weights of each item's examples in the batch, times their values."""
    weight_AB = batch.weight_AB if value_AB is None else batch.weight_AB * value_AB
    return table_AID.new_zeros(table_AID.shape[:2]).scatter_add_(1, batch.item_AB, weight_AB)


METHOD = Method(
    FedciaFittedConfig,
    fedcia_fitted,
    DEFAULTS,
    GRID,
    SPACE,
    item_tables=("similarity", "factor"),
    client_bytes=client_bytes,
    equal_weights=always,
    code=CODE,
)
