"""Crash-safe save, load and resume of a run: safetensors + JSON, written aside and renamed.

A checkpoint is a folder ``round_00012`` with the server tree, the local tree, the best round's copies of both and
``state.json``. It is written under a temporary name and renamed when complete, so a kill at any moment leaves
the previous checkpoint intact.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedecider.federation.method import Tree

_TREES = ("server", "local", "best_server", "best_local")


class RunState(NamedTuple):
    """Everything a run needs to go on: the round just finished, both trees, and the best round so far."""

    round: int
    server: Tree
    local: Tree
    best_round: int
    best_score: float
    best_server: Tree
    best_local: Tree


def save_state(state: RunState, folder: Path, fingerprint: str) -> None:
    """Write ``folder/round_NNNNN`` and remove older checkpoints. ``fingerprint`` names the configuration."""
    final = folder / f"round_{state.round:05d}"
    scratch = folder / f".{final.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name in _TREES:
        tree = {key: tensor.detach().cpu().contiguous() for key, tensor in getattr(state, name).items()}
        save_file(tree, scratch / f"{name}.safetensors")
    numbers = {"round": state.round, "best_round": state.best_round, "best_score": state.best_score}
    (scratch / "state.json").write_text(json.dumps({**numbers, "fingerprint": fingerprint}, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(scratch, final)
    for old in folder.glob("round_*"):
        if old != final:
            shutil.rmtree(old)


def load_state(folder: Path, fingerprint: str) -> RunState | None:
    """The newest complete checkpoint of ``folder``; None when there is none.

    Raises:
        ValueError: the checkpoint was written by another configuration.
    """
    complete = sorted(path for path in folder.glob("round_*") if (path / "state.json").is_file())
    if not complete:
        return None
    numbers = json.loads((complete[-1] / "state.json").read_text())
    if numbers["fingerprint"] != fingerprint:
        raise ValueError(
            f"{folder} belongs to a run with another configuration (got {fingerprint}, expected "
            f"{numbers['fingerprint']}). Resume with the settings in run.json, or choose another --output"
        )
    trees = {name: load_file(complete[-1] / f"{name}.safetensors") for name in _TREES}
    return RunState(numbers["round"], best_round=numbers["best_round"], best_score=numbers["best_score"], **trees)


def snapshot(tree: Tree, older: Tree | None = None) -> Tree:
    """A copy that later updates of ``tree`` leave alone; memory-mapped tensors are copied into files of their own.

    ``older`` is a snapshot that nobody needs any more: its memory and files are used again.
    """
    if older is not None:
        return {name: older[name].copy_(tensor) for name, tensor in tree.items()}
    return {
        name: mapped_like(tensor).copy_(tensor) if is_mapped(tensor) else tensor.clone()
        for name, tensor in tree.items()
    }


def is_mapped(tensor: Tensor) -> bool:
    """Whether the tensor lives in a file instead of in memory."""
    return tensor.untyped_storage().filename is not None


def mapped_like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """An uninitialised tensor in a file that is removed as soon as nobody uses it: tables that memory cannot hold."""
    shape = tensor.shape if shape is None else torch.Size(shape)
    with tempfile.NamedTemporaryFile(prefix="fedecider-table-") as file:  # the mapping outlives the name
        numel = max(1, shape.numel())
        return torch.from_file(file.name, shared=True, size=numel, dtype=tensor.dtype)[: shape.numel()].view(shape)
