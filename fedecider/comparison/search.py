"""Which settings of a method are tried: its own candidates first, then draws of optuna, which know what came of them.

A trial's draw has a seed of its own, so a table that was killed goes on with the same settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fedecider.federation.streams import derive_seed
from fedecider.running.options import nested
from fedecider.search_space import OneOf, Range, Real, Setting, Space, Whole, points

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
    for name in setting:
        value_of(blocks, name)
    values = nested(setting)
    changed = [_replaced(block, {name: values[name] for name in values if name in _fields(block)}) for block in blocks]
    return type(blocks)(*changed) if hasattr(blocks, "_fields") else type(blocks)(changed)


def _replaced(block: Any, values: Mapping[str, Any]) -> Any:
    inner = {name: getattr(block, name) for name in values}
    own = {
        name: _replaced(inner[name], value) if dataclasses.is_dataclass(inner[name]) else value
        for name, value in values.items()
    }
    return dataclasses.replace(block, **own) if own else block


def _fields(block: Any) -> Sequence[str]:
    return [field.name for field in dataclasses.fields(block)] if dataclasses.is_dataclass(block) else []


class Tried(NamedTuple):
    """A trial that is over."""

    setting: Setting
    valid: float | None
    """Validation ndcg@10; None where it failed."""


class Search(NamedTuple):
    """What decides which settings are tried."""

    space: Space
    start: Mapping[str, Any]
    """Value of every option of the space and of ``candidates`` before a setting is applied."""
    candidates: Sequence[Setting]
    """Tried in their order before any is drawn; the start itself is the first one."""
    seed: int = 0

    def values(self, setting: Setting) -> dict[str, Any]:
        """What a setting amounts to; equal for settings that are the same."""
        values = {**self.start, **setting}
        for name, one in self.space.items():
            if isinstance(one, Real) and one.of and not values[name] and values[name] == self.start[name]:
                values[name] = values[one.of]
        return values

    def params(self, setting: Setting) -> dict[str, Any]:
        """What the sampler would draw for ``setting``; empty where it changes something beyond the space."""
        values = self.values(setting)
        params = {
            name: values[name] / values[one.of] if isinstance(one, Real) and one.of else values[name]
            for name, one in self.space.items()
        }
        beyond = any(values[name] != self.start[name] for name in setting if name not in self.space)
        return {} if beyond or not all(one.holds(params[name]) for name, one in self.space.items()) else params

    def left(self, tried: Iterable[Setting]) -> list[Setting] | None:
        """Settings of the space that are no candidates and were not tried; None where they cannot be counted."""
        every = points(self.space) if self.space else []
        if every is None:
            return None
        known = [self.values(setting) for setting in (*self.candidates, *tried)]
        return [setting for point in every if self.values(setting := self.from_start(point)) not in known]

    def from_start(self, params: Setting) -> Setting:
        """What differs from the start, real numbers with three digits."""
        rounded = dict(params)
        for name, one in self.space.items():
            if isinstance(one, Real):
                rounded[name] = float(f"{params[name] * (rounded[one.of] if one.of else 1.0):.3g}")
        return {name: value for name, value in rounded.items() if value != self.start[name]}


ONE_SETTING = Search({}, {}, ({},))
"""Of what is run as it is."""


def search_of(blocks: Iterable[Any], space: Space, grid: Sequence[Setting], seed: int = 0) -> Search:
    """The search around the settings in ``blocks`` (dataclasses), with the candidates of ``grid`` first.

    Raises:
        ValueError: an option of space or grid is in no block.
    """
    blocks = tuple(blocks)
    names = dict.fromkeys([*space, *(name for setting in grid for name in setting)])
    search = Search(space, {name: value_of(blocks, name) for name in names}, (), seed)
    candidates: list[Setting] = []
    for setting in ({}, *grid):
        if all(search.values(setting) != search.values(one) for one in candidates):
            candidates.append(setting)
    return search._replace(candidates=tuple(candidates))


def best_of(tried: Sequence[Tried]) -> int | None:
    """Number of the trial with the best validation score, the earlier one on ties; None where all failed."""
    scores = [-math.inf if one.valid is None else one.valid for one in tried]
    return scores.index(max(scores)) if any(one.valid is not None for one in tried) else None


def check_budget(search: Search, budget: int) -> None:
    """``ValueError`` where settings would be drawn and optuna is not installed: told before any work."""
    if budget > len(search.candidates) and search.left(()) != []:
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


class Study:
    """The trials of a search as a study of optuna: one is asked for, run and told, then the next one."""

    def __init__(self, search: Search) -> None:
        """Raises ``ValueError`` where optuna is not installed."""
        optuna = load_optuna()
        self.search, self._optuna = search, optuna
        self._ranges = {name: _distribution(one) for name, one in search.space.items()}
        self.study = optuna.create_study(direction="maximize")

    @property
    def finished(self) -> list[Any]:
        """Trials of optuna that are over, in their order."""
        return [trial for trial in self.study.trials if trial.state.is_finished()]

    @property
    def tried(self) -> list[Tried]:
        """The same as settings and scores."""
        return [Tried(self._setting(trial), trial.value) for trial in self.finished]

    def ask(self) -> Setting | None:
        """The setting of the next trial; None where all were tried."""
        return self._setting(self._open) if self._begin() else None

    def tell(self, valid: float | None) -> None:
        """The score of the setting that was asked for, None where it failed."""
        failed = self._optuna.trial.TrialState.FAIL
        self.study.tell(self._open, valid, state=failed if valid is None else None)

    def _begin(self) -> bool:
        tried = [one.setting for one in self.tried]
        seed = derive_seed(self.search.seed, "tune", len(tried))
        left = self.search.left(tried)
        if len(tried) < len(self.search.candidates):
            given: Setting | None = self.search.candidates[len(tried)]
        elif left == []:
            return False
        else:
            given = left[seed % len(left)] if left else None
        params = {} if given is None else self.search.params(given)
        if params:
            self.study.enqueue_trial(params, skip_if_exists=True)
        self.study.sampler = self._optuna.samplers.TPESampler(seed=seed % 2**32)
        self._open = self.study.ask(self._ranges if params or given is None else {})
        return True

    def _setting(self, trial: Any) -> Setting:
        if trial.number < len(self.search.candidates):
            return self.search.candidates[trial.number]
        return self.search.from_start(trial.params)


def _distribution(one: Range) -> Any:
    from optuna import distributions

    if isinstance(one, OneOf):
        return distributions.CategoricalDistribution(one.values)
    if isinstance(one, Whole):
        return distributions.IntDistribution(one.least, one.most, log=one.log)
    return distributions.FloatDistribution(one.least, one.most, log=one.log)


def setting_text(setting: Setting) -> str:
    """A setting in words."""
    return ", ".join(f"{name} {value}" for name, value in setting.items()) or "default"
