"""The one engine: load, prepare, rounds, results; every track, `fedecider.federate` and the command line run on it.

A track gives an `Experiment` (what is run, on which data), which prepares `Rounds` (a method, its clients, and what is
written afterwards). Around them the engine opens the output directory, resumes, records, calls back, and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.bounds import Diverged
from fedecider.data.domain import Domain
from fedecider.data.store import save_domains
from fedecider.engine.track import Track
from fedecider.federation.callbacks import Checkpoints, Round, RoundCallback, recording
from fedecider.federation.channel import Channel
from fedecider.federation.method import FederatedMethod
from fedecider.federation.processes import Processes
from fedecider.federation.rounds import Clients, RoundSettings, run_rounds
from fedecider.federation.state import RunState
from fedecider.running import rounds as around
from fedecider.running.launch import Launch, start
from fedecider.running.manifest import SEEDS, write_manifest
from fedecider.running.plain import content_key
from fedecider.running.progress import log_line, quiet, round_progress, stage, timed_run, write_seconds
from fedecider.running.run_folder import RunFolder, fingerprint, forget_unstarted
from fedecider.running.settings_files import NOTHING_CHOSEN, Chosen, write_settings
from fedecider.scratch import aside


def kept_data(data: Mapping[str, Domain], cache: Path) -> Path:
    """The folder of these domains in the cache, by their content; written where it is not there yet, as a whole.

    Raises:
        ValueError: something else than domains, or none.
    """
    if not isinstance(data, Mapping) or not data or not all(isinstance(one, Domain) for one in data.values()):
        raise ValueError(
            f"got data of the type {type(data).__name__}, expected what fedecider.from_events gives, or a folder"
        )
    key = content_key({name: domain.content_hash() for name, domain in data.items()})
    folder = cache / f"data-{key}"
    if not folder.is_dir():
        try:
            with aside(folder) as scratch:
                save_domains(dict(data), scratch)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder


Callback = Callable[[Round], Any]
"""Called after each round, in every process; what is true ends the run after that round."""


class EarlyStopping:
    """Ends a run after ``patience`` rounds without a better validation score.

    >>> stop = EarlyStopping(3)

    Raises:
        ValueError: ``patience`` is not a whole number of at least 1.
    """

    def __init__(self, patience: int = 3):
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"got patience {patience!r}, expected a whole number of rounds, at least 1")
        self.patience = patience

    def __call__(self, round: Round) -> bool:
        return round.number - round.state.best_round >= self.patience


class Rounds(NamedTuple):
    """What the rounds of one run are made of, and what is done afterwards."""

    method: FederatedMethod
    clients: Clients
    settings: RoundSettings
    channel: Channel
    processes: Processes
    """Where clients are trained."""
    finish: Callable[[RunState, RunFolder], None] = lambda state, folder: None
    """Reads the test items once, for the reported round, and writes every file but the records."""
    opened: Callable[[RunFolder], None] = lambda folder: None
    """Writes down what was decided before the first round, by the main process."""
    checkpoint_every: int = 1


class Experiment(NamedTuple):
    """What is run on which data; everything that can be refused was checked when it was made."""

    settings: Any
    """Of the track: ``as_record()`` gives its blocks; ``run`` has output, resume, num_rounds, tracker."""
    hashes: Mapping[str, str]
    """Name -> hash of all that is read beside the settings."""
    names: Sequence[str]
    """Of clients or data, for the name of the output directory."""
    prepare: Callable[[Launch, RunFolder | None], Rounds]
    """Stages before the first round, and the method; the folder is that of a run that goes on."""
    facts: Mapping[str, Any] = {}
    """Further entries of ``run.json``."""


@timed_run()
def run_track(
    track: Track,
    settings: Any,
    callbacks: Sequence[Callback] = (),
    chosen: Chosen = NOTHING_CHOSEN,
    log_results: bool = True,
) -> Path:
    """`run` within processes and threads of its own, as ``accelerate launch`` or a notebook set them up.

    Further seeds (``seeds``) are trained after the first one, into ``seeds/`` of its folder, and their figures put into
    its own; what is exported is that of the first.
    """
    others = range(1, getattr(settings.run, "seeds", 1))
    with start(settings.run.num_threads, getattr(settings.run, "tracker", "")) as launch:
        settings = launch.from_main(settings)
        with stage("load"):
            experiment = track.part("load")(settings, launch)
        root = run(experiment, launch, callbacks, chosen, log_results and not others)
        folders = [root / SEEDS / str(settings.run.seed + number) for number in others]
        for number, folder in zip(others, folders, strict=True):
            if launch.is_main:
                log_line(f"training run {number + 1} of {settings.run.seeds}")
            own = {"seed": settings.run.seed + number, "seeds": 1, "output": str(folder)}
            resumes = RunFolder(folder).record.is_file()
            with quiet():
                again = settings._replace(run=replace(settings.run, **own, resume=resumes))
                run(track.part("load")(again, launch), launch, callbacks, log_results=False)
        if others and launch.is_main:
            with quiet(not log_results):
                track.part("merge_runs")(root, folders)
            write_manifest(root)
    return root


def check_same_run(track: Track, settings: Any) -> None:
    """``ValueError`` where the folder of ``settings``, which resume, holds a run of other settings or other data."""
    with start(settings.run.num_threads) as launch:
        experiment = track.part("load")(launch.from_main(settings), launch)
        around.checked_run(
            experiment.settings.as_record(), dict(experiment.hashes), list(experiment.names), **experiment.facts
        )


@timed_run()
def run(
    experiment: Experiment,
    launch: Launch,
    callbacks: Sequence[Callback] = (),
    chosen: Chosen = NOTHING_CHOSEN,
    log_results: bool = True,
) -> Path:
    """Run everything and return the output directory; see ``docs/run_folder.md`` for what it holds.

    ``chosen``: the configuration, where it was chosen for the data; it is kept in the folder. ``log_results``: print
    table and places of files at the end, as a command does.

    Raises:
        ValueError: the folder holds another run, or a stage finds settings that cannot be.
        Diverged: no client's numbers could be used any more; metrics and page say so.
    """
    config = experiment.settings.run
    root, record = around.checked_run(
        experiment.settings.as_record(), dict(experiment.hashes), list(experiment.names), **experiment.facts
    )
    launch.accelerator.wait_for_everyone()  # else a slow process would find the folder that the first one opens
    with stage("prepare"):
        rounds = experiment.prepare(launch, RunFolder(root) if config.resume else None)
    launch, names = launch._replace(processes=rounds.processes), rounds.clients.names
    with around.opened_together(root, record, launch) as folder:
        if launch.is_main:
            rounds.opened(folder)
            if chosen.settings:
                write_settings(folder.chosen, chosen.settings, chosen.reasons)
                log_line(f"settings chosen for your data, with the reasons: {folder.chosen}")
        try:
            with stage("rounds"), round_progress(config.num_rounds, launch.is_main) as clients_done:
                recorder = around.round_recorder(folder, launch, getattr(config, "tracker", ""), record, names)
                checkpoints = Checkpoints(
                    folder.checkpoints, fingerprint(record), recorder, rounds.checkpoint_every, launch.is_main
                )
                log_round = around.round_logger(launch, config.num_rounds, names)
                printed = RoundCallback(lambda round: log_round(round.record), clients_done)
                followers = [recording(recorder), *map(_from_user, callbacks), checkpoints.callback(), printed]
                state = train(rounds, followers, checkpoints.start(config.resume))
        except Diverged as error:
            if launch.is_main and folder.rounds.exists():
                from fedecider.engine.page import write_diverged  # pages are for the end of a run

                write_diverged(folder, rounds.method.name, str(error), names)
            elif launch.is_main:
                forget_unstarted(folder)
            raise
        except ValueError:
            if launch.is_main:
                forget_unstarted(folder)
            raise
        with stage("results"), quiet(not log_results):
            rounds.finish(state, folder)
        if launch.is_main and folder.metrics.is_file():
            write_seconds(folder.metrics)
            write_manifest(root)
        around.track_results(folder, launch, state.round)
    return root


def train(rounds: Rounds, callbacks: Sequence[RoundCallback] = (), state: RunState | None = None) -> RunState:
    """All rounds, from ``state`` on; each one is scored on the validation items, and no test item is looked at."""
    return run_rounds(
        rounds.method, rounds.clients, rounds.settings, rounds.channel, callbacks, rounds.processes, state
    )


def _from_user(callback: Callback) -> RoundCallback:
    return RoundCallback(lambda round: not round.diverged and callback(round))
