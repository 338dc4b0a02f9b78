"""Stacked tables, one for each client of a block: products, rows, what was received, what has diverged.

Shape legend: C clients of a block, A active clients of a step, B examples, I items, R touched rows, D dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embedding_fr.examples import ExampleBatch
from fedecider.bounds import Diverged
from fedecider.federation.method import Download, Tree


def inner_products(row_CBD: Tensor, vector_CD: Tensor) -> Tensor:
    """(C, B) products of each row with its client's vector; this order is several times faster than the other one."""
    return torch.bmm(vector_CD[:, None], row_CBD.mT)[:, 0]


def row_slopes(score_AR: Tensor, batch: ExampleBatch) -> tuple[Tensor, Tensor]:
    """(A, R) derivative of each client's loss by the score of each of its rows, and the logits (A, B).

    For scores that depend on the item alone: then every row is scored once, in order, and only these numbers are
    gathered and scattered, not rows of a table.
    """
    logit_AB = score_AR.gather(1, batch.item_AB)
    residual_AB = torch.sigmoid(logit_AB).sub_(batch.label_AB).mul_(batch.weight_AB)
    return torch.zeros_like(score_AR).scatter_add_(1, batch.item_AB, residual_AB), logit_AB


def weighted_sum(weight_AR: Tensor, table_ARD: Tensor) -> Tensor:
    """(A, D) ``sum_r w_r q_r``."""
    return torch.bmm(weight_AR[:, None], table_ARD)[:, 0]


def take(table: Tensor, item: Tensor | None) -> Tensor:
    """(C, B, D) rows ``item`` (C, B) of each client's table (C, R, D); None takes all rows."""
    if item is None:
        return table
    num_clients, num_rows, size = table.shape
    flat = table.reshape(num_clients * num_rows, size)
    return flat.index_select(0, _flat_rows(item, num_rows)).view(*item.shape, size)


def set_rows(table_CID: Tensor, row_CR: Tensor, value_CRD: Tensor) -> Tensor:
    """Write rows ``row_CR`` (-1 pads) of each client's table, in place."""
    real_CR = row_CR >= 0
    first_C1 = torch.arange(len(row_CR), device=row_CR.device)[:, None] * table_CID.shape[1]
    table_CID.view(-1, table_CID.shape[2]).index_copy_(0, (row_CR + first_C1)[real_CR], value_CRD[real_CR])
    return table_CID


def _flat_rows(item_CB: Tensor, num_rows: int) -> Tensor:
    """(C * B,) row numbers in the tables of all clients, one after the other."""
    first_C1 = torch.arange(len(item_CB), device=item_CB.device)[:, None] * num_rows
    return (item_CB + first_C1).reshape(-1)


def received(download: Download, name: str, num_clients: int) -> Tensor:
    """(C, ...) what every client got under ``name``; a shared tensor is expanded, not copied."""
    if name in download.per_client:
        return download.per_client[name]
    tensor = download.shared[name]
    return tensor.expand(num_clients, *tensor.shape)


def received_rows(download: Download, name: str, row_CR: Tensor) -> Tensor:
    """(C, R, D) a copy of the rows ``row_CR`` (-1 pads) of the table that every client got."""
    row = row_CR.clamp(min=0)
    if name in download.per_client:
        return take(download.per_client[name], row).clone()
    table = download.shared[name]
    return table.index_select(0, row.view(-1)).view(*row.shape, *table.shape[1:])


def check_finite(params: Tree, loss_C: Tensor, clients: Tensor, round: int) -> None:
    """``Diverged`` that names the first client, the round and the tensor when training has."""
    for name, tensor in {**params, "loss": loss_C}.items():
        finite_C = torch.isfinite(tensor.reshape(len(tensor), -1).sum(1))  # of a sum: twenty times faster
        if not bool(finite_C.all()):
            client = int(clients[int((~finite_C).int().argmax())])
            raise Diverged(
                f"got a non-finite {name} for client {client} in round {round}, "
                "expected numbers: the training diverged, lower learning_rate or item_learning_rate"
            )
