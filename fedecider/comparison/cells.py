"""Cells of tables that are trained in this process, kept by their content: settings, seed, data."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from fedecider.federation.record import read_json, write_json
from fedecider.running.progress import log_line
from fedecider.running.stages import cached_stage


class KeptCell(NamedTuple):
    """What is kept of a cell."""

    folder: Path
    info: dict[str, Any]
    """``valid`` is the validation ndcg@10."""

    def positions(self) -> dict[str, Tensor]:
        """What was ranked, by name; read when it is needed, since those of most trials never are."""
        return load_file(self.folder / "positions.safetensors")


def kept_cell(
    cache: Path,
    name: str,
    inputs: dict[str, Any],
    train: Callable[[Path], tuple[dict[str, Any], dict[str, Tensor]]],
    text: str,
) -> KeptCell:
    """The cell with these ``inputs``; ``train`` gives facts and positions where it is missing, and may write into its
    folder. ``text`` names it in the log."""

    def build(folder: Path) -> None:
        started = time.perf_counter()
        info, positions = train(folder)
        save_file(positions, folder / "positions.safetensors")
        write_json(folder / "info.json", {**info, "total_s": time.perf_counter() - started})

    stage = cached_stage(cache, name, inputs, build)
    info = read_json(stage.folder / "info.json")
    if not stage.reused:
        log_line(f"{text}: validation ndcg@10 {info['valid']:.4f}, {info['total_s']:.0f} s")
    return KeptCell(stage.folder, info)
