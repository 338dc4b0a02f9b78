"""The clients' memories in a run: fitted after the rounds, ranked with every client's own model, kept under private/.

Shape legend: U users of a client.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

from torch import Tensor

from fedecider.data.domain import Domain
from fedecider.evaluation.split import train_part
from fedecider.federation.method import FederatedMethod
from fedecider.federation.state import RunState
from fedecider.federation.streams import derive_seed, stream
from fedecider.llm.baselines import Positions
from fedecider.llm.item_texts import encoded_texts
from fedecider.llm.loading import Shares, load_reported
from fedecider.llm.model_scores import model_scores
from fedecider.llm.setup import Foundation, Settings, calibration
from fedecider.memory.choice import Choice, choose_weights
from fedecider.memory.config import MemoryConfig
from fedecider.memory.contexts import Contexts, held_out_contexts, training_contexts
from fedecider.memory.counts import Counts, count_events, no_counts
from fedecider.memory.experts import unit_vectors
from fedecider.memory.memory import Memory, ModelScores, fit_memory, positions
from fedecider.memory.others import securely_summed, without
from fedecider.memory.store import mixture_data, save_memory
from fedecider.methods.recommender import ClientModels
from fedecider.running.run_folder import RunFolder
from idgen.ranking import eval_users
from idgen.samples import Split

MEMORY_ROW = "memory"
"""Name of the row of the memory without the model."""
OWN_MEMORY_ROW = "own memory"
"""The same without what siblings count: what a client has that sends no counts, with the model where it does that."""


class Memories(NamedTuple):
    """The memory of every client, and what it took to sum their counts."""

    clients: dict[str, Memory]
    """Domain -> memory, in client order."""
    choices: dict[str, Choice]
    """Domain -> whose weights were taken on validation items; none where ``choose_weights`` is false."""
    traffic: dict[str, dict[str, int]]
    """Domain -> bytes up and down of the secure sum; clients without siblings are left out."""


def with_memory(method: str, row: str = MEMORY_ROW) -> str:
    """Name of the row of the model with the memory that is alone in ``row``."""
    return f"{method} + {row}"


def every_memory(
    settings: Settings,
    method: FederatedMethod,
    foundation: Foundation,
    recommender: ClientModels,
    state: RunState,
    shares: Shares,
    others: Mapping[str, Counts] | None = None,
) -> dict[str, Memories]:
    """Row of the memory alone -> the memories: those that are handed over, and what clients would have who keep their
    counts, where some get counts of others. ``others``: see `client_counts`."""
    config, asked = settings.run.memory, (method, foundation, recommender, state, shares)
    found = {MEMORY_ROW: build_memories(settings, *asked, others)}
    kept = [name for name in config.source_names if name != "others"]
    if kept and (others if others is not None else siblings(foundation.domains, config)):
        alone = dataclasses.replace(config, sources=",".join(kept))
        own_settings = settings._replace(run=dataclasses.replace(settings.run, memory=alone))
        found[OWN_MEMORY_ROW] = build_memories(own_settings, *asked, {})
    return found


def build_memories(
    settings: Settings,
    method: FederatedMethod,
    foundation: Foundation,
    recommender: ClientModels,
    state: RunState,
    shares: Shares,
    others: Mapping[str, Counts] | None = None,
) -> Memories:
    """Fit every client's memory beside its reported model, on train events of users whom no adapter has seen.

    Fitted on users who trained the adapters, nearly all weight would go to the model. ``others``: see `client_counts`.
    """
    config, domains = settings.run.memory, foundation.domains
    counts, traffic = client_counts(domains, config, settings.run.seed, others)
    vectors = encoded_texts(foundation.everyone, settings.run.pretrain.text_encoder, settings.run.cache)
    clients, choices = {}, {}
    for name, domain in domains.items():
        client = recommender.names.index(name)
        contexts = memory_contexts(domain, config, settings.run.seed)
        load_reported(settings, method, recommender, state, client, shares[name])
        unit_ID, scores = unit_vectors(vectors[name].numpy()), scores_of(recommender, client)
        clients[name] = fit_memory(counts[name], unit_ID, contexts, scores, config)
        if config.choose_weights:
            asked = held_out_contexts(ranked_sequences(recommender, client, "valid"), "valid")
            ranked = partial(positions, contexts=asked, model=scores)
            clients[name], choices[name] = choose_weights(clients[name], ranked)
    return Memories(clients, choices, traffic)


def memory_contexts(domain: Domain, config: MemoryConfig, seed: int) -> Contexts:
    """The train events of a client on which its weights are fitted."""
    sequences = [domain.clients.sequences[user] for user in calibration(domain, config, seed)]
    return training_contexts(sequences, config.max_contexts, stream(seed, "memory", domain.name))


def client_counts(
    domains: Mapping[str, Domain], config: MemoryConfig, seed: int, others: Mapping[str, Counts] | None = None
) -> tuple[dict[str, Counts], dict[str, dict[str, int]]]:
    """What each client counts from the sources of ``config``, and the bytes of the secure sums.

    ``others``: what the siblings of each client have counted, where they are on other machines; clients that are not in
    it go without. None: all siblings are here, and their secure sums are simulated.
    """
    own = {name: own_counts(domain) for name, domain in domains.items()}
    found = {}
    for name, domain in domains.items():
        parts = []
        if "own" in config.source_names:
            parts.append(own[name])
        if "public" in config.source_names:
            parts.append(count_events(domain.public.sequences, len(domain.item_keys)))
        found[name] = parts
    traffic: dict[str, dict[str, int]] = {}
    for name, counts in (others or {}).items():
        found[name].append(counts)
    for catalogue, names in (siblings(domains, config) if others is None else {}).items():
        summed = securely_summed([own[name] for name in names], derive_seed(seed, "memory sum", catalogue))
        for name in names:
            found[name].append(without(summed.total, own[name]))
            traffic[name] = {"down": summed.bytes_down, "up": summed.bytes_up}
    return {name: reduce(Counts.plus, parts, no_counts(own[name].num_items)) for name, parts in found.items()}, traffic


def siblings(domains: Mapping[str, Domain], config: MemoryConfig) -> dict[str, list[str]]:
    """Catalogue -> the clients that share it and add up their counts, two or more."""
    groups: dict[str, list[str]] = {}
    for name, domain in domains.items():
        groups.setdefault(domain.catalogue, []).append(name)
    return {one: names for one, names in groups.items() if len(names) > 1 and "others" in config.source_names}


def own_counts(domain: Domain) -> Counts:
    """What a client counts of its own users: their train events."""
    return count_events([train_part(sequence) for sequence in domain.clients.sequences], len(domain.item_keys))


def scores_of(recommender: ClientModels, client: int) -> ModelScores:
    """The model that is loaded now, on the catalogue of ``client``."""
    task, precision = recommender.tasks[client], recommender.training.precision
    return model_scores(recommender.model, task, recommender.ranking, precision, recommender.device)


def memory_rows(
    settings: Settings,
    method: FederatedMethod,
    recommender: ClientModels,
    state: RunState,
    memories: Memories,
    shares: Shares,
    split: Split,
    row: str = MEMORY_ROW,
) -> dict[str, Positions]:
    """Positions of the reported model with the memory, and of the memory alone (``row``); of the users that the model
    ranks."""
    both: dict[str, Tensor] = {}
    alone: dict[str, Tensor] = {}
    for name, memory in memories.clients.items():
        client = recommender.names.index(name)
        load_reported(settings, method, recommender, state, client, shares[name])
        asked = ranked_sequences(recommender, client, split)
        both[name], alone[name] = memory_positions(memory, asked, split, scores_of(recommender, client))
    return {with_memory(method.name, row): both, row: alone}


def ranked_sequences(recommender: ClientModels, client: int, split: Split) -> list[Sequence[int]]:
    """The users whose held-out items the client's model ranks."""
    task = recommender.tasks[client]
    generator = stream(recommender.seed, "eval_users", task.name)
    users = eval_users(task, split, recommender.ranking.num_eval_users, generator)
    return [task.sequences[user] for user in (range(len(task.sequences)) if users is None else users.tolist())]


def memory_positions(
    memory: Memory, sequences: Sequence[Sequence[int]], split: Split, scores: ModelScores
) -> tuple[Tensor, Tensor]:
    """Places of the held-out items with the model and without it, (U,) each."""
    contexts = held_out_contexts(sequences, split)
    return positions(memory, contexts, scores), positions(memory, contexts, None)


def save_memories(memories: Memories, domains: Mapping[str, Domain], folder: RunFolder) -> None:
    """Write every client's memory into its own folder below private/."""
    for name, memory in memories.clients.items():
        save_memory(memory, domains[name].item_keys, folder.private / name)


def memories_data(memories: Memories) -> dict[str, Any]:
    """Weights of every client as plain data, for ``metrics.json``."""
    found = {}
    for name, memory in memories.clients.items():
        assert memory.beside_model is not None  # fitted beside the reported model
        found[name] = {"alone": mixture_data(memory.alone), "beside_model": mixture_data(memory.beside_model)}
        if name in memories.choices:
            found[name]["choice"] = memories.choices[name]._asdict()
    return found
