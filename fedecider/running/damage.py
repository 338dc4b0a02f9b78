"""Files that a run, a stage or an export wrote and that were damaged since: one line that names the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds names and values.

    Raises:
        ValueError: it is missing, cut off, no text, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    if not isinstance(content, dict):
        raise damaged(path, f"a {type(content).__name__} instead of names and values")
    return content


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
