"""A server that keeps one item table for each client, and mixes those of a cohort with weights of its own for each.

The server holds the tables of the whole cohort at once, and those of all clients between rounds: N I D numbers twice
(ML-100K with D = 16: twice 101 MB). Nothing of this can be streamed, since every table goes into every mix.

Shape legend: N clients of the run, V clients of the cohort (U the ones a mix is for), C clients of a block, I items,
D dims, F = I D numbers of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Download, Tree, Upload
from fedecider.federation.wire import dense

COLUMNS = 4096
"""Numbers of each table that are mixed at a time."""
ROWS = 128
"""Clients whose distances to all others are computed at a time."""
PERSONAL = "is_personal"
"""Server tensor (N,) bool: clients whose table is a mix that was made for them."""


class Cohort(NamedTuple):
    """The uploads of a round, all of them."""

    client_V: Tensor
    share_V: Tensor
    """p_v: the client's part of all train items, float64."""
    table_VF: Tensor
    """Differences from ``mean_F``: products of small numbers keep their digits."""
    mean_F: Tensor
    """The mean, which is not weighted; or another origin (:func:`measured_from`)."""


def start_server(start_ID: Tensor, num_clients: int, table: str = "item_table") -> Tree:
    """Everybody's table is the common start."""
    personal_N = torch.zeros(num_clients, dtype=torch.bool, device=start_ID.device)
    return {table: start_ID.expand(num_clients, *start_ID.shape), PERSONAL: personal_N}


def send_personal(server: Tree, clients: Tensor, table: str = "item_table") -> Download:
    """To each client its own table."""
    return Download({}, {table: server[table][clients]})


def collect(server: Tree, uploads: Iterable[Upload], table: str = "item_table") -> Cohort | None:
    """The cohort's tables in one (V, F) matrix; clients with a non-finite one are left out, None when all are."""
    start_NID = server[table]
    matrix_NF = start_NID.new_empty(len(start_NID), start_NID[0].numel())
    clients, weights, filled = [], [], 0
    for upload in uploads:
        whole = dense(upload, send_personal(server, upload.clients, table)) if upload.rows else upload
        kept_C = finite_clients(whole)
        clients.append(upload.clients[kept_C])
        weights.append(upload.weights.cpu()[kept_C].double())
        end = filled + int(kept_C.sum())
        matrix_NF[filled:end] = whole.tensors[table].flatten(1)[kept_C.to(matrix_NF.device)]
        filled = end
    if not filled:
        return None
    weight_V, table_VF = torch.cat(weights), matrix_NF[:filled]
    mean_F = table_VF.mean(0)
    return Cohort(torch.cat(clients), weight_V / weight_V.sum(), table_VF.sub_(mean_F), mean_F)


def measured_from(cohort: Cohort, origin_F: Tensor) -> Cohort:
    """The same tables as differences from ``origin_F``, in the place of the old differences."""
    return cohort._replace(table_VF=cohort.table_VF.add_(cohort.mean_F - origin_F), mean_F=origin_F)


def gram_matrix(table_VF: Tensor) -> Tensor:
    """(V, V) float64 ``<q_u, q_v>``; its upper half is computed, in the type of the tables."""
    num_clients = len(table_VF)
    gram_VV = table_VF.new_zeros(num_clients, num_clients)
    for start in range(0, num_clients, ROWS):
        gram_VV[start : start + ROWS, start:] = table_VF[start : start + ROWS] @ table_VF[start:].T
    gram_VV = gram_VV.double()
    return gram_VV.triu() + gram_VV.triu(1).T


def squared_distances(table_VF: Tensor) -> Tensor:
    """(V, V) float64 ``||q_u - q_v||^2``, from the Gram matrix."""
    gram_VV = gram_matrix(table_VF)
    square_V = gram_VV.diagonal()
    distance_VV = (square_V[:, None] + square_V - 2.0 * gram_VV).clamp(min=0.0)
    return distance_VV.fill_diagonal_(0.0)


def mixed_server(server: Tree, cohort: Cohort, weights: Callable[[Cohort], Tensor], table: str = "item_table") -> Tree:
    """``Q_u <- sum_v w_uv Q_v`` for the cohort, with rows of w that sum to one.

    Clients that are absent keep their older mix; those that never had one take the plain mean ``sum_v p_v Q_v`` of
    this round. Overwrites ``cohort.table_VF``.
    """
    old_NID = server[table]
    plain_F = torch.mv(cohort.table_VF.T, cohort.share_V.to(cohort.table_VF)).add_(cohort.mean_F)
    personal_N = server[PERSONAL].clone()
    personal_N[cohort.client_V] = True
    tables_NID = torch.where(personal_N[:, None, None], old_NID, plain_F.view(old_NID.shape[1:]))
    tables_NID[cohort.client_V] = mix_in_place(cohort, weights(cohort)).view(-1, *old_NID.shape[1:])
    return {table: tables_NID, PERSONAL: personal_N}


def mix_in_place(cohort: Cohort, weight_VV: Tensor) -> Tensor:
    """(V, F) ``sum_v w_uv q_v`` in the place of the cohort's tables; rows of w sum to one."""
    table_VF, weight_VV = cohort.table_VF, weight_VV.to(cohort.table_VF)
    for start in range(0, table_VF.shape[1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        table_VF[:, columns] = torch.mm(weight_VV, table_VF[:, columns]).add_(cohort.mean_F[columns])
    return table_VF
