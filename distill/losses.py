"""Losses of layer-wise distillation: each student layer against two teacher layers, on the teacher's own inputs.

Shapes: B samples, S input tokens, T target tokens, D model width, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.pairing import Pair
from idgen.backbones.families import family_of
from idgen.backbones.family import TokenBatch
from idgen.losses import mean_in_pieces, predictions_loss


class BlockCall(NamedTuple):
    """One call of a transformer layer: what it was given, and the hidden states it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


@contextmanager
def recorded(model: Any) -> Iterator[dict[tuple[str, int], BlockCall]]:
    """Inside, every forward pass of ``model`` fills the dict: (stack, layer number) -> its last call.

    Hooks rather than ``output_hidden_states``, whose last entry is behind the final norm.
    """
    calls: dict[tuple[str, int], BlockCall] = {}

    def remember(key: tuple[str, int]) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls[key] = BlockCall(args, kwargs, _hidden(output))

        return hook

    handles = [
        block.register_forward_hook(remember((stack, number)), with_kwargs=True)
        for stack, layers in family_of(model).layers(model).items()
        for number, block in enumerate(layers)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def pair_losses(teacher: Any, student: Any, pairs: Sequence[Pair], batch: TokenBatch) -> Tensor:
    """(P,) losses ``|| g_i(h_i) - f_last(.. f_first(h_i)) ||^2``: summed over features, mean over tokens that count.

    h_i is what the teacher's first layer of the pair was given (padding mask, position bias and, in the decoder, the
    teacher encoder's output included). Tokens that count: no padding; in the decoder of a T5,
    labels other than -100. Source: FeDecider (WWW 2026), appendix B.2, equation for M_local; there the errors are
    summed over all tokens. The teacher runs once, in the mode it is in, without gradients.
    """
    family = family_of(teacher)
    with torch.no_grad(), recorded(teacher) as calls:
        family.predictions(teacher, batch)
    counts, layers = family.counting(batch), family.layers(student)
    losses = []
    for pair in pairs:
        given, wanted = calls[pair.stack, pair.first], calls[pair.stack, pair.last].output
        output = _hidden(layers[pair.stack][pair.student](*given.args, **given.kwargs))
        error_BT = (output.float() - wanted.float()).square().sum(-1)
        losses.append(error_BT[counts[pair.stack]].mean())
    return torch.stack(losses)


def finetune_loss(teacher: Any, student: Any, batch: TokenBatch, kl_weight: float) -> Tensor:
    """`sequence_loss` of the chained student plus ``kl_weight`` times KL(teacher || student) per target token."""
    family = family_of(student)
    predictions = family.predictions(student, batch)
    with torch.no_grad():
        wanted_RD = family.predictions(teacher, batch).hidden_RD

    def divergence(rows_RD: Tensor, wanted_rows_RD: Tensor) -> Tensor:
        with torch.no_grad():
            wanted_RV = family.token_logits(teacher, wanted_rows_RD).log_softmax(-1)
        given_RV = family.token_logits(student, rows_RD).log_softmax(-1)
        return F.kl_div(given_RV, wanted_RV, reduction="batchmean", log_target=True)

    entropy = predictions_loss(family, student, predictions, batch)
    kl = mean_in_pieces(divergence, student.config.vocab_size, predictions.hidden_RD, wanted_RD)
    return entropy + kl_weight * kl


def _hidden(output: Any) -> Tensor:
    """Layers return their hidden states alone or first, by architecture."""
    return output[0] if isinstance(output, tuple) else output
