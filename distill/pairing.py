"""Which student layer stands for which teacher layers, and a student of half depth.

Layers ("blocks" in the paper) are numbered from 0 here. The paper's pair i of a stack joins teacher layers 2 i and
2 i + 1. Stacks are the family's: encoder and decoder, or the decoder alone.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from idgen.backbones.families import family_of
from idgen.backbones.family import Family

Init = Literal["first", "second", "mean"]
Keep = Literal["uniform", "first_last", "all"]


class Pair(NamedTuple):
    """Student block ``student`` learns teacher blocks ``first`` to ``last`` of one stack: two, but for "first_last"."""

    stack: str
    student: int
    first: int
    last: int


def spans(depth: int, keep: Keep) -> list[tuple[int, int]]:
    """First and last teacher layer that each student layer stands for.

    "uniform": two each (FeDecider, WWW 2026, appendix B.2), the last one alone where the depth is odd. "first_last":
    the first and the last quarter of the layers are kept one by one, but for the one before the gap, which stands for
    all that is left out: deep layers of language models were found to add little for recommending (SLMRec, ICLR 2025).
    "all": every layer, no student of half depth.
    """
    half = (depth + 1) // 2
    if keep == "uniform":
        return [(2 * i, min(2 * i + 1, depth - 1)) for i in range(half)]
    if keep == "first_last":
        at_end = half // 2
        gap = half - at_end - 1
        kept = [*range(gap), *range(depth - at_end, depth)]
        return sorted([*((i, i) for i in kept), (gap, depth - at_end - 1)])
    if keep == "all":
        return [(i, i) for i in range(depth)]
    raise ValueError(f"got keep {keep!r}; expected 'uniform', 'first_last' or 'all'")


def pairs_of(teacher: Any, keep: Keep = "uniform") -> list[Pair]:
    """All student layers that stand for several teacher layers, encoder first; the others are copies.

    Errors: ``ValueError`` when there is nothing to halve.
    """
    depth = family_of(teacher).depths(teacher.config)
    found = [
        Pair(stack, i, first, last)
        for stack, layers in depth.items()
        for i, (first, last) in enumerate(spans(layers, keep))
        if first < last
    ]
    if not found and keep != "all":
        raise ValueError(f"the teacher has {depth} layers; expected at least 2 in one stack. Use a deeper backbone")
    return found


def build_student(teacher: Any, init: Init = "first", keep: Keep = "uniform") -> Any:
    """A student, of half depth unless all layers are kept; on the teacher's device, in evaluation mode.

    A layer that stands for several (`spans`) starts from the "first" of them, the last ("second") or their mean; all
    else, embeddings, final norms and T5's position bias, which only layer 0 of a stack holds, is the teacher's. The
    model is built from its config, so that layer numbers and depths agree everywhere.
    Source: FeDecider (WWW 2026), appendix B.2, which does not say how g_i starts; "first" is ours.
    """
    if init not in ("first", "second", "mean"):
        raise ValueError(f"got init {init!r}; expected 'first', 'second' or 'mean'")
    pairs_of(teacher, keep)
    family = family_of(teacher)
    kept = {stack: spans(layers, keep) for stack, layers in family.depths(teacher.config).items()}
    starts = {stack: [last if init == "second" else first for first, last in layers] for stack, layers in kept.items()}
    half = family.with_layers(teacher.config, starts)
    with torch.random.fork_rng(devices=[]):  # the drawn weights are all overwritten
        student = type(teacher)(half)
    if teacher.get_output_embeddings().weight is not teacher.get_input_embeddings().weight:
        head = student.get_output_embeddings()  # a config may call tied what is not
        head.weight = nn.Parameter(head.weight.detach().clone())
    state = teacher.state_dict()
    student.load_state_dict({name: _start(name, state, family, kept, init) for name in student.state_dict()})
    parameter = next(teacher.parameters())
    return student.to(parameter.device, parameter.dtype).eval()


def pair_parameters(student: Any, pair: Pair) -> list[nn.Parameter]:
    """What is trained for one pair: all of the student's layer but what it holds for other layers too."""
    family = family_of(student)
    layer = family.layers(student)[pair.stack][pair.student]
    return [parameter for name, parameter in layer.named_parameters() if family.kept_whole not in name]


def _start(
    name: str, state: dict[str, Tensor], family: Family, kept: dict[str, list[tuple[int, int]]], init: Init
) -> Tensor:
    for stack, path in family.stacks.items():
        if name.startswith(f"{path}."):
            number, rest = name.removeprefix(f"{path}.").split(".", 1)
            first, last = kept[stack][int(number)]
            if family.kept_whole in rest or first == last or init == "first":
                return state[f"{path}.{first}.{rest}"]
            if init == "second":
                return state[f"{path}.{last}.{rest}"]
            return torch.stack([state[f"{path}.{layer}.{rest}"] for layer in range(first, last + 1)]).mean(0)
    return state[name]
