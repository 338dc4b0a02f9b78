"""Which student layer stands for which teacher layers, and a student of half depth.

Layers ("blocks" in the paper) are numbered from 0 here. The paper's pair i of a stack joins teacher layers 2 i and
2 i + 1. Stacks are the family's: encoder and decoder, or the decoder alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from idgen.backbones.families import family_of
from idgen.backbones.family import Family


class Pair(NamedTuple):
    """Student block ``student`` learns teacher blocks ``first`` to ``last`` of one stack."""

    stack: str
    student: int
    first: int
    last: int


def spans(depth: int) -> list[tuple[int, int]]:
    """First and last teacher layer that each student layer stands for: two each (FeDecider, WWW 2026, appendix B.2),
    the last one alone where the depth is odd."""
    return [(2 * i, min(2 * i + 1, depth - 1)) for i in range((depth + 1) // 2)]


def pairs_of(teacher: Any) -> list[Pair]:
    """All student layers that stand for two teacher layers, encoder first; the others are copies.

    Errors: ``ValueError`` when there is nothing to halve.
    """
    depth = family_of(teacher).depths(teacher.config)
    found = [
        Pair(stack, i, first, last)
        for stack, layers in depth.items()
        for i, (first, last) in enumerate(spans(layers))
        if first < last
    ]
    if not found:
        raise ValueError(f"the teacher has {depth} layers; expected at least 2 in one stack. Use a deeper backbone")
    return found


def build_student(teacher: Any) -> Any:
    """A student of half depth; on the teacher's device, in evaluation mode.

    A layer that stands for two (`spans`) starts from the first of them; all else, embeddings, final norms and T5's
    position bias, which only layer 0 of a stack holds, is the teacher's. The model is built from its config, so that
    layer numbers and depths agree everywhere.
    Source: FeDecider (WWW 2026), appendix B.2, which does not say how g_i starts; the first is ours.
    """
    pairs_of(teacher)  # or there is nothing to halve
    family = family_of(teacher)
    starts = {stack: [first for first, _ in spans(layers)] for stack, layers in family.depths(teacher.config).items()}
    half = family.with_layers(teacher.config, starts)
    with torch.random.fork_rng(devices=[]):  # the drawn weights are all overwritten
        student = type(teacher)(half)
    if teacher.get_output_embeddings().weight is not teacher.get_input_embeddings().weight:
        head = student.get_output_embeddings()  # a config may call tied what is not
        head.weight = nn.Parameter(head.weight.detach().clone())
    state = teacher.state_dict()
    student.load_state_dict({name: _start(name, state, family, starts) for name in student.state_dict()})
    parameter = next(teacher.parameters())
    return student.to(parameter.device, parameter.dtype).eval()


def pair_parameters(student: Any, pair: Pair) -> list[nn.Parameter]:
    """What is trained for one pair: all of the student's layer but what it holds for other layers too."""
    family = family_of(student)
    layer = family.layers(student)[pair.stack][pair.student]
    return [parameter for name, parameter in layer.named_parameters() if family.kept_whole not in name]


def _start(name: str, state: dict[str, Tensor], family: Family, starts: dict[str, list[int]]) -> Tensor:
    for stack, path in family.stacks.items():
        if name.startswith(f"{path}."):
            number, rest = name.removeprefix(f"{path}.").split(".", 1)
            return state[f"{path}.{starts[stack][int(number)]}.{rest}"]
    return state[name]
