"""Implicit ALS (Hu, Koren and Volinsky, ICDM 2008, in the form of Rendle et al., RecSys 2022), centralised.

Shape legend: U users, I items, R rows of one side (users or items), C those of the other, D dims, B rows of a batch.
"""

from __future__ import annotations

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.baselines.fitting import Pooled, train_matrix
from fedecider.bounds import OneOrMore, Positive, Width, dataclass
from fedecider.evaluation.protocols import ScoreUsers
from fedecider.federation.streams import stream
from fedecider.search_space import OneOf, Real, Space

GRID: tuple[dict, ...] = (
    {},
    {"regularisation": 3e-3},
    {"unobserved_weight": 0.03},
    {"unobserved_weight": 0.3},
    {"regularisation": 3e-2},
    {"embedding_size": 128},
)
SPACE: Space = {
    "embedding_size": OneOf((32, 64, 128)),
    "unobserved_weight": Real(0.003, 1.0, log=True),
    "regularisation": Real(0.001, 0.1, log=True),
}
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class AlsConfig:
    """Settings of ALS.

    Args:
        embedding_size: dims of the user and item embeddings.
        unobserved_weight: weight of a pair that did not happen beside 1 of one that did.
        regularisation: weight of the squared norm of a row, times what its pairs weigh.
        num_epochs: times that both sides are solved.
    """

    embedding_size: Width = 64
    unobserved_weight: Positive = 0.1
    regularisation: Positive = 1e-2
    num_epochs: OneOrMore = 16


def fit(data: Pooled, config: AlsConfig) -> ScoreUsers:
    """Minimises sum over train pairs of (1 - p_u . q_i)^2, plus w times (p_u . q_i)^2 of all pairs, plus the norms.

    Rows are solved exactly, one side given the other; items start at N(0, 0.01 / D). ``valid`` is not used. Float64.
    Differs from the paper: the exponent of the frequency scaled norms is 1.
    """
    matrix_UI = train_matrix(data.sequences, data.num_items)
    matrix_IU = scipy.sparse.csr_array(matrix_UI.T)
    shape = (data.num_items, config.embedding_size)
    item_ID = torch.randn(shape, generator=stream(data.seed, "init")).double().numpy() * 0.1 / shape[1] ** 0.5
    for _ in range(config.num_epochs):
        user_UD = solved(matrix_UI, item_ID, config)
        item_ID = solved(matrix_IU, user_UD, config)

    def score(user_B: Tensor) -> Tensor:
        return torch.from_numpy(user_UD[user_B.numpy()] @ item_ID.T)

    return score


def solved(matrix_RC: scipy.sparse.csr_array, other_CD: np.ndarray, config: AlsConfig) -> np.ndarray:
    """(R, D) x_r = (sum of y_c y_c^T over its pairs + w Y^T Y + lambda (n_r + w C) I)^-1 times the sum of its y_c."""
    weight, size = config.unobserved_weight, other_CD.shape[1]
    shared_DD = weight * other_CD.T @ other_CD
    row_RD = np.zeros((matrix_RC.shape[0], size))
    for first in range(0, len(row_RD), ROWS_AT_ONCE):
        part_BC = matrix_RC[first : first + ROWS_AT_ONCE]
        own = [
            other_CD[part_BC.indices[low:high]] for low, high in zip(part_BC.indptr, part_BC.indptr[1:], strict=False)
        ]
        norm_B = config.regularisation * (np.diff(part_BC.indptr) + weight * len(other_CD))
        left_BDD = np.stack([y_ND.T @ y_ND for y_ND in own]) + shared_DD + norm_B[:, None, None] * np.eye(size)
        row_RD[first : first + ROWS_AT_ONCE] = np.linalg.solve(left_BDD, (part_BC @ other_CD)[..., None])[..., 0]
    return row_RD
