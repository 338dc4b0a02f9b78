"""What an ID-based federation knows of its clients: histories, catalogues, public users, and whom they share.

Shape legend: N clients, U users of a client, G customers of all clients, I items of a catalogue, R items of all
catalogues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.baselines.sasrec import training_sequences
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain
from fedecider.data.sellers import once_each
from fedecider.evaluation.protocols import Protocol, ScoreUsers, Sequences, rank_held_out
from fedecider.federation.method import Block
from fedecider.federation.streams import derive_seed


class Client(NamedTuple):
    """One domain or silo; ``sequences`` are private, all else is public."""

    name: str
    sequences: Sequences
    """Item numbers of each user, oldest first, the last two held out."""
    public: Sequences
    catalogue: int
    items: Catalogue
    num_items: int
    rows: slice
    """Its catalogue in a table of all catalogues."""
    customer_U: Tensor
    """int64, who a user is among all customers; users of one key in several domains are one customer."""

    def packed(self, max_length: int) -> tuple[Tensor, Tensor]:
        """Own train parts and public sequences, packed (`fedecider.baselines.sasrec.training_sequences`).

        ``ValueError``, with the client's name, where none of them has two events.
        """
        try:
            return training_sequences(self.sequences, self.num_items, self.public, max_length)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error


class IdClients(NamedTuple):
    """All clients of a run. A method reads the sequences of those alone that its block names."""

    clients: tuple[Client, ...]
    num_catalogues: int
    num_rows: int
    num_customers: int
    seed: int
    protocol: Protocol
    device: torch.device

    def __iter__(self) -> Iterator[Client]:  # type: ignore[override]
        return iter(self.clients)

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    @property
    def most_items(self) -> int:
        """Of one catalogue."""
        return max(client.num_items for client in self.clients)

    @property
    def most_users(self) -> int:
        """Of one client."""
        return max(len(client.sequences) for client in self.clients)

    def seed_of(self, number: int) -> int:
        """From which a client draws. The first one draws as a centralised model does, so that alone it is one."""
        return self.seed if number == 0 else derive_seed(self.seed, "client", number)

    def marked_rows(self, numbers: Tensor) -> Tensor:
        """(C, R) bool: rows of a table of all catalogues that are of each client's own."""
        mark_CR = torch.zeros(len(numbers), self.num_rows, dtype=torch.bool)
        for place, number in enumerate(numbers.tolist()):
            mark_CR[place, self.clients[number].rows] = True
        return mark_CR

    def first_of_catalogue(self) -> list[Client]:
        """One client of each catalogue, in the order of their numbers."""
        found = {client.catalogue: client for client in reversed(self.clients)}
        return [found[number] for number in range(self.num_catalogues)]

    def blocks(self, size: int = 1) -> list[Block]:
        """All clients in blocks of ``size``."""
        return [Block(numbers, None) for numbers in torch.arange(self.num_clients).split(size)]

    def rank(self, number: int, score: ScoreUsers, split: str) -> Tensor:
        """(U,) positions of a client's held-out items."""
        client = self.clients[number]
        return rank_held_out(score, client.sequences, client.num_items, split, self.protocol)


def id_clients(domains: Mapping[str, Domain], seed: int, protocol: Protocol, device: torch.device) -> IdClients:
    """Clients in the order of ``domains``; a part of a catalogue is one of its own.

    Raises:
        ValueError: the protocol samples candidates, which models of domains are not ranked among.
    """
    if protocol.num_sampled is not None:
        raise ValueError(f"got the protocol {protocol.name}, expected one of whole catalogues, such as strict")
    once = once_each(domains)
    catalogues = list(once)
    sizes = [len(domain.item_keys) for domain in once.values()]
    ends = list(accumulate(sizes))
    customer = {
        key: number for number, key in enumerate(sorted({u for d in domains.values() for u in d.clients.users}))
    }
    found = []
    for name, domain in domains.items():
        number = catalogues.index(domain.items.name)
        found.append(
            Client(
                name,
                domain.clients.sequences,
                domain.public.sequences,
                number,
                domain.items,
                sizes[number],
                slice(ends[number] - sizes[number], ends[number]),
                torch.tensor([customer[user] for user in domain.clients.users]),
            )
        )
    return IdClients(tuple(found), len(catalogues), ends[-1], len(customer), seed, protocol, device)
