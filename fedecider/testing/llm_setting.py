"""A tiny setting of the LLM track: a backbone of a few thousand weights and invented sequences of three domains.

Domains differ in size and taste. Nothing is pre-trained and nothing is read from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.federation.method import Block, FederatedMethod
from fedecider.federation.rounds import RoundSettings, evaluate, run_rounds
from fedecider.federation.state import RunState
from fedecider.lora.adapters import LoraSettings, attach_lora
from fedecider.methods.recommender import ClientModels, LocalTraining
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
    local_epochs: int = 1,
    learning_rate: float = 1e-2,
    dropout: float = 0.0,
) -> ClientModels:
    """What a method of the LLM track is built with.

    ``data`` takes the place of the invented data per client, ``base`` that of a T5 model with ``dropout``.
    """
    model: Any = attach_lora(base if base is not None else tiny_t5(dropout), LoraSettings(rank=rank))
    given = [tiny_data(name) for name in names] if data is None else data

    def batches(client: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(len(given[client]["labels"]), generator=generator)
        for rows in order.split(4):
            yield {key: tensor[rows] for key, tensor in given[client].items()}

    def positions(client: int, split: str) -> Tensor:
        family, unwrapped = family_of(model), unwrap(model)
        with torch.no_grad():
            hidden_RD, target_R = family.predictions(unwrapped, given[client])
            logit_BV = family.token_logits(unwrapped, hidden_RD[::2])  # every other target is the end token
        target_B = target_R[::2]
        place_B = (logit_BV > logit_BV.gather(1, target_B[:, None])).sum(1)
        return torch.where(place_B < 20, place_B, NOT_RANKED)

    return ClientModels(
        model=model,
        tokenizer=None,
        tasks=given,
        names=list(names),
        device=torch.device("cpu"),
        seed=seed,
        training=LocalTraining(local_epochs=local_epochs, batch_size=4, learning_rate=learning_rate),
        ranking=RankingConfig(),
        batches=batches,
        positions=positions,
        num_examples=lambda client: len(given[client]["labels"]),
    )


def tiny_silos(
    names: Sequence[str] = SILOS,
    *,
    base: PreTrainedModel | None = None,
    targets: Sequence[str] = ("table", "attention"),
    learning_rate: float = 1e-2,
) -> ClientModels:
    """Silos of catalogues that share no item, with adapters of the table; a target is compared with its catalogue."""
    model: Any = attach_lora(base if base is not None else tiny_t5(), LoraSettings(2, tuple(targets)))
    tokens = [torch.arange(*CATALOGUES[name.split(".")[0]]) for name in names]
    data = [_silo_data(token_I, SILO_SIZES[name]) for token_I, name in zip(tokens, names, strict=True)]
    own_KV = torch.zeros(len(names), 24, dtype=torch.bool)
    for row_V, token_I in zip(own_KV, tokens, strict=True):
        row_V[token_I] = True
        row_V[WORDING] = True

    def batches(client: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(len(data[client]["labels"]), generator=generator)
        for rows in order.split(4):
            yield {**{key: tensor[rows] for key, tensor in data[client].items()}, "catalogue": tokens[client]}

    def positions(client: int, split: str) -> Tensor:
        family, unwrapped = family_of(model), unwrap(model)
        with torch.no_grad():
            hidden_BD, target_B = family.predictions(unwrapped, data[client])
            logit_BI = family.token_logits(unwrapped, hidden_BD, tokens[client])
        return (logit_BI > logit_BI.gather(1, (target_B - tokens[client][0])[:, None])).sum(1)

    return tiny_models(names, data=data)._replace(
        model=model,
        batches=batches,
        positions=positions,
        training=LocalTraining(local_epochs=2, batch_size=4, learning_rate=learning_rate, softmax="catalogue"),
        own_rows={"lm_head.lora_b": own_KV},
    )


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
    """The final state after ``rounds`` rounds of the real loop, and the records; ``options`` are those of the loop."""
    records: list[dict] = []
    settings = RoundSettings(num_rounds=rounds, seed=0, participation=participation)
    state = run_rounds(method, blocks(num_clients, block_size), settings, summarise, on_round=records.append, **options)
    return state, records


def positions_of(method: FederatedMethod, state: RunState, view: str, num_clients: int) -> list[Tensor]:
    """Validation places of every client under one view."""
    return evaluate(method, state.round, view, "valid", state.server, state.local, blocks(num_clients))
