"""A tiny setting of the ID-based methods: three clients, two of them silos of one catalogue, some users in two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.evaluation.metrics import metrics_per_client
from fedecider.evaluation.protocols import STRICT
from fedecider.federation.method import Block, FederatedMethod
from fedecider.federation.rounds import Clients, RoundSettings
from fedecider.federation.state import RunState
from fedecider.id_based.clients import IdClients, id_clients
from fedecider.id_based.run import IdRunConfig
from fedecider.testing.bench import Bench, Ran, differing, require
from fedecider.testing.rounds import recorded_rounds
from fedecider.testing.shared_contract import SHARED

# A tiny setting of the ID-based methods: three clients, two of them silos of one catalogue, some users in two.

ITEMS = {"films": 12, "songs": 9}
Histories = Mapping[str, Mapping[str, Sequence[int]]]
HISTORIES: Histories = {
    "films.1": {"ann": [3, 1, 4, 0, 5, 9, 2], "bob": [2, 7, 8, 3], "cat": [6, 0, 11, 3, 5, 1, 8], "dan": [10, 2, 4]},
    "songs.1": {"ann": [5, 6, 7, 8, 0], "bob": [8, 7, 6, 0, 1], "eve": [4, 1, 2, 6, 3, 7], "fay": [1, 2, 3, 4, 5]},
    "films.2": {"gus": [1, 2, 3, 9, 10], "hal": [4, 5, 6, 7, 8, 9], "eve": [11, 10, 9, 8]},
}
"""Client -> user -> items in their order; the last one is tested, the one before validated."""
PUBLIC = {"films": {"pam": [0, 1, 2, 3, 4], "pia": [11, 10, 9]}, "songs": {"pat": [8, 0, 7, 1]}}


def tiny_domains(histories: Histories = HISTORIES) -> dict[str, Domain]:
    """The clients' domains, as a prepared folder would give them."""
    catalogues = {name: _tiny_catalogue(name) for name in ITEMS}
    found = {}
    for name, users in histories.items():
        catalogue = catalogues[name.partition(".")[0]]
        public = PUBLIC[catalogue.name]
        clients = Events(list(users), [list(items) for items in users.values()], None)
        others = Events(list(public), [list(items) for items in public.values()], None) if public else NO_EVENTS
        found[name] = Domain(name, catalogue, clients, others, {})
    return found


def _tiny_catalogue(name: str) -> Catalogue:
    keys = [f"{name}{number:02d}" for number in range(ITEMS[name])]
    texts = [f"title: {name} of kind{number % 4} size{number % 3}" for number in range(ITEMS[name])]
    return Catalogue(name, keys, keys, texts)


def tiny_clients(seed: int = 0, histories: Histories = HISTORIES) -> IdClients:
    """What a method is built over."""
    return id_clients(tiny_domains(histories), seed, STRICT, torch.device("cpu"))


def run(
    method: FederatedMethod,
    clients: IdClients,
    rounds: int = 3,
    *,
    block_size: int = 1,
    participation: float = 1.0,
    **options: Any,
) -> tuple[RunState, list[dict]]:
    """The final state after the real loop, and the records; ``options`` are those of `recorded_rounds`."""
    everyone = Clients(clients.blocks(block_size), metrics_per_client)
    return recorded_rounds(method, everyone, RoundSettings(rounds, clients.seed, participation), **options)


# What an ID-based method over domains and silos owes to the runner beside what every method owes.


class IdBench(Bench):
    """A method over three clients of two catalogues.

    Args:
        entry: The method.
        config: Its settings; None takes the defaults.
    """

    num_clients, tolerance, trains_on_draws = len(HISTORIES), 0.0, True

    def build(self, **changes: Any) -> FederatedMethod:
        built: FederatedMethod = self.entry.build(tiny_clients(**changes), self.config)
        return built

    def run(self, method: FederatedMethod, rounds: int, *, block_size: int = 1, **options: Any) -> Ran:
        return run(method, tiny_clients(), rounds, block_size=block_size, **options)

    def blocks(self, size: int) -> Sequence[Block]:
        return tiny_clients().blocks(size)

    def by_rows(self) -> tuple[FederatedMethod, Sequence[Block]]:
        return self.build(), self.blocks(1)

    def num_places(self, client: int) -> int:
        return len(list(HISTORIES.values())[client])

    def common_settings(self) -> tuple[type, ...]:
        return (IdRunConfig,)


def held_out_items(bench: IdBench) -> None:
    """What is held out does not reach training."""
    changed = {name: dict(users) for name, users in HISTORIES.items()}
    changed["films.1"]["ann"] = [3, 1, 4, 0, 5, 7, 10]
    changed["songs.1"]["eve"] = [4, 1, 2, 6, 5, 8]
    states = [bench.run(bench.build(histories=one), 3)[0] for one in (HISTORIES, changed)]
    wrong = differing(states[0].server, states[1].server) + differing(states[0].local, states[1].local)
    require(not wrong, f"what is held out changes {wrong}: read train parts only")


ID_CONTRACT: tuple[Callable[[IdBench], None], ...] = (*SHARED, held_out_items)


def bench_of(entry: Any, config: Any = None) -> tuple[IdBench, Sequence[Callable[[IdBench], None]]]:
    """An ID-based method over tiny domains, and the contract."""
    return IdBench(entry, config), ID_CONTRACT
