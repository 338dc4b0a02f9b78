"""Matrix factorisation, centralised: with binary cross-entropy, the counterpart of FedMF, or with the loss of BPR.

Shape legend: B users of a batch, N = 1 + num_negatives items of each, U users, I items, D dims.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedecider.baselines.fitting import (
    PairTraining,
    Pooled,
    fit_epochs,
    pairwise_loss,
    pointwise_loss,
    square_norms,
    training_batches,
)
from fedecider.bounds import NotNegative, Positive, Width, dataclass
from fedecider.evaluation.protocols import ScoreUsers
from fedecider.federation.streams import stream
from fedecider.search_space import OneOf, Real, Space

GRID: tuple[dict, ...] = (
    {},
    {"weight_decay": 3e-3},
    {"embedding_size": 128},
    {"weight_decay": 1e-2},
    {"embedding_size": 32},
    {"learning_rate": 1e-2},
    {"embedding_size": 16, "weight_decay": 0.0},
    {"weight_decay": 0.0},
)
BPR_GRID: tuple[dict, ...] = (
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.03},
    {"embedding_size": 128},
    {"weight_decay": 0.4},
    {"weight_decay": 1e-3},
)
SPACE: Space = {
    "embedding_size": OneOf((16, 32, 64, 128)),
    "learning_rate": Real(0.0003, 0.03, log=True),
    "weight_decay": OneOf((0.0, 1e-3, 3e-3, 7e-3, 1e-2, 3e-2, 0.1, 0.2)),
}


@dataclass(frozen=True)
class MfConfig(PairTraining):
    """Those of all baselines on pairs, with defaults for matrix factorisation."""

    embedding_size: Width = 64
    weight_decay: NotNegative = 7e-3


class MatrixFactors(nn.Module):
    """Logit of (u, i): ``p_u . q_i``. Embeddings start at N(0, 0.1^2)."""

    def __init__(self, num_users: int, num_items: int, embedding_size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.user_UD = nn.Parameter(0.1 * torch.randn(num_users, embedding_size, generator=generator))
        self.item_ID = nn.Parameter(0.1 * torch.randn(num_items, embedding_size, generator=generator))

    def forward(self, user_BD: Tensor, item_BND: Tensor) -> Tensor:
        return (item_BND @ user_BD[:, :, None])[..., 0]


@dataclass(frozen=True)
class BprConfig(MfConfig):
    """Those of matrix factorisation, with defaults for BPR."""

    learning_rate: Positive = 1e-2
    weight_decay: NotNegative = 0.2


def fit_bpr(data: Pooled, config: BprConfig) -> ScoreUsers:
    """:func:`fit` with the loss of BPR (Rendle et al., UAI 2009). Differs from the paper: Adam, several negatives."""
    return fit(data, config, pairwise_loss)


def fit(data: Pooled, config: MfConfig, loss_of: Callable[[Tensor], Tensor] = pointwise_loss) -> ScoreUsers:
    """:func:`fit_on_pairs` of ``p_u . q_i``, with binary cross-entropy."""
    sizes = len(data.sequences), data.num_items, config.embedding_size
    model = MatrixFactors(*sizes, stream(data.seed, "init")).to(data.device)

    @torch.no_grad()
    def score(user_B: Tensor) -> Tensor:
        return model.user_UD[user_B.to(data.device)] @ model.item_ID.T

    fit_on_pairs(model, (model.user_UD, model.item_ID), score, data, config, loss_of)
    return score


def fit_on_pairs(
    model: nn.Module,
    tables: tuple[Tensor, Tensor],
    score: ScoreUsers,
    data: Pooled,
    config: PairTraining,
    loss_of: Callable[[Tensor], Tensor] = pointwise_loss,
) -> None:
    """Adam on the mean of ``loss_of(model(p_u, q_i)) + weight_decay (|p_u|^2 + |q_i|^2)`` over train pairs and their
    negatives; ``tables``: the embeddings of users and of items in ``model``.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    batches = training_batches(data, config)

    def run_epoch(epoch: int) -> None:
        for user_B, item_BN in batches(epoch):
            user_BD, item_BND = tables[0][user_B], tables[1][item_BN]
            loss = loss_of(model(user_BD, item_BND))
            optimizer.zero_grad()
            (loss + config.weight_decay * square_norms(user_BD, item_BND)).backward()
            optimizer.step()

    fit_epochs(model, run_epoch, score, data.valid, config.num_epochs, config.patience)
