"""What a method of the cross-device track owes to the runner beside what both tracks owe, held over tiny users."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from embedding_fr.blocks import Federation, block_packer
from embedding_fr.config import EmbeddingTraining
from embedding_fr.local_only import local_only
from embedding_fr.setup import EmbeddingRunConfig
from embedding_fr.testing.loop import Reference, run_reference
from embedding_fr.testing.tiny_users import SEQUENCES, run, tiny_federation, tiny_population, tiny_training
from fedecider.data.interactions import InteractionsConfig
from fedecider.evaluation.protocols import PROTOCOLS
from fedecider.federation.config import DevicePrivacyConfig
from fedecider.federation.method import Block, FederatedMethod
from fedecider.testing.bench import Bench, Ran, alike, differing, require, require_same, updated
from fedecider.testing.shared_contract import SHARED


class EmbeddingBench(Bench):
    """A method over seven users.

    Args:
        entry: The method.
        config: Its settings; None takes the defaults.
        changes: Common settings of training that differ from those of the tiny setting.
    """

    num_clients, tolerance = len(SEQUENCES), 1e-9

    def __init__(self, entry: Any, config: Any = None, **changes: Any):
        super().__init__(entry, config)
        self.training = tiny_training(entry, **changes)
        self.trains_on_draws = entry.negatives
        self.needs_everyone = entry.needs_everyone(self.config)

    def build(self, **changes: Any) -> FederatedMethod:
        return self.within(tiny_federation(**changes))

    def within(self, federation: Federation) -> FederatedMethod:
        """The method in this federation."""
        built: FederatedMethod = self.entry.build(federation, self.training, self.config)
        return built

    def run(self, method: FederatedMethod, rounds: int, *, block_size: int = 1, **options: Any) -> Ran:
        return run(method, options.pop("population", None), rounds, block_clients=block_size, **options)

    def blocks(self, size: int) -> Sequence[Block]:
        return block_packer(tiny_population(), lambda num_train: 1, size)(range(self.num_clients))

    def num_places(self, client: int) -> int:
        return 1

    def common_settings(self) -> tuple[type, ...]:
        privacy = () if self.entry.guarantee else (DevicePrivacyConfig,)
        return (EmbeddingRunConfig, InteractionsConfig, EmbeddingTraining, *privacy)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Double: Adam turns rounding errors of gradients near zero into steps, and only real differences are left."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def held_out_items(bench: EmbeddingBench) -> None:
    """What is held out does not reach training, but under the protocols that say so."""
    sequences = [[3, 1, 4, 0, 5, 9, 2], [2, 7, 8, 0, 1], [6, 0, 13, 11, 3]]
    other = [[3, 1, 4, 0, 5, 7, 10], *sequences[1:]]
    for protocol, leaks in (("strict", False), ("paper", bench.entry.negatives)):
        chosen = dataclasses.replace(PROTOCOLS[protocol], num_sampled=None)
        states = []
        for items in (sequences, other):
            method = bench.within(tiny_federation(chosen, num_clients=3))
            states.append(bench.run(method, 2, population=tiny_population(chosen, items))[0])
        same = not differing(states[0].server, states[1].server) and not differing(states[0].local, states[1].local)
        if leaks:
            require(not same, f"under {protocol} held-out items may be no negatives: draw examples by the protocol")
        else:
            require(same, f"under {protocol} what is held out changes what is trained: read train items only")


def tables_in_files(bench: EmbeddingBench) -> None:
    """Personal tables that do not fit into the memory are mapped from files, and give the same bits."""
    states = []
    for table_bytes in (1 << 20, 1):
        method = bench.within(tiny_federation()._replace(table_bytes=table_bytes))
        participation = 1.0 if bench.needs_everyone else 0.5
        states.append(bench.run(method, 3, block_size=3, participation=participation)[0])
    require_same(states[0], states[1], "personal tables in files give other results than in memory")


def equal_weights(bench: EmbeddingBench) -> None:
    """Where ``equal_weights`` says that clients weigh alike, no weight of an upload changes the server's mean."""
    with bench.precision():
        method = bench.build()
        if not (method.takes_mean and bench.entry.equal_weights(bench.config)):
            return
        server, local = method.init()
        sent = [updated(method, 1, block, server, local)[1] for block in bench.blocks(1)]
        alone = [upload._replace(weights=torch.ones_like(upload.weights)) for upload in sent]
        mean, expected = (method.server_aggregate(1, server, iter(some)) for some in (sent, alone))
    wrong = differing(mean, expected, bench.tolerance)
    require(not wrong, f"equal_weights says that clients weigh alike, and their weights change the server's {wrong}")


def federation_off(bench: EmbeddingBench) -> None:
    """With federation off nothing travels and nobody learns from anybody, unless ``needs_server`` says it cannot be."""
    federation = tiny_federation()
    if bench.entry.needs_server(bench.config):
        try:
            bench.run(local_only(bench.within(federation), federation), 1)
        except ValueError as error:
            require("does not run with federation off" in str(error), f"with federation off it stops with: {error}")
            return
        raise AssertionError("needs_server says that federation cannot be off, and the method runs all the same")
    changed = [*SEQUENCES[:3], [9, 0, 13, 12], *SEQUENCES[4:]]
    states = []
    for sequences in (SEQUENCES, changed):
        method = local_only(bench.within(federation), federation)
        state, records = bench.run(method, 2, population=tiny_population(sequences=sequences))
        states.append(state)
        for record in records:
            for group in record["traffic"]:
                empty = (group["up"], group["down"], group["header_up"], group["header_down"]) == ({}, {}, 0, 0)
                require(empty, "with federation off something travels")
        require(not differing(state.server, method.init()[0]), "with federation off the server changes")
    first, second = states
    others = torch.tensor([client for client in range(bench.num_clients) if client != 3])
    wrong = [name for name in first.local if not alike(first.local[name][others], second.local[name][others])]
    require(not wrong, f"with federation off the data of client 3 change {wrong} of others")
    moved = [name for name in first.local if not alike(first.local[name][3], second.local[name][3])]
    require(bool(moved), "with federation off a client's own data change nothing that it keeps")


EMBEDDING_CONTRACT: tuple[Callable[[EmbeddingBench], None], ...] = (
    *SHARED,
    held_out_items,
    tables_in_files,
    equal_weights,
    federation_off,
)


def bench_of(entry: Any, config: Any = None) -> tuple[EmbeddingBench, Sequence[Callable[[EmbeddingBench], None]]]:
    """A method of the cross-device track over tiny users, and the contract."""
    return EmbeddingBench(entry, config), EMBEDDING_CONTRACT


def check_reference(
    bench: EmbeddingBench,
    reference: Callable[[Federation, EmbeddingTraining, Any], Reference],
    participation: float = 1.0,
    tolerance: float = 1e-7,
) -> None:
    """Three rounds of the batched runtime must equal a slow loop over users (`embedding_fr.testing.loop`), in double
    precision and to ``tolerance``.

    Raises:
        AssertionError: the names of the tensors that differ.
    """
    with bench.precision():
        federation, population = tiny_federation(), tiny_population()
        method = bench.within(federation)
        loop = reference(federation, bench.training, bench.config)
        server, local = run_reference(method, loop, federation, bench.training, population, 3, participation)
        state, _ = bench.run(method, 3, block_size=3, participation=participation)
        start = method.init()
    wrong = differing(state.server, server, tolerance) + differing(state.local, local, tolerance)
    require(not wrong, f"the batched runtime and the loop over users differ in {wrong}")
    moved = differing(start[0], state.server) + differing(start[1], state.local)
    require(bool(moved), "three rounds change nothing")
