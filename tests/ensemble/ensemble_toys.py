"""A small catalogue with users of uneven length, and a stand-in for a model."""

from __future__ import annotations

import random

import numpy as np
import torch

from fedecider.data.near_texts import unit_vectors
from fedecider.evaluation.protocols import histories, targets, train_parts
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.counts import count_events
from fedecider.models.ensemble import Ensemble, ModelScores, choices_of, fit_weights
from fedecider.models.features import Knowledge

NUM_ITEMS = 17


def sequences(num_users: int = 9, seed: int = 0, num_items: int = NUM_ITEMS) -> list[list[int]]:
    """Of 3 to 11 events, with items that come twice."""
    draw = random.Random(seed)
    return [[draw.randrange(num_items) for _ in range(3 + user)] for user in range(num_users)]


def baskets_of(rows: list[list[list[int]]]) -> SequenceArray:
    """User by user, basket by basket, their items."""
    events = SequenceArray.of([[item for basket in user for item in basket] for user in rows])
    numbers = [number for user in rows for number, basket in enumerate(user) for _ in basket]
    return SequenceArray(events.start_U, events.value_E, basket_E=np.array(numbers))


def vectors(num_items: int = NUM_ITEMS) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(num_items, 6))


def scores_of(histories) -> torch.Tensor:
    """(B, I) scores that depend on the newest item and the oldest."""
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


def fitted(users, model: ModelScores | None = None, unit_ID: np.ndarray | None = None) -> Ensemble:
    """An ensemble whose weights are fitted on the users' validation items, as in a run."""
    unit_ID = unit_vectors(vectors()) if unit_ID is None else unit_ID
    knowledge = Knowledge(count_events(train_parts(users), len(unit_ID)), unit_ID)
    asked = (histories(users, "valid"), targets(users, "valid"))
    choices = choices_of(knowledge, *asked, model, torch.Generator().manual_seed(0))
    beside = None if model is None else fit_weights(choices, True)
    return Ensemble(knowledge, fit_weights(choices, False), beside, ("own",))
