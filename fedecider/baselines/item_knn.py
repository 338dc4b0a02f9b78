"""Item-item cosine neighbours with shrinkage (Sarwar et al., 2001; shrinkage as in Bell and Koren, 2007).

Shape legend: B users of a batch, U users, I items, T target items of a block.
"""

from __future__ import annotations

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.baselines.fitting import Pooled, train_matrix
from fedecider.bounds import NotNegative, OneOrMore, dataclass
from fedecider.evaluation.protocols import ScoreUsers
from fedecider.search_space import Real, Space, Whole

GRID: tuple[dict, ...] = (
    {},
    {"num_neighbours": 50},
    {"shrinkage": 0.0},
    {"shrinkage": 50.0},
    {"num_neighbours": 200},
    {"num_neighbours": 20, "shrinkage": 0.0},
)
SPACE: Space = {"num_neighbours": Whole(5, 500, log=True), "shrinkage": Real(0.0, 200.0)}
ITEMS_PER_BLOCK = 1024


@dataclass(frozen=True)
class ItemKnnConfig:
    """Settings of item-kNN.

    Args:
        num_neighbours: neighbours kept of each item that is scored.
        shrinkage: added to the denominator, so that few common users make a small similarity.
    """

    num_neighbours: OneOrMore = 100
    shrinkage: NotNegative = 10.0


def fit(data: Pooled, config: ItemKnnConfig) -> ScoreUsers:
    """score(u, i) = sum of s_ij over the train items j of u among the neighbours of i.

    Nothing is random and nothing is trained: protocol, seed and ``valid`` are not used; float64 on the CPU.
    """
    matrix_UI = train_matrix(data.sequences, data.num_items)
    neighbour_II = neighbour_similarities(matrix_UI, config.num_neighbours, config.shrinkage)

    def score(user_B: Tensor) -> Tensor:
        return torch.from_numpy((matrix_UI[user_B.numpy()] @ neighbour_II.T).toarray())

    return score


def neighbour_similarities(
    matrix_UI: scipy.sparse.csr_array, num_neighbours: int, shrinkage: float
) -> scipy.sparse.csr_array:
    """Sparse (I, I); row i: ``s_ij = n_ij / (sqrt(n_i n_j) + shrinkage)`` of the ``num_neighbours`` nearest j.

    n_ij counts common users. The diagonal is zero. Similarities that tie with the last kept one are kept as well, so
    that the result does not depend on how items are numbered.
    """
    by_item_IU = matrix_UI.T.tocsr()
    root_I = np.sqrt(np.asarray(matrix_UI.sum(0)).ravel())
    rows = []
    for start in range(0, len(root_I), ITEMS_PER_BLOCK):
        common = (by_item_IU[start : start + ITEMS_PER_BLOCK] @ matrix_UI).tocoo()
        target, other = common.row + start, common.col
        similarity = common.data / (root_I[target] * root_I[other] + shrinkage)
        similarity[target == other] = 0.0
        dense_TI = scipy.sparse.coo_array((similarity, (common.row, common.col)), shape=common.shape).toarray()
        if num_neighbours < dense_TI.shape[1]:
            last_T1 = -np.partition(-dense_TI, num_neighbours - 1, axis=1)[:, num_neighbours - 1, None]
            dense_TI[dense_TI < last_T1] = 0.0
        rows.append(scipy.sparse.csr_array(dense_TI))
    return scipy.sparse.csr_array(scipy.sparse.vstack(rows))
