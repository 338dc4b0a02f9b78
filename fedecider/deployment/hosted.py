"""The clients that one site has: a single domain, or a block of users.

Shape legend: N clients of the run, H clients of the site, C clients of a block, U users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree
from fedecider.federation.rounds import Pack
from fedecider.federation.rows import write_rows
from fedecider.federation.wire import download_at


class Part(NamedTuple):
    """One block of those that a message asks."""

    block: Block
    download: Download
    """Of its clients, in their order."""
    row_C: Tensor
    """Their places among the clients of the site, by which it holds its local state."""


class Hosted(NamedTuple):
    """Clients of a site by their numbers in the run, ascending, and how some of them are put into blocks."""

    clients: Sequence[int]
    pack: Pack
    scored: Sequence[int]
    """Those that a validation is over: means over fewer would tell of single ones."""

    def check(self, clients: object) -> list[int]:
        """The clients that a message asks, if they are some of these.

        Raises:
            ValueError: they are not, or not each once and in ascending order.
        """
        own = set(self.clients)
        good = isinstance(clients, list) and bool(clients) and all(type(one) is int and one in own for one in clients)
        if not isinstance(clients, list) or not good or clients != sorted(set(clients)):
            raise ValueError(f"got the clients {str(clients)[:60]}, expected some of those of this site, ascending")
        return clients

    def parts(self, clients: Sequence[int], download: Download) -> Iterator[Part]:
        """The blocks of these clients, each with its own of what they were sent together."""
        asked, hosted = torch.tensor(list(clients)), torch.tensor(list(self.clients))
        for block in self.pack(clients):
            place_C = torch.searchsorted(asked, block.clients)
            yield Part(block, download_at(download, place_C), torch.searchsorted(hosted, block.clients))

    def start(self, method: FederatedMethod) -> Tree:
        """(H, ...) the local state before the first round."""
        _, local = method.init()
        host_H = torch.tensor(list(self.clients))
        return {name: tensor[host_H.to(tensor.device)] for name, tensor in local.items()}

    def positions(
        self, method: FederatedMethod, view: str, download: Download, local: Tree, clients: Sequence[int], split: str
    ) -> Tensor:
        """(U,) positions of these clients' held-out items, in client order."""
        found: dict[int, Tensor] = {}
        for block, own, row_C in self.parts(clients, download):
            positions = method.positions(view, own, rows_of(local, row_C), block, split)
            found |= zip(block.clients.tolist(), positions, strict=True)
        return torch.cat([found[client] for client in sorted(found)])


def one_client(client: int) -> Hosted:
    """A site that is one client: a domain."""
    return Hosted([client], lambda clients: [Block(torch.tensor(list(clients)), None)], [client])


def rows_of(local: Tree, row_C: Tensor) -> Tree:
    """What clients own of a site's local state."""
    return {name: tensor[row_C.to(tensor.device)] for name, tensor in local.items()}


def write_own(local: Tree, row_C: Tensor, new_own: NewRows) -> None:
    """Put the rows that clients have changed into a site's local state, in place."""
    for name, update in new_own.items():
        if isinstance(update, RowUpdate):
            write_rows(local[name], row_C, update)
        else:
            local[name][row_C] = update.to(local[name])
