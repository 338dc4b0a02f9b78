"""A search of settings of the embedding track."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embedding_fr.methods import METHODS
from embedding_fr.setup import EmbeddingSettings, faults_and_hashes, rounds_of, set_up
from fedecider.data.interactions import load_interactions
from fedecider.data.readers.raw import to_stderr
from fedecider.experiment.engine import train
from fedecider.experiment.tuning import Outcome, Track, TrialPlace, TuneConfig, tune
from fedecider.running.launch import Launch
from fedecider.running.progress import round_progress
from fedecider.running.run_folder import as_plain, fingerprint


def tune_embedding(settings: EmbeddingSettings, config: TuneConfig, fixed: Sequence[str], launch: Launch) -> Path:
    """Try settings of the method on the validation items and return the folder of the search (``docs/tune.md``)."""
    run, entry = settings.run, METHODS[settings.run.method]
    interactions = load_interactions(settings.data, tell=to_stderr if launch.is_main else lambda _: None)
    faults, hashes = faults_and_hashes(run, interactions)

    def prepare() -> None:
        set_up(
            settings, interactions, launch.device
        )  # what cannot be run as it is given is told before the first trial

    def play(own: EmbeddingSettings, place: TrialPlace) -> Outcome:
        own = own._replace(run=dataclasses.replace(own.run, output=str(place.checkpoints.parent), resume=True))
        setup = set_up(own, interactions, launch.device)
        with round_progress(own.run.num_rounds, launch.is_main) as on_clients:
            state = train(
                rounds_of(own, setup, launch.processes, faults),
                recorder=place.recorder,
                checkpoints=place.checkpoints,
                key=fingerprint({"config": own.as_record(), "data": hashes}),
                resume=True,
                on_clients=on_clients,
            )
        return Outcome(state.best_score, state.best_round, state.round)

    names = [interactions.name]
    track = Track(settings, entry.space, entry.grid, hashes, names, prepare, play, file_settings)
    return tune(track, config, fixed, launch)


def file_settings(settings: EmbeddingSettings) -> dict[str, Any]:
    """What a file of ``--config`` says for a run with these settings."""
    values = {**as_plain(settings.run), **as_plain(settings.data), **as_plain(settings.training)}
    if METHODS[settings.run.method].guarantee is None:
        values |= as_plain(settings.privacy)
    return {**values, **as_plain(settings.method)}
