"""EASE (Steck, WWW 2019): item-item weights in closed form. A strong baseline that is fitted in seconds.

Shape legend: B users of a batch, U users, I items.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedecider.baselines.fitting import Valid
from fedecider.baselines.interactions import train_matrix
from fedecider.baselines.symmetric import invert, mirror
from fedecider.bounds import Positive, check
from fedecider.evaluation.protocols import Protocol, ScoreUsers, Sequences
from fedecider.tuning.space import Real, Space

GRID: tuple[dict, ...] = (
    {},
    {"regularisation": 500.0},
    {"regularisation": 100.0},
    {"regularisation": 1000.0},
    {"regularisation": 50.0},
    {"regularisation": 2000.0},
    {"regularisation": 20.0},
)
SPACE: Space = {"regularisation": Real(10.0, 5000.0, log=True)}


@dataclass(frozen=True)
class EaseConfig:
    """Settings of EASE.

    Args:
        regularisation: lambda, the L2 weight; scales with the number of users.
    """

    regularisation: Positive = 200.0

    def __post_init__(self) -> None:
        check(self)


def ease_weights(gram_II: Tensor, regularisation: float) -> Tensor:
    """B minimising ``||X - X B||_F^2 + regularisation ||B||_F^2`` with a zero diagonal, from ``gram_II = X^T X``.

    Float64 (I, I), on the device of ``gram_II``: P = (X^T X + lambda I)^-1, B = I - P diag(1 / diag P), so that
    column j predicts item j. Memory 8 I^2 bytes besides ``gram_II``, time I^3. ``ValueError`` when the sum is not
    positive definite, as happens when noise was added to ``gram_II``. Source: Steck 2019, equation 8. Differs from the
    paper: nothing.
    """
    return ease_weights_in_place(gram_II.to(torch.float64, copy=True), regularisation)


def ease_weights_in_place(square_II: Tensor, regularisation: float) -> Tensor:
    """:func:`ease_weights` of the Gram matrix in the lower triangle, in its number format, over the whole square."""
    invert(square_II, regularisation)
    own_I = square_II.diagonal().clone()
    return mirror(square_II).div_(own_I).neg_().fill_diagonal_(0.0)


def fit(
    sequences: Sequences,
    num_items: int,
    protocol: Protocol,
    config: EaseConfig,
    *,
    seed: int,
    device: str = "cpu",
    valid: Valid | None = None,
) -> ScoreUsers:
    """score(u, .) = x_u B, with x_u the distinct train items of u.

    Nothing is random and there are no epochs: ``protocol``, ``seed`` and ``valid`` are not used.
    """
    matrix_UI = train_matrix(sequences, num_items)
    gram_II = torch.from_numpy((matrix_UI.T @ matrix_UI).toarray(order="C")).to(device)
    weight_II = ease_weights_in_place(gram_II, config.regularisation)

    def score(user_B: Tensor) -> Tensor:
        return torch.from_numpy(matrix_UI[user_B.cpu().numpy()].toarray()).to(device) @ weight_II

    return score
