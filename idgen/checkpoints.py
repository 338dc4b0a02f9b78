"""How far a training is, kept on disk: one that was killed goes on from there and ends with the same weights."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedecider.scratch import aside

EVERY_S = 300.0
"""Seconds between two checkpoints: what a kill costs at most. Trainings that are shorter write none."""


@dataclass
class Position:
    """How far a training is."""

    epoch: int = 0
    step: int = 0
    batches: int = 0
    """Steps of the epoch that are done."""
    loss: float = 0.0
    """Sum over the steps of the epoch."""
    first_loss: float | None = None
    """Mean of its first window (`LossGuard`)."""
    samples: int = 0
    seconds: float = 0.0
    logs: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    """Of validation: step, as JSON names it -> mean gain."""


@dataclass
class Best:
    """The best of what validation has seen before the last step."""

    step: int
    gain_U: Tensor
    parameters: list[Tensor]
    """On the CPU, in the order of `parameters_of`."""


class Checkpoint:
    """The file of one training: its position, trained parameters, optimiser and the state of the random generators;
    with validation the best weights as well.

    Whoever trains with other settings, data or models has to take another path. Batches are not kept: an epoch's are
    drawn again, and those that were trained on are passed over.
    """

    def __init__(self, path: Path, every_s: float | None = None) -> None:
        """``every_s``: instead of `EVERY_S`."""
        self.path, self.every_s = path, EVERY_S if every_s is None else every_s
        self._last = time.monotonic()

    def write_if_due(
        self, at: Position, optimizer: torch.optim.Optimizer, device: torch.device, best: Best | None = None
    ) -> None:
        """Write where the last one is ``every_s`` seconds ago; nothing half-written ever has the file's name."""
        if time.monotonic() - self._last < self.every_s:
            return
        tensors = {f"parameter.{i}": one.detach() for i, one in enumerate(parameters_of(optimizer))}
        for i, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": one for name, one in moments.items()}
        tensors["generator"] = torch.get_rng_state()
        if device.type == "cuda":
            tensors["device_generator"] = torch.cuda.get_rng_state(device)
        if best is not None:
            tensors |= {f"best.{i}": one for i, one in enumerate(best.parameters)}
            tensors |= {"best_step": torch.tensor(best.step), "best_gain": best.gain_U}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: one.contiguous() for name, one in tensors.items()}
        with aside(self.path) as scratch:
            save_file(tensors, scratch, {"position": json.dumps(vars(at))})
        self._last = time.monotonic()

    def read(self, optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Position, Best | None]:
        """Put everything back as it was, all but the best weights; the beginning where there is no file.

        Raises:
            ValueError: the file is damaged, or of another model.
        """
        if not self.path.is_file():
            return Position(), None
        advice = f"Delete {self.path.parent}, and the training starts anew"
        try:
            with safe_open(str(self.path), "pt") as file:
                told = json.loads(file.metadata()["position"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            found, generator = _group(tensors, "parameter"), tensors["generator"]
            at = Position(**told)
            best = None
            if "best_step" in tensors:
                best = Best(int(tensors["best_step"]), tensors["best_gain"], _group(tensors, "best"))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"got a damaged {self.path}, expected a checkpoint of a training. {advice}") from error
        trained = parameters_of(optimizer)
        shapes = [parameter.shape for parameter in trained]
        if any([one.shape for one in of_model] != shapes for of_model in (found, best.parameters if best else found)):
            raise ValueError(f"got {self.path} of another model, expected parameters of the same shapes. {advice}")
        with torch.no_grad():
            for parameter, one in zip(trained, found, strict=True):
                parameter.copy_(one)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": _moments(tensors)})
        torch.set_rng_state(generator)
        if device.type == "cuda" and "device_generator" in tensors:
            torch.cuda.set_rng_state(tensors["device_generator"], device)
        return at, best


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
