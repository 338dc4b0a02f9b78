"""Local training through DeepSpeed's ZeRO, where ``accelerate launch --use_deepspeed`` asks for it.

One process: the clients of a run are split over its processes, so that a second one would train another client.
ZeRO-2 works on the model of the run. ZeRO-3 partitions every weight for good, which ranking could not read afterwards:
it works on a copy, and what was trained is gathered from there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fedecider.bounds import Precision
from fedecider.methods.config import CLIP_NORM, LocalTraining
from fedecider.models.tied_table import adapted_embeddings
from idgen.backbones.families import unwrap
from idgen.losses import sequence_loss
from idgen.optimizer import keep_full_rates, set_rates
from idgen.precision import autocast
from idgen.quantize import quantize_of


class Objective(nn.Module):
    """The loss as a module that knows all that is trained: DeepSpeed wraps modules, and finds parameters in them."""

    def __init__(self, model: nn.Module, alpha: nn.Parameter | None, precision: Precision) -> None:
        super().__init__()
        self.model, self.alpha, self.precision = model, alpha, precision

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        with autocast(batch["input_ids"].device, self.precision):
            return sequence_loss(self.model, batch)


@contextmanager
def deepspeed_steps(
    accelerator: Accelerator,
    model: nn.Module,
    groups: list[dict[str, Any]],
    alpha: nn.Parameter | None,
    settings: LocalTraining,
) -> Iterator[Callable[[dict[str, Tensor], float], Tensor]]:
    """A function that takes one step of AdamW on a batch, at a factor on the learning rates, and returns its loss.

    ``model`` has the result at the end.

    ``groups``: AdamW's, of parameters of ``model`` and ``alpha``. Clipping and batch size of the DeepSpeed config are
    those of ``settings``.

    Raises:
        ValueError: a quantised base, or an adapter of a tied table, under ZeRO-3.
    """
    plugin, objective = accelerator.state.deepspeed_plugin, Objective(model, alpha, settings.precision)
    trained = [parameter for group in groups for parameter in group["params"]]
    copies: dict[int, Any] = {id(parameter): parameter for parameter in trained}
    if plugin.zero_stage == 3:
        if quantize_of(model) != "none":
            raise ValueError("got a quantised base with ZeRO-3, expected ZeRO-2: packed weights cannot be partitioned")
        if adapted_embeddings(unwrap(model)):
            raise ValueError(
                "got lora_targets table with ZeRO-3, expected ZeRO-2: embeddings cannot read the partitioned adapter "
                "of the output. Take the target output, or configs/deepspeed/zero2.json"
            )
        copies = {}
        objective = copy.deepcopy(objective, copies)
    groups = [{**group, "params": [copies[id(parameter)] for parameter in group["params"]]} for group in groups]
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = settings.batch_size
    plugin.deepspeed_config["gradient_clipping"] = CLIP_NORM
    optimizer = keep_full_rates(torch.optim.AdamW(groups, weight_decay=0.0))
    engine, sharded = accelerator.prepare(objective, optimizer)

    def step(batch: dict[str, Tensor], factor: float) -> Tensor:
        set_rates(sharded, factor)
        loss = engine(batch)
        accelerator.backward(loss)  # and a step, and gradients back to zero
        return loss.detach().float()

    try:
        yield step
        _gather(trained, [copies[id(parameter)] for parameter in trained], plugin.zero_stage)
    finally:
        engine.destroy()
        accelerator.free_memory()


def _gather(trained: list[nn.Parameter], copies: list[nn.Parameter], stage: int) -> None:
    """Whole values of partitioned copies into the model of the run: a partitioned parameter reads as an empty one."""
    if stage < 3:
        return
    from deepspeed import zero

    with zero.GatheredParameters(copies), torch.no_grad():
        for parameter, whole in zip(trained, copies, strict=True):
            parameter.copy_(whole)
