"""Neural collaborative filtering (He et al., WWW 2017), the MLP of it, centralised: the counterpart of FedNCF.

Shape legend: B users of a batch, N items of each, U users, I items, D dims, H first hidden layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedecider.baselines.fitting import PairTraining, Pooled
from fedecider.baselines.mf import fit_on_pairs
from fedecider.bounds import NotNegative, Width, dataclass
from fedecider.evaluation.protocols import ScoreUsers
from fedecider.federation.streams import derive_seed
from fedecider.search_space import OneOf, Real, Space

GRID: tuple[dict, ...] = (
    {},
    {"weight_decay": 1e-3},
    {"hidden_sizes": (64, 32, 16)},
    {"learning_rate": 1e-3, "weight_decay": 0.0},
    {"embedding_size": 64},
    {"weight_decay": 1e-2},
    {"embedding_size": 16, "hidden_sizes": (32, 16)},
    {"hidden_sizes": (64,)},
)
SPACE: Space = {
    "embedding_size": OneOf((16, 32, 64)),
    "learning_rate": Real(0.0003, 0.03, log=True),
    "weight_decay": OneOf((0.0, 1e-3, 3e-3, 1e-2)),
}
USERS_PER_SLICE = 16
"""Users scored at once: the hidden layers of 16 x I items stay in cache, four times faster than 256."""


@dataclass(frozen=True)
class NcfConfig(PairTraining):
    """Settings of MLP-NCF, beside those of all baselines on pairs.

    Args:
        hidden_sizes: hidden layers of the scorer, at least one.
    """

    hidden_sizes: tuple[Width, ...] = (64, 32)
    weight_decay: NotNegative = 3e-3

    def __post_init__(self) -> None:
        if not self.hidden_sizes:
            raise ValueError("got no hidden_sizes, expected one layer at least")


class MlpScorer(nn.Module):
    """Logit of (u, i): an MLP on [p_u, q_i]; the first layer is split in a user and an item part, the same function."""

    def __init__(self, num_users: int, num_items: int, config: NcfConfig) -> None:
        super().__init__()
        size, hidden = config.embedding_size, config.hidden_sizes
        self.user_UD = nn.Parameter(0.1 * torch.randn(num_users, size))
        self.item_ID = nn.Parameter(0.1 * torch.randn(num_items, size))
        self.first_user = nn.Linear(size, hidden[0])
        self.first_item = nn.Linear(size, hidden[0], bias=False)
        layers: list[nn.Module] = []
        for width, following in zip(hidden, (*hidden[1:], 1), strict=True):
            layers += [nn.ReLU(), nn.Linear(width, following)]
        self.rest = nn.Sequential(*layers)

    def forward(self, user_BD: Tensor, item_BND: Tensor) -> Tensor:
        return self.rest(self.first_user(user_BD)[:, None] + self.first_item(item_BND))[..., 0]

    @torch.no_grad()
    def catalogue(self, user_B: Tensor) -> Tensor:
        """Logits of all items, (B, I)."""
        item_1IH = self.first_item(self.item_ID)[None]
        slices = self.first_user(self.user_UD[user_B]).split(USERS_PER_SLICE)
        return torch.cat([self.rest(user_BH[:, None] + item_1IH)[..., 0] for user_BH in slices])


def fit(data: Pooled, config: NcfConfig) -> ScoreUsers:
    """:func:`fit_on_pairs` of ``MLP([p_u, q_i])``, with binary cross-entropy.

    Differs from the paper: the MLP alone, as in FedNCF, without the matrix-factorisation half of NeuMF (no better on
    ML-100K); weight decay; no pre-training.
    """
    with torch.random.fork_rng():  # layers take no generator
        torch.manual_seed(derive_seed(data.seed, "init"))
        model = MlpScorer(len(data.sequences), data.num_items, config).to(data.device)

    def score(user_B: Tensor) -> Tensor:
        return model.catalogue(user_B.to(data.device))

    fit_on_pairs(model, (model.user_UD, model.item_ID), score, data, config)
    return score
