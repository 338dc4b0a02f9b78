"""How far a training is, kept on disk: one that was killed goes on from there and ends with the same weights."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
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
        state = {
            "position": {**vars(at), "best": None if at.best is None else tuple(at.best)},
            "parameters": [parameter.detach() for parameter in parameters_of(optimizer)],
            "optimizer": optimizer.state_dict(),
            "generator": torch.get_rng_state(),
            "device_generator": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        torch.save(state, scratch)
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
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            found, best = state["parameters"], state["position"]["best"]
            at = Position(**{**state["position"], "best": None if best is None else Best(*best)})
        except Exception as error:  # whatever a damaged archive makes torch say
            raise ValueError(f"got a damaged {self.path}, expected a checkpoint of a training. {advice}") from error
        trained = parameters_of(optimizer)
        if [one.shape for one in found] != [parameter.shape for parameter in trained]:
            raise ValueError(f"got {self.path} of another model, expected parameters of the same shapes. {advice}")
        with torch.no_grad():
            for parameter, one in zip(trained, found, strict=True):
                parameter.copy_(one)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generator"])
        if device.type == "cuda" and state["device_generator"] is not None:
            torch.cuda.set_rng_state(state["device_generator"], device)
        return at


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All that it trains, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
