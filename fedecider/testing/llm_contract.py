"""A tiny setting of the cross-silo track: a backbone of a few thousand weights and invented sequences of three domains.

Domains differ in size and taste. Nothing is pre-trained and nothing is read from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from fedecider.cross_silo.settings import RunConfig
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.federation.method import Block, FederatedMethod, Tree
from fedecider.federation.rounds import Clients, RoundSettings, evaluate
from fedecider.federation.state import RunState
from fedecider.federation.wire import take_row
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import LocalTraining
from fedecider.methods.rows import Rows, common_rows, travelling_shapes
from fedecider.models.adapters import LoraSettings, attach_lora, base_hash
from fedecider.models.client_model import Base, Client, ClientModel
from fedecider.testing.bench import Bench, Ran, differing, require, updated
from fedecider.testing.rounds import recorded_rounds
from fedecider.testing.shared_contract import SHARED
from idgen.backbones.families import family_of, unwrap
from idgen.ranking_config import RankingConfig

NAMES = ("crime", "comics", "children")
SIZES = {"crime": 7, "comics": 5, "children": 9}
"""Domain -> its users, each of whom is one training sample and has one held-out item."""
SHIFTS = {"crime": 1, "comics": -2, "children": 5}
CATALOGUES = {"crime": (3, 12), "comics": (12, 22)}
"""First and last token of silos' items; other tokens are words, padding, or of a catalogue without clients."""
WORDING = [0, 2]
SILO_SIZES = {"crime.1": 21, "comics.1": 17, "crime.2": 30, "comics.2": 13}
SILOS = tuple(SILO_SIZES)


def tiny_t5(dropout: float = 0.0) -> T5ForConditionalGeneration:
    """A T5 model of one layer with fixed random weights, and one table for input and output."""
    config = T5Config(
        vocab_size=24,
        d_model=12,
        d_kv=5,
        d_ff=20,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        dropout_rate=dropout,
        decoder_start_token_id=0,  # type: ignore[call-arg]
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return T5ForConditionalGeneration(config).eval()


def tiny_data(name: str) -> dict[str, Tensor]:
    """The next token is the last one plus the domain's shift: learnable, and different in each domain."""
    size, shift = SIZES[name], SHIFTS[name]
    generator = torch.Generator().manual_seed(size)
    input_ids = torch.randint(3, 24, (size, 5), generator=generator)
    target = (input_ids[:, -1:] - 3 + shift) % 21 + 3
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "labels": torch.cat([target, torch.ones_like(target)], 1),
    }


def tiny_models(
    names: Sequence[str] = NAMES,
    *,
    data: Sequence[dict[str, Tensor]] | None = None,
    base: PreTrainedModel | None = None,
    seed: int = 3,
    rank: int = 2,
    dropout: float = 0.0,
    **training: Any,
) -> ClientModels:
    """What a method of the cross-silo track is built with.

    ``data`` takes the place of the invented data per client, ``base`` that of a T5 model with ``dropout``;
    ``training``: settings of `LocalTraining`.
    """
    given = [tiny_data(name) for name in names] if data is None else data
    clients = [_client(name, one) for name, one in zip(names, given, strict=False)]
    adapted = attach_lora(base if base is not None else tiny_t5(dropout), LoraSettings(rank=rank))
    settings = LocalTraining(**{"local_epochs": 1, "batch_size": 4, "learning_rate": 1e-2, **training})
    return ClientModels(Base(adapted, None), clients, settings, seed)


def tiny_silos(
    names: Sequence[str] = SILOS,
    *,
    base: PreTrainedModel | None = None,
    targets: Sequence[str] = ("table", "attention"),
    learning_rate: float = 1e-2,
) -> ClientModels:
    """Silos of catalogues that share no item, with adapters of the table; a target is compared with its catalogue."""
    tokens = [torch.arange(*CATALOGUES[name.split(".")[0]]) for name in names]
    clients = [
        _client(name, _silo_data(token_I, SILO_SIZES[name]), token_I)
        for token_I, name in zip(tokens, names, strict=True)
    ]
    own_KV = torch.zeros(len(names), 24, dtype=torch.bool)
    for row_V, token_I in zip(own_KV, tokens, strict=True):
        row_V[token_I] = True
        row_V[WORDING] = True
    adapted = attach_lora(base if base is not None else tiny_t5(), LoraSettings(2, tuple(targets)))
    training = LocalTraining(local_epochs=2, batch_size=4, learning_rate=learning_rate)
    return ClientModels(Base(adapted, None), clients, training, 3, Rows(own={"lm_head.lora_b": own_KV}))


def _client(name: str, data: dict[str, Tensor], token_I: Tensor | None = None) -> Client:
    """``token_I``: the items that a target is compared with; None: all tokens."""

    def batches(generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(len(data["labels"]), generator=generator)
        for rows in order.split(4):
            batch = {key: tensor[rows] for key, tensor in data.items()}
            yield batch if token_I is None else {**batch, "catalogue": token_I}

    def positions(model: Any, split: str, share: tuple[int, int]) -> Tensor:
        family, unwrapped = family_of(model), unwrap(model)
        with torch.no_grad():
            hidden_RD, target_R = family.predictions(unwrapped, data)
            if token_I is not None:
                logit_BI = family.token_logits(unwrapped, hidden_RD, token_I)
                return (~(logit_BI <= logit_BI.gather(1, (target_R - token_I[0])[:, None]))).sum(1)
            logit_BV = family.token_logits(unwrapped, hidden_RD[::2])  # every other target is the end token
        target_B = target_R[::2]
        place_B = (~(logit_BV <= logit_BV.gather(1, target_B[:, None]))).sum(1)  # so that NaN is never in front
        return torch.where(place_B < 20, place_B, NOT_RANKED)

    return Client(name, data, 0, len(data["labels"]), batches, positions)


def _silo_data(token_I: Tensor, size: int) -> dict[str, Tensor]:
    """A word, then items; the next item is the one behind the last one."""
    place = torch.randint(len(token_I), (size, 4), generator=torch.Generator().manual_seed(size))
    input_ids = torch.cat([torch.tensor(WORDING).repeat(size, 1), token_I[place]], 1)
    target = token_I[(place[:, -1:] + 1) % len(token_I)]
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": target}


def blocks(num_clients: int, size: int = 1) -> list[Block]:
    """The clients in blocks of ``size``."""
    return [Block(clients, None) for clients in torch.arange(num_clients).split(size)]


def summarise(positions: list[Tensor]) -> list[dict[str, float]]:
    """The mean discounted gain of each client, whatever the cutoff."""
    return [{"ndcg@10": float((1.0 / torch.log2(place_U.double() + 2.0)).mean())} for place_U in positions]


def run(
    method: FederatedMethod,
    num_clients: int,
    rounds: int,
    *,
    block_size: int = 1,
    participation: float = 1.0,
    **options: Any,
) -> tuple[RunState, list[dict]]:
    """The final state after the real loop, and the records; ``options`` are those of `recorded_rounds`."""
    clients = Clients(blocks(num_clients, block_size), summarise)
    return recorded_rounds(method, clients, RoundSettings(rounds, 0, participation), **options)


def positions_of(method: FederatedMethod, state: RunState, variant: str, num_clients: int) -> list[Tensor]:
    """Validation places of every client under one variant."""
    return evaluate(method, state.last, variant, "valid", blocks(num_clients))


# What a method of the cross-silo track owes to the runner beside what both tracks owe.


class LlmBench(Bench):
    """A method over three domains, and over four silos of two catalogues.

    Args:
        entry: The method.
        config: Its settings; None takes the defaults.
        models: What makes the models of the three domains, with the options of
            `fedecider.testing.llm_contract.tiny_models`.
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

    def client_model(
        self, models: ClientModels, method: FederatedMethod, ran: Ran, variant: str, client: int
    ) -> ClientModel:
        """One client's model after a run, as the export hands it over."""
        state, _ = ran
        download = method.broadcast(state.round + 1, state.server, torch.tensor([client]))
        made: ClientModel = self.entry.client_model(
            models, self.config, variant, download, take_row(state.local, client), client
        )
        return made

    def run(self, method: FederatedMethod, rounds: int, *, block_size: int = 1, **options: Any) -> Ran:
        return run(method, self.num_clients, rounds, block_size=block_size, **options)

    def blocks(self, size: int) -> Sequence[Block]:
        return blocks(self.num_clients, size)

    def by_rows(self) -> tuple[FederatedMethod, Sequence[Block]]:
        return self.over(self.silos()), blocks(len(SILOS))

    def num_places(self, client: int) -> int:
        return SIZES[NAMES[client]]

    def common_settings(self) -> tuple[type, ...]:
        return (RunConfig, LocalTraining, RankingConfig)


def base_stays(bench: LlmBench) -> None:
    """Training leaves the weights of the base alone."""
    models = bench.models(dropout=0.2)
    model = models.base.model
    frozen = base_hash(model)
    bench.run(bench.over(models), 2)
    require(base_hash(model) == frozen, "it changes weights of the base, of which all clients have one copy")


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
    shapes, common = models.shapes, common_rows(models.rows.own)
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


def client_model(bench: LlmBench) -> None:
    """``client_model`` gives what ``positions`` ranks, so that what is exported is what was scored."""
    models = bench.models()
    method, ran = bench.over(models), bench.reference(2)
    for variant in method.variants:
        found = positions_of(method, ran[0], variant, bench.num_clients)
        for client in range(bench.num_clients):
            model = bench.client_model(models, method, ran, variant, client)
            same = torch.equal(model.positions("valid"), found[client])
            require(same, f"client_model of {variant} gives client {client} another model than positions ranks")


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
    raise AssertionError("adapters of another rank are trained: load them with fedecider.models.adapters")


def order_of_clients(bench: LlmBench) -> None:
    """Two clients that change places change their models, bit for bit: with two no sum changes its order."""
    found: list[dict[tuple[str, str], Tree]] = []
    for names in (NAMES[::2], NAMES[::-2]):
        models = bench.models(names, dropout=0.1)
        method = bench.over(models)
        ran = run(method, 2, 3)
        made = {}
        for client, domain in enumerate(names):
            for variant in method.variants:
                adapters = bench.client_model(models, method, ran, variant, client).adapters
                require(adapters is not None, f"the {variant} model of {domain} has no adapters")
                made[domain, variant] = adapters.factors() if adapters is not None else {}
        found.append(made)
    first, second = found
    for (domain, variant), factors in first.items():
        wrong = differing(factors, second[domain, variant])
        require(
            not wrong,
            f"the {variant} model of {domain} depends on its place among the clients: draw from streams that are "
            "keyed by the domain's name, and give no client a part of its own by its number",
        )


LLM_CONTRACT: tuple[Callable[[LlmBench], None], ...] = (
    *SHARED,
    base_stays,
    scalars,
    scalars_of_silos,
    client_model,
    diverged_training,
    another_rank,
    order_of_clients,
)


def bench_of(entry: Any, config: Any = None) -> tuple[LlmBench, Sequence[Callable[[LlmBench], None]]]:
    """A method of the cross-silo track over tiny models, and the contract.

    Raises:
        ValueError: the method federates nothing.
    """
    if entry.pooled:
        raise ValueError("got a method that pools the data of all clients, expected one that federates")
    return LlmBench(entry, config), LLM_CONTRACT
