"""Processes, threads and devices of a run, as ``accelerate launch`` or ``torchrun`` set them up."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

from fedecider.federation.processes import Placement, Processes
from fedecider.running import trackers

Kept = TypeVar("Kept")


class Launch(NamedTuple):
    """Where this process runs; as a context it finishes trackers and leaves the process group at the end.

    A process that ends inside its group may be aborted by the group's threads.
    """

    accelerator: Any
    """An `accelerate.Accelerator`, which a command imports when it has read its options."""
    processes: Processes
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.processes.index == 0

    @property
    def deepspeed(self) -> Any:
        """The accelerator, or None unless it was launched with a DeepSpeed config."""
        return self.accelerator if self.accelerator.state.deepspeed_plugin is not None else None

    def placed(self, placement: Placement) -> Launch:
        """The same processes, which share out ``placement``."""
        return self._replace(processes=replace(self.processes, placement=placement))

    def from_main(self, value: Kept) -> Kept:
        """What the first process gives, in every process; Python objects of a moderate size."""
        if self.processes.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        box = [value]
        broadcast_object_list(box)
        return box[0]

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        trackers.end(self.accelerator)


def start(num_threads: int = 0, tracker: str = "") -> Launch:
    """Join the process group, if there is one, and say when fewer processes run than were asked for.

    Args:
        num_threads: CPU threads per process; 0 leaves torch's choice. Sums are split over threads, so bit-equal
            results need equal thread counts.
        tracker: Names of accelerate trackers such as ``tensorboard``, separated by commas; empty for none. They are
            opened when the output directory is (`fedecider.running.rounds`).

    Raises:
        ValueError: accelerate does not know a tracker, or its package is not installed; DeepSpeed is asked for and
            not installed, in more than one process, or would train in another format than fp32.
    """
    trackers.check(tracker)
    sharded = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if sharded:
        check_deepspeed(int(os.environ.get("WORLD_SIZE", "1")))
    if num_threads > 0:
        torch.set_num_threads(num_threads)
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available() and not sharded,  # accelerate drops DeepSpeed where the CPU is asked for
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=12))],  # other processes wait for pre-training
    )
    if sharded:
        plugin, precision = accelerator.state.deepspeed_plugin, accelerator.mixed_precision
        plugin.zero3_init_flag, plugin.dschf = False, None  # else transformers would load every model in parts
        if precision != "no":
            raise ValueError(
                f"got mixed_precision {precision} with DeepSpeed, expected no: adapters stay in fp32. Set "
                "--mixed_precision no for the launcher, and --precision bf16 for autocast of the frozen base"
            )
    processes = Processes(accelerator.process_index, accelerator.num_processes)
    asked = requested_processes(_ancestor_command_lines())
    if processes.index == 0 and asked is not None and asked != processes.count:
        print(
            f"warning: --num_processes {asked} was asked for, but {processes.count} process runs: `accelerate launch "
            f"--cpu` starts only one. For {asked} CPU processes use: torchrun --nproc_per_node {asked} "
            f"scripts/federate.py ... (results are the same, only slower)",
            file=sys.stderr,
        )
    device = accelerator.device if torch.cuda.is_available() else torch.device("cpu")
    return Launch(accelerator, processes, device)


def check_deepspeed(num_processes: int) -> None:
    """``ValueError`` when DeepSpeed is not installed, or for more processes than the one that a client trains in."""
    if find_spec("deepspeed") is None:
        raise ValueError(
            "got --use_deepspeed, but deepspeed is not installed, expected it to be there. Run: pip install '.[gpu]'"
        )
    if num_processes != 1:
        raise ValueError(
            f"got {num_processes} processes with DeepSpeed, expected 1: processes share out clients, not the training "
            "of one, and on CPUs accelerate would stop at DeepSpeed's check of the batch size. Set --num_processes 1, "
            "or leave out --use_deepspeed"
        )


def requested_processes(command_lines: list[list[str]]) -> int | None:
    """The number after ``--num_processes`` / ``--num-processes`` in the first ``accelerate launch`` line, or None."""
    for words in command_lines:
        if not any("accelerate" in word for word in words[:3]) or "launch" not in words:
            continue
        for position, word in enumerate(words):
            name, _, value = word.replace("-", "_").partition("=")
            if name == "__num_processes":
                value = value or (words[position + 1] if position + 1 < len(words) else "")
                return int(value) if value.isdigit() else None
    return None


def _ancestor_command_lines() -> list[list[str]]:
    try:
        return [parent.cmdline() for parent in psutil.Process().parents()[:3]]
    except psutil.Error:  # another user's process, or it ended meanwhile
        return []
