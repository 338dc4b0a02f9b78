"""Positions of held-out items -> metrics per user -> means.

A method hands over one thing only: the 0-based place of each user's held-out item, or of each item of the held-out
basket. Everything else is computed here.

Shape legend: B users of a batch, U users, T items of the largest held-out basket, P held-out items of all users,
I columns of a score matrix (items or sampled candidates), G groups, S scores that are stored, N seen items of all
users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

NOT_RANKED = 2**31 - 1
"""Position of a held-out item that was not returned, or that was no candidate."""
NO_ITEM = -1
"""In the place of an item behind the last one of a basket; its position is NaN."""
PAIRS_AT_ONCE = 256
"""Held-out items whose users' scores are compared together."""

CUTOFFS = (5, 10, 20)
MACRO = "macro"
"""Where a domain's name stands elsewhere: the unweighted mean over domains."""

Ties = Literal["expected", "best", "worst"]


def user_metrics(position_U: Tensor, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, Tensor]:
    """hit@k, ndcg@k and mrr@k of each user: float64 (U,), keys ``"hit@5"`` and so on; of baskets recall@k too.

    With one held-out item per user, positions (U,): hit@k = [position < k], ndcg@k = hit@k / log2(position + 2),
    mrr@k = hit@k / (position + 1). Of baskets, positions (U, T) with NaN behind the last item of a user with n items:
    recall@k = found / n, with ``found`` the items at positions below k; hit@k = [found > 0]; ndcg@k = sum of
    1 / log2(position + 2) over the found ones, over the same sum of the best min(n, k) places; mrr@k = 1 / (place of
    the first found one + 1). So Hu et al. (TIFU-KNN, SIGIR 2020) and Li et al. (A Next Basket Recommendation Reality
    Check, TOIS 2023). Positions may be half places (see :func:`positions_from_scores`).
    Raises ``ValueError`` for NaN or negative positions, and a basket without items. Differs from the papers: nothing.
    """
    place_U = torch.as_tensor(position_U).to(torch.float64)
    if place_U.ndim == 2:
        return _basket_metrics(place_U, cutoffs)
    if bool((~(place_U >= 0)).any()):  # written so that NaN is caught too
        raise ValueError(
            f"got positions {place_U[~(place_U >= 0)][:5].tolist()}, expected numbers from 0 up; use NOT_RANKED"
        )
    gain_U = 1.0 / torch.log2(place_U + 2.0)
    reciprocal_U = 1.0 / (place_U + 1.0)
    metrics: dict[str, Tensor] = {}
    for k in cutoffs:
        hit_U = (place_U < k).to(torch.float64)
        metrics[f"hit@{k}"] = hit_U
        metrics[f"ndcg@{k}"] = hit_U * gain_U
        metrics[f"mrr@{k}"] = hit_U * reciprocal_U
    return metrics


def _basket_metrics(place_UT: Tensor, cutoffs: Sequence[int]) -> dict[str, Tensor]:
    is_item_UT = ~place_UT.isnan()
    size_U = is_item_UT.sum(1)
    if bool((place_UT < 0).any()) or bool((size_U == 0).any()):
        raise ValueError(
            f"got {int((size_U == 0).sum())} baskets without items and {int((place_UT < 0).sum())} positions below 0, "
            "expected an item at least and numbers from 0 up; use NOT_RANKED"
        )
    gain_UT, reciprocal_UT = 1.0 / torch.log2(place_UT + 2.0), 1.0 / (place_UT + 1.0)
    best_K = (1.0 / torch.log2(torch.arange(max(cutoffs, default=0), dtype=torch.float64) + 2.0)).cumsum(0)
    metrics: dict[str, Tensor] = {}
    for k in cutoffs:
        is_found_UT = place_UT < k  # NaN is not
        metrics[f"hit@{k}"] = is_found_UT.any(1).to(torch.float64)
        metrics[f"ndcg@{k}"] = torch.where(is_found_UT, gain_UT, 0.0).sum(1) / best_K[size_U.clamp(max=k) - 1]
        metrics[f"mrr@{k}"] = torch.where(is_found_UT, reciprocal_UT, 0.0).amax(1)
        metrics[f"recall@{k}"] = is_found_UT.sum(1) / size_U.to(torch.float64)
    return metrics


def part_of(position_UT: Tensor, is_kept_UT: Tensor) -> Tensor:
    """Positions of a part of the held-out items, such as repeats, for the users who have some: (U', T)."""
    kept_UT = torch.where(is_kept_UT, position_UT, math.nan)
    return kept_UT[~kept_UT.isnan().all(1)]


def not_ranked(target_U: Tensor) -> Tensor:
    """`NOT_RANKED` for every held-out item, float64: (U,), or (U, T) with NaN where there is none."""
    found_U = torch.full(target_U.shape, float(NOT_RANKED), dtype=torch.float64)
    return found_U if target_U.ndim == 1 else found_U.masked_fill_(target_U.cpu() == NO_ITEM, math.nan)


def mean_metrics(position_U: Tensor, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, float]:
    """Mean over users of :func:`user_metrics`; users without a ranked item count as zero.

    Sums exactly (``math.fsum``), so neither the order of users nor sharding changes the last bit.
    Raises ``ValueError`` when there is no user.
    """
    if torch.as_tensor(position_U).dim() not in (1, 2):
        shape = tuple(torch.as_tensor(position_U).shape)
        raise ValueError(f"got positions of the shape {shape}, expected one for each user, (U,), or baskets, (U, T)")
    if torch.as_tensor(position_U).numel() == 0:
        raise ValueError("got no user, expected at least one position: check that the domain has clients")
    return {
        name: math.fsum(value_U.tolist()) / len(value_U) for name, value_U in user_metrics(position_U, cutoffs).items()
    }


def metrics_per_client(positions: Sequence[Tensor]) -> list[dict[str, float]]:
    """:func:`mean_metrics` of each client that has users of its own (a domain)."""
    return [mean_metrics(position_U) for position_U in positions]


def metrics_over_clients(positions: Sequence[Tensor]) -> list[dict[str, float]]:
    """One :func:`mean_metrics` over the users of all clients, where every client is one user."""
    return [mean_metrics(torch.cat(list(positions)))]


def ranked_share(position_U: Tensor) -> float:
    """Share of held-out items that came back at all (what a beam search leaves out is missing here)."""
    place_P = torch.as_tensor(position_U).to(torch.float64)
    return float((place_P[~place_P.isnan()] < NOT_RANKED).double().mean())


def macro_mean(domain_metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Unweighted mean over domains, metric by metric: each domain counts once however many users it has.

    Raises ``ValueError`` when two domains have other metrics.
    """
    names = list(next(iter(domain_metrics.values()), {}))
    odd = [domain for domain, found in domain_metrics.items() if set(found) != set(names)]
    if odd:
        raise ValueError(
            f"got the metrics {', '.join(domain_metrics[odd[0]])} of {odd[0]} and {', '.join(names)} of "
            f"{next(iter(domain_metrics))}, expected the same"
        )
    return {name: math.fsum(m[name] for m in domain_metrics.values()) / len(domain_metrics) for name in names}


def positions_from_scores(
    score_BI: Tensor, target_B: Tensor, candidate_BI: Tensor | None = None, ties: Ties = "expected"
) -> Tensor:
    """0-based place of column ``target_B`` when the candidates of each row are sorted by descending score.

    ``score_BI`` any float dtype, ``target_B`` int64 column numbers, ``candidate_BI`` bool (None: every column). Of
    baskets, ``target_B`` (B, T) with `NO_ITEM` behind a row's last one gives places (B, T) in the whole list, NaN
    behind the last one: an item of a basket stands behind a better one of the same basket. Returns float64 (B,): with
    ``ties="expected"`` the mean place over all orders of tied candidates, hence half places.
    ``"best"`` and ``"worst"`` are bounds for what public code does with ties: the order there follows from how the
    candidate list was put together. A target that is no candidate gets ``NOT_RANKED``.
    Raises ``ValueError`` for NaN among the candidates (a NaN must never turn into a good place), wrong shapes, and
    targets out of range.
    """
    target_B = torch.as_tensor(target_B)
    if target_B.ndim == 2 and score_BI.ndim == 2 and len(target_B) == len(score_BI):
        target_B = target_B.to(score_BI.device)
        return _of_baskets(
            target_B,
            lambda row_P, item_P: positions_from_scores(
                score_BI[row_P], item_P, None if candidate_BI is None else candidate_BI[row_P], ties
            ),
        )
    if score_BI.ndim != 2 or target_B.shape != score_BI.shape[:1]:
        raise ValueError(
            f"got scores {tuple(score_BI.shape)} and targets {tuple(target_B.shape)}, expected (B, I) and (B,)"
        )
    if len(target_B) and not (int(target_B.min()) >= 0 and int(target_B.max()) < score_BI.shape[1]):
        raise ValueError(
            f"got targets up to {int(target_B.max())} and down to {int(target_B.min())}, expected columns "
            f"0 to {score_BI.shape[1] - 1}: check that items are numbered as the score columns are"
        )
    if candidate_BI is None:
        candidate_BI = torch.ones_like(score_BI, dtype=torch.bool)
    if candidate_BI.shape != score_BI.shape or candidate_BI.dtype != torch.bool:
        raise ValueError(
            f"got candidates {candidate_BI.dtype} {tuple(candidate_BI.shape)}, expected bool {tuple(score_BI.shape)}"
        )
    bad_B = (torch.isnan(score_BI) & candidate_BI).any(1)
    if bool(bad_B.any()):
        raise ValueError(
            f"got NaN scores for {int(bad_B.sum())} of {len(bad_B)} users (first: row {int(bad_B.int().argmax())}), "
            "expected numbers: the model has diverged, lower its learning rate"
        )
    own_B1 = score_BI.gather(1, target_B[:, None])
    above_B = ((score_BI > own_B1) & candidate_BI).sum(1).to(torch.float64)
    tied_B = ((score_BI == own_B1) & candidate_BI).sum(1).to(torch.float64) - 1.0
    share = {"expected": 0.5, "best": 0.0, "worst": 1.0}[ties]
    is_candidate_B = candidate_BI.gather(1, target_B[:, None])[:, 0]
    return torch.where(is_candidate_B, above_B + share * tied_B, float(NOT_RANKED))


def catalogue_positions(score_BI: Tensor, target_B: Tensor, seen: Sequence[Sequence[int]] | None) -> Tensor:
    """`positions_from_scores` of all items but those of each user's ``seen``, float64 (B,) on the CPU.

    No sorting and no mask of candidates: what is larger and what is equal is counted, and seen items are taken off.

    Raises:
        ValueError: a score is not a number.
    """
    seen = [()] * len(target_B) if seen is None else seen
    if target_B.ndim == 2:
        return _of_baskets(
            target_B,
            lambda row_P, item_P: catalogue_positions(score_BI[row_P], item_P, [seen[row] for row in row_P.tolist()]),
        )
    row_N = torch.repeat_interleave(torch.tensor([len(set(items)) for items in seen], dtype=torch.long))
    item_N = torch.tensor([item for items in seen for item in set(items)], dtype=torch.long)
    place_N = (row_N * score_BI.shape[1] + item_N).to(score_BI.device)
    row_N, target_there_B = row_N.to(score_BI.device), target_B.to(score_BI.device)
    own_B1 = score_BI.gather(1, target_there_B[:, None])
    if bool(score_BI.sum(1).isnan().any()):
        candidate_BI = torch.ones_like(score_BI, dtype=torch.bool)
        candidate_BI.view(-1)[place_N] = False
        return positions_from_scores(score_BI, target_there_B, candidate_BI).cpu()  # says so, if it is a candidate
    seen_N = score_BI.view(-1)[place_N]
    own_N = own_B1[row_N, 0]
    above_B = torch.count_nonzero(score_BI > own_B1, 1).index_add(0, row_N, (seen_N > own_N).long(), alpha=-1)
    equal_B = torch.count_nonzero(score_BI == own_B1, 1).index_add(0, row_N, (seen_N == own_N).long(), alpha=-1)
    position_B = (above_B.double() + 0.5 * (equal_B.double() - 1.0)).cpu()
    is_seen_B = torch.tensor(
        [target in items for target, items in zip(target_B.tolist(), seen, strict=True)], dtype=torch.bool
    )
    return position_B.masked_fill_(is_seen_B, float(NOT_RANKED))


def _of_baskets(target_BT: Tensor, positions: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(B, T) places: those that ``positions`` gives for rows and items (P,), some hundred at a time."""
    found_BT = not_ranked(target_BT)
    for pair_P2 in (target_BT != NO_ITEM).nonzero().split(PAIRS_AT_ONCE):
        row_P, place_P = pair_P2.T
        found_BT[row_P.cpu(), place_P.cpu()] = positions(row_P, target_BT[row_P, place_P]).cpu()
    return found_BT


class SparseScores(NamedTuple):
    """Scores of a whole catalogue of which most are alike for all users."""

    value_BI: scipy.sparse.csr_array
    """Float64; each item once a user. What is stored, also a 0, is the score."""
    other_I: np.ndarray
    """Float64: the score of an item that is not stored."""

    def dense(self) -> Tensor:
        """Float64 (B, I)."""
        num_rows = self.value_BI.shape[0]
        score_BI = np.tile(self.other_I, (num_rows, 1))
        row_S = np.repeat(np.arange(num_rows), np.diff(self.value_BI.indptr))
        score_BI[row_S, self.value_BI.indices] = self.value_BI.data
        return torch.from_numpy(score_BI)


def sparse_positions(score: SparseScores, target_B: np.ndarray, row_N: np.ndarray, item_N: np.ndarray) -> Tensor:
    """What :func:`positions_from_scores` gives of ``score.dense()``, without the (B, I) scores.

    ``row_N``, ``item_N``: items that are no candidates of their row; a pair may come twice. Above a target are the
    stored items with a larger score, and of the others as many as in the sorted ``other_I`` less those that are stored
    or no candidates. ``target_B`` may be baskets, (B, T) with `NO_ITEM` behind the last item of a row.
    """
    value_BI, other_I = score
    if target_B.ndim == 2:
        seen_BI = scipy.sparse.csr_array((np.ones(len(row_N)), (row_N, item_N)), value_BI.shape)
        return _sparse_baskets(score, target_B, seen_BI)
    num_rows, num_items = value_BI.shape
    row_S = np.repeat(np.arange(num_rows), np.diff(value_BI.indptr))
    item_S, value_S = value_BI.indices, value_BI.data
    seen_BI = np.zeros((num_rows, num_items), bool)
    seen_BI[row_N, item_N] = True
    row_N, item_N = np.divmod(np.unique(row_N * num_items + item_N), num_items)
    open_S = ~seen_BI[row_S, item_S]
    if np.isnan(value_S[open_S]).any() or np.isnan(other_I).any():
        raise ValueError("got NaN scores, expected numbers: the vectors or counts behind them are none")
    row_S, item_S, value_S = row_S[open_S], item_S[open_S], value_S[open_S]
    own_B = other_I[target_B].astype(np.float64)
    hit_S = item_S == target_B[row_S]
    own_B[row_S[hit_S]] = value_S[hit_S]
    own_S, other_S, own_N, other_N = own_B[row_S], other_I[item_S], own_B[row_N], other_I[item_N]

    def counted(compare: np.ufunc, found_B: np.ndarray) -> np.ndarray:
        """Candidates whose score compares so with the target's; ``found_B``: of all items were none stored."""
        found_B = found_B - np.bincount(row_N[compare(other_N, own_N)], minlength=num_rows)
        found_B = found_B - np.bincount(row_S[compare(other_S, own_S)], minlength=num_rows)
        return found_B + np.bincount(row_S[compare(value_S, own_S)], minlength=num_rows)

    sorted_I = np.sort(other_I)
    first_B, last_B = (np.searchsorted(sorted_I, own_B, side) for side in ("left", "right"))
    above_B = counted(np.greater, num_items - last_B)
    tied_B = counted(np.equal, last_B - first_B) - 1.0
    position_B = np.where(seen_BI[np.arange(num_rows), target_B], float(NOT_RANKED), above_B + 0.5 * tied_B)
    return torch.from_numpy(position_B)


def _sparse_baskets(score: SparseScores, target_BT: np.ndarray, seen_BI: scipy.sparse.csr_array) -> Tensor:
    """Of baskets, row by row: comparing the few items of a basket with all costs less than sorting all."""
    value_BI, other_I = score
    found_BT = not_ranked(torch.from_numpy(target_BT)).numpy()
    for row, target_T in enumerate(target_BT):
        target_T = target_T[target_T != NO_ITEM]
        (item_S, value_S), (seen_N, _) = (
            (rows.indices[part], rows.data[part])
            for rows in (value_BI, seen_BI)
            for part in [slice(rows.indptr[row], rows.indptr[row + 1])]
        )
        score_I = other_I.astype(np.float64)
        score_I[item_S] = value_S
        score_I[seen_N] = -np.inf
        if np.isnan(score_I).any():
            raise ValueError("got NaN scores, expected numbers: the vectors or counts behind them are none")
        for place, own in enumerate(score_I[target_T]):
            above, tied = np.count_nonzero(score_I > own), np.count_nonzero(score_I == own) - 1
            found_BT[row, place] = float(NOT_RANKED) if own == -np.inf else above + 0.5 * tied
    return torch.from_numpy(found_BT)


def activity_buckets(num_train_U: Sequence[int] | Tensor, users: Sequence[str], num_buckets: int = 5) -> Tensor:
    """Bucket number of each user, 0 = least active: equal groups by train count, ties by user key. int64 (U,).

    Sizes differ by at most one. Raises ``ValueError`` when there are fewer users than buckets.
    """
    counts = torch.as_tensor(num_train_U).tolist()
    if len(counts) != len(users) or len(users) < num_buckets:
        raise ValueError(
            f"got {len(counts)} counts and {len(users)} users, expected equal numbers, at least {num_buckets}"
        )
    bucket_U = torch.empty(len(users), dtype=torch.int64)
    order = sorted(range(len(users)), key=lambda user: (counts[user], users[user]))
    bucket_U[torch.tensor(order)] = torch.arange(len(users)) * num_buckets // len(users)
    return bucket_U
