"""One JSON line per round: what happened, measured; readable while the run goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


def plain(value: Any) -> Any:
    """``value`` as strict JSON: non-finite floats become null, tensors become lists."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_text(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename: a reader never sees half a file."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as :func:`write_text` does."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


class Recorder(NamedTuple):
    """Appends records to ``path`` (None: a process that does not write) and hands them to ``tracker``."""

    path: Path | None
    tracker: Callable[[dict, int], None] | None = None

    def write(self, record: dict) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(plain(record), allow_nan=False) + "\n")
        if self.tracker is not None:
            self.tracker(record, record["round"])

    def rewind(self, round: int) -> None:
        """Drop records after ``round``: they belong to work that a resumed run does again."""
        if self.path is None or not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines() if _round_of(line) <= round]
        scratch = self.path.with_name(f".{self.path.name}.tmp")
        scratch.write_text("".join(line + "\n" for line in kept))
        os.replace(scratch, self.path)


def read_records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _round_of(line: str) -> float:
    try:
        return json.loads(line)["round"]
    except ValueError:  # the half line of a killed process
        return math.inf
