"""What a method of the LLM track owes to the runner beside what both tracks owe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedecider.federation.method import Block, FederatedMethod, Tree
from fedecider.federation.wire import take_row
from fedecider.llm.config import RunConfig
from fedecider.lora.adapters import adapter_shapes, base_hash
from fedecider.lora.fusion import fused_factors
from fedecider.methods.own_rows import common_rows, travelling_shapes
from fedecider.methods.recommender import ClientModels, LocalTraining
from fedecider.testing.bench import Bench, Ran, differing, require, updated
from fedecider.testing.llm_setting import NAMES, SILOS, SIZES, blocks, positions_of, run, tiny_models, tiny_silos
from fedecider.testing.shared_contract import SHARED
from idgen.ranking_config import RankingConfig


class LlmBench(Bench):
    """A method over three domains, and over four silos of two catalogues.

    Args:
        entry: The method.
        config: Its settings; None takes the defaults.
        models: What makes the models of the three domains, with the options of
            `fedecider.testing.llm_setting.tiny_models`.
        silos: What makes those of the silos.
    """

    num_clients, tolerance, trains_on_draws = len(NAMES), 0.0, True
    random: Mapping[str, Any] = {"dropout": 0.2}

    def __init__(
        self,
        entry: Any,
        config: Any = None,
        models: Callable[..., ClientModels] = tiny_models,
        silos: Callable[[], ClientModels] = tiny_silos,
    ):
        super().__init__(entry, config)
        self.models, self.silos = models, silos

    def build(self, **changes: Any) -> FederatedMethod:
        return self.over(self.models(**changes))

    def over(self, models: ClientModels) -> FederatedMethod:
        """The method over these models."""
        built: FederatedMethod = self.entry.build(models, self.config)
        return built

    def load(self, models: ClientModels, method: FederatedMethod, ran: Ran, view: str, client: int) -> None:
        """Put one client's model after a run into ``models.model``, as the export does."""
        state, _ = ran
        download = method.broadcast(state.round + 1, state.server, torch.tensor([client]))
        self.entry.load_view(models, self.config, view, download, take_row(state.local, client), client)

    def run(self, method: FederatedMethod, rounds: int, *, block_size: int = 1, **options: Any) -> Ran:
        return run(method, self.num_clients, rounds, block_size=block_size, **options)

    def blocks(self, size: int) -> Sequence[Block]:
        return blocks(self.num_clients, size)

    def num_places(self, client: int) -> int:
        return SIZES[NAMES[client]]

    def common_settings(self) -> tuple[type, ...]:
        return (RunConfig, LocalTraining, RankingConfig)


def base_stays(bench: LlmBench) -> None:
    """Training leaves the weights of the base alone."""
    models = bench.models(dropout=0.2)
    frozen = base_hash(models.model)
    bench.run(bench.over(models), 2)
    require(base_hash(models.model) == frozen, "it changes weights of the base, of which all clients have one copy")


def scalars(bench: LlmBench) -> None:
    """``scalars`` tells what travels, four bytes each, in every round; fusion weights never do."""
    models = bench.models()
    _, records = bench.run(bench.over(models), 3)
    _require_scalars(bench, models, records)


def scalars_of_silos(bench: LlmBench) -> None:
    """Where only rows of the own catalogue travel, ``scalars`` counts those."""
    models = bench.silos()
    _, records = run(bench.over(models), len(SILOS), 2)
    _require_scalars(bench, models, records)


def _require_scalars(bench: LlmBench, models: ClientModels, records: Sequence[dict]) -> None:
    shapes, common = adapter_shapes(models.model), common_rows(models.own_rows)
    for record in records:
        for group in record["traffic"]:
            named = [name for name in group["up"] if "alpha" in name]
            require(not named, f"the upload has {named}: fusion weights stay with their client")
            for client in group["clients"]:
                own, peers = travelling_shapes(shapes, common, client, models.num_clients)
                down, up = bench.entry.scalars(own, peers, record["round"])
                for way, told, found in (("down", down, group["down"]), ("up", up, group["up"])):
                    sent = sum(found.values())
                    where = f"client {client} in round {record['round']}"
                    require(4 * told == sent, f"scalars says {4 * told} bytes {way} of {where}, and {sent} travel")


def load_view(bench: LlmBench) -> None:
    """``load_view`` loads what ``positions`` ranks, so that what is exported is what was scored."""
    models = bench.models()
    method, ran = bench.over(models), bench.reference(2)
    for view in method.views:
        found = positions_of(method, ran[0], view, bench.num_clients)
        for client in range(bench.num_clients):
            bench.load(models, method, ran, view, client)
            same = torch.equal(models.positions(client, "valid"), found[client])
            require(same, f"load_view of {view} gives client {client} another model than positions ranks")


def diverged_training(bench: LlmBench) -> None:
    """Local training that ends in numbers that are not finite is logged, and changes nothing that is kept."""
    state, _ = bench.reference(1)
    method = bench.build(learning_rate=1e38)
    block = bench.blocks(1)[1]
    _, upload, new, logs = updated(method, 2, block, state.server, state.local)
    require(logs[0].get("finite") is False, "the log of a client whose training diverged does not say finite: false")
    own = {name: tensor[block.clients] for name, tensor in state.local.items()}
    wrong = [name for name, rows in new.items() if not torch.equal(rows, own[name])]
    require(not wrong, f"a client whose training diverged gets other own rows {wrong}, expected those it had")
    after = method.server_aggregate(2, state.server, iter([upload]))
    wrong = differing(after, state.server)
    require(not wrong, f"a client whose training diverged changes {wrong} of the server")


def another_rank(bench: LlmBench) -> None:
    """Adapters of another rank are refused with a ``ValueError`` that says what they might come from."""
    method, other = bench.build(), bench.build(rank=3)
    block = bench.blocks(1)[0]
    server, local = other.init()
    own = {name: tensor[:1] for name, tensor in local.items()}
    try:
        method.client_update(1, other.broadcast(1, server, block.clients), own, block)
    except ValueError as error:
        require("another backbone or lora_rank" in str(error), f"adapters of another rank are refused with: {error}")
        return
    raise AssertionError("adapters of another rank are trained: load them with fedecider.lora.fusion")


def order_of_clients(bench: LlmBench) -> None:
    """Two clients that change places change their models, bit for bit: with two no sum changes its order."""
    found: list[dict[tuple[str, str], Tree]] = []
    for names in (NAMES[::2], NAMES[::-2]):
        models = bench.models(names, dropout=0.1)
        method = bench.over(models)
        ran = run(method, 2, 3)
        loaded = {}
        for client, domain in enumerate(names):
            for view in method.views:
                bench.load(models, method, ran, view, client)
                loaded[domain, view] = fused_factors(models.model)
        found.append(loaded)
    first, second = found
    for (domain, view), factors in first.items():
        wrong = differing(factors, second[domain, view])
        require(
            not wrong,
            f"the {view} model of {domain} depends on its place among the clients: draw from streams that are keyed by "
            "the domain's name, and give no client a part of its own by its number",
        )


LLM_CONTRACT: tuple[Callable[[LlmBench], None], ...] = (
    *SHARED,
    base_stays,
    scalars,
    scalars_of_silos,
    load_view,
    diverged_training,
    another_rank,
    order_of_clients,
)
