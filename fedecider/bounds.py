"""What a setting may be: frozen dataclasses that pydantic checks whenever they are made, and the bounds they share.

``num_rounds: OneOrMore`` or ``num_layers: Annotated[Int, Field(ge=1, le=1000)]`` in a ``@dataclass(frozen=True)`` of
this module. A value that cannot be is a ``ValueError`` of one sentence, from the command line, from YAML and from
Python alike; what settings may not be together is checked in ``__post_init__``.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic import dataclasses as checked
from pydantic_core import PydanticCustomError


class Diverged(ValueError):
    """Numbers of a training are no numbers any more: a run that ends so has no result, and exit code 1."""


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool) -> Callable[[type], type]:
        """As the standard library's, with fields that are checked, and ``ValueError`` of one sentence."""

        def decorate(cls: type) -> type:
            made = checked.dataclass(cls, frozen=frozen, config=ConfigDict(extra="forbid", allow_inf_nan=False))
            init = made.__init__

            @functools.wraps(init)
            def __init__(self, *args: Any, **values: Any) -> None:
                try:
                    init(self, *args, **values)
                except ValidationError as error:
                    raise ValueError(sentence(error, cls)) from None

            made.__init__ = __init__
            return made

        return decorate


def sentence(error: ValidationError, config_class: type) -> str:
    """What was got and what is expected: the first field of ``config_class`` that cannot be."""
    problems = [(_path(config_class, problem["loc"]), problem) for problem in error.errors(include_url=False)]
    name, first = problems[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"got no {name}, expected one: --{name}"
    if first["type"] == "unexpected_keyword_argument":
        return f"got {name}, expected settings of {config_class.__name__}"
    value = first["input"]
    shown = value if isinstance(value, str) and value.strip() else repr(value)
    wishes = [
        problem["msg"].removeprefix("Input should be ").partition(", unable")[0]
        for path, problem in problems
        if path == name
    ]
    return f"got {name} {shown:.100}, expected {' or '.join(dict.fromkeys(wishes))}"


def _path(config_class: Any, places: Sequence[Any]) -> str:
    """``("pretrain", "train", "epochs", "int")`` -> pretrain.train.epochs: the last ones name types or entries."""
    if not places:
        return "settings"
    fields = getattr(config_class, "__pydantic_fields__", {})
    name = list(fields)[places[0]] if isinstance(places[0], int) and fields else str(places[0])  # given by position
    inside = fields.get(name)
    below = inside.annotation if inside is not None else None
    return f"{name}.{_path(below, places[1:])}" if is_dataclass(below) and places[1:] else name


def _no_truth_value(value: Any) -> Any:
    """True is no 1 here."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number")
    return value


Int = Annotated[int, BeforeValidator(_no_truth_value)]
Float = Annotated[float, BeforeValidator(_no_truth_value)]
LARGEST = 2 * 10**9
"""Whatever is larger is a typo."""
OneOrMore = Annotated[Int, Field(ge=1, le=LARGEST)]
ZeroOrMore = Annotated[Int, Field(ge=0, le=LARGEST)]
Positive = Annotated[Float, Field(gt=0)]
PositiveOrInfinite = Annotated[float, Field(gt=0, allow_inf_nan=True), BeforeValidator(_no_truth_value)]
NotNegative = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
ShareAbove0 = Annotated[Float, Field(gt=0, le=1)]
ShareBelow1 = Annotated[Float, Field(ge=0, lt=1)]
SecureThreshold = Annotated[Float, Field(gt=0.5, le=1)]
"""Two halves of a cohort could open single uploads."""
Seed = Annotated[Int, Field(ge=-(2**63), lt=2**63)]
WIDEST = 2**16
Width = Annotated[Int, Field(ge=1, le=WIDEST)]
"""Units of a layer, dimensions of an embedding: more would not fit into any machine that this is written for."""
Depth = Annotated[Int, Field(ge=1, le=1000)]
"""Layers or heads."""
Epochs = Annotated[Int, Field(ge=1, le=10_000)]
"""Passes over data whose order is drawn ahead for all of them."""
Precision = Literal["fp32", "bf16", "auto"]
"""``auto``: whichever multiplies faster on this machine (`idgen.precision`); fp16 overflows in T5."""
Schedule = Literal["linear", "cosine", "constant"]
"""Course of a learning rate: down to its final share, or not at all."""
Negatives = Annotated[Int, Field(ge=1, le=10_000)]
"""Drawn for every positive at once."""
LoraRank = Annotated[Int, Field(ge=1, le=4096)]
Threads = Annotated[Int, Field(ge=0, le=1024)]
"""A fixed end, whatever the machine: settings of a run are read on other machines too."""


NO_ROOM = ("DefaultCPUAllocator", "out of memory", "annot allocate memory", "bad_alloc", "failed to map segment")
"""In errors that have no class of their own: of torch, of files that are mapped, of libraries that are loaded."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether work did not fit: the errors of Python and numpy, of the system, of torch's accelerators and of its CPU
    allocator, and what was raised because of one.

    torch's class is known by its name, since importing torch takes seconds.
    """
    if error is None or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return error is not None
    known = isinstance(error, (RuntimeError, OSError, ImportError))
    full = known and (getattr(error, "errno", 0) == errno.ENOMEM or any(text in str(error) for text in NO_ROOM))
    return full or is_out_of_memory(error.__cause__ or error.__context__)
