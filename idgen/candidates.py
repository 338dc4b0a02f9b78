"""Large catalogues: a target is compared with a sample of the items instead of all (sampled softmax).

Shapes: B rows of a batch, S tokens of a row, C candidates, I items, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idgen.backbones.family import TokenBatch
from idgen.events import (
    EventTable,
    is_target,
)
from idgen.samples import _epoch, item_segments
from idgen.tasks import Task, _as_list, merge_tasks

SAMPLED_ABOVE = 15_000
"""Tokens to compare a target with above which a sample of them stands for all. A step is shorter from 3,000 on, by 3.6
times at 12,000 and 25 times at 96,000, and ndcg@10 is no lower (``benchmarks/speed.py``); below, the whole softmax is
affordable and without a draw."""
NUM_UNIFORM = 512
"""Tokens that are drawn uniformly for a batch, beside the targets that are in it; 1,024 were no better."""


class Candidates(NamedTuple):
    """What targets are compared with, where that is too much for every step."""

    token_I: Tensor
    """All of it, rising."""
    share_V: Tensor
    """By token, the share of an epoch's targets."""
    num_uniform: int


def candidates_of(tasks: Task | Sequence[Task], token_I: Tensor) -> Candidates | None:
    """Of the training samples of ``tasks`` against ``token_I``; None where these are no more than `SAMPLED_ABOVE`, or
    where IDs are no rows that end with tokens of their own."""
    tasks = _as_list(tasks)
    fits = all(task.trie.has_own_tokens and task.config.is_row for task in tasks)
    if len(token_I) <= SAMPLED_ABOVE or not fits:
        return None
    parts, events = merge_tasks(tasks)
    _, synthetic_N = _epoch(tasks, parts, events)
    target_N = np.flatnonzero(is_target(events))
    segment_N = item_segments(parts, events, target_N)
    last_N = parts.segments.start_G[segment_N] + parts.segments.length_G[segment_N] - 1
    weight_N = None if events.basket_first_E is None else _times_asked(events, target_N)
    num_V = np.bincount(parts.segments.token_F[last_N], weight_N, minlength=int(token_I[-1]) + 1).astype(float)
    for task in tasks:
        num_V[task.item_tokens()] += len(synthetic_N) / len(tasks) / len(task.trie)
    return Candidates(token_I, torch.from_numpy(num_V / max(1.0, num_V.sum())).float(), NUM_UNIFORM)


def _times_asked(events: EventTable, target_N: np.ndarray) -> np.ndarray:
    """How often an epoch asks for each event: every item of the basket before asks for one of its basket."""
    assert events.basket_first_E is not None
    assert events.basket_end_E is not None
    first_N = events.basket_first_E[target_N]
    before_N, size_N = events.basket_first_E[first_N - 1], events.basket_end_E[target_N] - first_N
    return (first_N - before_N) / size_N


def with_candidates(batch: TokenBatch, candidates: Candidates, generator: torch.Generator) -> TokenBatch:
    """``batch`` with ``catalogue`` (C,), its targets and tokens drawn uniformly, and what stands for all others.

    ``log_weights`` (B, C) are added to the logits of row b but for that of the target itself: ``-log pi_c``, ``pi_c``
    the probability with which the draw or another row brings c, so that ``e^{s_y} + sum_{c != y} e^{s_c} / pi_c`` has
    the sum over the whole catalogue as its mean (Horvitz and Thompson); ``-inf`` where nothing but row b itself brought
    c, since what its user buys next is no random draw. Without replacement, so that all tokens drawn are the full
    softmax. ``pi_c = 1 - (1 - m / I) (1 - p_c)^n``, m of I tokens drawn, p_c its share of all targets, n the targets of
    the other rows.

    Sampled softmax with a correction by log q: Bengio and Senecal 2008; uniform and in-batch negatives together: Yang
    et al. 2020, after Yi et al., RecSys 2019. Differs from them: the target is there for certain and is not corrected,
    q is a probability of being there and no expected number, and what the row alone brings is no negative of it.
    """
    label_BS = batch["row_labels"]
    counts_BS = torch.isin(label_BS, candidates.token_I)
    num_rows, num_all = len(label_BS), len(candidates.token_I)
    rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
    num_drawn = min(candidates.num_uniform, num_all)
    drawn_N = candidates.token_I[torch.from_numpy(rng.choice(num_all, num_drawn, replace=False, shuffle=False))]
    token_C = torch.cat([drawn_N, label_BS[counts_BS]]).unique()
    held_BC = torch.zeros(num_rows, len(token_C), dtype=torch.bool)
    held_BC[counts_BS.nonzero()[:, 0], torch.searchsorted(token_C, label_BS[counts_BS])] = True
    brought_C = held_BC.sum(0)
    brought_C[torch.searchsorted(token_C, drawn_N)] += 1
    num_others_B1 = counts_BS.sum() - counts_BS.sum(1, keepdim=True)
    absent_BC = (num_others_B1 * torch.log1p(-candidates.share_V[token_C])).exp_().mul_(1.0 - num_drawn / num_all)
    weight_BC = absent_BC.neg_().log1p_().neg_().masked_fill_(held_BC & (brought_C == 1), -torch.inf)
    return {**batch, "catalogue": token_C, "log_weights": weight_BC}
