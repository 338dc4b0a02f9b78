"""Start values of tables, from named streams.

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

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree, Upload
from fedecider.federation.state import mapped_like
from fedecider.federation.streams import stream
from fedecider.federation.wire import dense

# Start values of tables, from named streams.


def normal(federation: Federation, training: EmbeddingTraining, purpose: str, *shape: int) -> Tensor:
    """(*shape, D) normal start values with ``init_std``; the same for the same seed and purpose."""
    size = (*shape, training.embedding_size)
    value = torch.randn(size, generator=stream(federation.seed, "init", purpose), dtype=torch.float64)
    return (value * training.init_std).to(torch.get_default_dtype()).to(federation.device)


def personal_table(start_ID: Tensor, num_clients: int, max_bytes: int) -> Tensor:
    """(N, I, D) one item table per client, all of them ``start_ID`` at first, for the local state.

    Above ``max_bytes`` it is kept in a file (on the CPU, whatever the device of ``start_ID``), else it is a variant
    that takes memory only when it is copied; numbers are the same either way.
    """
    if _fits(start_ID, num_clients, max_bytes):
        return start_ID.expand(num_clients, *start_ID.shape)
    return personal_rows(start_ID, num_clients, max_bytes).copy_(start_ID)


def personal_rows(like: Tensor, num_clients: int, max_bytes: int) -> Tensor:
    """(N, ...) room for a tensor like this of each client, uninitialised; above ``max_bytes`` in a file, on the CPU."""
    shape = (num_clients, *like.shape)
    return like.new_empty(shape) if _fits(like, num_clients, max_bytes) else mapped_like(like.cpu(), shape)


def _fits(like: Tensor, num_clients: int, max_bytes: int) -> bool:
    return num_clients * like.numel() * like.element_size() <= max_bytes


# A server that keeps one item table for each client, and mixes those of a cohort with weights of its own for
# each.

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


# Evaluation with the item table that a client trained last, beside the one that it would download next.

PERSONAL_TABLE = "personal_table"
"""Local state (N, I, D): the table as the client uploaded it, or the start table while it has not taken part."""


def with_personal_variant(method: FederatedMethod, federation: Federation) -> FederatedMethod:
    """``method`` with the variant ``personal`` before its own: its client scores with its ``item_table`` as it was
    before the averaging.

    The table is kept in full, N I D numbers: rows that the client did not touch are those of the download it started
    from, which the server has replaced since then.
    """

    def init() -> tuple[Tree, Tree]:
        server, local = method.init()
        table_NID = personal_table(server["item_table"], federation.num_clients, federation.table_bytes)
        return server, {**local, PERSONAL_TABLE: table_NID}

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        upload, mine, logs = method.client_update(round, download, _without_table(own), block)
        if "item_table" in upload.rows and "item_table" in download.shared:
            rows, values = upload.rows["item_table"], upload.tensors["item_table"]
            return upload, {**mine, PERSONAL_TABLE: RowUpdate(rows, values, download.shared["item_table"])}, logs
        return upload, {**mine, PERSONAL_TABLE: dense(upload, download).tensors["item_table"]}, logs

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        if variant == "personal":
            table_CID = own[PERSONAL_TABLE].to(federation.device)  # a table in a file is read into memory
            download = download._replace(per_client={**download.per_client, "item_table": table_CID})
            variant = method.variants[0]
        return method.positions(variant, download, _without_table(own), block, split)

    variants = ("personal", *method.variants)
    unread = (*method.unread, PERSONAL_TABLE)
    return method._replace(
        init=init, client_update=client_update, positions=positions, variants=variants, unread=unread
    )


def _without_table(own: Tree) -> Tree:
    return {name: tensor for name, tensor in own.items() if name != PERSONAL_TABLE}
