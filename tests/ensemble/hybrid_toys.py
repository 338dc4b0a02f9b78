"""A small catalogue with users of uneven length, and a stand-in for a model."""

from __future__ import annotations

import random

import numpy as np
import torch

from fedecider.models.counts import POPULARITY_FLOOR, PRIOR, Contexts, count_events
from fedecider.models.ensemble import ModelScores

NUM_ITEMS = 17


def sequences(num_users: int = 9, seed: int = 0, num_items: int = NUM_ITEMS) -> list[list[int]]:
    """Of 3 to 11 events, with items that come twice."""
    draw = random.Random(seed)
    return [[draw.randrange(num_items) for _ in range(3 + user)] for user in range(num_users)]


def vectors(num_items: int = NUM_ITEMS) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(num_items, 6))


def scores_of(histories) -> torch.Tensor:
    """(B, I) scores that depend on the newest two items."""
    item_I = torch.arange(NUM_ITEMS, dtype=torch.float64)
    rows = [torch.sin(1.3 * item_I * (1 + items[-1])) + torch.cos(item_I + 3.0 * items[0]) for items in histories]
    return 2.0 * torch.stack(rows)


def toy_model(num_beams: int = 0) -> ModelScores:
    """A softmax over the catalogue; with ``num_beams`` it is asked for candidates, as one with long IDs is."""

    def log_probs(histories, item_BM):
        if item_BM is None:
            return scores_of(histories)
        found_BM = torch.log_softmax(scores_of(histories), 1).gather(1, item_BM.clamp(min=0))
        return found_BM.masked_fill(item_BM < 0, -torch.inf)

    return ModelScores(
        log_probs, (lambda histories, k: scores_of(histories).topk(num_beams).indices) if num_beams else None
    )


def with_far_mean(cos_II: np.ndarray, power: int, num_nearest: int) -> np.ndarray:
    """Powers row by row; those that are not among the nearest, or not above 0, have the mean of all such."""
    rows = []
    for cos_I in cos_II:
        far = np.ones(len(cos_I), bool)
        far[np.argsort(-cos_I)[:num_nearest]] = False
        far |= cos_I <= 0
        rows.append(np.where(far, (cos_I**power)[far].mean() if far.any() else 0.0, cos_I**power))
    return np.stack(rows)


def dense_experts(
    parts, contexts: Contexts, unit_ID: np.ndarray, num_context: int = 10, num_nearest: int = NUM_ITEMS
) -> dict[str, np.ndarray]:
    """Expert -> (B, I): the equations item by item, from counts in which the left-out user never was."""
    rows: dict[str, list[np.ndarray]] = {"counts": [], "text": [], "agreement": [], "uniform": []}
    cos_II = np.maximum(unit_ID.astype(np.float64) @ unit_ID.T.astype(np.float64), 0.0)
    cube_II, sixth_II = (with_far_mean(cos_II, power, num_nearest) for power in (3, 6))
    for items, left_out in zip(contexts.histories, contexts.left_out or [[]] * len(contexts.histories), strict=True):
        kept = list(parts)
        if left_out:
            kept.remove(left_out)
        counts = count_events(kept, len(unit_ID))
        pair_II, unseen_I = counts.pair_II.toarray() / 2**16, np.ones(len(unit_ID))
        unseen_I[items] = 0.0
        popularity_I = (counts.event_I + POPULARITY_FLOOR) * unseen_I
        popularity_I = popularity_I / popularity_I.sum()
        vote_I, text_I, near_I = (np.zeros(len(unit_ID)) for _ in range(3))
        for age, item in enumerate(items[: -num_context - 1 : -1]):
            share_I = (pair_II[item] + PRIOR * popularity_I) / (pair_II[item].sum() + PRIOR)
            vote_I += share_I * unseen_I / (age + 1)
            text_I += sixth_II[item] * unseen_I / (age + 1)
            near_I += cube_II[item] * unseen_I / (age + 1)
        uniform_I = unseen_I / unseen_I.sum()
        for name, found_I in {"counts": vote_I**1.5, "text": text_I, "agreement": np.sqrt(vote_I * near_I)}.items():
            rows[name].append(found_I / found_I.sum() if found_I.sum() > 0 else uniform_I)
        rows["uniform"].append(uniform_I)
    return {name: np.stack(found) for name, found in rows.items()}
