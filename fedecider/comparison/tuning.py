"""Searches of settings: which ones are tried next, the journal of the trials, their report.

What is proposed is a function of the space, the seed and the trials before, and of nothing else: no state of a sampler
is kept, so a search that was killed goes on as if it had not been, and processes that know the same trials agree.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from rich.table import Table

from fedecider.bounds import OneOrMore, dataclass, is_out_of_memory
from fedecider.engine.run import Experiment, train
from fedecider.engine.track import Track
from fedecider.federation.callbacks import Checkpoints, RoundCallback, recording
from fedecider.federation.record import CannotResume, Recorder, write_text
from fedecider.federation.streams import derive_seed
from fedecider.report.tables import markdown_grid
from fedecider.running.launch import Launch
from fedecider.running.progress import console, log_line, round_progress
from fedecider.running.rounds import checked_run, opened_together
from fedecider.running.run_folder import RunFolder, as_plain, default_name, fingerprint
from fedecider.search_space import OneOf, Range, Real, Setting, Space, Whole, points

# Settings of a search.


@dataclass(frozen=True)
class TuneConfig:
    """Search.

    Args:
        trials: The number of settings that are tried, the method's defaults among them; with resume, those that are
            there count too.
    """

    trials: OneOrMore = 20


# Settings of a run by the names of their options, in whichever of its blocks they lie.

Blocks = TypeVar("Blocks", bound=tuple)


def value_of(blocks: Iterable[Any], name: str) -> Any:
    """The value of the option ``name`` (``block.name`` within a block) in frozen dataclasses of settings.

    Raises:
        ValueError: none of them has it.
    """
    first, _, rest = name.partition(".")
    for block in blocks:
        if first in _fields(block):
            value = getattr(block, first)
            return value_of((value,), rest) if rest else value
    raise ValueError(f"got the setting {name} in a search, expected an option of the method or of the run")


def with_setting(blocks: Blocks, setting: Setting) -> Blocks:
    """The same blocks with these options; what cannot be is a ``ValueError`` of the block that checks it."""
    changed = list(blocks)
    for place, block in enumerate(blocks):
        own = {name: value for name, value in setting.items() if name.partition(".")[0] in _fields(block)}
        if own:
            changed[place] = _replaced(block, own)
    unknown = [name for name in setting if not any(name.partition(".")[0] in _fields(block) for block in blocks)]
    if unknown:
        raise ValueError(f"got the setting {unknown[0]} in a search, expected an option of the method or of the run")
    return type(blocks)(*changed) if hasattr(blocks, "_fields") else type(blocks)(changed)


def _replaced(block: Any, setting: Setting) -> Any:
    plain = {name: value for name, value in setting.items() if "." not in name}
    inner: dict[str, Setting] = {}
    for name, value in setting.items():
        first, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(first, {})[rest] = value
    nested = {name: _replaced(getattr(block, name), values) for name, values in inner.items()}
    return dataclasses.replace(block, **plain, **nested)


def _fields(block: Any) -> Sequence[str]:
    return [field.name for field in dataclasses.fields(block)] if dataclasses.is_dataclass(block) else []


# Which setting is tried next: the method's own candidates first, then a sampler that knows what came of the
# others.

LOST = 0.0
"""What a trial that failed counts for the sampler: validation ndcg@10 cannot be lower."""
MAX_DRAWS = 50
"""Draws by TPE, which repeats itself, before one of the settings that are left is drawn at random."""


class Tried(NamedTuple):
    """A trial that is over."""

    setting: Setting
    valid: float | None
    """Validation ndcg@10; None where it failed."""


class Search(NamedTuple):
    """What decides the proposals."""

    space: Space
    start: Mapping[str, Any]
    """Value of every option of the space and of ``firsts`` before a setting is applied."""
    firsts: Sequence[Setting]
    """Candidates that are tried in their order before any is drawn; the start itself is the first one."""
    seed: int

    @property
    def is_tunable(self) -> bool:
        """Whether there is more than one setting."""
        return bool(self.space) or len(self.firsts) > 1

    def values(self, setting: Setting) -> dict[str, Any]:
        """What a setting amounts to; equal for settings that are the same."""
        return {**self.start, **setting}


ONE_SETTING = Search({}, {}, ({},), 0)
"""Of what is run as it is."""


def search_of(blocks: Iterable[Any], space: Space, grid: Sequence[Setting], seed: int) -> Search:
    """The search around the settings in ``blocks`` (dataclasses), with the candidates of ``grid`` first.

    Raises:
        ValueError: an option of space or grid is in no block.
    """
    blocks = tuple(blocks)
    names = dict.fromkeys([*space, *(name for setting in grid for name in setting)])
    search = Search(space, {name: value_of(blocks, name) for name in names}, (), seed)
    firsts: list[Setting] = []
    for setting in ({}, *grid):
        if all(search.values(setting) != search.values(one) for one in firsts):
            firsts.append(setting)
    return search._replace(firsts=tuple(firsts))


def proposal(search: Search, tried: Sequence[Tried]) -> Setting | None:
    """The next setting, which no trial had yet; None where nothing is left (:func:`is_used_up`) or none was found.

    Raises:
        ValueError: the candidates are used up and optuna, which draws further ones, is not installed.
    """
    known = [search.values(one.setting) for one in tried]
    for setting in search.firsts:
        if search.values(setting) not in known:
            return setting
    left = _left(search, known)
    if left == []:
        return None
    for attempt in range(2 * MAX_DRAWS):
        at_random, seed = attempt >= MAX_DRAWS, derive_seed(search.seed, "tune", len(tried), attempt)
        if at_random and left:
            return left[seed % len(left)]
        drawn = _drawn(search, tried, seed, at_random)
        if search.values(drawn) not in known:
            return drawn
    return None


def is_used_up(search: Search, tried: Sequence[Tried]) -> bool:
    """Whether every setting was tried; false where they cannot be counted."""
    known = [search.values(one.setting) for one in tried]
    return _left(search, known) == [] and all(search.values(setting) in known for setting in search.firsts)


def shortfall(search: Search, tried: Sequence[Tried], budget: int) -> str:
    """Why a search that proposes nothing more has fewer trials than its budget, in words."""
    why = "every setting of the search was tried" if is_used_up(search, tried) else "no other setting was found"
    return f"{why}: {len(tried)} trials instead of {budget}"


def _left(search: Search, known: Sequence[Mapping[str, Any]]) -> list[Setting] | None:
    """Settings of the space without the ``known`` ones; None where they cannot be counted."""
    every = points(search.space) if search.space else []
    if every is None:
        return None
    return [own for point in every if search.values(own := _beyond_start(search, point)) not in known]


def _beyond_start(search: Search, values: Setting) -> Setting:
    return {name: value for name, value in values.items() if value != search.start[name]}


def best_of(tried: Sequence[Tried]) -> int | None:
    """Number of the trial with the best validation score, the earlier one on ties; None where all failed."""
    scores = [-math.inf if one.valid is None else one.valid for one in tried]
    return scores.index(max(scores)) if any(one.valid is not None for one in tried) else None


def check_budget(search: Search, budget: int) -> None:
    """``ValueError`` where settings would be drawn and optuna is not installed: told before any work."""
    firsts = [search.values(setting) for setting in search.firsts]
    if search.space and budget > len(firsts) and _left(search, firsts) != []:
        load_optuna()


def load_optuna() -> Any:
    """The module optuna, which says nothing of its own accord. ``ValueError`` where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ValueError(
            "got a search without optuna, which is not installed, expected it to be there. Run: pip install "
            "'fedecider[tune]', or give no more trials than the method has candidates of its own"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def known_parameters(search: Search, setting: Setting) -> dict[str, Any]:
    """Values of the options of the space under ``setting``; empty where it sets something beyond the space."""
    values = search.values(setting)
    if not set(setting) <= set(search.space):
        return {}
    found = {name: values[name] for name, one in search.space.items() if one.holds(values[name])}
    return found if len(found) == len(search.space) else {}


def distributions(space: Space) -> dict[str, Any]:
    """The space as optuna has it."""
    return {name: _distribution(one) for name, one in space.items()}


def _distribution(one: Range) -> Any:
    from optuna import distributions

    if isinstance(one, OneOf):
        return distributions.CategoricalDistribution(one.values)
    if isinstance(one, Whole):
        return distributions.IntDistribution(one.least, one.most, log=one.log)
    return distributions.FloatDistribution(one.least, one.most, log=one.log)


def _drawn(search: Search, tried: Sequence[Tried], seed: int, at_random: bool) -> Setting:
    """A draw by TPE (``at_random``, or while it knows fewer than ten trials: uniform); what differs from the start."""
    optuna = load_optuna()
    ranges = distributions(search.space)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = optuna.samplers.RandomSampler if at_random else optuna.samplers.TPESampler
        study = optuna.create_study(direction="maximize", sampler=kind(seed=seed % 2**32))
        for one in tried:
            if params := known_parameters(search, one.setting):
                value = LOST if one.valid is None else one.valid
                study.add_trial(optuna.trial.create_trial(params=params, distributions=ranges, value=value))
        drawn = study.ask(ranges).params
    rounded = {n: float(f"{v:.3g}") if isinstance(search.space[n], Real) else v for n, v in drawn.items()}
    return _beyond_start(search, rounded)


# The trials of a search in a file, one line each, written when a trial is over: a journal of optuna.

STUDY = "fedecider"
"""Name of the study in the journal."""


class Outcome(NamedTuple):
    """What the rounds of a trial gave."""

    valid: float
    """Validation ndcg@10 of the best round."""
    best_round: int
    last_round: int


class Trial(NamedTuple):
    """A trial that is over."""

    setting: Setting
    outcome: Outcome | None
    """None where it failed."""
    problem: str
    """Why it failed, in a sentence."""
    seconds: float

    @property
    def tried(self) -> Tried:
        return Tried(self.setting, None if self.outcome is None else self.outcome.valid)


class _NoLock:
    """A lock of optuna's journal that locks nothing: the folder of the search is locked already.

    Optuna's own locks are files beside the journal. A kill while a line is written leaves them, and the next writer
    waits for them.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class Journal:
    """The file, which optuna and its dashboard read too; one process writes it, which has locked its folder."""

    def __init__(self, path: Path, search: Search) -> None:
        """Open or begin it. ``ValueError`` where it cannot be read."""
        self._optuna, self._path, self._search = load_optuna(), path, search
        _cut_unfinished_line(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                file = self._optuna.storages.journal.JournalFileBackend(str(path.resolve()), lock_obj=_NoLock())
                storage = self._optuna.storages.JournalStorage(file)
                self.study = self._optuna.create_study(
                    study_name=STUDY, storage=storage, direction="maximize", load_if_exists=True
                )
                self._read()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"got a damaged {path} ({type(error).__name__}: {error}), expected the trials of a search. Restore it "
                "from a copy, or start again with another --output"
            ) from error

    def trials(self) -> list[Trial]:
        """In their order."""
        return self._read()

    def add(self, trial: Trial) -> None:
        """One line, written at once."""
        state, value = self._optuna.trial.TrialState.FAIL, None
        if trial.outcome is not None:
            state, value = self._optuna.trial.TrialState.COMPLETE, trial.outcome.valid
        params = known_parameters(self._search, trial.setting)
        facts: dict[str, Any] = {"setting": trial.setting, "problem": trial.problem, "seconds": trial.seconds}
        if trial.outcome is not None:
            facts |= {"best_round": trial.outcome.best_round, "last_round": trial.outcome.last_round}
        self.study.add_trial(
            self._optuna.trial.create_trial(
                state=state,
                value=value,
                params=params,
                distributions=distributions(self._search.space) if params else {},
                user_attrs=facts,
            )
        )

    def _read(self) -> list[Trial]:
        found = []
        for one in self.study.trials:
            facts = one.user_attrs
            outcome = None
            if one.state == self._optuna.trial.TrialState.COMPLETE:
                outcome = Outcome(float(one.value), int(facts["best_round"]), int(facts["last_round"]))
            setting = {name: self._value(name, value) for name, value in dict(facts["setting"]).items()}
            found.append(Trial(setting, outcome, str(facts["problem"]), float(facts["seconds"])))
        return found

    def _value(self, name: str, read: Any) -> Any:
        """The value of a candidate that JSON keeps as ``read``: it knows no tuples."""
        values = [one[name] for one in (self._search.start, *self._search.firsts) if name in one]
        return next((value for value in values if _as_json(value) == _as_json(read)), read)


def importances(journal: Journal, least: int = 10) -> dict[str, float]:
    """Option -> its share of the differences between trials by fANOVA (Hutter et al., 2014), the largest first.

    Of the trials that finished within the space: one beyond it has no parameters that the others share. Empty with
    fewer than ``least`` of them, of which nothing could be told.
    """
    optuna = load_optuna()
    finished = [one for one in journal.study.trials if one.params and one.state == optuna.trial.TrialState.COMPLETE]
    if len(finished) < least or len({one.value for one in finished}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        within = optuna.create_study(direction="maximize")
        within.add_trials(finished)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        return dict(optuna.importance.get_param_importances(within, evaluator=evaluator))


def _as_json(value: Any) -> str:
    return json.dumps(as_plain(value), sort_keys=True)


def _cut_unfinished_line(path: Path) -> None:
    """What a kill left of a line: its trial is played again."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


# What a search leaves behind: a table for the terminal, a page in Markdown, and the best settings as YAML.

HEADER = ("trial", "validation ndcg@10", "best / last round", "seconds", "setting")


def setting_text(setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items()) or "default"


def trial_cells(trials: Sequence[Trial]) -> list[list[str]]:
    """Cells below ``HEADER``, the best trial in bold."""
    best = best_of([trial.tried for trial in trials])
    cells = []
    for number, trial in enumerate(trials, 1):
        if trial.outcome is None:
            result = ["failed", "-"]
        else:
            mark = "**" if number - 1 == best else ""
            result = [
                f"{mark}{trial.outcome.valid:.4f}{mark}",
                f"{trial.outcome.best_round}/{trial.outcome.last_round}",
            ]
        problem = f" ({trial.problem})" if trial.problem else ""
        cells.append([str(number), *result, f"{trial.seconds:.1f}", setting_text(trial.setting) + problem])
    return cells


def trial_table(trials: Sequence[Trial], title: str) -> Table:
    """For a terminal."""
    table = Table(title=title)
    for name in HEADER:
        table.add_column(name, justify="left" if name == "setting" else "right", overflow="fold")
    for cells in trial_cells(trials):
        is_best = cells[1].startswith("**")
        table.add_row(*(cell.strip("*") for cell in cells), style="bold" if is_best else None)
    return table


def trial_page(
    title: str, heading: Sequence[str], trials: Sequence[Trial], search: Search, shares: Mapping[str, float]
) -> str:
    """Markdown: what was searched, all trials, what decided."""
    parts = [f"# {title}", "", *(f"- {line}" for line in heading), "", "## Trials", ""]
    parts += [*markdown_grid(HEADER, trial_cells(trials), HEADER[:4]), ""]
    if space := [[name, str(one), str(search.start[name])] for name, one in search.space.items()]:
        parts += ["## Space", "", *markdown_grid(("setting", "drawn from", "start"), space), ""]
    if shares:
        grid = [[name, f"{share:.2f}"] for name, share in shares.items()]
        parts += ["## What the differences come from (fANOVA, rough)", ""]
        parts += [*markdown_grid(("setting", "share"), grid, ("share",)), ""]
    return "\n".join(parts)


# A search from its settings to its folder, for every track: trials are rounds alone, scored on validation items.

NOT_KEPT = ("output", "resume", "tracker")
"""Settings of a run that are no part of the best ones."""


class Tunable(NamedTuple):
    """What a track gives to searches: its part ``tune``."""

    space: Space
    grid: Sequence[Setting]
    experiment: Callable[[Any], Experiment]
    """Settings -> what is run with them, on data that are read once. ``ValueError`` for settings that cannot be."""
    as_file: Callable[[Any], dict[str, Any]]
    """Settings -> what a file of ``--config`` says for the same run."""


class _Work(NamedTuple):
    """One search while it goes on."""

    settings: Any
    """Where it starts."""
    tunable: Tunable
    search: Search
    trials: int
    """How many there will be."""
    launch: Launch

    def play(self, setting: Setting, place: Path) -> Outcome:
        """All rounds of a trial, scored on validation items; it goes on after the last checkpoint of ``place``.

        Raises:
            ValueError: settings that cannot be run or that diverged.
            CannotResume: ``place`` is damaged.
        """
        launch, own = self.launch, with_setting(self.settings, setting)
        experiment = self.tunable.experiment(own)
        rounds = experiment.prepare(launch, None)
        recorder = Recorder(place / "rounds.jsonl" if launch.is_main else None)
        key = fingerprint({"config": own.as_record(), "data": dict(experiment.hashes)})
        checkpoints = Checkpoints(place / "checkpoints", key, recorder, rounds.checkpoint_every, launch.is_main)
        with round_progress(own.run.num_rounds, launch.is_main) as clients_done:
            progress = RoundCallback(clients_done=clients_done)
            callbacks = [recording(recorder), checkpoints.callback(), progress]
            state = train(rounds, callbacks, checkpoints.start(resume=True))
        return Outcome(state.best_score, state.best_round, state.round)


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
    work = _Work(settings, tunable, search_of(settings, space, grid, run.seed), config.trials, launch)
    start = tunable.experiment(settings)
    names, written = list(start.names), settings.as_record()
    written["run"]["output"] = run.output or str(Path("runs") / default_name(f"tune-{run.method}", names))
    written["tune"] = {"space": {name: str(one) for name, one in space.items()}, "grid": as_plain(grid)}
    root, record = checked_run(written, dict(start.hashes), names)
    launch.accelerator.wait_for_everyone()
    start.prepare(launch, None)  # what cannot be run as it is given is told before the first trial
    with opened_together(root, record, launch) as folder:
        journal = Journal(root / "journal.jsonl", work.search) if launch.is_main else None
        trials = _all_trials(work, folder, journal)
        if journal is not None:
            _write(work, f"Search of {run.method} on {', '.join(names)}", journal, trials, record, root)
    if all(trial.outcome is None for trial in trials):
        raise ValueError(f"no trial of {run.method} finished, expected one at least: see {root / 'tune.md'}")
    return root


def _all_trials(work: _Work, folder: RunFolder, journal: Journal | None) -> list[Trial]:
    """Those of the journal, then the missing ones; every process plays its part in each."""
    is_main = work.launch.is_main
    trials = work.launch.from_main(journal.trials() if journal is not None else [])
    if trials and is_main:
        log_line(f"{len(trials)} trials are there already")
    while len(trials) < work.trials:
        tried = [trial.tried for trial in trials]
        setting = proposal(work.search, tried)
        if setting is None:
            if is_main:
                log_line(shortfall(work.search, tried, work.trials))
            break
        place = folder.root / "trials" / f"{len(trials) + 1:03d}"
        trials.append(_played(work, setting, place))
        if journal is not None:
            journal.add(trials[-1])
            shutil.rmtree(place / "checkpoints", ignore_errors=True)
            _log(trials, work.trials)
    return trials


def _played(work: _Work, setting: Setting, folder: Path) -> Trial:
    started, outcome, problem = time.perf_counter(), None, ""
    if work.launch.is_main:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        outcome = work.play(setting, folder)
    except CannotResume:  # says nothing about the setting
        raise
    except ValueError as error:  # such as a run that diverged
        problem = " ".join(str(error).split())
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        problem = "out of memory"
    return Trial(setting, outcome, problem, time.perf_counter() - started)


def _log(trials: Sequence[Trial], num: int) -> None:
    last, best = trials[-1], best_of([trial.tried for trial in trials])
    result = f"failed: {last.problem}" if last.outcome is None else f"valid ndcg@10 {last.outcome.valid:.4f}"
    note = "" if best is None else f" | best so far: trial {best + 1}"
    log_line(f"trial {len(trials)}/{num}: {setting_text(last.setting)} | {result} | {last.seconds:.1f} s{note}")


def _write(
    work: _Work, title: str, journal: Journal, trials: Sequence[Trial], record: Mapping[str, Any], root: Path
) -> None:
    """``best.yaml`` and ``tune.md``, and the table on the terminal."""
    best = best_of([trial.tried for trial in trials])
    failed = sum(trial.outcome is None for trial in trials)
    heading = [
        f"{len(trials)} trials, {failed} of them failed; seed {work.search.seed}",
        f"commit {record['commit']}, fedecider tune",
    ]
    notes = [
        "Trials were scored on validation items alone. The best of several scores is too high as an estimate: what the "
        "chosen settings are worth is what a run with them gives on the test items."
    ]
    if best is not None:
        chosen = with_setting(work.settings, trials[best].setting)
        values = {name: value for name, value in work.tunable.as_file(chosen).items() if name not in NOT_KEPT}
        score = f"validation ndcg@10 {trials[best].tried.valid:.4f}"
        said = [f"{title}: trial {best + 1} of {len(trials)}, {score}", setting_text(trials[best].setting)]
        text = yaml.safe_dump(as_plain(values), sort_keys=False, allow_unicode=True)
        write_text(root / "best.yaml", "".join(f"# {line}\n" for line in said) + text)
        notes.append(f"A run with them: `fedecider federate --config {root / 'best.yaml'}`")
    page = trial_page(title, heading, trials, work.search, importances(journal))
    write_text(root / "tune.md", "\n".join([page, *(f"{note}\n" for note in notes)]))
    console.print(trial_table(trials, title))
    for note in notes:
        log_line(note)
    log_line(f"search: {root}")
