"""The search of a method's settings, from the settings it starts at to its folder: trials are rounds alone, scored on
validation items."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fedecider.bounds import OneOrMore, dataclass, is_out_of_memory
from fedecider.comparison.search import Study, best_of, load_optuna, search_of, setting_text, with_setting
from fedecider.engine.run import Experiment, train
from fedecider.engine.track import Track
from fedecider.federation.callbacks import Checkpoints, RoundCallback, recording
from fedecider.federation.record import CannotResume, Recorder, write_text
from fedecider.report.tables import markdown_grid
from fedecider.running.launch import Launch
from fedecider.running.plain import as_plain
from fedecider.running.progress import log_line, round_progress
from fedecider.running.rounds import checked_run, opened_together
from fedecider.running.run_folder import default_name, fingerprint
from fedecider.search_space import Setting, Space

NOT_KEPT = ("output", "resume", "tracker")
"""Settings of a run that are no part of the best ones."""
HEADER = ("trial", "validation ndcg@10", "best / last round", "seconds", "setting")
NOTE = (
    "Trials were scored on validation items alone. The best of several scores is too high as an estimate: what the "
    "chosen settings are worth is what a run with them gives on the test items."
)


@dataclass(frozen=True)
class TuneConfig:
    """Search.

    Args:
        trials: The number of settings that are tried, the method's defaults among them; with resume, those that are
            there count too.
    """

    trials: OneOrMore = 20


class Tunable(NamedTuple):
    """What a track gives to searches: its part ``tune``."""

    space: Space
    grid: Sequence[Setting]
    experiment: Callable[[Any], Experiment]
    """Settings -> what is run with them, on data that are read once. ``ValueError`` for settings that cannot be."""
    as_file: Callable[[Any], dict[str, Any]]
    """Settings -> what a file of ``--config`` says for the same run."""


def tune(track: Track, settings: Any, config: TuneConfig, fixed: Sequence[str], launch: Launch) -> Path:
    """Run what is missing of ``config.trials`` and return the folder of the search (``docs/compare.md``).

    ``settings`` are where the search starts; ``fixed`` are options that are not searched, since they were given by
    name.

    Raises:
        ValueError: there is nothing to search; no trial finished; the folder holds another search; or the trial in
            progress cannot go on from what is there of it.
    """
    load_optuna()
    settings = launch.from_main(settings)
    run, tunable = settings.run, track.part("tune")(settings, launch)
    space = {name: one for name, one in tunable.space.items() if name not in fixed}
    grid = [setting for setting in tunable.grid if not set(setting) & set(fixed)]
    if getattr(run, "tracker", ""):
        raise ValueError("got --tracker with a search, expected none: its trials are in its folder. Leave it out")
    if not space and len(grid) < 2:
        raise ValueError(
            f"got nothing to search with the method {run.method}, expected settings that it declares and that are not "
            "given on the command line"
        )
    search = search_of(settings, space, grid, run.seed)
    start = tunable.experiment(settings)
    names, written = list(start.names), settings.as_record()
    written["run"]["output"] = run.output or str(Path("runs") / default_name(f"tune-{run.method}", names))
    written["tune"] = {"space": {name: str(one) for name, one in space.items()}, "grid": as_plain(grid)}
    root, record = checked_run(written, dict(start.hashes), names)
    launch.accelerator.wait_for_everyone()
    start.prepare(launch, None)  # what cannot be run as it is given is told before the first trial
    with opened_together(root, record, launch):
        study = Study(search, root / "journal.jsonl") if launch.is_main else None
        number = launch.from_main(len(study.finished) if study else 0)
        if number and study:
            log_line(f"{number} trials are there already")
        while number < config.trials:
            setting = launch.from_main(study.ask() if study else None)
            if setting is None:
                if study:
                    log_line(f"every setting of the search was tried: {number} trials instead of {config.trials}")
                break
            number += 1
            place = root / "trials" / f"{number:03d}"
            started = time.perf_counter()
            valid, facts = _trial(tunable, with_setting(settings, setting), place, launch)
            if study:
                study.tell(valid, setting=as_plain(setting), seconds=time.perf_counter() - started, **facts)
                shutil.rmtree(place / "checkpoints", ignore_errors=True)
                _log(study, config.trials)
        if study:
            heading = [f"seed {search.seed}", f"commit {record['commit']}, fedecider tune"]
            best = best_of(study.tried)
            if best is not None:
                chosen = tunable.as_file(with_setting(settings, study.tried[best].setting))
                kept = {name: value for name, value in chosen.items() if name not in NOT_KEPT}
                _write_best(study, best, f"Search of {run.method} on {', '.join(names)}", kept, root)
            _write_page(study, best, f"Search of {run.method} on {', '.join(names)}", heading, root)
        has_best = launch.from_main(study is not None and best_of(study.tried) is not None)
    if not has_best:
        raise ValueError(f"no trial of {run.method} finished, expected one at least: see {root / 'tune.md'}")
    return root


def _trial(tunable: Tunable, settings: Any, place: Path, launch: Launch) -> tuple[float | None, dict[str, Any]]:
    """The validation score of all rounds, None where they failed, and the facts of it; goes on after a checkpoint.

    Raises:
        CannotResume: ``place`` is damaged, which says nothing about the setting.
    """
    if launch.is_main:
        place.mkdir(parents=True, exist_ok=True)
    try:
        experiment = tunable.experiment(settings)
        rounds = experiment.prepare(launch, None)
        recorder = Recorder(place / "rounds.jsonl" if launch.is_main else None)
        key = fingerprint({"config": settings.as_record(), "data": dict(experiment.hashes)})
        checkpoints = Checkpoints(place / "checkpoints", key, recorder, rounds.checkpoint_every, launch.is_main)
        with round_progress(settings.run.num_rounds, launch.is_main) as clients_done:
            callbacks = [recording(recorder), checkpoints.callback(), RoundCallback(clients_done=clients_done)]
            state = train(rounds, callbacks, checkpoints.start(resume=True))
        return state.best_score, {"best_round": state.best_round, "last_round": state.round}
    except CannotResume:
        raise
    except ValueError as error:  # such as a run that diverged
        return None, {"problem": " ".join(str(error).split())}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None, {"problem": "out of memory"}


def _log(study: Study, num: int) -> None:
    last, best = study.finished[-1], best_of(study.tried)
    facts = last.user_attrs
    result = f"failed: {facts['problem']}" if last.value is None else f"valid ndcg@10 {last.value:.4f}"
    note = "" if best is None else f" | best so far: trial {best + 1}"
    text = setting_text(study.tried[-1].setting)
    log_line(f"trial {last.number + 1}/{num}: {text} | {result} | {facts['seconds']:.1f} s{note}")


def _write_best(study: Study, best: int, title: str, values: Mapping[str, Any], root: Path) -> None:
    chosen = study.tried[best]
    score = f"validation ndcg@10 {chosen.valid:.4f}"
    lines = [f"{title}: trial {best + 1} of {len(study.finished)}, {score}", setting_text(chosen.setting)]
    text = yaml.safe_dump(as_plain(values), sort_keys=False, allow_unicode=True)
    write_text(root / "best.yaml", "".join(f"# {line}\n" for line in lines) + text)


def _write_page(study: Study, best: int | None, title: str, heading: Sequence[str], root: Path) -> None:
    """``tune.md``: what was searched, all trials, what decided; trials and notes on the terminal too."""
    search, trials = study.search, markdown_grid(HEADER, _cells(study, best), HEADER[:4])
    failed = sum(one.valid is None for one in study.tried)
    first = f"{len(study.finished)} trials, {failed} of them failed"
    notes = [
        NOTE,
        *([f"A run with them: `fedecider federate --config {root / 'best.yaml'}`"] if best is not None else []),
    ]
    parts = [f"# {title}", "", *(f"- {line}" for line in (first, *heading)), "", "## Trials", "", *trials, ""]
    if space := [[name, str(one), str(search.start[name])] for name, one in search.space.items()]:
        parts += ["## Space", "", *markdown_grid(("setting", "drawn from", "start"), space), ""]
    if shares := study.importances():
        grid = [[name, f"{share:.2f}"] for name, share in shares.items()]
        parts += ["## What the differences come from (fANOVA, rough)", ""]
        parts += [*markdown_grid(("setting", "share"), grid, ("share",)), ""]
    write_text(root / "tune.md", "\n".join([*parts, *(f"{note}\n" for note in notes)]))
    for line in (title, *trials, *notes, f"search: {root}"):
        log_line(line)


def _cells(study: Study, best: int | None) -> list[list[str]]:
    """Cells below ``HEADER``, the best trial in bold."""
    cells = []
    for trial, (setting, valid) in zip(study.finished, study.tried, strict=True):
        facts, mark = trial.user_attrs, "**" if trial.number == best else ""
        result = (
            ["failed", "-"]
            if valid is None
            else [f"{mark}{valid:.4f}{mark}", f"{facts['best_round']}/{facts['last_round']}"]
        )
        problem = f" ({facts['problem']})" if valid is None else ""
        cells.append([str(trial.number + 1), *result, f"{facts['seconds']:.1f}", setting_text(setting) + problem])
    return cells
