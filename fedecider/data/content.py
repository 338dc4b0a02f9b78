"""Hashes of content: the JSON text of what may influence a result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from fedecider.evaluation.sequences import SequenceArray

ROWS_AT_ONCE = 4096
"""Users whose events are written as text together."""


def update_json(digest: Any, parts: Iterable[Any]) -> None:
    """Give a hash the JSON text of every part and a line break; of sequences of numbers a few thousand at a time."""
    for part in parts:
        for piece in _json_pieces(part):
            digest.update(piece.encode())
        digest.update(b"\n")


def _json_pieces(part: Any) -> Iterator[str]:
    if not isinstance(part, SequenceArray):
        yield json.dumps(part, ensure_ascii=True, separators=(",", ":"))
        return
    yield "["
    for first in range(0, len(part), ROWS_AT_ONCE):
        text = json.dumps(list(part[first : first + ROWS_AT_ONCE]), separators=(",", ":"))
        yield f"{',' if first else ''}{text[1:-1]}"
    yield "]"
