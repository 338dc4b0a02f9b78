"""Reading YAML that somebody else wrote: its size, its nesting and what its aliases expand to are limited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PACKAGE = Path(__file__).resolve().parents[1]
MAX_CHARACTERS = 100_000
MAX_VALUES = 20_000
"""Scalars, lists and blocks, an alias counted as all that it stands for."""
MAX_DEPTH = 40

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def settings_file(path: str | Path) -> Path:
    """``path``, or the file of that name that comes with the package: configs/demo.yaml is there in every folder."""
    own = PACKAGE / path
    return own if Path(path).parts[:1] == ("configs",) and not Path(path).exists() and own.is_file() else Path(path)


def load_yaml(path: Path) -> Any:
    """The content of a YAML file, which may be one of the package (:func:`settings_file`).

    Raises:
        ValueError: it cannot be read as text, is no YAML, or is larger than any file of settings.
    """
    path = settings_file(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"got {path}, which is not UTF-8 text ({error}), expected YAML. Save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}), expected a YAML file of settings") from error
    check_yaml_size(text, str(path))
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error


def check_yaml_size(text: str, source: str) -> None:
    """Refuse ``text`` that would become huge when it is parsed; text that is no YAML passes.

    Nothing is built: a few hundred characters of nested aliases can stand for terabytes.

    Raises:
        ValueError: too long, too deep, or too many values; the message names ``source``.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"got {source} with {len(text):,} characters, expected at most {MAX_CHARACTERS:,} of settings")
    size_of: dict[str, int] = {}
    open_values: list[tuple[str | None, int]] = [(None, 0)]

    def add(anchor: str | None, size: int) -> None:
        if anchor is not None:
            size_of[anchor] = size
        parent, total = open_values[-1]
        open_values[-1] = (parent, total + size)

    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent):
                add(
                    None, size_of.get(event.anchor or "", MAX_VALUES + 1)
                )  # unknown: the alias stands inside its own anchor
            elif isinstance(event, yaml.ScalarEvent):
                add(event.anchor, 1)
            elif isinstance(event, yaml.CollectionStartEvent):
                open_values.append((event.anchor, 1))
            elif isinstance(event, yaml.CollectionEndEvent):
                add(*open_values.pop())
            if len(open_values) > MAX_DEPTH or open_values[-1][1] > MAX_VALUES:
                raise ValueError(
                    f"got {source} with more than {MAX_VALUES:,} values (aliases counted as what they stand for) or "
                    f"{MAX_DEPTH} levels, expected a file of settings. Write it without aliases"
                )
    except yaml.YAMLError:
        return
