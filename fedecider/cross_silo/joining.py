"""What joining brought: every client's own model beside the joint one, which of the two it keeps, and the figures.

Shape legend: U users of a client, E events, P pairs of events, I items, D dims of a text's vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from fedecider.cross_silo.ensembles import Fitting, System, every_ensemble
from fedecider.cross_silo.entries import ModelOf, Positions
from fedecider.cross_silo.hyperparameter_selection import choices as selectable
from fedecider.cross_silo.reported import chosen_scale
from fedecider.cross_silo.settings import Settings
from fedecider.data.domain import Domain, Events, clients_of
from fedecider.data.matching import unmatched
from fedecider.data.overlap import overlap_of, overlap_sentences, own_sentence, unlike_keys
from fedecider.data.sellers import once_each
from fedecider.evaluation.metrics import user_metrics
from fedecider.evaluation.protocols import NUM_HELD_OUT
from fedecider.evaluation.sequences import SequenceArray
from fedecider.evaluation.statistics import ONE_SIDED, clearly_above
from fedecider.federation.aggregate import LEAST_PEERS
from fedecider.federation.config import PrivacyConfig
from fedecider.federation.streams import derive_seed
from fedecider.methods import METHODS
from fedecider.methods.beside import has_local
from fedecider.methods.config import COUNTS, LOCAL, LocalConfig
from fedecider.models.client_model import ClientModel, mean_of

Keeps = Literal["joined", "half", "local"]
"""What a client goes on with: the model of the rounds, the mean of both updates, or the one it trained alone."""
HALF = "half"
"""Name of the row of the mean of both updates, which no table shows."""
CHOSEN_BY = "ndcg@10"
MOST_PAIRS = 20_000
"""Of items in a row whose texts are compared, of a client."""


AloneOf = Callable[[str], tuple[ClientModel, float]]
"""What a client has trained alone, by its name, with its validation ndcg@10."""


def only_items(settings: Settings) -> bool:
    """Whether adapters change nothing but rows of items, so that clients without a common item have nothing to share.

    What factors of other rows have in common, such as those that all coordinates of a table share, moves little and
    says nothing of an item that the others do not have.
    """
    pretrain, targets = settings.run.pretrain, set(settings.run.lora_settings.targets)
    words = pretrain.samples.dense_head or ("table" in targets and pretrain.samples.templates != "history")
    return pretrain.has_own_tokens and targets <= {"table", "output"} and not words


def as_trained(settings: Settings, nothing_common: bool) -> Settings:
    """The settings with which a run trains: `local`, where the rounds of another method would change nothing."""
    entry = METHODS[settings.run.method]
    if not nothing_common or settings.run.local_row != "choose" or settings.run.method == LOCAL or entry.pooled:
        return settings
    if not only_items(settings):
        return settings
    sent: dict[str, Any] = {"privacy": PrivacyConfig(), "secure_sum": False, "robust_mean": "mean"}
    return settings._replace(run=dataclasses.replace(settings.run, method=LOCAL, **sent), method=LocalConfig())


def overlap_data(
    settings: Settings, domains: Mapping[str, Domain], clients: Mapping[str, Domain] | None = None, own: str = ""
) -> dict[str, Any]:
    """What stands in ``run.json`` under ``overlap``: what clients have in common, pair by pair, and in sentences.

    ``clients``: those of ``domains`` with client users, or of a deployment all of them: its server has nobody's users,
    and the site ``own`` has its own, of which its sentences are then.
    """
    clients = clients_of(domains) if clients is None else clients
    overlap = overlap_of(clients)
    hope = all(map(only_items, selectable(settings))), any(domain.public.users for domain in domains.values())
    told = own_sentence(overlap, own, *hope) if own else ""
    sentences = [told] if told else overlap_sentences(overlap, *hope)
    common = [(pair.first, pair.second) for pair in overlap.pairs if pair.num_items]
    apart = [pair for pair in common if clients[pair[0]].catalogue is not clients[pair[1]].catalogue]
    if apart:
        who = "; ".join(" and ".join(pair) for pair in apart)
        sentences.append(
            f"These items are not matched, and nothing is learnt of them together: {who}. Prepare the data with one "
            "--catalogue, such as ean, where equal keys are the same items."
        )
    if unlike := unlike_keys({name: domain.item_keys for name, domain in once_each(clients).items()}):
        sentences.append(unlike)
    return {
        "by": overlap.by,
        "nothing": len(clients) > 1 and len(apart) == len(common),
        "pairs": [pair._asdict() for pair in overlap.pairs],
        "sentences": sentences,
    }


def check_matched(settings: Settings, clients: Mapping[str, Domain]) -> None:
    """``ValueError`` where companies sell the same goods and nobody has matched them."""
    if not settings.run.different_goods and (said := unmatched(clients)):
        raise ValueError(
            f"{said}: nothing would be learnt of them together. Match them: fedecider match {settings.run.data} "
            "--output pairs.csv, then --pairs pairs.csv --output matched, and train on matched; or say that they are "
            "different goods: --different_goods true"
        )


def check_common(settings: Settings, overlap: Mapping[str, Any]) -> None:
    """``overlap``: `overlap_data`.

    Raises:
        ValueError: rounds between machines would change nothing.
    """
    if as_trained(settings, overlap["nothing"]) != settings:
        raise ValueError(
            f"got companies for whom rounds would change nothing, expected some with items in common. "
            f"{' '.join(overlap['sentences'])} L{AT_HOME[1:]}. --local_row show deploys all the same"
        )


AT_HOME = "let each train alone, where its data are: fedecider federate --method local"
ALONE = (
    "No two clients have rows of items in common, and adapters are rows of items: rounds would change nothing, so "
    "every client is trained alone. --local_row show federates all the same."
)


def trains_alone(settings: Settings, num_clients: int) -> bool:
    """Whether every client is to train alone too: there is somebody to join, and a method that does."""
    return settings.run.local_row != "off" and settings.run.method not in (LOCAL, COUNTS) and num_clients > 1


def has_local_row(settings: Settings, local: Mapping[str, Any]) -> bool:
    """Whether what clients have trained alone stands beside the method: it does in a run of `counts` without being
    trained again, and is all that there is in one of `local`. ``local``: their state."""
    return settings.run.local_row != "off" and settings.run.method != LOCAL and has_local(local)


def may_choose(settings: Settings) -> bool:
    """Whether a client may keep its own model. Not where users are hidden: its own training has no noise, so that what
    is exported would not have the epsilon that the run tells."""
    return settings.run.local_row == "choose" and not settings.training.user_privacy.on


def system_of(fitting: Fitting, label: str, model_of: ModelOf, names: Collection[str]) -> System:
    """The models of ``names``, ranked; ``label``: the entry of the models."""
    if fitting.settings.run.ensemble.kind != "none":
        return every_ensemble(fitting, label, model_of, names)
    places: dict[str, Positions] = {"test": {}, "valid": {}}
    for name in names:
        model = model_of(name)
        for split, of_split in places.items():
            of_split[name] = model.positions(split)
        fitting.on_ranked(label)
    return System(model_of, places, places)


def local_system(fitting: Fitting, alone: AloneOf) -> System:
    """What clients have alone: their own adapters, at a scale of the update as joint ones have, and own counts."""
    settings, best = fitting.settings, {}
    for name in fitting.artifacts.domains:
        model, score = alone(name)
        best[name] = model.scaled(chosen_scale(settings, model, {1.0: score}))
    own = settings._replace(run=dataclasses.replace(settings.run, method=LOCAL))  # without counts of others
    return system_of(fitting._replace(settings=own, others={}, prior=None), LOCAL, best.__getitem__, list(best))


def leaving(joined: System, local: System) -> list[str]:
    """Clients whose validation customers like their own model better by a one-sided paired test at 95 %."""
    return [
        name
        for name, place_U in joined.whole["valid"].items()
        if clearly_above([_gains(local.whole["valid"][name])], [_gains(place_U)], ONE_SIDED)
    ]


def chosen_systems(fitting: Fitting, joined: System, local: System) -> tuple[dict[str, Keeps], System]:
    """What every client keeps, and that as one system.

    The joint model, unless its own validation customers like what it has alone clearly better; then that or the mean of
    both updates, whichever they like better. The choice is the client's own, and nobody is told of it.
    """
    keeps: dict[str, Keeps] = dict.fromkeys(joined.whole["valid"], "joined")
    leave = leaving(joined, local)

    def half_of(name: str) -> ClientModel:
        return mean_of([joined.model_of(name), local.model_of(name)])

    if joined.ensembles is not None:
        fitting = fitting._replace(prior=joined.ensembles.prior)
    half = system_of(fitting, HALF, half_of, leave)
    for name in leave:
        halved, alone = (_gains(system.whole["valid"][name]).mean() for system in (half, local))
        keeps[name] = "half" if halved > alone else "local"
    return keeps, kept_system({"joined": joined, "half": half, "local": local}, keeps)


def _gains(position_U: torch.Tensor) -> np.ndarray:
    return user_metrics(position_U)[CHOSEN_BY].double().numpy()


def kept_system(systems: Mapping[Keeps, System], keeps: Mapping[str, Keeps]) -> System:
    """What every client keeps, as one system; ensembles are those of the models they stand beside."""
    of_client = {name: systems[kept] for name, kept in keeps.items()}
    model = {split: {name: of_client[name].model[split][name] for name in keeps} for split in ("test", "valid")}
    whole = {split: {name: of_client[name].whole[split][name] for name in keeps} for split in ("test", "valid")}
    ensembles = systems["joined"].ensembles
    if ensembles is not None:
        kept = {name: system.ensembles for name, system in of_client.items() if system.ensembles is not None}
        ensembles = ensembles._replace(clients={name: of_system.clients[name] for name, of_system in kept.items()})
    apart = {name: system.apart[name] for name, system in of_client.items() if name in system.apart}
    return System(lambda name: of_client[name].model_of(name), model, whole, ensembles, apart=apart)


def checked_events(domains: Mapping[str, Domain], unit_of: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Client -> what `fedecider.report.joining.odd_sentences` warns by; ``unit_of``: client -> (I, D) unit texts.

    ``most_sold``: share of train events on the item with most of them. ``likeness``, by how much texts of items that
    customers take one after the other are more alike (cosine) than those of the same items drawn anew, with its
    ``error``: numbers that mean other items, and events by chance, have none. ``usual``: the median of that at the
    other clients of its catalogue, of which there must be two; at a site, which sees no other client, that of the
    public users, who may be other people. Without it ``likeness`` is left out too. Each client is looked at by itself,
    so that nothing is sent for it.
    """
    every = {name: _likeness(name, domain.clients, unit_of[name]) for name, domain in domains.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, domain in domains.items():
        item_E = _train_events(domain.clients).value_E
        found[name] = {"most_sold": float(np.bincount(item_E).max() / len(item_E))} if len(item_E) else {}
        least = LEAST_PEERS - 1
        others = [
            one[0]
            for other, one in every.items()
            if one is not None and other != name and domains[other].catalogue is domain.catalogue
        ]
        if len(domains) == 1 and (public := _likeness(name, domain.public, unit_of[name])) is not None:
            others, least = [public[0]], 1
        if len(others) >= least and (own := every[name]) is not None:
            found[name] |= {"likeness": own[0], "error": own[1], "usual": median(others)}
    return found


def _train_events(events: Events) -> SequenceArray:
    return SequenceArray.of(events.sequences).without_last(NUM_HELD_OUT)


def _likeness(name: str, events: Events, unit_ID: np.ndarray) -> tuple[float, float] | None:
    """Mean and standard error; None of fewer than two pairs."""
    train, draw = _train_events(events), np.random.default_rng(derive_seed(0, "text likeness", name))
    item_E = train.value_E
    place_P = np.flatnonzero((train.row_E[1:] == train.row_E[:-1]) & (item_E[1:] != item_E[:-1]))
    place_P = draw.permutation(place_P)[:MOST_PAIRS]
    if len(place_P) < 2:
        return None
    first_P, next_P = item_E[place_P], item_E[place_P + 1]
    likeness_P = (unit_ID[first_P] * (unit_ID[next_P] - unit_ID[draw.permutation(next_P)])).sum(1)
    return float(likeness_P.mean()), float(likeness_P.std() / len(place_P) ** 0.5)
