"""The common form of a federated embedding model: train locally, upload the shared tensors, average them.

A method of this form is a :class:`Model` and a few values; the file of the method says which.

Shape legend: N clients of the run, C clients of a block, I items, D dims, B examples, R touched rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import EmbeddingTraining
from embedding_fr.examples import round_examples
from embedding_fr.kernels import Kernel
from embedding_fr.local_training import Gradients, Logits, Objective, plain_gradients, train_epochs
from embedding_fr.optimisers import Optimiser
from embedding_fr.stacked import check_finite, received, received_rows
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload


class Model(NamedTuple):
    """What a client trains and how it scores items."""

    shared: Tree
    """Start of the server tree: item tables (I, D) and whatever else is averaged."""
    private: Tree
    """Start of the local tree: every tensor leads with N and is never uploaded."""
    logits: Logits
    tables: tuple[str, ...] = ("item_table",)
    """Shared tensors that are item tables, held by their touched rows during local training."""
    scores: Callable[[Tree, Tree], Tensor] | None = None
    """Server tree, own rows -> (C, I) logits of the whole catalogue, where what clients share can be computed once."""
    by_row: bool = False
    gradients: Gradients = plain_gradients
    kernel: Kernel | None = None

    @property
    def objective(self) -> Objective:
        """What a client minimises."""
        return Objective(self.logits, by_row=self.by_row, gradients=self.gradients, kernel=self.kernel)


def averaged(
    name: str,
    model: Model,
    federation: Federation,
    training: EmbeddingTraining,
    *,
    optimiser: Optimiser,
    uniform: bool = False,
) -> FederatedMethod:
    """Local epochs on (shared, private), then ``theta <- sum_u w_u theta_u / sum_u w_u`` over the shared tensors.

    ``uniform`` weighs clients alike instead of by train items. The optimiser's state is fresh in every round. Variant
    ``global``: the shared tensors after aggregation with the private ones of the client.
    """

    def init() -> tuple[Tree, Tree]:
        return dict(model.shared), dict(model.private)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        drawn = round_examples(federation, training, block, round)
        params = {name: tensor.clone() for name, tensor in own.items()}
        params |= received_model(model, download, drawn.row_CR)
        loss_C = train_epochs(model.objective, params, drawn, training, optimiser)
        check_finite(params, loss_C, block.clients, round)
        upload = Upload(
            block.clients,
            torch.ones_like(loss_C) if uniform else block.data.num_train_C.to(loss_C.dtype),
            {shared: params[shared] for shared in model.shared},
            rows=dict.fromkeys(model.tables, drawn.row_CR),
        )
        return upload, {name: params[name] for name in own}, [{"loss": loss} for loss in loss_C.tolist()]

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        return rank_users(score_all(model, download, own), block.data, split, federation.protocol)

    return FederatedMethod(
        name,
        init,
        send_server,
        client_update,
        mean_over_clients(uniform=uniform),
        positions,
        ("global",),
        upload_like=lambda round, server: {shared: server[shared] for shared in model.shared},
        takes_mean=True,
    )


def send_server(round: int, server: Tree, clients: Tensor) -> Download:
    """All of the server's tensors, the same to everybody."""
    return Download(server)


def mean_over_clients(uniform: bool = False) -> Callable[[int, Tree, Iterable[Upload]], Tree]:
    """Server tensors become the mean of the uploads, by the clients' weights or all alike."""
    return lambda round, server, uploads: weighted_mean(uploads, fallback=server, uniform=uniform)


def received_model(model: Model, download: Download, row_CR: Tensor) -> Tree:
    """Copies of what the clients got: of item tables the rows ``row_CR``, networks in full."""
    return {
        name: received_rows(download, name, row_CR)
        if name in model.tables
        else received(download, name, len(row_CR)).clone()
        for name in model.shared
    }


def score_all(model: Model, download: Download, own: Tree) -> Tensor:
    """(C, I) logits of the whole catalogue from what the clients got and their own rows."""
    if model.scores is not None and not download.per_client:
        with torch.no_grad():
            return model.scores(download.shared, own)
    num_clients = len(next(iter({**own, **download.per_client}.values())))
    params = {**own, **{shared: received(download, shared, num_clients) for shared in model.shared}}
    with torch.no_grad():
        return model.logits(params, None)
