"""What the settings of a method owe to the commands, and what it says of them to a search."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from fedecider.federation.registry import RESERVED
from fedecider.running.cli import from_plain
from fedecider.running.stages import as_plain
from fedecider.testing.bench import Bench, require
from fedecider.tuning.config import TuneConfig
from fedecider.tuning.settings import value_of, with_setting
from fedecider.tuning.space import OneOf, Range, Real, Setting, Whole


def settings(bench: Bench) -> None:
    """The settings are a frozen dataclass with a default and a help text for each, and the grid is made of settings."""
    config, entry = bench.entry.config, bench.entry
    frozen = is_dataclass(config) and getattr(config, "__dataclass_params__").frozen  # noqa: B009 (mypy lacks it)
    require(frozen, f"{config.__name__} is no frozen dataclass")
    own = {field.name for field in fields(config)}
    told = set(re.findall(r"\n    (\w+): \S", inspect.getdoc(config) or ""))
    require(own <= told, f"{config.__name__} has no help text for {sorted(own - told)}: give them below Args:")
    common = {field.name for one in bench.common_settings() for field in fields(one)}
    taken = common | {field.name for field in fields(TuneConfig)} | {*RESERVED}
    require(not own & taken, f"{sorted(own & taken)} of {config.__name__} are names of common settings")
    for setting in entry.grid:
        unknown = sorted({name.partition(".")[0] for name in setting} - own - common)
        require(not unknown, f"the grid has {unknown}, which are no settings")
        problem = _refused(bench, setting)
        require(not problem, f"the grid has {setting}, which the settings refuse: {problem}")


def space(bench: Bench) -> None:
    """What a search may draw are settings, in ranges of `fedecider.tuning.space` whose values they accept."""
    blocks = _blocks(bench)
    for name, one in bench.entry.space.items():
        try:
            value_of(blocks, name)
        except ValueError as error:
            raise AssertionError(f"the space has {name!r}, which is no setting") from error
        require(
            isinstance(one, (Real, Whole, OneOf)),
            f"the space has {one!r} for {name}, expected Real, Whole or OneOf of fedecider.tuning.space",
        )
        require(not _wrong(one), f"the space has {one!r} for {name}, expected {_wrong(one)}")
        for value in _tried(one):
            problem = _refused(bench, {name: value})
            require(not problem, f"the space may draw {name} {value!r}, which the settings refuse: {problem}")


def _blocks(bench: Bench) -> tuple[Any, ...]:
    """The settings of a run by default, the method's own first."""
    return (bench.entry.config(), *(one() for one in bench.common_settings()))


def _refused(bench: Bench, setting: Setting) -> str:
    """Why the settings cannot have these values, also when a file says them; empty where they can."""
    try:
        for block in with_setting(_blocks(bench), setting):
            if any(name.partition(".")[0] in {field.name for field in fields(block)} for name in setting):
                from_plain(type(block), as_plain(block))
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _wrong(one: Range) -> str:
    """What is expected of a range that cannot be drawn from; empty where it can."""
    if isinstance(one, OneOf):
        return "" if len(one.values) else "one value at least"
    if not (math.isfinite(one.least) and math.isfinite(one.most) and one.least < one.most):
        return "two finite ends, the smaller one first"
    if one.log and one.least <= 0:
        return "ends above 0, since the range is logarithmic"
    if isinstance(one, Whole):
        return "" if one.holds(one.least) and one.holds(one.most) else "whole numbers as ends"
    inside = all(one.holds(_three_digits(end)) for end in (one.least, one.most))
    return "" if inside else "ends of at most three digits, as drawn numbers have"


def _tried(one: Range) -> Sequence[Any]:
    """Both ends of a range and, of real numbers, one in between; all values where there are no ends."""
    if isinstance(one, OneOf):
        return one.values
    if isinstance(one, Whole):
        return (one.least, one.most)
    between = math.sqrt(one.least * one.most) if one.log else one.least + 0.382 * (one.most - one.least)
    return (float(one.least), _three_digits(between), float(one.most))


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
