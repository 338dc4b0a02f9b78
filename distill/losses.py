"""Losses of layer-wise distillation: each student block against two teacher blocks, on the teacher's own inputs.

Shapes: B samples, S input tokens, T target tokens, D model width, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5ForConditionalGeneration

from distill.pairing import STACKS, Pair
from idgen.decode import token_logits
from idgen.samples import TokenBatch
from idgen.training import decoder_states
from idgen.trie import IGNORED_LABEL


class BlockCall(NamedTuple):
    """One call of a transformer block: what it was given, and the hidden states it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


@contextmanager
def recorded(model: T5ForConditionalGeneration) -> Iterator[dict[tuple[str, int], BlockCall]]:
    """Inside, every forward pass of ``model`` fills the dict: (stack, block number) -> its last call.

    Hooks rather than ``output_hidden_states``, whose last entry is behind the final norm.
    """
    calls: dict[tuple[str, int], BlockCall] = {}

    def remember(key: tuple[str, int]) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls[key] = BlockCall(args, kwargs, output[0])

        return hook

    handles = [
        block.register_forward_hook(remember((stack, number)), with_kwargs=True)
        for stack in STACKS
        for number, block in enumerate(getattr(model, stack).block)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def pair_losses(
    teacher: T5ForConditionalGeneration, student: T5ForConditionalGeneration, pairs: Sequence[Pair], batch: TokenBatch
) -> Tensor:
    """(P,) losses ``|| g_i(h_i) - f_2i(f_2i-1(h_i)) ||^2``: summed over features, mean over tokens that count.

    h_i is what the teacher's first block of the pair was given (padding mask, position bias and, in the decoder, the
    teacher encoder's output included). Tokens that count: no padding in the encoder, labels other than -100 in the
    decoder. Source: FeDecider (WWW 2026), appendix B.2, equation for M_local; there the errors are summed over all
    tokens. The teacher runs once, in the mode it is in, without gradients.
    """
    with torch.no_grad(), recorded(teacher) as calls:
        decoder_states(teacher, batch)
    counts = {"encoder": batch["attention_mask"] != 0, "decoder": batch["labels"] != IGNORED_LABEL}
    losses = []
    for pair in pairs:
        given, wanted = calls[pair.stack, pair.first], calls[pair.stack, pair.first + 1].output
        output = getattr(student, pair.stack).block[pair.student](*given.args, **given.kwargs)[0]
        error_BT = (output.float() - wanted.float()).square().sum(-1)
        losses.append(error_BT[counts[pair.stack]].mean())
    return torch.stack(losses)


def finetune_loss(
    teacher: T5ForConditionalGeneration, student: T5ForConditionalGeneration, batch: TokenBatch, kl_weight: float
) -> Tensor:
    """Cross-entropy of the chained student plus ``kl_weight`` times KL(teacher || student) per target token."""
    label_BT = batch["labels"]
    counts_BT = label_BT != IGNORED_LABEL
    logit_RV = token_logits(student, decoder_states(student, batch)[counts_BT])
    loss = F.cross_entropy(logit_RV, label_BT[counts_BT])
    if kl_weight > 0:
        with torch.no_grad():
            wanted_RV = token_logits(teacher, decoder_states(teacher, batch)[counts_BT]).log_softmax(-1)
        loss = loss + kl_weight * F.kl_div(logit_RV.log_softmax(-1), wanted_RV, reduction="batchmean", log_target=True)
    return loss
