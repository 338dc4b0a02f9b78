"""Given items scored exactly, on the cache of the prompt; and how likely each ID is whatever somebody had before.

Shapes: B users, S input tokens, M candidates of a user, T tokens of an ID with its end token, N nodes of the trie, I
items, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from idgen.backbones.families import family_of, unwrap
from idgen.backbones.family import evaluating
from idgen.decode import MAX_LOGITS, log_prob_of
from idgen.trie import Trie

AT_ONCE = 128
"""Items whose priors are computed together."""


def score_candidates(
    model: Any,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    trie: Trie,
    candidate_BM: Tensor,
    length_penalty: float = 0.0,
) -> Tensor:
    """Exact scores of given items, (B, M), as `idgen.decode.score_catalogue` gives them; -inf for a candidate of -1.

    score = (sum of token log-probabilities, end token included) / (number of tokens) ** length_penalty.
    """
    log_prob_BMT = token_log_probs(model, input_ids_BS, attention_mask_BS, trie, candidate_BM)
    length_BM = trie.to(log_prob_BMT.device).length_I[candidate_BM.to(log_prob_BMT.device).clamp(min=0)]
    score_BM = log_prob_BMT.sum(2) / length_BM**length_penalty
    return score_BM.masked_fill(candidate_BM.to(score_BM.device) < 0, -torch.inf)


def token_log_probs(
    model: Any, input_ids_BS: Tensor, attention_mask_BS: Tensor, trie: Trie, candidate_BM: Tensor
) -> Tensor:
    """Log-probabilities (B, M, T) of the tokens of given items, 0 behind an ID; candidates of -1 count as item 0.

    Teacher-forced on the cache of the prompt, which is read once a user: all candidates of a user stand side by side as
    the beams of a search do. Memory of the cache grows with users x candidates x tokens: for some hundred candidates.
    """
    model, trie = unwrap(model), trie.to(input_ids_BS.device)
    num_candidates = candidate_BM.shape[1]
    label_BMT = trie.label_IT[candidate_BM.to(trie.device).clamp(min=0)]
    row_C = torch.arange(candidate_BM.numel(), device=trie.device)
    found = []
    with evaluating(model):
        for hidden_BMD, token_BM in _steps(model, input_ids_BS, attention_mask_BS, label_BMT):
            hidden_BMD = hidden_BMD.expand(-1, num_candidates, -1)
            log_prob_C = log_prob_of(model, hidden_BMD.flatten(0, 1), row_C, token_BM.clamp(min=0).flatten())
            found.append(log_prob_C.view_as(token_BM).masked_fill(token_BM < 0, 0.0))
    missing = trie.max_length - len(found)
    return torch.nn.functional.pad(torch.stack(found, 2), (0, missing))


def node_priors(model: Any, input_ids_1S: Tensor, attention_mask_1S: Tensor, trie: Trie) -> Tensor:
    """log p(token | its beginning, a prompt without a history) at every node of the trie, (N,); 0 at the root.

    A language model gives much probability to short and common titles, whoever asks. Given to the search times -w, it
    ranks by log p(ID | history) - w log p(ID | nothing): at w = 1 by how much the history speaks
    for an item. Cost: one pass over all tokens of the catalogue.
    """
    prior_N = torch.zeros(len(trie.token_N), device=input_ids_1S.device)
    trie = trie.to(input_ids_1S.device)
    for item_M in torch.arange(len(trie), device=trie.device).split(AT_ONCE):
        log_prob_MT = token_log_probs(model, input_ids_1S, attention_mask_1S, trie, item_M[None])[0]
        node_M = torch.zeros_like(item_M)
        for number in range(trie.max_length):
            token_M = trie.label_IT[item_M, number]
            inside_M = token_M >= 0
            node_M = torch.where(inside_M, trie.advance(node_M, token_M.clamp(min=0)), node_M)
            prior_N[node_M[inside_M]] = log_prob_MT[inside_M, number]
    return prior_N


def trie_log_probs(
    model: Any,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    trie: Trie,
    candidate_BM: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probabilities of given items among all items of the catalogue, (B, M) float64; -inf for a candidate of -1.

    log p(ID) = sum of log softmax(logits / temperature) over the tokens that may follow in the trie: a distribution
    over the catalogue, whose sum over all items is 1. `score_candidates` keeps what the
    model gives to tokens outside the trie. Cost: as `token_log_probs`; where IDs are one token long, one step for
    any number of candidates.
    """
    model, trie = unwrap(model), trie.to(input_ids_BS.device)
    label_BMT = trie.label_IT[candidate_BM.to(trie.device).clamp(min=0)]
    node_BM = torch.zeros_like(label_BMT[..., 0])
    score_BM = torch.zeros(node_BM.shape, dtype=torch.float64, device=trie.device)
    with evaluating(model):
        for hidden_BMD, token_BM in _steps(model, input_ids_BS, attention_mask_BS, label_BMT):
            inside_BM = token_BM >= 0
            next_BM = torch.where(inside_BM, trie.advance(node_BM, token_BM.clamp(min=0)), -1)
            score_BM += _child_log_probs(model, hidden_BMD, node_BM, next_BM, trie, temperature)
            node_BM = torch.where(inside_BM, next_BM, node_BM)
    return score_BM.masked_fill(candidate_BM.to(trie.device) < 0, -torch.inf)


def _steps(
    model: Any, input_ids_BS: Tensor, attention_mask_BS: Tensor, label_BMT: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """What predicts each token of the candidates, (B, 1, D) for the first and (B, M, D) later, with it, (B, M)."""
    family, device = family_of(model), label_BMT.device
    num_users, num_candidates, _ = label_BMT.shape
    itself_BM = torch.arange(num_candidates, device=device).expand(num_users, -1)
    nobody_B1 = torch.zeros(num_users, 1, dtype=torch.long, device=device)
    state = family.start(model, input_ids_BS, attention_mask_BS)
    hidden_BMD, state = family.step(model, state, nobody_B1 + family.start_token(model), nobody_B1, 0)
    for number in range(int((label_BMT >= 0).sum(2).max())):
        if number:
            given_BM = label_BMT[..., number - 1].clamp(min=0)  # behind its end an ID does not count any more
            parent_BM = itself_BM if number > 1 else torch.zeros_like(itself_BM)
            hidden_BMD, state = family.step(model, state, given_BM, parent_BM, number)
        yield hidden_BMD, label_BMT[..., number]


def _child_log_probs(
    model: Any, hidden_BKD: Tensor, node_BM: Tensor, next_BM: Tensor, trie: Trie, temperature: float
) -> Tensor:
    """log p(next node | its parent) among the parent's children, (B, M) float64; 0 where the next node is -1.

    ``hidden_BKD``: one state a candidate, or (K = 1) one state a user, whose candidates all stand at the same node.
    """
    num_users, num_states = hidden_BKD.shape[:2]
    hidden_RD, node_R = hidden_BKD.flatten(0, 1), node_BM[:, :num_states].flatten()
    row_M = torch.arange(len(node_R), device=trie.device).view(num_users, num_states).expand_as(node_BM).flatten()
    next_M = next_BM.flatten()
    found_M = torch.zeros(len(next_M), dtype=torch.float64, device=trie.device)
    rows_at_once = max(1, MAX_LOGITS // model.config.vocab_size)
    for start in range(0, len(node_R), rows_at_once):
        part_R = node_R[start : start + rows_at_once]
        child = trie.children(part_R)
        logit_RV = family_of(model).token_logits(model, hidden_RD[start : start + rows_at_once])
        logit_C = logit_RV[child.row_C, child.token_C].double() / temperature
        count_R = trie.num_children(part_R)
        asked_M = ((row_M >= start) & (row_M < start + len(part_R)) & (next_M >= 0)).nonzero().squeeze(1)
        row_A = row_M[asked_M] - start
        before_R = torch.cumsum(count_R, 0) - count_R
        place_A = before_R[row_A] + next_M[asked_M] - trie.first_child_N1[part_R[row_A]]
        largest_R = logit_C.new_full((len(part_R),), -torch.inf).scatter_reduce(0, child.row_C, logit_C, "amax")
        total_R = torch.zeros_like(largest_R).index_add(0, child.row_C, (logit_C - largest_R[child.row_C]).exp())
        found_M[asked_M] = logit_C[place_A] - largest_R[row_A] - total_R[row_A].log()
    return found_M.view_as(node_BM)
