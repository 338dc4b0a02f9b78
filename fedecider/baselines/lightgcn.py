"""LightGCN (He et al., SIGIR 2020), centralised: the counterpart of the federated graph methods.

Shape legend: B users of a batch, N = 1 + num_negatives items of each, U users, I items, D dims.
"""

from __future__ import annotations

import warnings

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.baselines.fitting import (
    PairTraining,
    Pooled,
    fit_epochs,
    pairwise_loss,
    square_norms,
    train_matrix,
    training_batches,
)
from fedecider.baselines.mf import MatrixFactors
from fedecider.bounds import Depth, Negatives, Positive, Width, dataclass
from fedecider.evaluation.protocols import ScoreUsers
from fedecider.federation.streams import stream
from fedecider.search_space import OneOf, Real, Space, Whole

GRID: tuple[dict, ...] = (
    {},
    {"embedding_size": 128},
    {"num_layers": 3},
    {"weight_decay": 1e-4},
    {"num_negatives": 4},
    {"num_layers": 1},
    {"learning_rate": 3e-3, "num_epochs": 120},
)
SPACE: Space = {
    "embedding_size": OneOf((32, 64, 128)),
    "num_layers": Whole(1, 4),
    "learning_rate": Real(0.001, 0.1, log=True),
    "weight_decay": OneOf((0.0, 1e-5, 1e-4, 1e-3)),
    "num_negatives": OneOf((1, 2, 4, 8)),
}


@dataclass(frozen=True)
class LightgcnConfig(PairTraining):
    """Settings of LightGCN, beside those of all baselines on pairs. Every step propagates over the whole graph;
    ``weight_decay`` weighs the embeddings of layer 0.

    Args:
        num_layers: propagation steps.
    """

    embedding_size: Width = 64
    num_layers: Depth = 2
    learning_rate: Positive = 1e-2
    num_negatives: Negatives = 1


def normalised(matrix_UI: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Entries over ``sqrt(n_u n_i)``, the degrees of user and item."""
    scales = [np.maximum(np.asarray(matrix_UI.sum(axis)).ravel(), 1.0) ** -0.5 for axis in (1, 0)]
    return scipy.sparse.csr_array(scipy.sparse.diags_array(scales[0]) @ matrix_UI @ scipy.sparse.diags_array(scales[1]))


def propagate(graph_UI: Tensor, graph_IU: Tensor, tables: tuple[Tensor, Tensor], num_layers: int) -> list[Tensor]:
    """Mean over layers 0 to ``num_layers`` of the user and the item table, (U, D) and (I, D).

    Layer k + 1: users get ``R`` times the items of layer k, items ``R^T`` times the users, R from :func:`normalised`.
    Source: equations 3 and 4, with the uniform layer weights of the paper. Differs from the paper: nothing.
    """
    user_UD, item_ID = tables
    sums = [user_UD, item_ID]
    for _ in range(num_layers):
        user_UD, item_ID = graph_UI @ item_ID, graph_IU @ user_UD
        sums = [sums[0] + user_UD, sums[1] + item_ID]
    return [total / (num_layers + 1) for total in sums]


def fit(data: Pooled, config: LightgcnConfig) -> ScoreUsers:
    """Adam on the mean BPR loss of the propagated tables + weight_decay times the squared norms of layer 0.

    The propagation is linear and symmetric, so the gradient of layer 0 is the propagation of the gradient of the
    result: no graph of sparse products is kept. Differs from the paper: batches and learning rate (theirs: 1024, 0.001,
    a thousand epochs).
    """
    sizes = len(data.sequences), data.num_items, config.embedding_size
    model = MatrixFactors(*sizes, stream(data.seed, "init")).to(data.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    batches = training_batches(data, config)
    matrix_UI = normalised(train_matrix(data.sequences, data.num_items))
    graphs = sparse_tensor(matrix_UI, data.device), sparse_tensor(scipy.sparse.csr_array(matrix_UI.T), data.device)

    def run_epoch(epoch: int) -> None:
        for user_B, item_BN in batches(epoch):
            start = (model.user_UD.detach(), model.item_ID.detach())
            user_UD, item_ID = (table.requires_grad_() for table in propagate(*graphs, start, config.num_layers))
            loss = pairwise_loss((item_ID[item_BN] @ user_UD[user_B][:, :, None])[..., 0])
            slope_UD, slope_ID = torch.autograd.grad(loss, (user_UD, item_ID))
            model.user_UD.grad, model.item_ID.grad = propagate(*graphs, (slope_UD, slope_ID), config.num_layers)
            if config.weight_decay:
                norms = square_norms(model.user_UD[user_B], model.item_ID[item_BN])
                (config.weight_decay * norms).backward()  # adds to the gradients
            optimizer.step()

    @torch.no_grad()
    def score(user_B: Tensor) -> Tensor:
        user_UD, item_ID = propagate(*graphs, (model.user_UD, model.item_ID), config.num_layers)
        return user_UD[user_B.to(data.device)] @ item_ID.T

    fit_epochs(model, run_epoch, score, data.valid, config.num_epochs, config.patience)
    return score


def sparse_tensor(matrix: scipy.sparse.csr_array, device: str) -> Tensor:
    """A float32 CSR tensor: twice as fast as COO on a CPU."""
    rows, columns = (torch.from_numpy(part.astype(np.int64)) for part in (matrix.indptr, matrix.indices))
    values = torch.from_numpy(matrix.data.astype(np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "beta state": products with a dense matrix are tested here
        return torch.sparse_csr_tensor(rows, columns, values, size=matrix.shape, device=device)
