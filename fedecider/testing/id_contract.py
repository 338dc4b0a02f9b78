"""What an ID-based method over domains and silos owes to the runner beside what every method owes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedecider.federation.method import Block, FederatedMethod
from fedecider.id_based.config import IdRunConfig
from fedecider.testing.bench import Bench, Ran, differing, require
from fedecider.testing.id_setting import HISTORIES, run, tiny_clients
from fedecider.testing.shared_contract import SHARED


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
