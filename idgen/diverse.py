"""Diverse (group) beam search for a sequence-to-sequence model, one beam a group, batched over inputs.

Shapes: B inputs, S input tokens, G groups, T output tokens, V vocabulary, D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from idgen.backbones.families import family_of, unwrap
from idgen.backbones.family import evaluating


class DiverseBeams(NamedTuple):
    """Outputs of each input, best first."""

    token_BGT: Tensor  # without the start token; pads behind the end token
    score_BG: Tensor  # accumulated score, penalties included, per generated token


def diverse_beam_search(
    model: Any,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    num_groups: int = 10,
    diversity_penalty: float = 1.0,
    min_length: int = 1,
    max_length: int = 11,
) -> DiverseBeams:
    """Write ``num_groups`` different texts per input, greedily within a group.

    Groups choose one after the other: group g scores token v at step t as
    ``log p(v | prefix_g) - diversity_penalty * #{earlier groups that chose v at this step}`` and takes the best; a
    group stops at its end token. Lengths count the decoder start token, as Hugging Face does: no end token
    before ``min_length`` tokens stand, at most ``max_length - 1`` tokens are written.
    Source: Diverse Beam Search (Vijayakumar et al., 2016) with one beam a group, as IDGenRec (SIGIR 2024) uses it.
    Differs from the paper: nothing.
    """
    if num_groups < 1 or diversity_penalty < 0 or max_length < 2:
        raise ValueError(
            f"num_groups is {num_groups}, diversity_penalty {diversity_penalty} and max_length {max_length}; "
            "expected at least 1, 0 and 2"
        )
    model = unwrap(model)
    with evaluating(model):
        token_BGT, score_BG, ended_BG = _write(
            model, input_ids_BS, attention_mask_BS, num_groups, diversity_penalty, min_length, max_length
        )
    pad, eos = model.config.pad_token_id, _eos(model)
    length_BG = (token_BGT != pad).sum(2).clamp(min=1)
    assert bool(((token_BGT == eos).any(2) == ended_BG).all())
    score_BG, order_BG = torch.sort(score_BG / length_BG, dim=1, descending=True, stable=True)
    return DiverseBeams(token_BGT.gather(1, order_BG[..., None].expand_as(token_BGT)), score_BG)


def _write(
    model: Any,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    num_groups: int,
    diversity_penalty: float,
    min_length: int,
    max_length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    pad, eos = model.config.pad_token_id, _eos(model)
    num_inputs, device = len(input_ids_BS), input_ids_BS.device
    family = family_of(model)
    state = family.start(model, input_ids_BS, attention_mask_BS)
    last_BG = torch.full((num_inputs, num_groups), model.config.decoder_start_token_id, device=device)
    parent_BG = torch.zeros_like(last_BG)
    score_BG = torch.zeros(num_inputs, num_groups, device=device)
    ended_BG = torch.zeros_like(last_BG, dtype=torch.bool)
    written: list[Tensor] = []
    for step in range(max_length - 1):
        hidden_BGD, state = family.step(model, state, last_BG, parent_BG, step)
        logit = family.token_logits(model, hidden_BGD.flatten(0, 1)).unflatten(0, (num_inputs, num_groups))
        log_prob_BGV = torch.log_softmax(logit, -1)
        log_prob_BGV[..., pad] = -torch.inf  # a pad inside a text could not be told from its end
        if step + 1 < min_length:
            log_prob_BGV[..., eos] = -torch.inf
        last_BG, gain_BG = _choose(log_prob_BGV, ended_BG, diversity_penalty)
        last_BG = last_BG.masked_fill(ended_BG, pad)
        score_BG = score_BG + gain_BG.masked_fill(ended_BG, 0.0)
        written.append(last_BG)
        ended_BG = ended_BG | (last_BG == eos)
        if bool(ended_BG.all()):
            break
        parent_BG = torch.arange(num_groups, device=device).expand(num_inputs, -1)
    return torch.stack(written, 2), score_BG, ended_BG


def _choose(log_prob_BGV: Tensor, ended_BG: Tensor, diversity_penalty: float) -> tuple[Tensor, Tensor]:
    """Token and penalised score of each group; groups that have ended neither choose nor penalise."""
    chosen_BV = torch.zeros_like(log_prob_BGV[:, 0])
    tokens, gains = [], []
    for group in range(log_prob_BGV.shape[1]):
        gain_B, token_B = (log_prob_BGV[:, group] - diversity_penalty * chosen_BV).max(1)
        counts_B1 = (~ended_BG[:, group]).to(chosen_BV.dtype)[:, None]
        chosen_BV = chosen_BV.scatter_add(1, token_B[:, None], counts_B1)
        tokens.append(token_B)
        gains.append(gain_B)
    return torch.stack(tokens, 1), torch.stack(gains, 1)


def _eos(model: Any) -> int:
    eos = model.config.eos_token_id
    return eos[0] if isinstance(eos, list) else eos
