"""Settings of a run by the names of their options, in whichever of its blocks they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from fedecider.tuning.space import Setting

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
