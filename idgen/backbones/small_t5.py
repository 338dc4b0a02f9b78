"""A small T5 from scratch whose tokens have text vectors, and which starts as a text-neighbour rule.

T5 has no path from its input to its output: vectors of texts in its tied table mean nothing to it before it has learned
one. Here the path is there from the start. The encoder's first layer adds to every position the age-weighted mean of
the tokens around it, the decoder's first layer reads that of the end token and adds it to its stream, and the tied
table turns it into logits: before its first step the model ranks item IDs by the texts of their tokens, and can only
learn on top. All other layers write nothing yet: their output projections are zero.

Shape legend: V tokens, D width, R buckets of relative positions, H heads.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

NUM_FLAGS = 2
"""Dimensions at the end of the width that no vector has: one that every token has, and one of the end token."""
FLAG = 0.5
"""Of a flag, in lengths of a token's vector."""
SCALE = 12.0
"""The logit of a token against itself at the start, the inverse of a temperature for cosines."""
HISTORY_WEIGHT = 4.0
"""How much more the history counts in the decoder's stream at the start than the token that was written last, which the
next one of its ID is near to; 12 was measured, and was worse."""
SHARPNESS = 8.0
"""By how much the end token's score is above the others' where the decoder first looks at the prompt."""
NOISE = 0.02
"""Standard deviation of rows without a vector, such as words of a template."""


def build_small_t5(
    table_VD: Tensor, config: T5Config, tokens_per_item: float, seed: int = 0
) -> T5ForConditionalGeneration:
    """A T5 in evaluation mode whose logits at the start are `SCALE` cos(mean of the history's token vectors, e_v).

    ``table_VD``: vectors of length 1 of tokens, zeros for others; they become the tied embeddings, but for their last
    `NUM_FLAGS` dimensions. The mean weighs a token ``d`` places before the end of the prompt by
    1 / (1 + d / ``tokens_per_item``). ``config``: sizes; its heads together are as wide as the model. The model is a
    plain T5, so that folders, adapters and ``generate`` are those of any other.

    Raises:
        ValueError: heads whose widths do not add up to the model's.
    """
    width, num_heads = config.d_model, config.num_heads
    if config.d_kv * num_heads != width or table_VD.shape[1] != width:
        raise ValueError(
            f"got {num_heads} heads of width {config.d_kv} and vectors of width {table_VD.shape[1]}, expected heads "
            f"and vectors of width {width} in all: the vectors pass through the heads unchanged. Change d_model"
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = T5ForConditionalGeneration(config)  # whose blocks are modules to the type checker
        _fill_table(model, table_VD)
        for stack in (model.encoder, model.decoder):
            for block in stack.block:
                for layer in block.layer[:-1]:
                    _attention(layer).o.weight.zero_()
                block.layer[-1].DenseReluDense.wo.weight.zero_()
        _gather_history(model, tokens_per_item)
        _read_history(model)
        model.decoder.final_layer_norm.weight.fill_(SCALE)
    return cast(T5ForConditionalGeneration, model.eval())


def _attention(layer: nn.Module) -> Any:
    return layer.EncDecAttention if hasattr(layer, "EncDecAttention") else layer.SelfAttention


def _fill_table(model: Any, vector_VD: Tensor) -> None:
    """Rows of length 1, so that a learning rate means what it does to a decoder; others are little but flags."""
    table_VD, width = model.get_input_embeddings().weight, vector_VD.shape[1]
    known_V = vector_VD.norm(dim=1) > 0
    table_VD[:] = with_flags(torch.where(known_V[:, None], vector_VD, table_VD * (NOISE / math.sqrt(width))))
    table_VD[model.config.eos_token_id, -1] = FLAG


def with_flags(row_VD: Tensor) -> Tensor:
    """Rows of the table from vectors of tokens."""
    return torch.cat([row_VD[:, :-NUM_FLAGS], torch.tensor([FLAG, 0.0]).expand(len(row_VD), NUM_FLAGS)], 1)


def _carried(width: int) -> Tensor:
    """(D, D) the identity without the flags."""
    diagonal_D = torch.ones(width)
    diagonal_D[-NUM_FLAGS:] = 0.0
    return torch.diag(diagonal_D)


def _gather_history(model: Any, tokens_per_item: float) -> None:
    """Let the encoder's layer 0 add to each position the mean of the tokens around it, weighed by distance alone."""
    attention = model.encoder.block[0].layer[0].SelfAttention
    attention.q.weight.zero_()  # the position bias alone decides; keys stay as drawn, so that queries can be learned
    attention.v.weight.copy_(_carried(model.config.d_model))
    attention.o.weight.copy_(_carried(model.config.d_model) / math.sqrt(model.config.d_model))
    distance = torch.arange(model.config.relative_attention_max_distance)
    bucket = attention._relative_position_bucket(
        -distance,
        bidirectional=True,
        num_buckets=model.config.relative_attention_num_buckets,
        max_distance=model.config.relative_attention_max_distance,
    )
    num_past = model.config.relative_attention_num_buckets // 2
    mean_R = torch.zeros(num_past).index_add(0, bucket, distance.float()) / bucket.bincount(minlength=num_past).clamp(1)
    bias_R = -torch.log1p(mean_R / tokens_per_item)
    attention.relative_attention_bias.weight.copy_(bias_R.repeat(2)[:, None].expand(-1, model.config.num_heads))


def _read_history(model: Any) -> None:
    """Let the decoder's layer 0 add what the encoder has gathered at the end token."""
    attention, width, num_heads = (
        model.decoder.block[0].layer[1].EncDecAttention,
        model.config.d_model,
        model.config.num_heads,
    )
    for projection in (attention.q, attention.k):
        projection.weight.zero_()
    first_H = torch.arange(num_heads) * model.config.d_kv
    # Both flags have FLAG of the length of a vector; norms bring a token with its flag to the length sqrt(D).
    flag = FLAG * math.sqrt(width) / math.sqrt(1.0 + FLAG**2)
    attention.q.weight[first_H, -NUM_FLAGS] = SHARPNESS / flag
    attention.k.weight[first_H, -1] = 1.0 / flag
    attention.v.weight.copy_(_carried(width))
    attention.o.weight.copy_(_carried(width) * HISTORY_WEIGHT / math.sqrt(width))
