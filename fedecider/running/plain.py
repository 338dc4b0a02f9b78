"""Settings as plain values, and the key of their content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any


def content_key(inputs: Any) -> str:
    """16 hex digits that depend on every value in ``inputs`` (dataclasses, dicts, lists, scalars)."""
    text = json.dumps(as_plain(inputs), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_plain(value: Any) -> Any:
    """Configs as nested dicts, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): as_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
