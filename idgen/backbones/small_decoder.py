"""A small decoder from scratch whose tokens are items, and which starts as a text-neighbour rule.

Its residual stream carries the item vectors of the history to the output: with tied embeddings made of text vectors and
attention that takes an age-weighted mean, the model ranks by text before its first step, and can only learn on top.

Shape legend: V tokens, D width, L distances, F rotary frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

RIDGE = 1e-3
"""Keeps the fit solvable: the cosines are nearly dependent."""


SCALE = 12.0
"""The logit of an item against itself at the start, the inverse of a temperature for cosines."""
HISTORY_WEIGHT = 4.0
"""How much more the mean over the history counts at the start than the newest item, which the residual stream carries
anyway; 20 was measured, and was worse."""


def build_small_decoder(
    table_VD: Tensor,
    *,
    num_layers: int,
    num_heads: int,
    d_ff: int,
    max_tokens: int,
    padding: int,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A Llama in evaluation mode whose logits at the start order items by cos(sum_k w_k e_{h_k}, e_b).

    ``table_VD``: vectors of length 1 of tokens that stand for items (:func:`idgen.text_vectors.token_vectors`), zeros
    for others; they become the tied embeddings. The first layer's heads carry the vectors through unchanged, and
    constant query and key biases under the rotary embedding make their attention a function of distance alone, fitted
    to w_k ~ 1 / (k + 1) over ``max_tokens`` distances. All other layers write nothing yet: their output projections are
    zero. The model is a plain Llama with attention biases, so that folders, adapters and ``generate`` are those of any
    other.

    Raises:
        ValueError: the width is no multiple of twice the number of heads.
    """
    num_tokens, width = table_VD.shape
    if width % (2 * num_heads):
        raise ValueError(
            f"got item vectors of width {width} for {num_heads} heads, expected a multiple of {2 * num_heads}: rotary "
            "embeddings turn pairs of dimensions. Change d_model"
        )
    llama = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=width,
        intermediate_size=d_ff,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_tokens,
        attention_bias=True,
        tie_word_embeddings=True,
        pad_token_id=padding,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama)
        model.model.embed_tokens.weight.copy_(table_VD)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        _attend_by_age(model)
        model.model.norm.weight.fill_(SCALE / math.sqrt(width))
    return model.eval()


def age_weights(distance_L: Tensor, frequency_F: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients a with sum_f a_f cos(frequency_f l) near -log(1 + l) but for a constant, and softmax of that sum.

    A ridge regression over the distances, near ones weighted more: what a head can know of age is a sum of cosines.
    """
    basis_LF = torch.cat([torch.cos(distance_L[:, None] * frequency_F), torch.ones(len(distance_L), 1)], 1).double()
    weight_L1 = (1.0 / (1.0 + distance_L))[:, None].double()
    wanted_L = -torch.log1p(distance_L.double())
    gram_FF = basis_LF.T @ (weight_L1 * basis_LF) + RIDGE * torch.eye(basis_LF.shape[1], dtype=torch.float64)
    fitted_F = torch.linalg.solve(gram_FF, basis_LF.T @ (weight_L1[:, 0] * wanted_L))
    return fitted_F[:-1].float(), torch.softmax(basis_LF @ fitted_F, 0).float()


def _attend_by_age(model: LlamaForCausalLM) -> None:
    """Let layer 0 add `HISTORY_WEIGHT` times the age-weighted mean of the history's vectors."""
    attention, width = model.model.layers[0].self_attn, model.config.hidden_size
    num_heads = model.config.num_attention_heads
    head_width = width // num_heads
    frequency_F = model.model.rotary_emb.inv_freq.float()
    fitted_F, _ = age_weights(torch.arange(model.config.max_position_embeddings).float(), frequency_F)
    strength_F = fitted_F * math.sqrt(head_width)  # attention divides scores by the root of the head's width
    nothing_F = torch.zeros_like(strength_F)
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.zero_()
    attention.q_proj.bias.copy_(torch.cat([strength_F.abs().sqrt(), nothing_F]).repeat(num_heads))
    signed_F = strength_F.abs().sqrt() * strength_F.sign()
    attention.k_proj.bias.copy_(torch.cat([signed_F, nothing_F]).repeat(num_heads))
    attention.v_proj.weight.copy_(torch.eye(width))
    attention.v_proj.bias.zero_()
    # The layer reads vectors at length sqrt(D): the norm before it made them so.
    attention.o_proj.weight.copy_(torch.eye(width) * HISTORY_WEIGHT / math.sqrt(width))
