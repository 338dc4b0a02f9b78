"""A server that keeps one item table for each client, and mixes those of a cohort with weights of its own for each.

The server holds the tables of the whole cohort at once, and those of all clients between rounds: N I D numbers twice
(ML-100K with D = 16: twice 101 MB), since the next tables are made in the place of the uploads; beside them some
columns and a few V x V matrices. Nothing of this can be streamed, since every table goes into every mix.

Shape legend: N clients of the run, V clients of the cohort (U the ones a mix is for), K rows of mixing weights, C
clients of a block, A absent clients, I items, D dims, F = I D numbers of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Download, Tree, Upload
from fedecider.federation.wire import dense

TABLE = "item_table"
"""The client's table in uploads, and those of all clients (N, I, D) at the server."""
COLUMNS = 2048
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
    room_NF: Tensor
    """The tables as differences from ``mean_F`` (products of small numbers keep their digits) in the first V rows; with
    the others it is the room of the next tables (:func:`next_tables`)."""
    mean_F: Tensor
    """The mean, which is not weighted; or another origin (:func:`measured_from`)."""

    @property
    def table_VF(self) -> Tensor:
        """The differences alone, not copied."""
        return self.room_NF[: len(self.client_V)]


def start_server(start_ID: Tensor, num_clients: int) -> Tree:
    """Everybody's table is the common start."""
    personal_N = torch.zeros(num_clients, dtype=torch.bool, device=start_ID.device)
    return {TABLE: start_ID.expand(num_clients, *start_ID.shape), PERSONAL: personal_N}


def send_personal(server: Tree, clients: Tensor) -> Download:
    """To each client its own table."""
    return Download({}, {TABLE: server[TABLE][clients]})


def collect(server: Tree, uploads: Iterable[Upload], table: str = TABLE) -> Cohort | None:
    """The cohort's tables in one matrix; clients with a non-finite one are left out, None when all are.

    ``table`` is the server's tensor of all clients' tables, where it has another name; an upload by rows is completed
    with it.
    """
    start_NID = server[table]
    room_NF = start_NID.new_empty(len(start_NID), start_NID[0].numel())
    clients, weights, filled = [], [], 0
    for upload in uploads:
        whole = dense(upload, Download({}, {TABLE: start_NID[upload.clients]})) if upload.rows else upload
        kept_C = finite_clients(whole)
        clients.append(upload.clients[kept_C])
        weights.append(upload.weights.cpu()[kept_C].double())
        end = filled + int(kept_C.sum())
        room_NF[filled:end] = whole.tensors[TABLE].flatten(1)[kept_C.to(room_NF.device)]
        filled = end
    if not filled:
        return None
    weight_V, mean_F = torch.cat(weights), room_NF[:filled].mean(0)
    room_NF[:filled].sub_(mean_F)
    return Cohort(torch.cat(clients), weight_V / weight_V.sum(), room_NF, mean_F)


def measured_from(cohort: Cohort, origin_F: Tensor) -> Cohort:
    """The same tables as differences from ``origin_F``, in the place of the old differences."""
    cohort.table_VF.add_(cohort.mean_F - origin_F)
    return cohort._replace(mean_F=origin_F)


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


def mixed_table(cohort: Cohort, weight_V: Tensor) -> Tensor:
    """(F,) one mix ``sum_v w_v Q_v``, with weights that sum to one."""
    return torch.addmv(cohort.mean_F, cohort.table_VF.T, weight_V.to(cohort.table_VF))


def mixed_columns(cohort: Cohort, weight_KV: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some columns at a time of the mixes ``sum_v w_kv Q_v``, a row for each row of w; these sum to one.

    When columns have been handed out, those of ``cohort.table_VF`` may be overwritten.
    """
    weight_KV = weight_KV.to(cohort.table_VF)
    for start in range(0, cohort.table_VF.shape[1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        yield columns, torch.addmm(cohort.mean_F[columns], weight_KV, cohort.table_VF[:, columns])


class Mix(NamedTuple):
    """Weights of the mixes ``sum_v w_kv Q_v``, where clients may share one; rows sum to one."""

    weight_KV: Tensor
    row_V: Tensor | None = None
    """(V,) each client's row k; None: as many rows as clients, in their order."""


def shared_mix(weight_VV: Tensor) -> Mix:
    """The same mixes with equal rows once, where that halves them at least."""
    weight_KV, row_V = torch.unique(weight_VV, dim=0, return_inverse=True)
    return Mix(weight_KV, row_V) if 2 * len(weight_KV) <= len(weight_VV) else Mix(weight_VV)


def next_tables(old_NID: Tensor, cohort: Cohort, mix: Mix) -> Tensor:
    """(N, I, D) ``Q_u <- sum_v w_uv Q_v`` for the cohort; the others keep theirs. It takes K V F products.

    They are made in the room of the cohort, which is gone afterwards.
    """
    old_NF = old_NID.flatten(1)
    absent_A = torch.ones(len(old_NID), dtype=torch.bool).index_fill_(0, cohort.client_V.cpu(), False).nonzero()[:, 0]
    for columns, mixed_KF in mixed_columns(cohort, mix.weight_KV):
        cohort.room_NF[cohort.client_V, columns] = mixed_KF if mix.row_V is None else mixed_KF[mix.row_V]
        if len(absent_A):
            cohort.room_NF[absent_A, columns] = old_NF[absent_A, columns]
    return cohort.room_NF.view(old_NID.shape)


def mixed_server(server: Tree, cohort: Cohort, mix: Mix) -> Tree:
    """``Q_u <- sum_v w_uv Q_v`` for the cohort.

    Clients that are absent keep their older mix; those that never had one take the plain mean ``sum_v p_v Q_v`` of
    this round. The tables are made in the room of the cohort.
    """
    personal_N = server[PERSONAL].clone()
    personal_N[cohort.client_V] = True
    plain_F = None if bool(personal_N.all()) else mixed_table(cohort, cohort.share_V)
    tables_NID = next_tables(server[TABLE], cohort, mix)
    if plain_F is not None:
        tables_NID[~personal_N] = plain_F.view(tables_NID.shape[1:])
    return {TABLE: tables_NID, PERSONAL: personal_N}
