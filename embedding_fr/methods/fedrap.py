"""FedRAP: additive personalisation (Li, Long, Zhou, ICLR 2024).

Item i of user u is ``C_i + D^(u)_i``: the common table C travels and is averaged; the personal table D and the user
side stay with the client.

Shape legend: C clients of a block, I items, D dims, N clients of the run, A active clients of a step, B examples of
it.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from embedding_fr.averaged import mean_over_clients, send_server
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import ExampleBatch, epoch_batches, round_examples
from embedding_fr.local_training import batch_loss
from embedding_fr.methods.entry import Method, always
from embedding_fr.stacked import check_finite, inner_products, received, take, weighted_sum
from embedding_fr.tables import normal, personal_table
from fedecider.bounds import NotNegative, dataclass
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.search_space import OneOf, Real, Space


def share_above(table_CID: Tensor, limit: float) -> Tensor:
    """(C,) share of entries with ``|x| > limit``; what FedRAP's paper reports of its common table at 1e-1 and 1e-2."""
    return (table_CID.abs() > limit).sum((1, 2)) / table_CID[0].numel()


COMMON, PERSONAL = "common_table", "personal_table"
TABLES = (COMMON, PERSONAL)
LARGEST_ENTRY = 1e4
"""Tables beyond this have diverged: long before numbers overflow, scores are saturated and nothing is learnt."""
SHARE_LIMITS = (1e-1, 1e-2)
"""Entries of C above these are counted in the logs, as in the paper."""
STEP_DECAY, ROUND_DECAY = 0.95, 0.97
"""Of the public code: learning rates shrink by these with every local step and with every round."""

Curriculum = Literal["tanh", "fixed", "sin", "square", "frac"]

DEFAULTS: dict[str, Any] = {"embedding_size": 32, "batch_size": 2048, "learning_rate": 0.01}
CODE: dict[str, Any] = {
    "variant": "code",
    "learning_rate": 0.5,
    "item_learning_rate": 200.0,
    "weight_decay": 1e-4,
    "init_std": 1.0,
}
"""What the public code does, with its argument defaults."""
WEAK = {"distance_weight": 1e-3, "sparsity_weight": 1e-3}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {**WEAK, "weight_decay": 0.01},
    WEAK,
    {**WEAK, "local_epochs": 2, "item_learning_rate": 0.5},
    {"sparsity_weight": 0.01, "distance": "bounded"},
    CODE,
    {**CODE, "personal_learning_rate": 4.0},
)
SPACE: Space = {
    **TRAINING_SPACE,
    "weight_decay": OneOf((0.0, 0.001, 0.01)),
    "distance_weight": Real(1e-4, 1.0, log=True),
    "sparsity_weight": Real(1e-4, 1.0, log=True),
    "item_learning_rate": Real(0.01, 100.0, log=True, of="learning_rate"),
    "personal_learning_rate": Real(1e-4, 10.0, log=True, of="item_learning_rate"),
}
CODE_SPACE: Space = {
    **SPACE,
    "weight_decay": OneOf((0.0, 1e-4, 1e-3, 1e-2)),
    "item_learning_rate": Real(1.0, 500.0, log=True),
}
"""Its gradients of tables are means over examples: rates are larger by their number."""


@dataclass(frozen=True)
class FedrapConfig:
    """Settings of FedRAP.

    Args:
        variant: The variant: paper is Algorithm 1 with Eq. 3: sums over examples and over whole tables, plain gradient
            descent and soft-thresholding. code is the public code: means, the regularisers on the rows of the batch
            only, L1 by its subgradient, a linear layer with bias as the user side, and shrinking learning rates; give
            it its other settings too (CODE).
        tables: Which tables a score is made of: both, common (FedRAP-C: no personal table) or personal (FedRAP-D:
            nothing is shared). The distance needs both tables, sparsity the common one.
        sparsity: The penalty on the common table: l1, l2 (FedRAP-L2: squared Frobenius norm) or none (FedRAP-No).
        distance: The measure that pushes the tables apart: frobenius has no upper bound and can diverge; bounded is
            sum_j g_j / (1 + g_j) with g_j = ||D_j - C_j||^2, at most 1 an item.
        distance_weight: The largest weight v1 of the distance.
        sparsity_weight: The largest weight v2 of the sparsity penalty.
        personal_learning_rate: The learning rate of the personal table. If not given, that of the common one is taken;
            0 keeps it as it started.
        curriculum: How both weights depend on the round; None is tanh, and fixed for the code variant, which never
            applies the one it computes.
    """

    variant: Literal["paper", "code"] = "paper"
    tables: Literal["both", "common", "personal"] = "both"
    sparsity: Literal["l1", "l2", "none"] = "l1"
    distance: Literal["frobenius", "bounded"] = "frobenius"
    distance_weight: NotNegative = 0.1
    sparsity_weight: NotNegative = 0.1
    personal_learning_rate: NotNegative | None = None
    curriculum: Curriculum | None = None

    @property
    def schedule(self) -> Curriculum:
        return self.curriculum or ("tanh" if self.variant == "paper" else "fixed")


class FedrapRound(NamedTuple):
    """What a round fixes: the weights of the regularisers and the learning rates."""

    distance: float
    """lambda(a)."""
    sparsity: float
    """mu(a)."""
    user_rate: float
    common_rate: float
    personal_rate: float

    def rate(self, name: str) -> float:
        """The learning rate of this tensor."""
        return {COMMON: self.common_rate, PERSONAL: self.personal_rate}.get(name, self.user_rate)


def curriculum_weight(curriculum: Curriculum, round: int) -> float:
    """Factor of v1 and v2 in round a = 1, 2, ... (sections 4.3 and 4.5).

    tanh(a / 10); fixed 1; sin(a / 10), cut at 0 since the paper keeps the weights between 0 and v; square 0 for ten
    rounds, 1 for the next ten, and so on; frac 1 / (a + 1).
    """
    return {
        "tanh": math.tanh(round / 10),
        "fixed": 1.0,
        "sin": max(0.0, math.sin(round / 10)),
        "square": float((round - 1) // 10 % 2),
        "frac": 1.0 / (round + 1),
    }[curriculum]


def fedrap_round(training: EmbeddingTraining, config: FedrapConfig, round: int) -> FedrapRound:
    """Weights and rates of one round; the public code's rates shrink from round to round."""
    weight = curriculum_weight(config.schedule, round)
    decay = ROUND_DECAY ** (round - 1) if config.variant == "code" else 1.0
    distance = config.distance_weight * weight if config.tables == "both" else 0.0
    sparsity = config.sparsity_weight * weight if config.sparsity != "none" else 0.0
    personal = training.item_rate if config.personal_learning_rate is None else config.personal_learning_rate
    rates = (training.learning_rate, training.item_rate, personal)
    return FedrapRound(distance, sparsity, *(rate * decay for rate in rates))


def fedrap(federation: Federation, training: EmbeddingTraining, config: FedrapConfig) -> FederatedMethod:
    """Minimise ``sum BCE(<u, C_j + D_j>) - lambda(a) ||D - C||_F^2 + mu(a) ||C||_1`` per client; average C uniformly.

    Algorithm 1 and Eq. 3: every local step takes the three gradients at the same point and descends along each; L1 is
    the soft-threshold of Eq. 13 with theta = learning rate x mu(a). Both regularisers change every row in every step,
    so each client holds whole tables (I, D) while it trains, and uploads C whole.

    Variant ``global``: the averaged C with the client's D and u.

    Differs from the paper: it prints the distance with two signs, the one of Eq. 3 (tables apart) holds; it names no
    learning rate and no theta; D starts at zero (the paper does not say); it scores with the client's C before
    averaging, here as in its code with the averaged one; its bound and noise fall on the gradient of C in every step
    (Eq. 4), ours (``clip``, ``noise_scale``) on the upload once a round. Differs from the public code:
    clients do not stop early when their loss stalls.

    Raises:
        ValueError: training diverged, with the client, the round and the tensor.
    """

    def init() -> tuple[Tree, Tree]:
        return start_values(federation, training, config)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        # A table kept in a file lives on the CPU.
        params = {name: tensor.to(federation.device, copy=True) for name, tensor in own.items()}
        if config.tables != "personal":
            params[COMMON] = received(download, COMMON, len(block.clients)).clone()
        logs = _train(params, federation, training, config, block, round)
        loss_C = logs["loss"]
        check_finite({name: params[name] for name in params if name not in TABLES}, loss_C, block.clients, round)
        shared = {COMMON: params.pop(COMMON)} if COMMON in params else {}
        upload = Upload(block.clients, torch.ones_like(loss_C), shared)
        return upload, params, _per_client(logs)

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        params = {name: tensor.to(federation.device) for name, tensor in own.items()}
        if config.tables != "personal":
            params[COMMON] = received(download, COMMON, len(block.clients))
        return rank_users(logits(params, None)[0], block.data, split, federation.protocol)

    return FederatedMethod(
        "fedrap",
        init,
        send_server,
        client_update,
        mean_over_clients(uniform=True),
        positions,
        ("global",),
        upload_like=lambda round, server: dict(server),
        takes_mean=config.tables != "personal",
    )


def start_values(federation: Federation, training: EmbeddingTraining, config: FedrapConfig) -> tuple[Tree, Tree]:
    """Server and local tree: C and u normal with ``init_std``, D zero.

    The public code starts every client alike: D normal as C is, the linear layer uniform in +-1 / sqrt(D).
    """
    common_ID = normal(federation, training, COMMON, federation.num_items)
    personal_ID = torch.zeros_like(common_ID)
    local: Tree = {"user": normal(federation, training, "user", federation.num_clients)}
    if config.variant == "code":
        draw = torch.rand(training.embedding_size + 1, generator=stream(federation.seed, "init", "scorer"))
        layer = (
            ((2.0 * draw - 1.0) / math.sqrt(training.embedding_size)).to(common_ID).repeat(federation.num_clients, 1)
        )
        local = {"user": layer[:, :-1].contiguous(), "bias": layer[:, -1].contiguous()}
        personal_ID = normal(federation, training, PERSONAL, federation.num_items)
    if config.tables != "common":
        local[PERSONAL] = personal_table(personal_ID, federation.num_clients, federation.table_bytes)
    return {COMMON: common_ID} if config.tables != "personal" else {}, local


def logits(params: Tree, item: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits (C, B) ``<u, C_j + D_j> (+ bias)`` of items (C, B), None for all in order; and the rows (C, B, D)."""
    tables = [take(params[name], item) for name in TABLES if name in params]
    row_CBD = tables[0] + tables[1] if len(tables) == 2 else tables[0]
    logit_CB = inner_products(row_CBD, params["user"])
    return logit_CB + params["bias"][:, None] if "bias" in params else logit_CB, row_CBD


def soft_threshold_(value: Tensor, theta: float) -> Tensor:
    """``max(v - theta, 0) - max(-v - theta, 0)`` in place (below Eq. 13): v less its part within +-theta."""
    return value.sub_(value.clamp(-theta, theta))


def gradients(
    params: Tree, batch: ExampleBatch, config: FedrapConfig, now: FedrapRound, weight_decay: float
) -> tuple[Tree, Tensor]:
    """Gradients (A, ...) by name of one step's loss, in closed form, and the logits (A, B); L1 of the paper left out.

    With e the residuals sigmoid(z) - y of the batch, summed per item: ``dC = e u^T + 2 lambda (D - C)``,
    ``dD = e u^T - 2 lambda (D - C)``. Whole tables, since the regularisers touch every row.
    """
    mine = {name: tensor[: batch.active] for name, tensor in params.items()}
    score_AI, row_AID = logits(mine, None)
    logit_AB = score_AI.gather(1, batch.item_AB)
    weight_AB = batch.weight_AB if config.variant == "code" else (batch.weight_AB > 0.0).to(logit_AB.dtype)
    error_AB = (torch.sigmoid(logit_AB) - batch.label_AB) * weight_AB
    slope_AI = torch.zeros_like(score_AI).scatter_add_(1, batch.item_AB, error_AB)
    by_name = {"user": weighted_sum(slope_AI, row_AID)}
    if "bias" in mine:
        by_name["bias"] = error_AB.sum(1)
    tables = {name: mine[name] for name in TABLES if name in mine}
    fit_AID = slope_AI[:, :, None] * mine["user"][:, None]
    share_AI1 = None
    if config.variant == "code":
        share_AI = torch.zeros_like(score_AI).scatter_add_(1, batch.item_AB, weight_AB)
        share_AI1 = share_AI[:, :, None] / row_AID.shape[2]
    by_name.update(dict.fromkeys(tables, fit_AID))
    if now.distance:
        push_AID = _push(tables, config.distance, share_AI1)
        by_name[PERSONAL] = fit_AID.add(push_AID, alpha=-2.0 * now.distance)
        by_name[COMMON] = fit_AID.add_(push_AID, alpha=2.0 * now.distance)
    if COMMON in tables:
        by_name[COMMON] = _common_gradient(by_name[COMMON], tables[COMMON], config, now, share_AI1)
    if weight_decay:
        by_name = {name: gradient.add(mine[name], alpha=weight_decay) for name, gradient in by_name.items()}
    return by_name, logit_AB


def _push(tables: Tree, distance: str, share_AI1: Tensor | None) -> Tensor:
    """Half the gradient of the distance with respect to D; with respect to C it is the negative.

    frobenius D - C; bounded (D_j - C_j) / (1 + g_j)^2; times the share of item j where the distance is a mean.
    """
    gap_AID = tables[PERSONAL] - tables[COMMON]
    if distance == "bounded":
        gap_AID /= (1.0 + gap_AID.square().sum(2, keepdim=True)).square_()
    return gap_AID if share_AI1 is None else gap_AID.mul_(share_AI1)


def _common_gradient(
    gradient: Tensor, common: Tensor, config: FedrapConfig, now: FedrapRound, share_AI1: Tensor | None
) -> Tensor:
    """Adds that of the sparsity penalty: 2 mu C for l2, mu sign C for the code's l1 (the paper thresholds instead)."""
    if not now.sparsity or (config.sparsity == "l1" and config.variant == "paper"):
        return gradient
    slope = 2.0 * common if config.sparsity == "l2" else common.sign()
    return gradient.add(slope if share_AI1 is None else slope * share_AI1, alpha=now.sparsity)


def _train(
    params: Tree, federation: Federation, training: EmbeddingTraining, config: FedrapConfig, block: Block, round: int
) -> dict[str, Tensor]:
    """Local epochs in place -> by name (C,) ``loss``, the mean cross-entropy per example of the last epoch, without the
    regularisers; and what :func:`_measure` finds.
    """
    now = fedrap_round(training, config, round)
    drawn = round_examples(federation, training, block, round).on_whole_tables(federation.num_items)
    shrinks = config.variant == "paper" and config.sparsity == "l1" and COMMON in params
    decay_C = params["user"].new_ones(len(block.clients))
    loss_C, batches_C = torch.zeros_like(decay_C), torch.zeros_like(decay_C)
    for batch in epoch_batches(drawn.examples, drawn.place_CB, training.batch_size, range(training.local_epochs)):
        active = slice(batch.active)
        step, logit_AB = gradients(params, batch, config, now, training.weight_decay)
        for name, gradient in step.items():
            _descend(params[name][active], gradient, now.rate(name), decay_C[active], config.variant)
        if shrinks:
            soft_threshold_(params[COMMON][active], now.common_rate * now.sparsity)
        decay_C[active] *= STEP_DECAY
        if batch.last_A is not None:
            loss_C[active] += batch_loss(logit_AB, batch) * batch.last_A
            batches_C[active] += batch.last_A
    return {"loss": loss_C / batches_C, **_measure(params, block.clients, round)}


def _descend(param: Tensor, gradient: Tensor, rate: float, decay_A: Tensor, variant: str) -> None:
    """``param -= rate * gradient`` in place; the public code's rate has shrunk with every step of the client."""
    if variant == "code":
        param.addcmul_(gradient, decay_A.view(-1, *[1] * (param.dim() - 1)), value=-rate)
    else:
        param.add_(gradient, alpha=-rate)


def _measure(params: Tree, clients: Tensor, round: int) -> dict[str, Tensor]:
    """Per client the shares of large entries of C that the paper reports; ``ValueError`` for a table that diverged."""
    shares = {}
    for name in (name for name in TABLES if name in params):
        size_CID = params[name].abs()
        largest_C = size_CID.amax((1, 2))
        if not bool((largest_C <= LARGEST_ENTRY).all()):  # NaN is caught as well
            place = int((~(largest_C <= LARGEST_ENTRY)).int().argmax())
            raise ValueError(
                f"got {name} with an entry of size {float(largest_C[place]):.3g} for client {int(clients[place])} in "
                f"round {round}, expected at most {LARGEST_ENTRY:g}: the training diverged, since the distance of the "
                "tables has no upper bound; lower distance_weight or item_learning_rate, or set distance to bounded"
            )
        if name == COMMON:
            shares = {f"common_above_{limit:g}": share_above(size_CID, limit) for limit in SHARE_LIMITS}
    return shares


def _per_client(logs: dict[str, Tensor]) -> list[dict]:
    return [dict(zip(logs, row, strict=True)) for row in zip(*(one_C.tolist() for one_C in logs.values()), strict=True)]


METHOD = Method(
    FedrapConfig,
    fedrap,
    DEFAULTS,
    GRID,
    SPACE,
    whole_tables=2,
    equal_weights=always,
    item_tables=(COMMON,),
    code=CODE,
    code_space=CODE_SPACE,
)
