"""CentRAP: FedRAP's additive item tables, trained by one party that holds all data (Li, Long, Zhou, ICLR 2024).

The paper names this counterpart of FedRAP in one sentence; its form is ours: the loss of FedRAP, mini-batches over all
users, so that every step trains the one common table C.

Shape legend: B users of a batch, N = 1 + num_negatives items of each, U users, I items, D dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedecider.baselines.fitting import PairTraining, Pooled, fit_epochs, pointwise_loss, training_batches
from fedecider.bounds import NotNegative, OneOrMore, Positive, dataclass
from fedecider.evaluation.protocols import ScoreUsers
from fedecider.federation.streams import stream
from fedecider.search_space import OneOf, Real, Space

GRID: tuple[dict, ...] = (
    {},
    {"personal_rate": 1e-3},
    {"distance_weight": 1e-2, "sparsity_weight": 1e-2},
    {"weight_decay": 1e-2},
    {"learning_rate": 1e-2},
    {"embedding_size": 64},
)
SPACE: Space = {
    "embedding_size": OneOf((16, 32, 64)),
    "learning_rate": Real(0.0003, 0.03, log=True),
    "personal_rate": Real(1e-5, 0.01, log=True),
    "distance_weight": Real(1e-4, 1.0, log=True),
    "sparsity_weight": Real(1e-4, 1.0, log=True),
    "weight_decay": OneOf((0.0, 1e-3, 1e-2)),
}


@dataclass(frozen=True)
class CentrapConfig(PairTraining):
    """Settings of CentRAP, beside those of all baselines on pairs: ``embedding_size`` is that of both item tables too,
    ``learning_rate`` that of user embeddings and common table, ``weight_decay`` that of user embeddings.

    Args:
        personal_rate: of Adam, for the personal tables.
        distance_weight: largest weight v1 of the distance of the two tables.
        sparsity_weight: largest weight v2 of the absolute entries of the common table.
    """

    personal_rate: Positive = 1e-4
    batch_size: OneOrMore = 2048
    distance_weight: NotNegative = 0.1
    sparsity_weight: NotNegative = 0.1


class AdditiveTables(nn.Module):
    """Logit of (u, i): ``p_u . (C_i + D_ui)``. p and C start at N(0, 0.1^2), D at 0; row u I + i of D is D_ui."""

    def __init__(self, num_users: int, num_items: int, embedding_size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.num_items = num_items
        self.user_UD = nn.Parameter(0.1 * torch.randn(num_users, embedding_size, generator=generator))
        self.common_ID = nn.Parameter(0.1 * torch.randn(num_items, embedding_size, generator=generator))
        self.personal = nn.Embedding(num_users * num_items, embedding_size, sparse=True)
        nn.init.zeros_(self.personal.weight)


def centrap_loss(model: AdditiveTables, user_B: Tensor, item_BN: Tensor, config: CentrapConfig, epoch: int) -> Tensor:
    """``mean BCE - tanh(e / 10) (v1 mean (D - C)^2 - v2 mean |C|)`` over the rows of the batch, e = epoch + 1.

    As in FedRAP's Eq. 11, where the regularisers run over the rated pairs: whole tables of all users at every step
    would cost U times as much as one client's.
    """
    user_BD, common_BND = model.user_UD[user_B], model.common_ID[item_BN]
    personal_BND = model.personal(user_B[:, None] * model.num_items + item_BN)
    logit_BN = ((common_BND + personal_BND) @ user_BD[:, :, None])[..., 0]
    distance, sparsity = (personal_BND - common_BND).square().mean(), common_BND.abs().mean()
    extra = config.sparsity_weight * sparsity - config.distance_weight * distance
    decay = config.weight_decay * user_BD.square().sum(-1).mean()
    return pointwise_loss(logit_BN) + math.tanh((epoch + 1) / 10) * extra + decay


def fit(data: Pooled, config: CentrapConfig) -> ScoreUsers:
    """Adam on :func:`centrap_loss`; moments of personal rows move only when the row is in a batch.

    Holds four tables (U, I, D): D, its moments and its best epoch (ML-100K with D = 32: 0.8 GB).
    """
    sizes = len(data.sequences), data.num_items, config.embedding_size
    model = AdditiveTables(*sizes, stream(data.seed, "init")).to(data.device)
    optimizer = torch.optim.Adam([model.user_UD, model.common_ID], lr=config.learning_rate, fused=True)
    personal = torch.optim.SparseAdam(model.personal.parameters(), lr=config.personal_rate)
    batches = training_batches(data, config)

    def run_epoch(epoch: int) -> None:
        for user_B, item_BN in batches(epoch):
            optimizer.zero_grad()
            personal.zero_grad()
            centrap_loss(model, user_B, item_BN, config, epoch).backward()
            optimizer.step()
            personal.step()

    @torch.no_grad()
    def score(user_B: Tensor) -> Tensor:
        user_B = user_B.to(data.device)
        personal_BID = model.personal.weight.view(-1, data.num_items, config.embedding_size)[user_B]
        return torch.einsum("bd,bid->bi", model.user_UD[user_B], model.common_ID + personal_BID)

    fit_epochs(model, run_epoch, score, data.valid, config.num_epochs, config.patience)
    return score
