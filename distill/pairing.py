"""Which student layer stands for which two teacher layers, and a student of half depth.

Layers ("blocks" in the paper) are numbered from 0 here: pair i of a stack joins teacher layers 2 i and 2 i + 1. Stacks
are the family's: encoder and decoder, or the decoder alone.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from idgen.backbones.families import family_of
from idgen.backbones.family import Family

Init = Literal["first", "second", "mean"]


class Pair(NamedTuple):
    """Student block ``student`` learns teacher blocks ``first`` and ``first + 1`` of one stack."""

    stack: str
    student: int
    first: int


def pairs_of(teacher: Any) -> list[Pair]:
    """All pairs of a teacher, encoder first; the last layer of a stack of odd depth is in none.

    Errors: ``ValueError`` when there is nothing to halve.
    """
    depth = family_of(teacher).depths(teacher.config)
    found = [Pair(stack, i, 2 * i) for stack, layers in depth.items() for i in range(layers // 2)]
    if not found:
        raise ValueError(f"the teacher has {depth} layers; expected at least 2 in one stack. Use a deeper backbone")
    return found


def build_student(teacher: Any, init: Init = "first") -> Any:
    """A student of half depth that starts from the teacher's weights, on the teacher's device, in evaluation mode.

    Layer i starts from teacher layer 2 i ("first"), 2 i + 1 ("second") or their mean; embeddings, final norms and
    T5's position bias, which only layer 0 of a stack holds, are the teacher's. The last layer of a stack of odd depth
    is copied. The model is built from its config, so that layer numbers and depths agree everywhere.
    Source: FeDecider (WWW 2026), appendix B.2, which does not say how g_i starts; "first" is ours.
    """
    if init not in ("first", "second", "mean"):
        raise ValueError(f"got init {init!r}; expected 'first', 'second' or 'mean'")
    pairs_of(teacher)
    family = family_of(teacher)
    depth = family.depths(teacher.config)
    half = family.with_depths(teacher.config, {stack: (layers + 1) // 2 for stack, layers in depth.items()})
    with torch.random.fork_rng(devices=[]):  # the drawn weights are all overwritten
        student = type(teacher)(half)
    state = teacher.state_dict()
    student.load_state_dict({name: _start(name, state, family, depth, init) for name in student.state_dict()})
    parameter = next(teacher.parameters())
    return student.to(parameter.device, parameter.dtype).eval()


def pair_parameters(student: Any, pair: Pair) -> list[nn.Parameter]:
    """What is trained for one pair: all of the student's layer but what it holds for other layers too."""
    family = family_of(student)
    layer = family.layers(student)[pair.stack][pair.student]
    return [parameter for name, parameter in layer.named_parameters() if family.kept_whole not in name]


def _start(name: str, state: dict[str, Tensor], family: Family, depth: dict[str, int], init: Init) -> Tensor:
    for stack, path in family.stacks.items():
        if name.startswith(f"{path}."):
            number, rest = name.removeprefix(f"{path}.").split(".", 1)
            first = 2 * int(number)
            names = [f"{path}.{layer}.{rest}" for layer in (first, first + 1)]
            if family.kept_whole in rest or first + 1 >= depth[stack] or init == "first":
                return state[names[0]]
            return state[names[1]] if init == "second" else (state[names[0]] + state[names[1]]) / 2
    return state[name]
