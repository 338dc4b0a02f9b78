"""Files that a run, a stage or an export wrote and that were damaged since: one line that names the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedecider.federation import record


def read_object(path: Path, fields: Mapping[str, type] = {}) -> dict[str, Any]:
    """:func:`fedecider.federation.record.read_object` of a file that must be there.

    Raises:
        ValueError: it is missing, no JSON object, or lacks one of ``fields``.
    """
    try:
        return record.read_object(path, fields)
    except OSError as error:
        raise damaged(path, error) from error


@contextmanager
def damage_names(path: Path) -> Iterator[None]:
    """Turn what missing, wrong-typed or surplus values of ``path`` lead to into a ``ValueError`` that names it."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
        raise damaged(path, error) from error


def check_tensors(path: Path) -> None:
    """Refuse a safetensors file whose header cannot be read or whose end is missing; tensors are not read.

    Raises:
        ValueError: the message names the file.
    """
    try:
        with safe_open(path, "pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, reason: Exception | str) -> ValueError:
    """The error that says so; not raised."""
    if isinstance(reason, KeyError):
        reason = f"no {reason}"
    return ValueError(
        f"got a damaged or missing {path} ({reason}), expected it as it was written. Copy it again, or make it anew"
    )
