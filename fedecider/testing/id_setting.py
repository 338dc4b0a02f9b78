"""A tiny setting of the ID-based methods: three clients, two of them silos of one catalogue, some users in two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.evaluation.metrics import metrics_per_client
from fedecider.evaluation.protocols import STRICT
from fedecider.federation.method import FederatedMethod
from fedecider.federation.rounds import RoundSettings, run_rounds
from fedecider.federation.state import RunState
from fedecider.id_based.clients import IdClients, id_clients

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
    found = {}
    for name, users in histories.items():
        catalogue = name.partition(".")[0]
        keys = [f"{catalogue}{number:02d}" for number in range(ITEMS[catalogue])]
        public = PUBLIC[catalogue]
        clients = Events(list(users), [list(items) for items in users.values()], None)
        others = Events(list(public), [list(items) for items in public.values()], None) if public else NO_EVENTS
        found[name] = Domain(name, keys, keys, keys, clients, others, {}, catalogue)
    return found


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
    """The final state after the real loop, and the records."""
    records: list[dict] = []
    settings = RoundSettings(rounds, clients.seed, participation)
    state = run_rounds(
        method, clients.blocks(block_size), settings, metrics_per_client, on_round=records.append, **options
    )
    return state, records
