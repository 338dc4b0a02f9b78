"""The clients' ensembles in a run: fitted after the rounds beside every client's own model, kept under private/."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import torch

from fedecider.baselines.counts import UNTRAINED
from fedecider.cross_silo.entries import STUDENT, TEACHER, ItemTexts, ModelOf, OnRanked, Positions, silent
from fedecider.cross_silo.prepare import BaseArtifacts
from fedecider.cross_silo.settings import Settings
from fedecider.data.domain import Domain
from fedecider.data.sellers import by_catalogue
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import get_protocol, held_out, histories, targets, train_parts, with_target
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import derive_seed, stream
from fedecider.methods.config import LOCAL, NOT_HIDDEN, UserPrivacy
from fedecider.models import ensemble
from fedecider.models.client_model import ClientModel
from fedecider.models.config import EnsembleConfig
from fedecider.models.counts import (
    Counts,
    count_events,
    no_counts,
    rest_of_sum,
    securely_summed,
    securely_summed_events,
    shared_items,
)
from fedecider.models.ensemble import Choices, Ensemble, Places, Weights
from fedecider.models.ensemble_files import save_ensemble, weights_data
from fedecider.models.features import Knowledge
from fedecider.models.noised_events import noised_events, others_events
from fedecider.models.weight_sums import securely_meaned
from fedecider.report.tables import CANARY
from fedecider.running.run_folder import RunFolder

ENSEMBLE_ROW = "ensemble without a model"
"""Name of the entry of counts, texts and habits alone."""
OWN_ENSEMBLE_ROW = "own ensemble without a model"
"""The same without what others count: what a client has that sends no counts, with the model where it does that."""
KEPT = "joined or local"
"""Name of the entry of what each client keeps, where one does not keep the joint model (`LOCAL` is what it would have
alone); with its ensemble where there is one."""
SPLITS = ("valid", "test")


class Ensembles(NamedTuple):
    """The ensemble of every client, and what it took to sum their counts."""

    clients: dict[str, Ensemble]
    """Domain -> ensemble, in client order."""
    prior: Mapping[str, float] | None
    """The weights of all clients, where they were exchanged."""
    traffic: dict[str, dict[str, int]]
    """Domain -> bytes up and down of the secure sums of counts and of weights, of those who take part in any."""


class System(NamedTuple):
    """What clients would recommend with, and how it ranks both splits."""

    model_of: ModelOf
    model: Mapping[str, Positions]
    """Split -> positions under the model by itself."""
    whole: Mapping[str, Positions]
    """The same with its ensemble, where there is one."""
    ensembles: Ensembles | None = None
    """Those that are exported."""
    entries: Mapping[str, Mapping[str, Positions]] = {"test": {}, "valid": {}}
    """Split -> entry -> positions of every ensemble, with the model and alone; with those of clients who keep their
    counts, where some get counts of others."""
    apart: Mapping[str, Places] = {}
    """Client -> places of ``whole`` on the test items, those that were bought before and new ones apart."""


def reserved_labels(method: str) -> list[str]:
    """Entries of a run that no baseline of one's own may be called after."""
    labels = [TEACHER, STUDENT, *UNTRAINED, CANARY, ENSEMBLE_ROW, OWN_ENSEMBLE_ROW, MACRO]
    return [*labels, *(label for name in (method, LOCAL, KEPT) for label in (name, with_ensemble(name)))]


def with_ensemble(method: str, row: str = ENSEMBLE_ROW) -> str:
    """Name of the entry of the ensemble whose private part is alone in ``row``."""
    return f"{method} + {row.removesuffix(' without a model')}"


class Fitting(NamedTuple):
    """What ensembles of a run are fitted with."""

    settings: Settings
    artifacts: BaseArtifacts
    texts: Mapping[str, ItemTexts]
    others: Mapping[str, Counts] | None = None
    """See `client_counts`."""
    prior: Mapping[str, float] | None = None
    """The weights of all clients, where they are on other machines; else those of ``artifacts`` are all."""
    on_ranked: OnRanked = silent

    @property
    def shares(self) -> bool:
        """Whether clients tell each other anything: alone none does."""
        return "others" in self.settings.run.ensemble.source_names


class Fitted(NamedTuple):
    """An entry of a client while its weights are fitted."""

    knowledge: Knowledge
    choices: Choices
    sources: tuple[str, ...]

    def ensemble(self, prior: Mapping[str, float] | None = None) -> Ensemble:
        beside = ensemble.fit_weights(self.choices, True, prior)
        return Ensemble(self.knowledge, ensemble.fit_weights(self.choices, False), beside, self.sources)


def every_ensemble(fitting: Fitting, label: str, model_of: ModelOf, names: Collection[str] | None = None) -> System:
    """Fit every client's ensemble beside its model, on its validation items, and rank both splits.

    All clients first fit their weights by themselves; the mean of these is the prior with which they fit them again,
    and comes from a secure sum. Not where customers are hidden: nothing bounds what one of them does to the weights.
    A client's users are scored once a split, for the model and for all ensembles. ``label``: the entry of the models.
    ``names``: of some clients alone.
    """
    settings, artifacts, texts, others, prior, on_ranked = fitting
    domains, config = artifacts.domains, settings.run.ensemble
    names = list(domains) if names is None else list(names)
    if not names:
        return System(model_of, {split: {} for split in SPLITS}, {split: {} for split in SPLITS})
    configs = {ENSEMBLE_ROW: config}
    if fitting.shares and (others if others is not None else catalogue_groups(domains, config)):
        configs[OWN_ENSEMBLE_ROW] = config.without_others
    counted = {
        row: client_counts(
            domains, one, settings.run.seed, others if row == ENSEMBLE_ROW else {}, settings.training.user_privacy
        )
        for row, one in configs.items()
    }

    def fitted(row: str, name: str) -> Fitted:
        knowledge = Knowledge(counted[row][0][name], texts[name].unit_ID)
        sources = tuple(configs[row].source_names)
        return Fitted(knowledge, choices_for(fitting, name, model_of(name), knowledge), sources)

    by_itself = {name: fitted(ENSEMBLE_ROW, name) for name in names}
    traffic = counted[ENSEMBLE_ROW][1]
    hides = settings.training.user_privacy.on
    if fitting.shares and not hides and prior is None and len(names) > 1:
        every = [ensemble.fit_weights(one.choices, True) for one in by_itself.values()]
        prior, sizes = securely_meaned(every, derive_seed(settings.run.seed, "weight sum"))
        each = {name: traffic.get(name, {"down": 0, "up": 0}) for name in names}
        traffic = {name: {way: size + sizes[way] for way, size in own.items()} for name, own in each.items()}
    clients: dict[str, Ensemble] = {}
    apart: dict[str, Places] = {}
    model_places: dict[str, Positions] = {split: {} for split in SPLITS}
    entries: dict[str, dict[str, Positions]] = {split: {} for split in SPLITS}
    for name in names:
        clients[name] = by_itself.pop(name).ensemble(prior)
        rows = {ENSEMBLE_ROW: clients[name]}
        if OWN_ENSEMBLE_ROW in configs:
            rows[OWN_ENSEMBLE_ROW] = fitted(OWN_ENSEMBLE_ROW, name).ensemble()
        for split in SPLITS:
            for row, of_row in rows.items():
                places = ranked(fitting, name, model_of(name), of_row, split)
                labels = (with_ensemble(label, row), row)
                for entry, place in zip(labels, places[1:], strict=True):
                    entries[split].setdefault(entry, {})[name] = place.whole
                if row == ENSEMBLE_ROW:
                    model_places[split][name] = places[0].whole
                    apart |= {name: places[1]} if split == "test" else {}
        on_ranked(with_ensemble(label))
    whole = {split: of_split.get(with_ensemble(label), {}) for split, of_split in entries.items()}

    def with_own(name: str) -> ClientModel:
        return model_of(name)._replace(ensemble=clients[name])

    ensembles = Ensembles(clients, prior, traffic)
    return System(with_own, model_places, whole, ensembles, entries, apart)


def own_weights(fitting: Fitting, name: str, model: ClientModel) -> Weights:
    """The weights that a client fits by itself, of which the others learn the mean."""
    run = fitting.settings.run
    counts = client_counts(fitting.artifacts.domains, run.ensemble, run.seed, fitting.others)[0]
    knowledge = Knowledge(counts[name], fitting.texts[name].unit_ID)
    return ensemble.fit_weights(choices_for(fitting, name, model, knowledge), True)


def choices_for(fitting: Fitting, name: str, model: ClientModel, knowledge: Knowledge) -> Choices:
    """What the weights of a client are fitted on: the validation items of its customers, or of a draw of many."""
    sequences = SequenceArray.of(fitting.artifacts.domains[name].clients.sequences)
    sequences = sequences.take(with_target(sequences, "valid"))
    draw = stream(fitting.settings.run.seed, "ensemble", name)
    if len(sequences) > ensemble.MAX_CUSTOMERS:
        drawn = torch.randperm(len(sequences), generator=draw)[: ensemble.MAX_CUSTOMERS]
        sequences = sequences.take(drawn.sort().values.numpy())
    asked = (histories(sequences, "valid"), targets(sequences, "valid"))
    return ensemble.choices_of(knowledge, *asked, model.scores(), draw, fitting.texts[name].near)


def ranked(fitting: Fitting, name: str, model: ClientModel, whole: Ensemble, split: str) -> list[Places]:
    """Places of the held-out items of the users who are ranked: by the model, by the ensemble, and by it without the
    model."""
    sequences = SequenceArray.of(fitting.artifacts.domains[name].clients.sequences)
    users = model.client.ranked_users(split, fitting.settings.ranking)
    sequences = sequences if users is None else sequences.take(users.numpy())
    drop_seen, near = get_protocol(fitting.settings.run.protocol).drop_seen, fitting.texts[name].near
    past, target_NT = histories(sequences, split), held_out(sequences, split)
    assert whole.beside_model is not None
    scores, beside = model.scores(), [whole.beside_model, ensemble.MODEL_ALONE]

    def places(scores: ensemble.ModelScores | None, every: list[Weights]) -> list[Places]:
        return ensemble.positions(whole.knowledge, past, target_NT, scores, every, drop_seen, near)

    if scores.beams is None:
        both, alone, without = places(scores, [*beside, whole.alone])
        if not drop_seen:  # beside an ensemble the model says nothing of what was bought before
            alone = alone._replace(whole=model.positions(split))
        return [alone, both, without]
    both, alone = places(scores, beside)
    alone = alone._replace(whole=model.positions(split))  # the model's own list is that of its beams
    return [alone, both, *places(None, [whole.alone])]


def client_counts(
    domains: Mapping[str, Domain],
    config: EnsembleConfig,
    seed: int,
    others: Mapping[str, Counts] | None = None,
    users: UserPrivacy = NOT_HIDDEN,
) -> tuple[dict[str, Counts], dict[str, dict[str, int]]]:
    """What each client counts from the sources of ``config``, and the bytes of the secure sums.

    ``others``: what the others of each client's catalogue have counted, where they are on other machines; clients that
    are not in it go without. None: all clients are here, and their secure sums are simulated. ``users``: where it is
    on, others' counts are those of `fedecider.models.noised_events`.
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
        train = {name: train_parts(domains[name].clients.sequences) for name in names}
        noise, draws = users.noise_scale, partial(stream, seed, "noise on events")
        secure, given = securely_summed, own
        if users.on:
            secure = securely_summed_events
            given = {name: noised_events(train[name], own[name].num_items, noise, draws(name)) for name in names}
        sent = [shared.sent(client, given[name]) for client, name in enumerate(names)]
        summed = secure(sent, derive_seed(seed, "memory sum", catalogue))
        for client, name in enumerate(names):
            rest = rest_of_sum(summed.total, sent[client])
            if users.on:
                rest = others_events(rest.event_I, len(names) - 1, noise, train[name])
            found[name].append(shared.received(client, rest))
            traffic[name] = {"down": summed.bytes_down, "up": summed.bytes_up}
    return {name: reduce(Counts.plus, parts, no_counts(own[name].num_items)) for name, parts in found.items()}, traffic


def catalogue_groups(domains: Mapping[str, Domain], config: EnsembleConfig) -> dict[str, list[str]]:
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
    return count_events(train_parts(domain.clients.sequences), len(domain.item_keys))


def save_ensembles(ensembles: Ensembles, domains: Mapping[str, Domain], folder: RunFolder) -> None:
    """Write every client's ensemble into its own folder below private/."""
    for name, whole in ensembles.clients.items():
        save_ensemble(whole, domains[name].own_keys, folder.private / name)


def ensembles_data(ensembles: Ensembles) -> dict[str, Any]:
    """Weights of every client as plain data, for ``metrics.json``."""
    return {
        name: {"alone": weights_data(whole.alone), "beside_model": weights_data(whole.beside_model)}
        for name, whole in ensembles.clients.items()
    }
