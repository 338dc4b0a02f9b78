"""The clients' hybrids in a run: fitted after the rounds, ranked with every client's own model, kept under private/."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import reduce
from typing import Any, NamedTuple

from fedecider.baselines.counts import UNTRAINED
from fedecider.cross_silo.entries import STUDENT, TEACHER, ItemTexts, ModelOf, OnRanked, Positions, silent
from fedecider.cross_silo.prepare import BaseArtifacts, calibration
from fedecider.cross_silo.settings import Settings
from fedecider.data.domain import Domain
from fedecider.data.sellers import by_catalogue
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import NUM_HELD_OUT
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import derive_seed, stream
from fedecider.models.config import HybridConfig
from fedecider.models.counts import (
    Contexts,
    Counts,
    count_events,
    no_counts,
    securely_summed,
    shared_items,
    training_contexts,
    without,
)
from fedecider.models.hybrid import (
    Choice,
    Hybrid,
    beside_model_of,
    choose_weights,
    fit_hybrid,
    mixture_data,
    save_hybrid,
    sides_of,
)
from fedecider.report.tables import CANARY
from fedecider.running.run_folder import RunFolder

HYBRID_ROW = "hybrid without a model"
"""Name of the row of counts and texts alone."""
OWN_HYBRID_ROW = "own hybrid without a model"
"""The same without what others count: what a client has that sends no counts, with the model where it does that."""


LOCAL, KEPT = "local", "joined or local"
"""Names of the rows of what clients would have alone, and of what each keeps, where one does not keep the joint model;
with their hybrids where there are some."""


class Hybrids(NamedTuple):
    """The hybrid of every client, and what it took to sum their counts."""

    clients: dict[str, Hybrid]
    """Domain -> hybrid, in client order."""
    choices: dict[str, Choice]
    """Domain -> whose weights were taken on validation items."""
    traffic: dict[str, dict[str, int]]
    """Domain -> bytes up and down of the secure sum; clients with a catalogue of their own are left out."""


class System(NamedTuple):
    """What clients would recommend with, and how it ranks both splits."""

    model_of: ModelOf
    model: Mapping[str, Positions]
    """Split -> positions under the model by itself."""
    whole: Mapping[str, Positions]
    """The same with its hybrid, where there is one."""
    hybrids: Hybrids | None = None
    """Those that are exported."""
    entries: Mapping[str, Mapping[str, Positions]] = {"test": {}, "valid": {}}
    """Split -> entry -> positions of every hybrid, with the model and alone; with those of clients who keep their
    counts, where some get counts of others."""


def reserved_labels(method: str) -> list[str]:
    """Entries of a run that no baseline of one's own may be called after."""
    labels = [TEACHER, STUDENT, *UNTRAINED, CANARY, HYBRID_ROW, OWN_HYBRID_ROW, MACRO]
    return [*labels, *(label for name in (method, LOCAL, KEPT) for label in (name, with_hybrid(name)))]


def with_hybrid(method: str, row: str = HYBRID_ROW) -> str:
    """Name of the row of the hybrid whose private part is alone in ``row``."""
    return f"{method} + {row.removesuffix(' without a model')}"


class Fitting(NamedTuple):
    """What hybrids of a run are fitted with."""

    settings: Settings
    artifacts: BaseArtifacts
    texts: Mapping[str, ItemTexts]
    others: Mapping[str, Counts] | None = None
    """See `client_counts`."""
    on_ranked: OnRanked = silent


def every_hybrid(fitting: Fitting, label: str, model_of: ModelOf, names: Collection[str] | None = None) -> System:
    """Fit every client's hybrid beside its model, choose its weights, and rank both splits.

    Fitted on train events of users whom no adapter has seen: on users who trained the adapters, nearly all weight would
    go to the model. A client's users are scored once a split, for the model and for all hybrids. ``label``: the entry
    of the models. ``names``: of some clients alone.
    """
    settings, artifacts, texts, others, on_ranked = fitting
    config, domains = settings.run.hybrid, artifacts.domains
    configs = {HYBRID_ROW: config}
    kept = [name for name in config.source_names if name != "others"]
    if kept and (others if others is not None else catalogue_groups(domains, config)):
        configs[OWN_HYBRID_ROW] = dataclasses.replace(config, sources=",".join(kept))
    counted = {
        row: client_counts(domains, one, settings.run.seed, others if row == HYBRID_ROW else {})
        for row, one in configs.items()
    }
    hybrids = Hybrids({}, {}, counted[HYBRID_ROW][1])
    reported: dict[str, Positions] = {"test": {}, "valid": {}}
    entries: dict[str, dict[str, Positions]] = {"test": {}, "valid": {}}
    for name in domains if names is None else names:
        model, near = model_of(name), texts[name].near
        contexts, scores = hybrid_contexts(domains[name], settings.run.seed), model.scores()
        fitted = {
            row: fit_hybrid(counts[name], texts[name].unit_ID, contexts, scores, configs[row], near)
            for row, (counts, _) in counted.items()
        }
        sides = {row: (hybrid, {**sides_of(hybrid), "alone": hybrid.alone}) for row, hybrid in fitted.items()}
        model_valid, valid = model.mixed("valid", sides, near)
        chosen = {}
        for row, hybrid in fitted.items():
            ensemble, choice = choose_weights(hybrid, {side: valid[row][side] for side in sides_of(hybrid)})
            if row == HYBRID_ROW:
                hybrids.clients[name], hybrids.choices[name] = ensemble, choice
            chosen[row] = (ensemble, {"both": beside_model_of(ensemble), "alone": ensemble.alone})
            valid[row]["both"] = valid[row][choice.weights]
        for split, (model_U, places) in {
            "valid": (model_valid, valid),
            "test": model.mixed("test", chosen, near),
        }.items():
            reported[split][name] = model_U
            for row, of_row in places.items():
                entries[split].setdefault(with_hybrid(label, row), {})[name] = of_row["both"]
                entries[split].setdefault(row, {})[name] = of_row["alone"]
        on_ranked(with_hybrid(label))
    whole = {split: of_split.get(with_hybrid(label), {}) for split, of_split in entries.items()}
    return System(model_of, reported, whole, hybrids, entries)


def hybrid_contexts(domain: Domain, seed: int) -> Contexts:
    """The train events of a client on which its weights are fitted."""
    sequences = SequenceArray.of(domain.clients.sequences).take(calibration(domain, seed))
    return training_contexts(sequences, stream(seed, "memory", domain.name))  # names of streams stay: same draws


def client_counts(
    domains: Mapping[str, Domain], config: HybridConfig, seed: int, others: Mapping[str, Counts] | None = None
) -> tuple[dict[str, Counts], dict[str, dict[str, int]]]:
    """What each client counts from the sources of ``config``, and the bytes of the secure sums.

    ``others``: what the others of each client's catalogue have counted, where they are on other machines; clients that
    are not in it go without. None: all clients are here, and their secure sums are simulated.
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
    for catalogue, names in (catalogue_groups(domains, config) if others is None else {}).items():
        shared = shared_items([domains[name].item_keys for name in names])
        sent = [shared.sent(client, own[name]) for client, name in enumerate(names)]
        summed = securely_summed(sent, derive_seed(seed, "memory sum", catalogue))
        for client, name in enumerate(names):
            found[name].append(shared.received(client, without(summed.total, sent[client])))
            traffic[name] = {"down": summed.bytes_down, "up": summed.bytes_up}
    return {name: reduce(Counts.plus, parts, no_counts(own[name].num_items)) for name, parts in found.items()}, traffic


def catalogue_groups(domains: Mapping[str, Domain], config: HybridConfig) -> dict[str, list[str]]:
    """Catalogue -> the clients that add up their counts, two or more; where clients of a catalogue fall apart into
    several groups without an item in common, each is called after its first client too. None where too few sell any
    item (`fedecider.models.counts.SharedItems`)."""
    if "others" not in config.source_names:
        return {}
    groups: dict[str, list[str]] = {}
    for catalogue, sellers in by_catalogue(domains).items():
        apart = [names := list(sellers.domains)]
        if any(domain.is_part for domain in sellers.domains.values()):
            apart = _overlapping({name: set(domain.item_keys) for name, domain in sellers.domains.items()})
        for group in apart:
            if len(group) > 1 and shared_items([domains[name].item_keys for name in group]).num_items:
                groups[catalogue if len(group) == len(names) else f"{catalogue}-{group[0]}"] = group
    return groups


def _overlapping(keys: Mapping[str, set[str]]) -> list[list[str]]:
    """The names in groups: two of one group have an item in common, or each with others of it."""
    groups: list[tuple[list[str], set[str]]] = []
    for name, own in keys.items():
        touching = [group for group in groups if group[1] & own]
        groups = [group for group in groups if not group[1] & own]
        names = [one for group, _ in touching for one in group]
        groups.append(([*names, name], own.union(*(others for _, others in touching))))
    return [[name for name in keys if name in names] for names, _ in groups]


def own_counts(domain: Domain) -> Counts:
    """What a client counts of its own users: their train events."""
    parts = SequenceArray.of(domain.clients.sequences).without_last(NUM_HELD_OUT)
    return count_events(parts, len(domain.item_keys))


def save_hybrids(hybrids: Hybrids, domains: Mapping[str, Domain], folder: RunFolder) -> None:
    """Write every client's hybrid into its own folder below private/."""
    for name, hybrid in hybrids.clients.items():
        save_hybrid(hybrid, domains[name].item_keys, folder.private / name)


def hybrids_data(hybrids: Hybrids) -> dict[str, Any]:
    """Weights of every client as plain data, for ``metrics.json``."""
    found = {}
    for name, hybrid in hybrids.clients.items():
        sides = {"alone": mixture_data(hybrid.alone), "beside_model": mixture_data(beside_model_of(hybrid))}
        found[name] = {**sides, "choice": hybrids.choices[name]._asdict()}
    return found
