"""Constrained decoding: batched beam search over a `Trie`.

How a model reads a prompt and one token of every beam is its family's (`idgen.backbones.family`). IDs of one token
without an end token need no beams: one softmax over the catalogue is the ranking.

Shapes: B users, S input tokens, K beams, D model width, V vocabulary, M candidates of a user, R live beams of all
users, C candidates of all users, I items, T tokens of an ID with its end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.evaluation.metrics import NO_ITEM, NOT_RANKED, not_ranked
from idgen.backbones.families import family_of, unwrap
from idgen.backbones.family import evaluating, output_rows
from idgen.trie import Trie, log_softmax_of_rows

MAX_LOGITS = 2**26  # logits computed at a time: 256 MiB in fp32
CACHED_LOGITS = 2**20
"""The same on a CPU: 4 MiB, which the sums over the vocabulary then read from its cache. Measured: 0.6 of the time."""


class _Beams(NamedTuple):
    """Running beams, best first; dead ones have the score -inf and stand last."""

    node_BK: Tensor
    score_BK: Tensor  # sum of token log-probabilities
    parent_BK: Tensor  # place in the beams of the step before


def constrained_beam_search(
    model: Any,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    trie: Trie,
    num_beams: int,
) -> tuple[Tensor, Tensor]:
    """The best ``num_beams`` items of the catalogue for each user by beam search: (item_BK, score_BK), best first.

    score = sum of token log-probabilities, end token included, each among the tokens that may follow in the trie: a
    distribution over the catalogue. With fewer items than beams the list ends with item -1, score -inf. With at
    least as many beams as items the ranking is exact. Equal scores: the lower item first.
    A finished ID enters the
    list when it is among the ``num_beams`` best candidates of its step, as in the ``generate`` of transformers; a
    user's search stops when no running beam can enter the list any more.
    Differs from IDGenRec (SIGIR 2024): likelihood in place of its mean per token, no probability for what is no
    item, batched, and that stopping rule is exact where the default of ``generate`` guesses.
    """
    if num_beams < 1:
        raise ValueError(f"num_beams is {num_beams}; expected at least 1, and at least the largest k of hit@k")
    if trie.max_length == 1:
        return top_items(model, input_ids_BS, attention_mask_BS, trie, num_beams)
    model, trie = unwrap(model), trie.to(input_ids_BS.device)
    with evaluating(model):
        return _search(model, input_ids_BS, attention_mask_BS, trie, num_beams)


def top_items(
    model: Any, input_ids_BS: Tensor, attention_mask_BS: Tensor, trie: Trie, num_beams: int
) -> tuple[Tensor, Tensor]:
    """The items that the model ranks best, as of `constrained_beam_search`: where items have tokens of their own by the
    softmax over these, which is exact; else by what it writes."""
    if not trie.has_own_tokens:
        return constrained_beam_search(model, input_ids_BS, attention_mask_BS, trie, num_beams)
    model, trie = unwrap(model), trie.to(input_ids_BS.device)
    family, start_B1 = family_of(model), input_ids_BS.new_zeros(len(input_ids_BS), 1)
    with evaluating(model):
        state = family.start(model, input_ids_BS, attention_mask_BS)
        hidden_B1D, _ = family.step(model, state, start_B1 + family.start_token(model), start_B1, 0)
        return _best_of_catalogue(model, hidden_B1D[:, 0], trie, num_beams)


def _search(
    model: Any,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    trie: Trie,
    num_beams: int,
) -> tuple[Tensor, Tensor]:
    num_users, device, family = len(input_ids_BS), input_ids_BS.device, family_of(model)
    state = family.start(model, input_ids_BS, attention_mask_BS)
    start_B1 = torch.zeros(num_users, 1, dtype=torch.long, device=device)
    beams = _Beams(start_B1, torch.zeros(num_users, 1, device=device), start_B1)
    token_BK = start_B1 + family.start_token(model)
    item_BK = torch.full((num_users, num_beams), -1, device=device)
    score_BK = torch.full((num_users, num_beams), -torch.inf, device=device)
    for step in range(trie.max_length):
        hidden_BKD, state = family.step(model, state, token_BK, beams.parent_BK, step)
        found = _best_candidates(model, hidden_BKD, beams, trie, 2 * num_beams)
        leaf_BM = trie.item_N[found.node_BK] >= 0
        ended_BM = leaf_BM & (found.score_BK > -torch.inf)
        ended_BM[:, num_beams:] = False
        new_item_BM = torch.where(ended_BM, trie.item_N[found.node_BK], -1)
        new_score_BM = found.score_BK.masked_fill(~ended_BM, -torch.inf)
        item_BK, score_BK = _merge(
            torch.cat([item_BK, new_item_BM], 1), torch.cat([score_BK, new_score_BM], 1), num_beams
        )
        beams = _running(found, leaf_BM, num_beams)
        beams = _in_reach(beams, score_BK[:, -1:])
        num_live = int((beams.score_BK > -torch.inf).sum(1).max())
        if num_live == 0:
            break
        beams = _Beams(*(value[:, :num_live] for value in beams))
        token_BK = trie.token_N[beams.node_BK].clamp(min=0)
    return item_BK, score_BK


def _best_of_catalogue(model: Any, hidden_BD: Tensor, trie: Trie, num_beams: int) -> tuple[Tensor, Tensor]:
    """The best by the items' own tokens: (item_BK, score_BK), best first, from one softmax a user."""
    num_users, device = len(hidden_BD), hidden_BD.device
    token_I = trie.last_token_I
    rows_ID = output_rows(model.lm_head, token_I)
    item_BK = torch.full((num_users, num_beams), -1, device=device)
    score_BK = torch.full((num_users, num_beams), -torch.inf, device=device)
    at_once = min(MAX_LOGITS, CACHED_LOGITS) if device.type == "cpu" else MAX_LOGITS
    for user_B in torch.arange(num_users, device=device).split(max(1, at_once // len(trie))):
        logit_BI = family_of(model).token_logits(model, hidden_BD[user_B], token_I, rows_ID)
        score_BI = torch.log_softmax(logit_BI, 1)
        _refuse_nan(score_BI)
        top_BK, place_BK = stable_topk(score_BI, num_beams)
        score_BK[user_B, : top_BK.shape[1]], item_BK[user_B, : top_BK.shape[1]] = top_BK, place_BK
    return item_BK, score_BK


def _refuse_nan(score: Tensor) -> None:
    if bool(score.isnan().any()):
        raise ValueError("the model's scores are not numbers; expected a model that has not diverged. Train it again")


def _best_candidates(model: Any, hidden_BKD: Tensor, beams: _Beams, trie: Trie, count: int) -> _Beams:
    """The up to ``count`` best continuations of each user, best first (ties: earlier beam, then lower token).

    Only the children of live beams are looked at. Missing candidates have the score -inf.
    """
    num_users, num_beams = beams.score_BK.shape
    live_R = (beams.score_BK > -torch.inf).flatten().nonzero().squeeze(1)
    child = trie.children(beams.node_BK.flatten()[live_R])
    score_C = child_log_probs(model, hidden_BKD.flatten(0, 1)[live_R], beams.node_BK.flatten()[live_R], trie)
    score_C = score_C + beams.score_BK.flatten()[live_R][child.row_C]
    _refuse_nan(score_C)
    # Ragged to padded: place of each candidate among those of its user.
    beam_C = live_R[child.row_C]
    user_C = beam_C // num_beams
    count_B = torch.bincount(user_C, minlength=num_users)
    place_C = torch.arange(len(user_C), device=user_C.device) - (torch.cumsum(count_B, 0) - count_B)[user_C]
    shape = (num_users, max(int(count_B.max()), 1))
    score_BM = hidden_BKD.new_full(shape, -torch.inf, dtype=torch.float32)
    score_BM[user_C, place_C] = score_C
    index_BM = beam_C.new_zeros(shape)
    index_BM[user_C, place_C] = torch.arange(len(user_C), device=user_C.device)
    score_BK, order_BK = stable_topk(score_BM, count)
    index_BK = index_BM.gather(1, order_BK)
    return _Beams(child.node_C[index_BK], score_BK, (beam_C % num_beams)[index_BK])


def child_log_probs(model: Any, hidden_RD: Tensor, node_R: Tensor, trie: Trie) -> Tensor:
    """log p(child | node) for the children of all nodes, (C,) in the order of `Trie.children`.

    The softmax over the tokens that may follow in the trie; a limited number of logits exists at a time.
    """
    if not len(node_R):
        return hidden_RD.new_zeros(0, dtype=torch.float32)
    family, parts = family_of(model), []
    token_U = trie.children(node_R.unique()).token_C.unique()
    rows_UD = output_rows(model.lm_head, token_U)
    at_once = min(MAX_LOGITS, CACHED_LOGITS) if hidden_RD.device.type == "cpu" else MAX_LOGITS
    rows_at_once = max(1, at_once // max(1, len(token_U)))
    for part_R, part_RD in zip(node_R.split(rows_at_once), hidden_RD.split(rows_at_once), strict=True):
        child = trie.children(part_R)
        logit_RU = family.token_logits(model, part_RD, token_U, rows_UD)
        logit_C = logit_RU[child.row_C, torch.searchsorted(token_U, child.token_C)]
        parts.append(log_softmax_of_rows(logit_C, child.row_C, len(part_R)))
    return torch.cat(parts)


def _running(found: _Beams, leaf_BM: Tensor, num_beams: int) -> _Beams:
    """The best unfinished candidates, in their order; finished ones become dead beams at the end."""
    score_BM = found.score_BK.masked_fill(leaf_BM, -torch.inf)
    order_BM = torch.sort((score_BM == -torch.inf).long(), dim=1, stable=True).indices[:, :num_beams]
    return _Beams(*(value.gather(1, order_BM) for value in found._replace(score_BK=score_BM)))


def _in_reach(beams: _Beams, worst_B1: Tensor) -> _Beams:
    """The beams without those whose items cannot enter a list that ends with ``worst_B1``: scores only fall.

    Equal scores may enter by their item number, so a beam of just that score runs on beside better ones.
    """
    late_BK = (beams.score_BK < worst_B1) | (beams.score_BK <= worst_B1).all(1, keepdim=True)
    return beams._replace(score_BK=beams.score_BK.masked_fill(late_BK, -torch.inf))


def _merge(item_BM: Tensor, score_BM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best finished items, best first, equal scores by item number."""
    by_item_BM = torch.sort(item_BM, dim=1, stable=True).indices
    score_BM, order_BM = torch.sort(score_BM.gather(1, by_item_BM), dim=1, descending=True, stable=True)
    return item_BM.gather(1, by_item_BM).gather(1, order_BM)[:, :count], score_BM[:, :count]


def stable_topk(score_BM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Like ``torch.topk`` with at most M entries, but equal scores keep their order."""
    count = min(count, score_BM.shape[1])
    top_BK, place_BK = torch.topk(score_BM, count, dim=1)
    tied_T = ((score_BM >= top_BK[:, -1:]).sum(1) > count).nonzero()[:, 0]
    if len(tied_T):  # a tie at the border: topk may have picked any
        place_BK[tied_T] = torch.sort(score_BM[tied_T], dim=1, descending=True, stable=True).indices[:, :count]
    place_BK = place_BK.sort(1).values
    top_BK, order_BK = torch.sort(score_BM.gather(1, place_BK), dim=1, descending=True, stable=True)
    return top_BK, place_BK.gather(1, order_BK)


def item_positions(item_BK: Tensor, target_B: Tensor, seen: Sequence[Sequence[int]] | None = None) -> Tensor:
    """0-based place of each user's target in the list, `NOT_RANKED` when it is not there, (B,) int64 on the CPU; of
    baskets, targets (B, T) with `NO_ITEM` behind the last one, float64 (B, T) with NaN there.

    Places are counted after dropping empty entries (-1) and, with ``seen``, the items of the user's history. A target
    that the user had before is dropped like them: no candidate, hence `NOT_RANKED`, as for every baseline.
    """
    if len(item_BK) != len(target_B) or (seen is not None and len(seen) != len(target_B)):
        raise ValueError(
            f"got lists for {len(item_BK)} users, {len(target_B)} targets and "
            f"{'no' if seen is None else len(seen)} histories; expected one of each per user"
        )
    if target_B.ndim == 2:
        position_BT = not_ranked(target_B)
        for place in range(target_B.shape[1]):
            row_N = (target_B[:, place] != NO_ITEM).nonzero()[:, 0]
            chosen = None if seen is None else [seen[row] for row in row_N.tolist()]
            position_BT[row_N, place] = item_positions(item_BK[row_N], target_B[row_N, place], chosen).double()
        return position_BT
    position_B = torch.full((len(target_B),), NOT_RANKED, dtype=torch.long)
    for user, (items, target) in enumerate(zip(item_BK.tolist(), target_B.tolist(), strict=True)):
        dropped = {-1, *(seen[user] if seen is not None else ())}
        if target not in items or target in dropped:
            continue
        before = items[: items.index(target)]
        position_B[user] = len(before) - sum(map(dropped.__contains__, before))
    return position_B
