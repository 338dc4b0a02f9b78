"""``run.json`` of a run of the LLM track."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedecider.running.damage import damaged
from fedecider.running.run_folder import RunFolder, read_run


def read_llm_run(root: Path) -> dict[str, Any]:
    """``run.json`` with settings of the LLM track.

    Raises:
        FileNotFoundError: ``root`` is not a run folder.
        ValueError: it holds a run of the embedding track, or its record is damaged.
    """
    record = read_run(root)
    if "ranking" not in record["config"]:
        raise ValueError(
            f"got {root}, a run of the embedding track, expected one of the LLM track: its results are in "
            "results.md and report.html"
        )
    if not isinstance(record.get("data"), dict):
        raise damaged(RunFolder(root).record, "no block data")
    return record
