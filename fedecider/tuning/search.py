"""Which setting is tried next: the method's own candidates first, then a sampler that knows what came of the others.

What is proposed is a function of the space, the seed and the trials before, and of nothing else: no state of a sampler
is kept, so a search that was killed goes on as if it had not been, and processes that know the same trials agree.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedecider.federation.streams import derive_seed
from fedecider.running.progress import say
from fedecider.tuning.settings import value_of
from fedecider.tuning.space import OneOf, Range, Real, Setting, Space, Whole, points

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


def tune(search: Search, budget: int, score: Callable[[Setting], float], label: str) -> list[Tried]:
    """Up to ``budget`` trials; one whose ``score`` raises ``ValueError`` has failed, and its sentence is printed.

    So is a shortfall, where there is anything to tune.
    """
    tried: list[Tried] = []
    while len(tried) < budget and (setting := proposal(search, tried)) is not None:
        try:
            tried.append(Tried(setting, score(setting)))
        except ValueError as error:  # a diverged trial is a trial that lost
            say(f"{label} {setting}: {error}")
            tried.append(Tried(setting, None))
    if len(tried) < budget and search.is_tunable:
        say(f"{label}: {shortfall(search, tried, budget)}")
    return tried


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
