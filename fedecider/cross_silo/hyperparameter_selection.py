"""Settings of local training among which the clients' validation items choose before the first round.

Few events a user want layers that stay as they are and a table that learns, many events want both to learn; which of
the two the data are is seen when every client has trained alone for two rounds: layers take up in one what a table
needs two for, and may stop lower. The choice is one for all clients, since adapters of one shape are exchanged; each of
them needs to tell two numbers a round for it (`fedecider.evaluation.statistics`).

Shape legend: U users of a client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedecider.cross_silo.prepare import BaseArtifacts, make_recommender
from fedecider.cross_silo.settings import RunConfig, Settings
from fedecider.evaluation.metrics import user_metrics
from fedecider.evaluation.statistics import clearly_best
from fedecider.federation.record import plain, read_json, write_json
from fedecider.methods import METHODS
from fedecider.methods.centralised import pooled_models
from fedecider.methods.config import LocalTraining
from fedecider.methods.local_training import train_locally
from fedecider.running.damage import damage_names, read_object
from fedecider.running.launch import Launch
from fedecider.running.options import from_plain
from fedecider.running.plain import as_plain
from fedecider.running.progress import log_line, progress
from fedecider.running.run_folder import RunFolder
from fedecider.running.stages import cached_stage

METRIC = "ndcg@10"
ROUNDS = 2
"""Every setting is judged by the better one of so many rounds of local training alone."""
TARGETS = "lora_targets"
CHANGEABLE = (TARGETS, *(field.name for field in fields(LocalTraining) if field.name != "user_privacy"))


class Selected(NamedTuple):
    """What was taken, and what decided it."""

    settings: Settings
    """Without candidates."""
    taken: Mapping[str, Any]
    """What differs from the settings as given."""
    tried: Sequence[Mapping[str, Any]]
    """``changes`` and ``valid``, the mean over clients of ndcg@10; the settings as given first. Empty where there was
    no choice."""


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """``settings`` with these in place of its own, and without candidates.

    Raises:
        ValueError: a setting that is not one of `CHANGEABLE`, or a value that it cannot have.
    """
    unknown = sorted(set(changes) - set(CHANGEABLE))
    if unknown or not changes:
        raise ValueError(
            f"got {unknown or 'nothing'} in hyperparameter_candidates, expected some of {', '.join(CHANGEABLE)}"
        )
    targets = changes.get(TARGETS, settings.run.lora_targets)
    run = from_plain(
        RunConfig,
        {**as_plain(settings.run), TARGETS: targets, "hyperparameter_candidates": []},
        "hyperparameter_candidates",
    )
    own = {name: value for name, value in changes.items() if name != TARGETS}
    training = from_plain(LocalTraining, {**as_plain(settings.training), **own}, "hyperparameter_candidates")
    return settings._replace(run=run, training=training)


def choices(settings: Settings) -> list[Settings]:
    """The settings as given, then with each candidate; all without candidates."""
    as_given = settings._replace(run=replace(settings.run, hyperparameter_candidates=()))
    return [as_given, *(changed(settings, one) for one in settings.run.hyperparameter_candidates)]


def select(settings: Settings, artifacts: BaseArtifacts, launch: Launch, resumed: RunFolder | None = None) -> Selected:
    """The candidate that ranks the clients' validation items best within `ROUNDS` rounds of local training alone,
    where it is clearly better than the settings as given; tried once, kept beside the other stages and alike for all
    methods but those that pool.

    A candidate is taken where its ndcg@10 is above that of the settings as given by more than one standard error;
    of several the best one. Each is judged by its own best round, the same one for all clients. The test items are not
    looked at, and the clients' models start anew in the first round. A run that goes on (``resumed``) keeps the choice
    that it has written down, wherever the cache is now.

    Raises:
        ValueError: what ``resumed`` has written down is damaged.
    """
    offered = choices(settings)
    if len(offered) == 1:
        return Selected(offered[0], {}, [])
    changes: list[dict[str, Any]] = [{}, *map(dict, settings.run.hyperparameter_candidates)]
    if resumed is not None and resumed.selection.is_file():
        kept = read_object(resumed.selection, {"taken": dict, "tried": list})
        with damage_names(resumed.selection):
            number = [plain(one) for one in changes].index(kept["taken"])
        return Selected(offered[number], changes[number], kept["tried"])

    def try_all(folder: Path) -> None:
        total = len(offered) * ROUNDS * len(artifacts.domains)
        with progress("hyper-parameter selection", launch.is_main) as told:
            steps = count(1)
            gains = [_gains(one, artifacts, launch, lambda: told(next(steps), total)) for one in offered]
        write_json(folder / "gains.json", gains)

    with launch.accelerator.main_process_first():
        stage = cached_stage(
            Path(settings.run.cache),
            "selection",
            _inputs(settings, offered, artifacts, launch),
            try_all,
        )
    gains = read_json(stage.folder / "gains.json")
    taken = clearly_best([[np.array(gain_U) for gain_U in one.values()] for one in gains])
    tried = [{"changes": one, "valid": _macro(gain)} for one, gain in zip(changes, gains, strict=True)]
    selected = Selected(offered[taken], changes[taken], tried)
    if launch.is_main:
        log_line(selection_text(selected.taken, tried))
    return selected


def keep(selected: Selected, folder: RunFolder) -> None:
    """Write down what was taken, where there was a choice."""
    if selected.tried:
        write_json(folder.selection, {"taken": selected.taken, "tried": selected.tried})


def selection_text(taken: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> str:
    """What was selected, in one sentence."""
    words = " ".join(f"{name} {value}" for name, value in taken.items()) or "as given"
    scores = ", ".join(f"{candidate['valid']:.4f}" for candidate in tried)
    return f"settings of local training, by validation ndcg@10 of two rounds alone ({scores}): {words}"


def as_taken(settings: Settings, folder: RunFolder) -> Settings:
    """The settings of a finished run as they were in its rounds."""
    if not settings.run.hyperparameter_candidates:
        return settings
    taken = read_object(folder.selection)["taken"]
    return changed(settings, taken) if taken else choices(settings)[0]


def _gains(
    settings: Settings, artifacts: BaseArtifacts, launch: Launch, ranked: Callable[[], None]
) -> dict[str, list[float]]:
    """Client -> ndcg@10 of each of its validation users after the best of `ROUNDS` rounds of training alone.

    ``ranked`` hears of every client and round.

    A method that pools trains on all clients' data together. Whose training diverges is left with the student.
    """
    models = make_recommender(settings, artifacts, launch.device)
    pools = METHODS[settings.run.method].pooled
    trained_by = pooled_models(models) if pools else models
    gains_R: list[dict[str, list[float]]] = [{} for _ in range(ROUNDS)]
    for clients in [range(models.num_clients)] if pools else [[one] for one in range(models.num_clients)]:
        pair = models.start
        for number, gains in enumerate(gains_R, 1):
            trained = train_locally(trained_by, clients[0], number, pair)
            pair = trained.pair if trained.finite else models.start
            for client in clients:
                positions_U = models.model(client, pair).positions("valid")
                gains[models.names[client]] = user_metrics(positions_U)[METRIC].tolist()
                ranked()
    return max(gains_R, key=_macro)


def _macro(gains: Mapping[str, Sequence[float]]) -> float:
    return float(np.mean([np.mean(gain_U) for gain_U in gains.values()]))


def _inputs(
    settings: Settings, offered: Sequence[Settings], artifacts: BaseArtifacts, launch: Launch
) -> dict[str, Any]:
    """What decides the outcome of the trials: the student, the clients' data, and how they train and rank."""
    run = settings.run
    return {
        "student": artifacts.distilled.folder.name,
        "data": {name: domain.content_hash() for name, domain in artifacts.domains.items()},
        "pooled": METHODS[run.method].pooled,
        "rounds": ROUNDS,
        "choices": [[one.run.lora_targets, as_plain(one.training)] for one in offered],
        "ranking": as_plain(settings.ranking),
        **{name: getattr(run, name) for name in ("seed", "lora_rank", "quantize", "protocol")},
        "samples": as_plain(run.pretrain.samples),
        "device": launch.device.type,
    }
