"""How far a training is, kept on disk: one that was killed goes on from there and ends with the same weights."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

EVERY_S = 300.0
"""Seconds between two checkpoints: what a kill costs at most. Trainings that are shorter write none."""


class Best(NamedTuple):
    """The best validation so far."""

    score: float
    step: int
    weights: list[Tensor]


@dataclass
class Position:
    """How far a training is. A piece is what one log is of: an epoch, or ``evaluate_every`` steps of it."""

    epoch: int = 0
    step: int = 0
    batches: int = 0
    """Steps of the epoch that are done."""
    done: int = 0
    """Steps of the piece."""
    loss: float = 0.0
    """Sum over the steps of the piece."""
    samples: int = 0
    seconds: float = 0.0
    logs: list[dict[str, Any]] = field(default_factory=list)
    best: Best | None = None


class Checkpoint:
    """The file of one training: its position, trained parameters, optimiser and the state of the random generators.

    Whoever trains with other settings, data or models has to take another path. Batches are not kept: an epoch's are
    drawn again, and those that were trained on are passed over.
    """

    def __init__(self, path: Path, every_s: float | None = None) -> None:
        """``every_s``: instead of `EVERY_S`."""
        self.path, self.every_s = path, EVERY_S if every_s is None else every_s
        self._last = time.monotonic()

    def write_if_due(self, at: Position, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Write where the last one is ``every_s`` seconds ago; nothing half-written ever has the file's name."""
        if time.monotonic() - self._last < self.every_s:
            return
        tensors = {f"parameter.{i}": one.detach() for i, one in enumerate(parameters_of(optimizer))}
        for i, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": one for name, one in moments.items()}
        tensors["generator"] = torch.get_rng_state()
        if device.type == "cuda":
            tensors["device_generator"] = torch.cuda.get_rng_state(device)
        told: dict[str, Any] = {**vars(at), "best": None}
        if at.best is not None:
            tensors |= {f"best.{i}": one for i, one in enumerate(at.best.weights)}
            told["best"] = [at.best.score, at.best.step]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        save_file({name: one.contiguous() for name, one in tensors.items()}, scratch, {"position": json.dumps(told)})
        os.replace(scratch, self.path)
        self._last = time.monotonic()

    def read(self, optimizer: torch.optim.Optimizer, device: torch.device) -> Position:
        """Put everything back as it was; the beginning where there is no file.

        Raises:
            ValueError: the file is damaged, or of another model.
        """
        if not self.path.is_file():
            return Position()
        advice = f"Delete {self.path.parent}, and the training starts anew"
        try:
            with safe_open(str(self.path), "pt") as file:
                told = json.loads(file.metadata()["position"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            found, best, generator = _group(tensors, "parameter"), _group(tensors, "best"), tensors["generator"]
            if best:
                score, step = told["best"]
                told["best"] = Best(score, step, best)
            at = Position(**told)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"got a damaged {self.path}, expected a checkpoint of a training. {advice}") from error
        trained = parameters_of(optimizer)
        if [one.shape for one in found] != [parameter.shape for parameter in trained]:
            raise ValueError(f"got {self.path} of another model, expected parameters of the same shapes. {advice}")
        with torch.no_grad():
            for parameter, one in zip(trained, found, strict=True):
                parameter.copy_(one)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": _moments(tensors)})
        torch.set_rng_state(generator)
        if device.type == "cuda" and "device_generator" in tensors:
            torch.cuda.set_rng_state(tensors["device_generator"], device)
        return at


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All that it trains, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _group(tensors: dict[str, Tensor], name: str) -> list[Tensor]:
    """``name.0``, ``name.1``, ... in this order."""
    return [tensors[f"{name}.{i}"] for i in range(sum(key.startswith(f"{name}.") for key in tensors))]


def _moments(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Parameter -> what AdamW keeps of it."""
    found: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            number, _, name = rest.partition(".")
            found.setdefault(int(number), {})[name] = tensor
    return found
