"""What a setting may be, and what a search may set of it: said once, checked wherever settings are made.

``num_rounds: OneOrMore`` or ``num_layers: Annotated[int, at_least(1, most=1000)]`` in a frozen dataclass, and
``check(self)`` in its ``__post_init__``: types, choices (``Literal``) and bounds are read from the annotations; a text
in ``Annotated`` is added to the message. The command line reads the type and leaves the bound to ``check``, so a number
out of bounds is refused in the same words from an option, from YAML and from Python. The machine's own bound, its
memory, is known by the errors of those who hit it (`is_out_of_memory`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union

# What a setting may be, said once in its annotation and checked whenever a dataclass of settings is made.

LARGEST: dict[Any, float] = {int: 2 * 10**9, float: sys.float_info.max}
"""Where a bound names no end: whatever is larger is a typo, or infinite."""
KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    types.NoneType: "null",
}


class Diverged(ValueError):
    """Numbers of a training are no numbers any more: a run that ends so has no result, and exit code 1."""


class Bound(NamedTuple):
    """The numbers from ``least`` to ``most``; ``above`` and ``below`` leave out the ends themselves."""

    least: float
    most: float | None = None
    """None: as much as is sensible for the type."""
    above: bool = False
    below: bool = False
    hint: str = ""
    """What helps whoever was outside, such as what an end of the range means."""

    def wish(self, value: float, largest: float) -> str:
        """Empty where ``value`` is within; else the range in words."""
        most = largest if self.most is None else self.most
        low = value > self.least if self.above else value >= self.least
        high = value < most if self.below else value <= most
        if low and high:
            return ""
        named = math.isfinite(most) and (self.most is not None or (low and abs(value) < math.inf))
        return self._range(most if named else None) + (f": {self.hint}" if self.hint else "")

    def _range(self, most: float | None) -> str:
        low = f"above {_shown(self.least)}" if self.above else f"at least {_shown(self.least)}"
        if most is None:
            return "0 or more" if self.least == 0 and not self.above else low
        if self.above or self.below:
            return f"{low} and {'below' if self.below else 'at most'} {_shown(most)}"
        return f"{_shown(self.least)} to {_shown(most)}"


def at_least(least: float, *, most: float | None = None, below: float | None = None, hint: str = "") -> Bound:
    """``least`` or more, and ``most`` at most, or less than ``below``."""
    return Bound(least, most if below is None else below, below=below is not None, hint=hint)


def above(least: float, *, most: float | None = None, below: float | None = None, hint: str = "") -> Bound:
    """More than ``least``, and ``most`` at most, or less than ``below``."""
    return at_least(least, most=most, below=below, hint=hint)._replace(above=True)


OneOrMore = Annotated[int, at_least(1)]
ZeroOrMore = Annotated[int, at_least(0)]
Positive = Annotated[float, above(0)]
PositiveOrInfinite = Annotated[float, above(0, most=math.inf)]
NotNegative = Annotated[float, at_least(0)]
Share = Annotated[float, at_least(0, most=1)]
ShareAbove0 = Annotated[float, above(0, most=1)]
ShareBelow1 = Annotated[float, at_least(0, below=1)]
Participation = Annotated[float, above(0, most=1, hint="the cohort of a round may not be empty")]
SecureThreshold = Annotated[float, above(0.5, most=1, hint="two halves of a cohort could open single uploads")]
Seed = Annotated[int, at_least(-(2**63), most=2**63 - 1)]
WIDEST = 2**16
Width = Annotated[int, at_least(1, most=WIDEST)]
"""Units of a layer, dimensions of an embedding: more would not fit into any machine that this is written for."""
Depth = Annotated[int, at_least(1, most=1000)]
"""Layers or heads."""
Epochs = Annotated[int, at_least(1, most=10_000)]
"""Passes over data whose order is drawn ahead for all of them."""
Precision = Annotated[Literal["fp32", "bf16", "auto"], "fp16 overflows in T5"]
"""``auto``: whichever multiplies faster on this machine (`idgen.precision`)."""
Schedule = Literal["linear", "cosine", "constant"]
"""Course of a learning rate: down to its final share, or not at all."""
Negatives = Annotated[int, at_least(1, most=10_000)]
"""Drawn for every positive at once."""
LoraRank = Annotated[int, at_least(1, most=4096, hint="the paper uses 8 and 16")]
Threads = Annotated[int, at_least(0, most=1024, hint="0 is the library's choice")]
"""A fixed end, whatever the machine: settings of a run are read on other machines too."""


def check(settings: Any) -> None:
    """``ValueError`` for the first field of this dataclass whose value is not what its annotation says."""
    config_class: Any = type(settings)
    for name, hint in _hints(config_class).items():
        value = getattr(settings, name)
        wish = _wish(value, hint)
        if wish:
            raise ValueError(f"got {name} {value!r:.100}, expected {wish}")


@functools.cache
def _hints(config_class: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


def _wish(value: Any, hint: Any) -> str:
    """Empty where ``value`` fits the annotation ``hint``; else what it should be."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        wishes = [_wish(value, one) for one in arguments]
        return "" if "" in wishes else " or ".join(dict.fromkeys(wishes))
    if origin is Literal:
        known = any(type(value) is type(one) and value == one for one in arguments)
        return "" if known else _listed([str(one) for one in arguments])
    if origin is Annotated and isinstance(arguments[1], Bound):
        return _number(value, *arguments)
    if origin is Annotated:
        wish, reason = _wish(value, arguments[0]), arguments[1]
        return wish and f"{wish}: {reason}"
    if hint in LARGEST:
        return _number(value, hint, Bound(-LARGEST[hint]))
    if origin in (tuple, list, dict):
        return _collection(value, origin, arguments)
    return "" if hint is Any or isinstance(value, hint) else KINDS.get(hint, f"settings ({hint.__name__})")


def _number(value: Any, kind: type, bound: Bound) -> str:
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return bound.wish(value, LARGEST[kind]) if fits else KINDS[kind]


def _collection(value: Any, origin: type, arguments: Sequence[Any]) -> str:
    if origin is dict and not isinstance(value, dict):
        return "names with values"
    if origin is not dict and not isinstance(value, (tuple, list)):
        return "a list"
    entries, hint = (value.values(), arguments[1]) if isinstance(value, dict) else (value, arguments[0])
    wish = next((found for entry in entries if (found := _wish(entry, hint))), "")
    return wish and f"each entry to be {wish}"


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether work did not fit: the errors of Python and numpy, of torch's accelerators and of its CPU allocator.

    torch's class is known by its name, since importing torch takes seconds; the CPU allocator has no class of its own.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in str(error) or "out of memory" in str(error))


def shares_of(text: str, name: str) -> list[float]:
    """The different numbers from 0 to 1 that stand in ``text``, separated by commas, in their order.

    Raises:
        ValueError: anything else; the message names the setting ``name``.
    """
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not shares or len(set(shares)) != len(shares) or not all(0.0 <= share <= 1.0 for share in shares):
        raise ValueError(f"got {name} {text!r}, expected different numbers from 0 to 1, separated by commas")
    return shares


# What a method says of its settings for a search: which of them may be tried, and in which range.


class Real(NamedTuple):
    """Numbers from ``least`` to ``most``, both included; with ``log`` every factor is as likely as any other.

    Drawn numbers have three digits, so the ends should have no more.
    """

    least: float
    most: float
    log: bool = False

    def holds(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}{', log' if self.log else ''}"


class Whole(NamedTuple):
    """Whole numbers from ``least`` to ``most``, both included."""

    least: int
    most: int
    log: bool = False

    def holds(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least} to {self.most}{', log' if self.log else ''}"


class OneOf(NamedTuple):
    """One of these values: numbers, texts, truth values or None, without an order."""

    values: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        return any(type(one) is type(value) and one == value for one in self.values)

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


Range = Real | Whole | OneOf
Space = Mapping[str, Range]
"""Setting -> what may be tried. Names are those of options; ``block.name`` is a field of a block of settings."""
Setting = dict[str, Any]
"""Setting -> value, for those that differ from the start; ``{}`` is the start itself."""
MAX_LISTED = 10_000
"""Points of a space that are listed; a larger space is no more used up than one with real numbers."""


def points(space: Space) -> list[Setting] | None:
    """All points of a space of whole numbers and choices; None with real numbers, or with more than ``MAX_LISTED``."""
    values = [_values(one) for one in space.values()]
    if any(own is None for own in values) or math.prod(len(own or ()) for own in values) > MAX_LISTED:
        return None
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*(own or () for own in values))]


def _values(one: Range) -> Sequence[Any] | None:
    if isinstance(one, Real):
        return None
    return range(one.least, one.most + 1) if isinstance(one, Whole) else one.values
