"""A search of settings of the LLM track: trials share pre-training and distillation, and begin at the same student."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedecider.data.domain import by_catalogue, clients_of
from fedecider.experiment.alternatives import settle
from fedecider.experiment.engine import train
from fedecider.experiment.federate import check_federation, prepare_rounds, rounds_of, shared_out
from fedecider.experiment.prepare import Foundation, Settings, build_foundation, load_data
from fedecider.experiment.tuning import Outcome, Track, TrialPlace, TuneConfig, tune
from fedecider.methods import METHODS, RATES, TRAINING_SPACE
from fedecider.running.launch import Launch
from fedecider.running.progress import round_progress
from fedecider.running.run_folder import as_plain, fingerprint


def tune_llm(settings: Settings, config: TuneConfig, fixed: Sequence[str], launch: Launch) -> Path:
    """Try settings of the method on the validation items and return the folder of the search (``docs/tune.md``)."""
    settings = launch.from_main(settings)
    run, entry = settings.run, METHODS[settings.run.method]
    domains = load_data(run)
    hashes, faults = check_federation(settings, domains)
    launch.accelerator.wait_for_everyone()
    launch = shared_out(settings, launch, clients_of(domains))
    built: list[Foundation] = []

    def prepare() -> None:
        built.append(build_foundation(run, launch))

    def play(asked: Settings, place: TrialPlace) -> Outcome:
        check_federation(asked, domains)
        own = settle(asked, built[0], launch).settings
        prepared = prepare_rounds(own, built[0], launch)
        with round_progress(run.num_rounds, launch.is_main) as on_clients:
            state = train(
                rounds_of(own, prepared, launch, faults),
                recorder=place.recorder,
                checkpoints=place.checkpoints,
                key=fingerprint({"config": asked.as_record(), "data": hashes}),
                resume=True,
                on_clients=on_clients,
            )
        return Outcome(state.best_score, state.best_round, state.round)

    space, grid = {**TRAINING_SPACE, **entry.space}, (*entry.grid, *RATES)
    names = list(by_catalogue(clients_of(domains)))
    return tune(Track(settings, space, grid, hashes, names, prepare, play, file_settings), config, fixed, launch)


def file_settings(settings: Settings) -> dict[str, Any]:
    """What a file of ``--config`` says for a run with these settings; the method's own stand in its block."""
    own = {settings.run.method: values} if (values := as_plain(settings.method)) else {}
    return {**as_plain(settings.run), **as_plain(settings.training), **as_plain(settings.ranking), **own}
