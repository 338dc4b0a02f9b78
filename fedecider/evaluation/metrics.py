"""Positions of held-out items -> metrics per user -> means.

A method hands over one thing only: the 0-based place of each user's held-out item. Everything else is computed here.

Shape legend: B users of a batch, U users, I columns of a score matrix (items or sampled candidates), G groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

NOT_RANKED = 2**31 - 1
"""Position of a held-out item that was not returned, or that was no candidate."""

CUTOFFS = (5, 10, 20)
MACRO = "macro"
"""Where a domain's name stands elsewhere: the unweighted mean over domains."""

Ties = Literal["expected", "best", "worst"]


def user_metrics(position_U: Tensor, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, Tensor]:
    """hit@k, ndcg@k and mrr@k of each user: float64 (U,), keys ``"hit@5"`` and so on.

    With one held-out item per user: hit@k = [position < k], ndcg@k = hit@k / log2(position + 2),
    mrr@k = hit@k / (position + 1). Positions may be half places (see :func:`positions_from_scores`).
    Raises ``ValueError`` for NaN or negative positions. Differs from the papers: nothing.
    """
    place_U = torch.as_tensor(position_U).to(torch.float64)
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


def mean_metrics(position_U: Tensor, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, float]:
    """Mean over users of :func:`user_metrics`; users without a ranked item count as zero.

    Sums exactly (``math.fsum``), so neither the order of users nor sharding changes the last bit.
    Raises ``ValueError`` when there is no user.
    """
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
    """Share of users whose held-out item came back at all (what a beam search leaves out is missing here)."""
    return float((torch.as_tensor(position_U) < NOT_RANKED).double().mean())


def macro_mean(domain_metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Unweighted mean over domains, metric by metric: each domain counts once however many users it has."""
    names = list(next(iter(domain_metrics.values()), {}))
    return {name: math.fsum(m[name] for m in domain_metrics.values()) / len(domain_metrics) for name in names}


def positions_from_scores(
    score_BI: Tensor, target_B: Tensor, candidate_BI: Tensor | None = None, ties: Ties = "expected"
) -> Tensor:
    """0-based place of column ``target_B`` when the candidates of each row are sorted by descending score.

    ``score_BI`` any float dtype, ``target_B`` int64 column numbers, ``candidate_BI`` bool (None: every column). Returns
    float64 (B,): with ``ties="expected"`` the mean place over all orders of tied candidates, hence half places.
    ``"best"`` and ``"worst"`` are bounds for what public code does with ties: the order there follows from how the
    candidate list was put together. A target that is no candidate gets ``NOT_RANKED``.
    Raises ``ValueError`` for NaN among the candidates (a NaN must never turn into a good place), wrong shapes, and
    targets out of range.
    """
    target_B = torch.as_tensor(target_B)
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


def popularity_groups(
    target_U: Tensor, train_count_I: Tensor, item_keys: Sequence[str], inactive_share: float = 0.02
) -> Tensor:
    """True for users whose held-out item is among the ``inactive_share`` least popular held-out items. bool (U,).

    The distinct held-out items are sorted by train frequency, ties by item key (frequencies tie massively), and the
    bottom share, at least one item, is "inactive" (FeDecider, Fig. 7; the tie rule is ours: the paper has none).
    """
    counts = train_count_I.tolist()
    items = sorted(set(target_U.tolist()), key=lambda item: (counts[item], item_keys[item]))
    inactive = set(items[: max(1, round(inactive_share * len(items)))])
    return torch.tensor([item in inactive for item in target_U.tolist()])
