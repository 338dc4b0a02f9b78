"""Any method with federation off: every client trains on from its own last upload, and nothing leaves it.

Shape legend: N clients of the run, C clients of a block or of a part of the run.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.tables import personal_rows, personal_table
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree, Upload

KEPT = "kept."
"""Prefix of the local tensors that hold a client's own last upload."""


def local_only(method: FederatedMethod, federation: Federation) -> FederatedMethod:
    """``method`` with the server's tensors replaced by the client's own, which are local state (N, ...).

    What a client receives next is what it uploaded, or what ``method.alone`` makes of that. A method whose server sends
    one tensor to all starts every client from it; one that sends each client its own rows
    (``per_client`` downloads) starts from those rows. The server's tensors never change, and neither does a client's
    copy of a tensor that it receives but never uploads.

    Raises:
        ValueError: in the first round, when clients upload what they do not receive under the same name (gradients,
            Gram matrices) and the method has no ``alone``: without a server nobody turns that into the next model.
    """

    def init() -> tuple[Tree, Tree]:
        server, local = method.init()
        of_one = method.broadcast(1, server, torch.arange(1))
        alike = {
            name: personal_table(value, federation.num_clients, federation.table_bytes)
            for name, value in of_one.shared.items()
        }
        first = {**alike, **first_rows(method, server, of_one.per_client, federation)}
        return server, {**local, **{KEPT + name: value for name, value in first.items()}}

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download({})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        mine, kept = _split(own)
        received = Download({}, {name: tensor.to(federation.device) for name, tensor in kept.items()})
        upload, new, logs = method.client_update(round, received, mine, block)
        if method.alone is None:
            _check_names(method.name, upload.tensors, kept)
            stays: NewRows = {
                name: RowUpdate(upload.rows[name], tensor) if name in upload.rows else tensor
                for name, tensor in upload.tensors.items()
            }
        else:
            stays = method.alone(round, received.per_client, upload)
        own_next = {KEPT + name: tensor for name, tensor in stays.items()}
        return upload._replace(tensors={}, rows={}, payload={}, num_rows={}), {**new, **own_next}, logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return server

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        mine, kept = _split(own)
        kept = {name: tensor.to(federation.device) for name, tensor in kept.items()}
        return method.positions(variant, Download({}, kept), mine, block, split)

    return method._replace(
        name=f"{method.name}, federation off",
        init=init,
        broadcast=broadcast,
        client_update=client_update,
        server_aggregate=server_aggregate,
        positions=positions,
        upload_like=lambda round, server: {},
        takes_mean=False,
        cohort=None,
    )


def first_rows(method: FederatedMethod, server: Tree, of_one: Tree, federation: Federation) -> Tree:
    """(N, ...) what each client alone receives in round 1, which looks like ``of_one``: asked for by parts within the
    budget for a table, and written into a file where it is larger."""
    if not of_one:
        return {}
    num_clients, budget = federation.num_clients, federation.table_bytes
    first = {name: personal_rows(value[0], num_clients, budget) for name, value in of_one.items()}
    largest = max(value.numel() * value.element_size() for value in of_one.values())
    for client_C in torch.arange(num_clients).split(min(num_clients, max(1, budget // largest))):
        for name, value in method.broadcast(1, server, client_C).per_client.items():
            first[name][client_C] = value.to(first[name].device)
    return first


def _check_names(method: str, uploaded: Tree, kept: Tree) -> None:
    unknown = sorted(set(uploaded) - set(kept))
    if unknown:
        raise ValueError(
            f"got an upload of {unknown} from {method}, expected only tensors that clients also receive "
            f"({sorted(kept)}): this method does not run with federation off"
        )


def _split(own: Tree) -> tuple[Tree, Tree]:
    mine = {name: tensor for name, tensor in own.items() if not name.startswith(KEPT)}
    return mine, {name.removeprefix(KEPT): tensor for name, tensor in own.items() if name.startswith(KEPT)}
