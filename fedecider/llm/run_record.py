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
        embedding = "training" in record["config"]
        kind = "of the embedding track" if embedding else "without a language model"
        where = "results.md and report.html" if embedding else "results.md"
        raise ValueError(f"got {root}, a run {kind}, expected one of the LLM track: its results are in {where}")
    if not isinstance(record.get("data"), dict):
        raise damaged(RunFolder(root).record, "no block data")
    return record
