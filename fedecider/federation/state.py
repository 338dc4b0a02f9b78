"""The state of a run, and crash-safe checkpoints of it.

A checkpoint is a folder ``round_00012``: the server tree, the local tree, copies of both from the best round if that
was an earlier one, ``state.json``, and the SHA-256 sums of all these. It is written aside (`fedecider.scratch`) and
renamed when complete; before it is removed it is hidden again. So a kill at any moment leaves whole checkpoints. While
a run goes on the two newest are kept: if the newest is damaged, the other one is used. A finished run keeps the newest.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedecider.federation.checksums import check_sums, write_sums
from fedecider.federation.method import Tree
from fedecider.federation.record import CannotResume, read_object
from fedecider.scratch import aside, remove, scratch_name

FORMAT = 4
"""Raise it when checkpoints are laid out in another way, so that older ones are refused."""

_FIELDS = {"round": int, "best_round": int, "best_score": float, "records": str, "fingerprint": str, "format": int}
_KEPT = 2
"""The newest, and the one before it in case the newest is damaged."""


class Parameters(NamedTuple):
    """The tensors after one round."""

    round: int
    server: Tree
    local: Tree


class RunState(NamedTuple):
    """Everything a run needs to go on: the round just finished, both trees, and the best round so far."""

    round: int
    server: Tree
    local: Tree
    best_round: int
    best_score: float
    best_server: Tree
    best_local: Tree
    records: str = ""
    """:meth:`fedecider.federation.record.Recorder.digest` of the rounds so far."""

    @property
    def last(self) -> Parameters:
        return Parameters(self.round, self.server, self.local)

    @property
    def best(self) -> Parameters:
        return Parameters(self.best_round, self.best_server, self.best_local)


def save_state(state: RunState, folder: Path, fingerprint: str) -> None:
    """Write ``folder/round_NNNNN`` and keep the checkpoint before it; ``fingerprint`` names the configuration."""
    final = folder / f"round_{state.round:05d}"
    with aside(final) as scratch:
        scratch.mkdir(parents=True)
        for name in dict.fromkeys(_files(state.round, state.best_round).values()):
            tree = {key: tensor.detach().cpu().contiguous() for key, tensor in getattr(state, name).items()}
            save_file(tree, scratch / f"{name}.safetensors")
        numbers = {name: value for name, value in state._asdict().items() if name in _FIELDS}
        content = {**numbers, "fingerprint": fingerprint, "format": FORMAT}
        (scratch / "state.json").write_text(json.dumps(content, indent=1) + "\n")
        write_sums(scratch)
        _remove(final)
    found = _checkpoints(folder)
    kept = [path for round, path in found if round <= state.round][-_KEPT:]
    for _, path in found:
        if path not in kept:
            _remove(path)


def load_state(
    folder: Path,
    fingerprint: str,
    warn: Callable[[str], None] = lambda text: None,
    not_past: int | None = None,
) -> RunState | None:
    """The newest checkpoint of ``folder`` that is whole; None when there is none. ``warn`` is told of damaged ones.

    ``not_past``: a round after which no checkpoint is looked at.

    Raises:
        CannotResume: the checkpoint was written by another configuration; or all of them are damaged.
    """
    problems: list[str] = []
    for round, checkpoint in reversed(_checkpoints(folder)):
        if not_past is not None and round > not_past:
            continue
        try:
            numbers, trees = _read(checkpoint, round)
        except ValueError as error:
            problems.append(str(error))
            continue
        if numbers["fingerprint"] != fingerprint:
            raise CannotResume(
                f"{folder} belongs to a run with another configuration (got {fingerprint}, expected "
                f"{numbers['fingerprint']}). Resume with the settings in run.json, or choose another --output"
            )
        for problem in problems:
            warn(f"{problem}. The run goes on from {checkpoint.name}, the checkpoint before it")
        return RunState(
            round,
            best_round=numbers["best_round"],
            best_score=numbers["best_score"],
            records=numbers["records"],
            **trees,
        )
    if problems:
        raise CannotResume(
            f"{problems[0]}. No checkpoint of this run can be used: restore {folder} from a copy, or start again with "
            "another --output"
        )
    return None


def keep_newest(folder: Path) -> None:
    """Remove the checkpoints before the newest one: a run that came to its end reads no other."""
    for _, path in _checkpoints(folder)[:-1]:
        _remove(path)


def _files(round: int, best_round: int) -> dict[str, str]:
    """Tree of the state -> the file that holds it: the best round's are the newest ones while it is the last round."""
    best = {"best_server": "server", "best_local": "local"}
    return {"server": "server", "local": "local"} | (best if best_round == round else {name: name for name in best})


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Rounds and folders, ascending."""
    named = [(re.fullmatch(r"round_(\d+)", path.name), path) for path in folder.glob("round_*")]
    return sorted((int(match[1]), path) for match, path in named if match and path.is_dir())


def _remove(checkpoint: Path) -> None:
    if checkpoint.exists():
        hidden = scratch_name(checkpoint)
        os.replace(checkpoint, hidden)
        remove(hidden)


def _read(checkpoint: Path, round: int) -> tuple[dict[str, Any], dict[str, Tree]]:
    """What ``state.json`` says, and the trees; ``ValueError`` that names the file when any of it is not as written."""
    check_sums(checkpoint)
    path = checkpoint / "state.json"
    numbers = read_object(path, _FIELDS)
    if numbers["format"] != FORMAT:
        raise ValueError(f"got format {numbers['format']} in {path}, expected {FORMAT}: another version wrote it")
    if numbers["round"] != round or not 0 <= numbers["best_round"] <= round or not math.isfinite(numbers["best_score"]):
        raise ValueError(f"got {path} with numbers out of range, expected round {round} and a best round up to it")
    files = _files(round, numbers["best_round"])  # read twice where both are one: a best tree is never trained in place
    return numbers, {name: _load_tree(checkpoint / f"{file}.safetensors") for name, file in files.items()}


def _load_tree(path: Path) -> Tree:
    try:
        return load_file(path)
    # missing, or of kinds and sizes that torch does not have
    except (SafetensorError, KeyError, TypeError, RuntimeError, FileNotFoundError) as error:
        raise ValueError(f"got a damaged {path} ({error}), expected safetensors") from error


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
