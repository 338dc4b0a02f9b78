"""Rows of the own catalogue only travel: adapters of the output and of the table, whose B has a row for every token.

Where a target is compared with the items of its own catalogue alone (``softmax catalogue``), a client changes rows of
that catalogue only, and of the words that its prompts hold where the embeddings are adapted too. Catalogues and wording
are published, so that the places of these rows say nothing about a client, and both sides know them.

Shape legend: K clients of the run, C clients of a block, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import only_rows, received
from fedecider.lora.adapters import Shapes
from fedecider.lora.tied_table import HEAD
from idgen.samples import Task

TABLE = f"{HEAD}.lora_b"
"""Name of the factor that holds a row for every token."""

CommonRows = Sequence[Sequence[int]]
"""(K, K) numbers of rows of `TABLE` that belong to both of two clients; empty where everybody holds all rows."""


def rows_of_clients(shapes: Shapes, tasks: Sequence[Task]) -> Tree:
    """``TABLE`` -> (K, V) bool, the rows that training over the own catalogue may change; {} where that is any row.

    Prompts that hold texts of users may hold any token. Which ones these are would be told by the places of the rows
    that are sent, so whole tables travel then.

    Raises:
        ValueError: an item ID of several tokens.
    """
    if HEAD not in shapes or (shapes[HEAD].is_table and any(task.user_texts is not None for task in tasks)):
        return {}
    own_KV = torch.zeros(len(tasks), shapes[HEAD].out_features, dtype=torch.bool)
    for client, task in enumerate(tasks):
        own_KV[client, task.one_token_catalogue()] = True
        if shapes[HEAD].is_table:
            own_KV[client, task.wording_tokens()] = True
    return {TABLE: own_KV}


def sends_own_rows(method: FederatedMethod, own_rows: Tree) -> FederatedMethod:
    """``method`` whose clients are sent, know and send no other rows of a table than their own; {} changes nothing.

    ``own_rows``: tensor name -> (K, V). A table (V, R) travels by the receiver's own rows; of a stack of all clients'
    tables (K, V, R), by those that are the receiver's and that client's. Every other row is zero for who does not get
    it. Clients of a block are handled one by one, since they do not know the same rows.
    """
    if not own_rows:
        return method

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        download = method.broadcast(round, server, clients)
        tables = {**download.shared, **download.per_client}
        marks = {
            name: _marks(own_KV, clients, tables[name], name in download.per_client)
            for name, own_KV in own_rows.items()
            if name in tables
        }
        for name, sent in download.sent_rows.items():
            marks[name] = marks[name] & sent[..., None] if name in marks else sent
        return download._replace(sent_rows=marks)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        uploads: list[Upload] = []
        rows: list[Any] = []  # whole rows: these methods keep no tables of thousands of clients
        logs: list[dict] = []
        for row in range(len(block.clients)):
            upload, new_own, log = method.client_update(round, *_alone(download, own, block, row))
            uploads.append(upload)
            rows.append(new_own)
            logs += log
        tensors, marks = _joined([upload.tensors for upload in uploads]), {}
        for name, own_KV in own_rows.items():
            if name in tensors:
                marks[name] = own_KV[block.clients]
                tensors[name] = only_rows(tensors[name], marks[name])
        weight_C = torch.cat([upload.weights for upload in uploads])
        return Upload(block.clients, weight_C, tensors, sent_rows=marks), _joined(rows), logs

    def positions(view: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        found = []
        for row in range(len(block.clients)):
            found += method.positions(view, *_alone(download, own, block, row), split)
        return found

    return method._replace(broadcast=broadcast, client_update=client_update, positions=positions)


def common_rows(own_rows: Tree) -> CommonRows:
    """How many rows of the table two clients have in common, for all pairs; empty where everybody holds all."""
    if TABLE not in own_rows:
        return []
    own_KV = own_rows[TABLE].double()
    return (own_KV @ own_KV.T).long().tolist()


def travelling_shapes(shapes: Shapes, common: CommonRows, client: int, num_clients: int) -> tuple[Shapes, list[Shapes]]:
    """What a method's ``scalars`` asks for: the client's own adapters as they travel, and what it reads of each
    client's."""
    if not common:
        return shapes, [shapes] * num_clients
    peers: list[Shapes] = [
        {**shapes, HEAD: shapes[HEAD]._replace(out_features=num_rows)} for num_rows in common[client]
    ]
    return peers[client], peers


def _marks(own_KV: Tensor, clients: Tensor, table: Tensor, per_client: bool) -> Tensor:
    """(C, V) for one table, shared or per client; (C, K, V) for a shared stack of all clients' tables."""
    own_CV = own_KV[clients]
    return own_CV if per_client or table.dim() == 2 else own_CV[:, None] & own_KV


def _alone(download: Download, own: Tree, block: Block, row: int) -> tuple[Download, Tree, Block]:
    here = slice(row, row + 1)
    rows = {name: tensor[here] for name, tensor in own.items()}
    return received(download, row), rows, block._replace(clients=block.clients[here])


def _joined(trees: Sequence[Tree]) -> Tree:
    """Trees of blocks of one as the tree of their block."""
    return {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}
