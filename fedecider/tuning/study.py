"""A search from its settings to its folder, for both tracks: trials are rounds alone, scored on validation items."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.bounds import is_out_of_memory
from fedecider.federation.record import CannotResume, Recorder
from fedecider.running.launch import Launch
from fedecider.running.progress import console, say
from fedecider.running.run_folder import RunFolder, default_name
from fedecider.running.stages import as_plain
from fedecider.running.tracking import checked_run, opened_together
from fedecider.tuning.config import TuneConfig
from fedecider.tuning.journal import Journal, Outcome, Trial, importances
from fedecider.tuning.report import setting_text, trial_page, trial_table, write_settings
from fedecider.tuning.search import Search, best_of, load_optuna, proposal, search_of, shortfall
from fedecider.tuning.settings import with_setting
from fedecider.tuning.space import Setting, Space

NOT_KEPT = ("output", "resume", "tracker")
"""Settings of a run that are no part of the best ones."""


class TrialPlace(NamedTuple):
    """Where the rounds of one trial are kept while they go on."""

    recorder: Recorder
    checkpoints: Path


class Track(NamedTuple):
    """What a search needs of a track."""

    settings: Any
    """NamedTuple of the run's blocks of settings, ``run`` among them; the start of the search."""
    space: Space
    grid: Sequence[Setting]
    data: dict[str, str]
    """Name -> hash of the data."""
    names: Sequence[str]
    """What the folder is named after, besides the method."""
    prepare: Callable[[], None]
    """What all trials share is built, and what cannot be run as it is given is refused; called once before them."""
    play: Callable[[Any, TrialPlace], Outcome]
    """settings, place -> what all rounds gave on validation items; goes on after the last checkpoint of ``place``.
    ``ValueError`` for settings that cannot be run or that diverged; ``CannotResume`` where ``place`` is damaged."""
    as_file: Callable[[Any], dict[str, Any]]
    """settings -> what a file of ``--config`` says for the same run."""


def tune(track: Track, config: TuneConfig, fixed: Sequence[str], launch: Launch) -> Path:
    """Run what is missing of ``config.trials`` and return the folder of the search.

    ``fixed``: options that are not searched, since they were given by name.

    Raises:
        ValueError: there is nothing to search; no trial finished; the folder holds another search; or the trial in
            progress cannot go on from what is there of it.
    """
    load_optuna()
    run = track.settings.run
    space = {name: one for name, one in track.space.items() if name not in fixed}
    grid = [setting for setting in track.grid if not set(setting) & set(fixed)]
    if run.tracker:
        raise ValueError("got --tracker with a search, expected none: its trials are in its folder. Leave it out")
    if not space and len(grid) < 2:
        raise ValueError(
            f"got nothing to search with the method {run.method}, expected settings that it declares and that are not "
            "given on the command line"
        )
    search = search_of(track.settings, space, grid, run.seed)
    config_record = track.settings.as_record()
    config_record["run"]["output"] = run.output or str(
        Path("runs") / default_name(f"tune-{run.method}", [*track.names])
    )
    config_record["tune"] = {"space": {name: str(one) for name, one in space.items()}, "grid": as_plain(grid)}
    root, record = checked_run(config_record, track.data, list(track.names))
    track.prepare()
    with opened_together(root, record, launch) as folder:
        journal = Journal(root / "journal.jsonl", search) if launch.is_main else None
        trials = _all_trials(track, config, search, folder, launch, journal)
        if journal is not None:
            _write(track, search, folder, journal, trials, record)
    if all(trial.outcome is None for trial in trials):
        raise ValueError(f"no trial of {run.method} finished, expected one at least: see {root / 'tune.md'}")
    return root


def _all_trials(
    track: Track, config: TuneConfig, search: Search, folder: RunFolder, launch: Launch, journal: Journal | None
) -> list[Trial]:
    """Those of the journal, then the missing ones; every process plays its part in each."""
    trials = launch.from_main(journal.trials() if journal is not None else [])
    if trials and launch.is_main:
        say(f"{len(trials)} trials are there already")
    while len(trials) < config.trials:
        tried = [trial.tried for trial in trials]
        setting = proposal(search, tried)
        if setting is None:
            if launch.is_main:
                say(shortfall(search, tried, config.trials))
            break
        trial = _played(track, setting, folder.root / "trials" / f"{len(trials) + 1:03d}", launch)
        trials.append(trial)
        if journal is not None:
            journal.add(trial)
            shutil.rmtree(folder.root / "trials" / f"{len(trials):03d}" / "checkpoints", ignore_errors=True)
            _tell(trials, config)
    return trials


def _played(track: Track, setting: Setting, folder: Path, launch: Launch) -> Trial:
    started, outcome, problem = time.perf_counter(), None, ""
    if launch.is_main:
        folder.mkdir(parents=True, exist_ok=True)
    place = TrialPlace(Recorder(folder / "rounds.jsonl" if launch.is_main else None), folder / "checkpoints")
    try:
        outcome = track.play(with_setting(track.settings, setting), place)
    except CannotResume:  # says nothing about the setting
        raise
    except ValueError as error:  # such as a run that diverged
        problem = " ".join(str(error).split())
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        problem = "out of memory"
    return Trial(setting, outcome, problem, time.perf_counter() - started)


def _tell(trials: Sequence[Trial], config: TuneConfig) -> None:
    last, best = trials[-1], best_of([trial.tried for trial in trials])
    result = f"failed: {last.problem}" if last.outcome is None else f"valid ndcg@10 {last.outcome.valid:.4f}"
    note = "" if best is None else f" | best so far: trial {best + 1}"
    say(f"trial {len(trials)}/{config.trials}: {setting_text(last.setting)} | {result} | {last.seconds:.1f} s{note}")


def _write(
    track: Track,
    search: Search,
    folder: RunFolder,
    journal: Journal,
    trials: Sequence[Trial],
    record: Mapping[str, Any],
) -> None:
    """``best.yaml`` and ``tune.md``, and the table on the terminal."""
    run, root = track.settings.run, folder.root
    best = best_of([trial.tried for trial in trials])
    title = f"Search of {run.method} on {', '.join(track.names)}"
    heading = [
        f"{len(trials)} trials, {sum(trial.outcome is None for trial in trials)} of them failed; seed {run.seed}",
        f"commit {record['commit']}, fedecider tune",
    ]
    notes = [
        "Trials were scored on validation items alone. The best of several scores is too high as an estimate: what the "
        "chosen settings are worth is what a run with them gives on the test items."
    ]
    if best is not None:
        chosen = with_setting(track.settings, trials[best].setting)
        values = {name: value for name, value in track.as_file(chosen).items() if name not in NOT_KEPT}
        score = f"validation ndcg@10 {trials[best].tried.valid:.4f}"
        comments = [f"{title}: trial {best + 1} of {len(trials)}, {score}", setting_text(trials[best].setting)]
        write_settings(root / "best.yaml", values, comments)
        notes.append(f"A run with them: `fedecider federate --config {root / 'best.yaml'}`")
    shares = importances(journal)
    (root / "tune.md").write_text(trial_page(title, heading, trials, search, shares, notes), encoding="utf-8")
    console.print(trial_table(trials, title))
    for note in notes:
        say(note)
    say(f"search: {root}")
