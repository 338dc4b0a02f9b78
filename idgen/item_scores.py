"""Scores of given items, or of all, behind a batch of prompts: exact, on the cache of the prompt.

Shapes: B users, S input tokens, M candidates of a user, K nodes of a user, C children, T tokens of an ID, I items,
R rows of a block, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedecider.bounds import Precision
from idgen.backbones.families import family_of, unwrap
from idgen.backbones.family import evaluating, output_rows
from idgen.decode import MAX_LOGITS, child_log_probs
from idgen.precision import autocast
from idgen.trie import Trie


def trie_log_probs(
    model: Any, input_ids_BS: Tensor, attention_mask_BS: Tensor, trie: Trie, candidate_BM: Tensor
) -> Tensor:
    """Log-probabilities of given items among all items of the catalogue, (B, M) float64; -inf for a candidate of -1.

    log p(ID) = sum of log softmax(logits) over the tokens that may follow in the trie: a
    distribution over the catalogue, whose sum over all items is 1. Cost: a user's candidates read the beginnings that
    they share once, and nothing behind the last place where the trie leaves a choice; where IDs are one token long, one
    step for any number of candidates.
    """
    model, trie = unwrap(model), trie.to(input_ids_BS.device)
    family, candidate_BM = family_of(model), candidate_BM.to(trie.device)
    path = _paths(trie)
    asked_BM, item_BM = candidate_BM >= 0, candidate_BM.clamp(min=0)
    nobody_B1 = torch.zeros(len(item_BM), 1, dtype=torch.long, device=trie.device)
    place_BM = torch.zeros_like(item_BM)  # of each candidate's node among its user's nodes
    score_BM = torch.zeros(item_BM.shape, dtype=torch.float64, device=trie.device)
    with evaluating(model):
        state = family.start(model, input_ids_BS, attention_mask_BS)
        hidden_BKD, state = family.step(model, state, nobody_B1 + family.start_token(model), nobody_B1, 0)
        log_prob_BC = _root_log_probs(model, hidden_BKD[:, 0], trie)
        score_BM += log_prob_BC.gather(1, path.after_IT[item_BM, 0] - 1)
        for number in range(1, trie.max_length):
            open_BM = path.open_IT[item_BM, number] & asked_BM
            if not bool(open_BM.any()):
                break
            node_BM = path.after_IT[item_BM, number - 1]
            node_BK, parent_BK, place_BM = _distinct(node_BM, open_BM, place_BM, len(trie.token_N) - 1)
            hidden_BKD, state = family.step(model, state, trie.token_N[node_BK], parent_BK, number)
            count_R = trie.num_children(node_BK.flatten())
            first_BK = (count_R.cumsum(0) - count_R).view_as(node_BK)
            log_prob_C = child_log_probs(model, hidden_BKD.flatten(0, 1), node_BK.flatten(), trie)
            first_BM = first_BK.gather(1, place_BM.clamp(max=node_BK.shape[1] - 1))
            child_BM = first_BM + path.after_IT[item_BM, number] - trie.first_child_N1[node_BM]
            score_BM[open_BM] += log_prob_C[child_BM[open_BM]].double()
    return score_BM.masked_fill_(~asked_BM, -torch.inf)


ITEMS_AT_ONCE = 512
"""Of `written_log_probs`: what a step costs grows with the square of the nodes that are read together."""


def written_log_probs(model: Any, input_ids_BS: Tensor, attention_mask_BS: Tensor, trie: Trie) -> Tensor:
    """`trie_log_probs` of all items, (B, I) float64: items with near IDs together, which share beginnings."""
    order_I = torch.from_numpy(np.lexsort(trie.label_IT.cpu().numpy().T[::-1]).copy()).to(input_ids_BS.device)
    parts = [
        trie_log_probs(model, input_ids_BS, attention_mask_BS, trie, part.expand(len(input_ids_BS), -1))
        for part in order_I.split(ITEMS_AT_ONCE)
    ]
    return torch.cat(parts, 1)[:, order_I.argsort()]


class _Paths(NamedTuple):
    """The way of each item through the trie."""

    after_IT: Tensor
    """The node that each token leads into; -1 behind an ID."""
    open_IT: Tensor
    """Whether the trie leaves a choice at this token or a later one."""


def _paths(trie: Trie) -> _Paths:
    node_I, nodes = torch.zeros(len(trie), dtype=torch.long, device=trie.device), []
    for label_I in trie.label_IT.unbind(1):
        node_I = trie.advance(node_I, label_I)
        nodes.append(node_I)
    after_IT = torch.stack(nodes, 1)
    before_IT = torch.nn.functional.pad(after_IT[:, :-1], (1, 0))
    choice_IT = (trie.num_children(before_IT.clamp(min=0)) > 1) & (after_IT >= 0)
    return _Paths(after_IT, choice_IT.flip(1).cumsum(1).flip(1) > 0)


def _distinct(node_BM: Tensor, open_BM: Tensor, parent_BM: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each user's different nodes of open candidates: (node_BK, parent_BK, place_BM); place K where not open."""
    node_BM = torch.where(open_BM, node_BM, padding)
    sorted_BM, order_BM = torch.where(open_BM, node_BM, torch.iinfo(node_BM.dtype).max).sort(1)
    rank_BM = torch.nn.functional.pad((sorted_BM[:, 1:] != sorted_BM[:, :-1]).long().cumsum(1), (1, 0))
    place_BM = torch.empty_like(rank_BM).scatter_(1, order_BM, rank_BM)
    num_nodes = int(place_BM[open_BM].max()) + 1
    place_BM = torch.where(open_BM, place_BM, num_nodes)
    shape = (len(node_BM), num_nodes + 1)
    node_BK = node_BM.new_full(shape, padding).scatter_(1, place_BM, node_BM)[:, :num_nodes]
    parent_BK = node_BM.new_zeros(shape).scatter_(1, place_BM, parent_BM)[:, :num_nodes]
    return node_BK, parent_BK, place_BM


def _root_log_probs(model: Any, hidden_BD: Tensor, trie: Trie) -> Tensor:
    """Log-probabilities of the root's children, (B, C) float64."""
    token_C = trie.token_N[trie.first_child_N1[0] : trie.first_child_N1[1]]
    parts = [
        torch.log_softmax(family_of(model).token_logits(model, part_BD, token_C).double(), 1)
        for part_BD in hidden_BD.split(max(1, MAX_LOGITS // len(token_C)))
    ]
    return torch.cat(parts)


def catalogue_rows(model: Any, trie: Trie) -> Tensor:
    """(I, D), what hidden states are multiplied with for the scores of all items: the rows of their own tokens."""
    model = unwrap(model)
    with evaluating(model):
        return output_rows(model.lm_head, trie.last_token_I)


def catalogue_scores(
    model: Any,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    trie: Trie,
    precision: Precision = "fp32",
    rows_ID: Tensor | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a batch and their scores of all items, as of `ScoredUsers`; at most `MAX_LOGITS` at a time.

    The logits of the items' own tokens behind the prompt; where IDs are one token, what `trie_log_probs` gives of every
    item, less its sum over the catalogue: places need no softmax. ``rows_ID``: `catalogue_rows`, for many batches.
    """
    assert trie.has_own_tokens
    model, trie = unwrap(model), trie.to(input_ids_BS.device)
    family, token_I = family_of(model), trie.last_token_I
    nobody_B1 = torch.zeros(len(input_ids_BS), 1, dtype=torch.long, device=trie.device)
    rows_at_once = max(1, MAX_LOGITS // len(token_I))
    with evaluating(model), autocast(trie.device, precision):
        state = family.start(model, input_ids_BS, attention_mask_BS)
        hidden_BKD, _ = family.step(model, state, nobody_B1 + family.start_token(model), nobody_B1, 0)
        parts = [
            (slice(start, start + rows_at_once), hidden_BKD[start : start + rows_at_once, 0])
            for start in range(0, len(hidden_BKD), rows_at_once)
        ]
    for rows, hidden_RD in parts:
        with evaluating(model), autocast(trie.device, precision):
            score_RI = family.token_logits(model, hidden_RD, token_I, rows_ID)
        yield rows, score_RI
