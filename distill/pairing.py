"""Which student block stands for which two teacher blocks, and a student of half depth.

Blocks are numbered from 0 here: pair i of a stack joins teacher blocks 2 i and 2 i + 1.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

Stack = Literal["encoder", "decoder"]
Init = Literal["first", "second", "mean"]

STACKS: tuple[Stack, Stack] = ("encoder", "decoder")
POSITION_BIAS = "relative_attention_bias"


class Pair(NamedTuple):
    """Student block ``student`` learns teacher blocks ``first`` and ``first + 1`` of one stack."""

    stack: Stack
    student: int
    first: int


def depths(config: T5Config) -> dict[Stack, int]:
    """Blocks of each stack."""
    return {"encoder": config.num_layers, "decoder": config.num_decoder_layers or config.num_layers}


def pairs_of(config: T5Config) -> list[Pair]:
    """All pairs of a teacher, encoder first; the last block of a stack of odd depth is in none."""
    return [Pair(stack, i, 2 * i) for stack, depth in depths(config).items() for i in range(depth // 2)]


def student_config(config: T5Config) -> T5Config:
    """The teacher's config at half depth, rounded up. Errors: ``ValueError`` when there is nothing to halve."""
    depth = depths(config)
    if not pairs_of(config):
        raise ValueError(f"the teacher has {depth} layers; expected at least 2 in one stack. Use a deeper backbone")
    half = copy.deepcopy(config)
    half.num_layers, half.num_decoder_layers = ((depth[stack] + 1) // 2 for stack in STACKS)
    return half


def build_student(teacher: T5ForConditionalGeneration, init: Init = "first") -> T5ForConditionalGeneration:
    """A student of half depth that starts from the teacher's weights, on the teacher's device, in evaluation mode.

    Block i starts from teacher block 2 i ("first"), 2 i + 1 ("second") or their mean; embeddings, final norms and
    the position bias, which only block 0 of a stack holds, are the teacher's. The last block of a stack of odd depth
    is copied. The model is built from its config, so that layer numbers and depths agree everywhere.
    Source: FeDecider (WWW 2026), appendix B.2, which does not say how g_i starts; "first" is ours.
    """
    if init not in ("first", "second", "mean"):
        raise ValueError(f"got init {init!r}; expected 'first', 'second' or 'mean'")
    with torch.random.fork_rng(devices=[]):  # the drawn weights are all overwritten
        student = type(teacher)(student_config(teacher.config))
    depth = depths(teacher.config)
    state = teacher.state_dict()
    student.load_state_dict({name: _start(name, state, depth, init) for name in student.state_dict()})
    parameter = next(teacher.parameters())
    return student.to(parameter.device, parameter.dtype).eval()  # type: ignore[arg-type]


def pair_parameters(student: T5ForConditionalGeneration, pair: Pair) -> list[nn.Parameter]:
    """What is trained for one pair: all of the student's block but the position bias."""
    block = getattr(student, pair.stack).block[pair.student]
    return [parameter for name, parameter in block.named_parameters() if POSITION_BIAS not in name]


def _start(name: str, state: Mapping[str, Tensor], depth: Mapping[Stack, int], init: Init) -> Tensor:
    found = re.fullmatch(r"(encoder|decoder)\.block\.(\d+)\.(.+)", name)
    if found is None:
        return state[name]
    stack, number, rest = found[1], 2 * int(found[2]), found[3]

    def of_block(block: int) -> Tensor:
        return state[f"{stack}.block.{block}.{rest}"]

    unpaired = number + 1 >= depth["encoder" if stack == "encoder" else "decoder"]
    if POSITION_BIAS in rest or unpaired or init == "first":
        return of_block(number)
    return of_block(number + 1) if init == "second" else (of_block(number) + of_block(number + 1)) / 2
