"""Baselines from item texts alone: items whose texts stand near those of the history, with and without counts.

Nothing is trained. Where counts are thin, the neighbours of an item are its own series, format variants and franchises.

Shape legend: B users of a batch, I items, D dimensions, H newest items of a history.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedecider.baselines.counts import cooccurrence_scores
from fedecider.evaluation.protocols import ScoreUsers, Sequences
from fedecider.evaluation.split import history

POWER = 3
"""Exponent of the cosine: a near text counts much more than two half-near ones."""
NUM_CONTEXT = 10
"""Newest items of a history that vote, weighted 1, 1/2, 1/3, ..."""
TEXT_WEIGHT = 0.3
"""Weight of the text scores beside co-occurrence, fixed for every data set."""


def text_neighbour_scores(
    vector_ID: Tensor, sequences: Sequences, split: str, *, power: int = POWER, num_context: int = NUM_CONTEXT
) -> ScoreUsers:
    """s(b | h) = sum_k max(0, cos(e_{h_k}, e_b))^power / (k + 1), h_0 the newest item, e centred over the catalogue.

    ``vector_ID``: one vector per item text, of any length. Products are taken per batch of users, so that no (I, I)
    matrix is held. Source: nearest neighbours in text space, as in content-based recommendation; the exponent and the
    decay are ours, chosen on the validation items of three Amazon domains (movies, CDs, video games).
    """
    unit_ID = normalize((vector_ID - vector_ID.mean(0)).double(), dim=1)

    def score(user_B: Tensor) -> Tensor:
        context = [list(history(sequences[user], split))[: -num_context - 1 : -1] for user in user_B.tolist()]
        item_C = torch.tensor([item for items in context for item in items], dtype=torch.int64)
        row_C = torch.repeat_interleave(torch.tensor([len(items) for items in context]))
        age_C = torch.tensor([age for items in context for age in range(len(items))], dtype=torch.float64)
        known_I, place_C = item_C.unique(return_inverse=True)
        near_KI = (unit_ID[known_I] @ unit_ID.T).clamp(min=0.0).pow(power)
        weight_BK = torch.zeros(len(context), len(known_I), dtype=torch.float64)
        weight_BK.index_put_((row_C, place_C), 1.0 / (age_C + 1.0), accumulate=True)
        return weight_BK @ near_KI

    return score


def text_and_count_scores(
    vector_ID: Tensor,
    sequences: Sequences,
    split: str,
    extra: Sequences = (),
    *,
    text_weight: float = TEXT_WEIGHT,
) -> ScoreUsers:
    """Decayed co-occurrence plus ``text_weight`` times :func:`text_neighbour_scores`; one weight for every data set.

    Events counted: train parts of ``sequences`` and all of ``extra``.
    """
    text = text_neighbour_scores(vector_ID, sequences, split)
    counts = cooccurrence_scores(
        sequences, len(vector_ID), split, extra, window=None, directed=False, num_context=NUM_CONTEXT
    )
    return lambda user_B: counts(user_B) + text_weight * text(user_B)
