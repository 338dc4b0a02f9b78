"""The trials of a search in a file, one line each, written when a trial is over: a journal of optuna."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.running.stages import as_plain
from fedecider.tuning.search import Search, Tried, distributions, known_parameters, load_optuna
from fedecider.tuning.space import Setting

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
