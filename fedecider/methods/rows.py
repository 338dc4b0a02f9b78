"""Rows of the own catalogue only travel: adapters of the output and of the table, whose B has a row for every token.

Where item IDs are one token each, a target is compared with the items of its own catalogue alone: a client changes rows
of that catalogue only, and of the words that its prompts hold where the embeddings are adapted too. Catalogues and
templates are published, so that the places of these rows say nothing about a client's users, and both sides know them.

Of methods whose server takes a mean, a row that one client alone has stays with it: there is nobody to average it with.

Shape legend: K clients of the run, C clients of a block, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.secure_rounds import SecureSums
from fedecider.federation.secure_sum import THRESHOLD
from fedecider.federation.wire import only_rows, received, take_row
from fedecider.models.adapters import Shapes
from fedecider.models.tied_table import HEAD
from idgen.tasks import Task

TABLE = f"{HEAD}.lora_b"
"""Name of the factor that holds a row for every token."""

HOME = "home."
"""What names of the local state start with that hold what of a table stays with a client."""

CommonRows = Sequence[Sequence[int]]
"""(K, K) numbers of rows of `TABLE` that belong to both of two clients; empty where everybody holds all rows."""


def rows_of_clients(shapes: Shapes, tasks: Sequence[Task]) -> Tree:
    """``TABLE`` -> (K, V) bool, the rows that training over the own catalogue may change; {} where that is any row."""
    if HEAD not in shapes:
        return {}
    own_KV = torch.zeros(len(tasks), shapes[HEAD].out_features, dtype=torch.bool)
    for client, task in enumerate(tasks):
        own_KV[client, task.id_tokens()] = True
        if shapes[HEAD].is_table:
            own_KV[client, task.template_tokens()] = True
    return {TABLE: own_KV}


def rows_at_home(shapes: Shapes, tasks: Sequence[Task]) -> Tree:
    """Factor name -> (K, n) bool, what of the adapter of a table a mean leaves with each client; {} where all is sent.

    That is the rows that it alone has; and where it has no item in common with anybody the whole adapter, A too, since
    a mean of A would join what has nothing to do with each other.
    """
    own_rows = rows_of_clients(shapes, tasks)
    if not own_rows or len(tasks) == 1:
        return {}
    own_KV, item_KV = own_rows[TABLE], torch.zeros_like(own_rows[TABLE])
    for client, task in enumerate(tasks):
        item_KV[client, task.id_tokens()] = True
    apart_K = ~(item_KV & (item_KV.sum(0) > 1)).any(1)
    home_KV = own_KV & (apart_K[:, None] | (own_KV.sum(0) == 1))
    factor_a = {f"{HEAD}.lora_a": apart_K[:, None].expand(-1, shapes[HEAD].rank)} if apart_K.any() else {}
    return {TABLE: home_KV, **factor_a} if home_KV.any() else {}


class Rows(NamedTuple):
    """Which rows of tables are whose."""

    own: Tree = {}  # noqa: RUF012 (never written to)
    """Factor name -> (K, V) bool: its rows that a client's training may change; factors that are not named it may
    change anywhere."""
    home: Tree = {}  # noqa: RUF012 (never written to)
    """Factor name -> (K, n) bool: what of it stays with each client where a mean is taken (`rows_at_home`)."""
    hidden: bool = False
    """Whether messages are not to tell whose rows they are about: in secure sums."""


class Travelling(NamedTuple):
    """Tensor name -> (K, n) bool; {} where all of every tensor travels."""

    sent: Tree
    """The rows that are a client's, and not at home: those that its messages are about."""
    in_messages: Tree
    """The rows that its messages have; more of them where these are not to tell which are its own."""
    home: Tree


def travelling_rows(rows: Rows, takes_mean: bool) -> Travelling:
    """What travels of tables. Where single uploads are hidden, all messages have the rows of all clients."""
    home = rows.home if takes_mean else {}
    everything = {name: torch.ones_like(home[name]) for name in home if name not in rows.own}
    sent = {name: mark & ~home[name] if name in home else mark for name, mark in {**rows.own, **everything}.items()}
    in_messages = {name: mark.any(0).expand_as(mark) for name, mark in sent.items()} if rows.hidden else sent
    return Travelling(sent, in_messages, home)


def secure_sums(rows: Rows, takes_mean: bool, participation: float, seed: int) -> SecureSums:
    """How uploads with these rows are summed. Where clients sell parts of a catalogue, over all of them or not at all:
    the difference of the row weights of two cohorts are the rows of who was away.

    Raises:
        ValueError: clients sell parts of a catalogue, and not all of them take part in every round.
    """
    travelling = travelling_rows(rows, takes_mean)
    sell_parts = any(bool((mark != mark[:1]).any()) for mark in travelling.sent.values())
    if participation < 1.0 and sell_parts:
        raise ValueError(
            f"got secure_sum with participation {participation} and clients that sell parts of a catalogue, expected "
            "participation 1: sums over changing cohorts would tell who sells what"
        )
    return SecureSums(seed, threshold=1.0 if sell_parts else THRESHOLD, own_rows=travelling.in_messages)


def as_known(download: Download, own: Tree, sent: Tree, client: int) -> Download:
    """What ``client`` makes of a download that it alone has got: its rows, and what it has at home of the others."""
    shared = dict(download.shared)
    for name in sorted(sent.keys() & shared.keys()):
        if shared[name].dim() > 2:
            continue  # the tables of all clients, which hold what is this one's already
        shared[name] = only_rows(shared[name], sent[name][client])
        if HOME + name in own:
            shared[name] = torch.where(sent[name][client][:, None], shared[name], own[HOME + name])
    return download._replace(shared=shared)


def sends_own_rows(method: FederatedMethod, rows: Travelling) -> FederatedMethod:
    """``method`` whose clients are sent, know and send no other rows of a table than their own; {} changes nothing.

    A table (V, R) travels by the receiver's own rows; of a stack of all clients' tables (K, V, R), by those that are
    the receiver's and that client's. Every other row is zero for who does not get it. What is at home is what the
    client would have sent of it, as if its upload alone had entered the mean. Clients of a block are handled one by
    one, since they do not know the same rows.
    """
    if not rows.sent:
        return method

    def init() -> tuple[Tree, Tree]:
        server, local = method.init()
        kept = {name: home for name, home in rows.home.items() if name in server}
        started = {name: server[name].expand(len(home), *server[name].shape) for name, home in kept.items()}
        return server, local | {HOME + name: only_rows(tensor, kept[name]) for name, tensor in started.items()}

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        download = method.broadcast(round, server, clients)
        tables = {**download.shared, **download.per_client}
        marks = {
            name: _marks(own_KV, clients, tables[name], name in download.per_client)
            for name, own_KV in rows.in_messages.items()
            if name in tables
        }
        for name, sent in download.sent_rows.items():
            marks[name] = marks[name] & sent[..., None] if name in marks else sent
        return download._replace(sent_rows=marks)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        uploads: list[Upload] = []
        states: list[Any] = []  # whole rows: these methods keep no tables of thousands of clients
        logs: list[dict] = []
        for row in range(len(block.clients)):
            known, before, alone = _alone(download, own, block, row, rows.sent)
            upload, new_own, log = method.client_update(round, known, before, alone)
            uploads.append(upload)
            states.append({**new_own, **_kept(upload, before, rows.home)})
            logs += log
        tensors, marks = _joined([upload.tensors for upload in uploads]), {}
        for name, own_KV in rows.sent.items():
            if name in tensors:
                marks[name] = own_KV[block.clients]
                tensors[name] = only_rows(tensors[name], marks[name])
        weight_C = torch.cat([upload.weights for upload in uploads])
        return Upload(block.clients, weight_C, tensors, sent_rows=marks), _joined(states), logs

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        found = []
        for row in range(len(block.clients)):
            found += method.positions(variant, *_alone(download, own, block, row, rows.sent), split)
        return found

    return method._replace(
        init=init if rows.home else method.init,
        broadcast=broadcast,
        client_update=client_update,
        positions=positions,
    )


def _kept(upload: Upload, before: Tree, home: Tree) -> Tree:
    """What stays at home of the upload of one client: its state before where nothing usable is there."""
    found = {name: tensor for name, tensor in before.items() if name.startswith(HOME)}
    for name in sorted(home.keys() & upload.tensors.keys()):
        if HOME + name in found and bool(torch.isfinite(upload.tensors[name]).all()):
            found[HOME + name] = only_rows(upload.tensors[name], home[name][upload.clients])
    return found


def common_rows(sent: Tree) -> CommonRows:
    """How many rows of the table travel for both of two clients, for all pairs; empty where everybody sends all."""
    if TABLE not in sent:
        return []
    own_KV = sent[TABLE].double()
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


def _alone(download: Download, own: Tree, block: Block, row: int, sent: Tree) -> tuple[Download, Tree, Block]:
    here = slice(row, row + 1)
    rows = {name: tensor[here] for name, tensor in own.items()}
    known = as_known(received(download, row), take_row(own, row), sent, int(block.clients[row]))
    return known, rows, block._replace(clients=block.clients[here])


def _joined(trees: Sequence[Tree]) -> Tree:
    """Trees of blocks of one as the tree of their block."""
    return {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}
