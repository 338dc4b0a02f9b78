"""PFedCLR: calibration by a personal buffer, learnt after the upload (Chen et al., 2025).

Shape legend: N clients of the run, C clients of a block, A active clients of a step, I items, D dims, K = ``rank``,
B examples, R touched rows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from embedding_fr.averaged import mean_over_clients, send_server
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import round_examples
from embedding_fr.kernels import Kernel
from embedding_fr.local_training import Objective, dot_logits, train_epochs
from embedding_fr.methods.entry import Method
from embedding_fr.methods.fedmf import dot_kernel
from embedding_fr.optimisers import Optimiser
from embedding_fr.personal_variant import with_personal_variant
from embedding_fr.stacked import check_finite, inner_products, received, received_rows, take
from embedding_fr.tables import normal, personal_table
from fedecider.bounds import WIDEST, Int, NotNegative, dataclass
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree, Upload
from fedecider.search_space import OneOf, Space, Whole


@dataclass(frozen=True)
class PfedclrConfig:
    """Settings of PFedCLR.

    Args:
        variant: The variant: clr calibrates with a low-rank buffer, cf with a full one, and af trains a full one
            together with all else.
        rank: The number of columns of the low-rank buffer's first factor.
        buffer_learning_rate: The learning rate of the buffer (beta). If not given, learning_rate is taken; 0 leaves the
            buffer empty.
    """

    variant: Literal["clr", "cf", "af"] = "clr"
    rank: Annotated[Int, Field(ge=1, le=WIDEST)] = 2
    buffer_learning_rate: NotNegative | None = None


DEFAULTS: dict[str, Any] = {"learning_rate": 0.01, "participation": 0.6}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"local_epochs": 2, "learning_rate": 0.03, "init_std": 0.1},
    {"local_epochs": 2, "learning_rate": 0.03, "init_std": 0.1, "buffer_learning_rate": 0.0},
    {"local_epochs": 1, "learning_rate": 0.1, "init_std": 0.1, "buffer_learning_rate": 0.001},
)
SPACE: Space = {
    **TRAINING_SPACE,
    "rank": Whole(1, 16),
    "buffer_learning_rate": OneOf((None, 0.0, 1e-4, 0.001, 0.01, 0.1)),
}


class Stage(NamedTuple):
    """Local epochs over some tensors while the others are frozen."""

    names: tuple[str, ...]
    objective: Objective


def pfedclr(federation: Federation, training: EmbeddingTraining, config: PfedclrConfig) -> FederatedMethod:
    """Step 1: ``Q_u <- min L(p_u, Q)`` with p_u frozen, and Q_u is uploaded; step 2: Q_u frozen,
    ``p_u, A_u, B_u <- min L(p_u, Q_u + A_u B_u)`` (equations 6, 10, 11; algorithm 1). A_u starts at 0, B_u normal.

    ``cf`` has W_u (I, D), from 0, in place of A_u B_u; ``af`` trains p_u, Q_u and W_u at once, and then uploads Q_u.
    The buffer is kept from round to round, as in algorithm 1. Variant ``personal``: the client's own last Q_u and
    buffer, which is what algorithm 1 returns; ``global``: the table of the next download and the buffer.

    Differs from the paper: the start of B_u has ``init_std`` (the paper gives none); both steps share the round's
    negatives; af is not spelled out there, it is read as the additive personal table of the methods it stands for. Its
    Laplace noise (Tables 3, 8, 9) has a strength and no bound: ``noise_without_clip``; the sensitivity 2 p_u eta C
    that it names is that of one clipped SGD step, not of ten epochs of Adam, so no epsilon follows from it here.
    """
    stages = _stages(config)
    beta = training.learning_rate if config.buffer_learning_rate is None else config.buffer_learning_rate
    rates = {"user": training.learning_rate, "item_table": training.item_rate}

    def init() -> tuple[Tree, Tree]:
        table_ID = normal(federation, training, "item_table", federation.num_items)
        user_ND = normal(federation, training, "user", federation.num_clients)
        return {"item_table": table_ID}, {"user": user_ND, **start_buffer(federation, training, config)}

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        drawn = round_examples(federation, training, block, round)
        own = {name: tensor.to(federation.device) for name, tensor in own.items()}  # a table in a file is read
        params = {name: _held(name, tensor, drawn.row_CR) for name, tensor in own.items()}
        params["item_table"] = received_rows(download, "item_table", drawn.row_CR)
        losses = []
        for number, stage in enumerate(stages):
            optimiser = Optimiser("adam", {name: rates.get(name, beta) for name in stage.names}, training.weight_decay)
            first_epoch = number * training.local_epochs
            losses.append(train_epochs(stage.objective, params, drawn, training, optimiser, first_epoch))
            check_finite(params, losses[-1], block.clients, round)
        upload = Upload(
            block.clients,
            block.data.num_train_C.to(losses[0].dtype),
            {"item_table": params["item_table"]},
            rows={"item_table": drawn.row_CR},
        )
        logs = {"loss": losses[-1].tolist(), **({"table_loss": losses[0].tolist()} if len(stages) > 1 else {})}
        return (
            upload,
            {name: RowUpdate(drawn.row_CR, params[name]) if name in _TABLES else params[name] for name in own},
            [dict(zip(logs, client, strict=True)) for client in zip(*logs.values(), strict=True)],
        )

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        params = {name: tensor.to(federation.device) for name, tensor in own.items()}
        params["item_table"] = received(download, "item_table", len(block.clients))
        with torch.no_grad():
            score_CI = stages[-1].objective.logits(params, None)
        return rank_users(score_CI, block.data, split, federation.protocol)

    method = FederatedMethod(
        "pfedclr",
        init,
        send_server,
        client_update,
        mean_over_clients(),
        positions,
        ("global",),
        upload_like=lambda round, server: dict(server),
        takes_mean=True,
    )
    return with_personal_variant(method, federation)


def start_buffer(federation: Federation, training: EmbeddingTraining, config: PfedclrConfig) -> Tree:
    """``buffer_a`` (N, I, K) zeros and ``buffer_b`` (N, K, D) normal; ``buffer`` (N, I, D) zeros where it is full."""
    low_rank = config.variant == "clr"
    width = config.rank if low_rank else training.embedding_size
    empty = torch.zeros(federation.num_items, width, device=federation.device)
    table = personal_table(empty, federation.num_clients, federation.table_bytes)
    if not low_rank:
        return {"buffer": table}
    return {"buffer_a": table, "buffer_b": normal(federation, training, "buffer_b", federation.num_clients, width)}


def low_rank_logits(params: Tree, item: Tensor | None) -> Tensor:
    """(C, B) ``p . (q_i + B^T a_i) = p . q_i + a_i . (B p)``: the sum of the tables is never formed."""
    seen_CK = inner_products(params["buffer_b"], params["user"])
    return dot_logits(params, item) + inner_products(take(params["buffer_a"], item), seen_CK)


def full_logits(params: Tree, item: Tensor | None) -> Tensor:
    """(C, B) ``p . (q_i + w_i)``."""
    row_CBD = take(params["item_table"], item) + take(params["buffer"], item)
    return inner_products(row_CBD, params["user"])


def _stages(config: PfedclrConfig) -> tuple[Stage, ...]:
    from embedding_fr.compiled.training import train_low_rank  # Numba: half a second that only training needs

    low_rank = Kernel(
        train=train_low_rank,
        tables=("item_table", "buffer_a"),
        vectors=(("user",), ("buffer_b",)),
    )
    table = Stage(("item_table",), Objective(dot_logits, by_row=True, kernel=dot_kernel()))
    reduced = Objective(low_rank_logits, by_row=True, kernel=low_rank)
    full = Objective(full_logits, by_row=True)
    return {
        "clr": (table, Stage(("user", "buffer_a", "buffer_b"), reduced)),
        "cf": (table, Stage(("user", "buffer"), full)),
        "af": (Stage(("user", "item_table", "buffer"), full),),
    }[config.variant]


_TABLES = ("buffer_a", "buffer")


def _held(name: str, own: Tensor, row_CR: Tensor) -> Tensor:
    """What a client trains of an own tensor: the touched rows of a table, a copy of anything else."""
    return take(own, row_CR.clamp(min=0)) if name in _TABLES else own.clone()


METHOD = Method(PfedclrConfig, pfedclr, DEFAULTS, GRID, SPACE, passing_tables=2)
