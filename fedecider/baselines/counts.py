"""Baselines that stand in every table: popularity and item co-occurrence.

All of them count over train parts only (plus given public sequences), and are ranked by
:func:`fedecider.evaluation.protocols.rank_held_out` like every other model.

Nothing is trained. Where counts are thin, the neighbours of an item are its own series, format variants and franchises.

Shape legend: B users of a batch, U users, I items, E events, T other items in a context, D dimensions, H newest items
of a history.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedecider.evaluation.protocols import STRICT, Protocol, ScoreUsers, Sequences, history, rank_held_out, train_part

# Baselines that stand in every table: popularity and item co-occurrence.

MAX_PAIRS = 4_000_000


def train_counts(sequences: Sequences, num_items: int, extra: Sequences = ()) -> Tensor:
    """Events per item in the train parts of ``sequences`` and in all of ``extra``. float64 (I,)."""
    parts = _train_parts(sequences, extra)
    items = [item for part in parts for item in part]
    return torch.bincount(torch.tensor(items, dtype=torch.int64), minlength=num_items).to(torch.float64)


def cooccurrence_matrix(
    sequences: Sequences, num_items: int, extra: Sequences = (), *, window: int | None = 1, directed: bool = True
) -> scipy.sparse.csr_array:
    """Sparse (I, I): entry (a, b) sums 1 / distance over the places where b stands up to ``window`` events after a.

    ``window=1, directed=True`` counts direct successors (a first-order Markov chain); ``window=None`` takes the
    whole sequence; ``directed=False`` adds the transpose. Train parts of ``sequences`` and all of ``extra``.
    """
    parts = _train_parts(sequences, extra)
    item_E = np.fromiter((item for part in parts for item in part), dtype=np.int64)
    owner_E = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    longest = max((len(part) for part in parts), default=1)
    total = scipy.sparse.csr_array((num_items, num_items))
    pairs: list[np.ndarray] = []
    for distance in range(1, min(longest - 1, window or longest) + 1):
        same = owner_E[:-distance] == owner_E[distance:]
        first, second = item_E[:-distance][same], item_E[distance:][same]
        pairs.append(np.stack([first, second, np.full(len(first), 1.0 / distance)]))
        if sum(pair.shape[1] for pair in pairs) > MAX_PAIRS:  # one sparse sum per few million pairs: fast, bounded
            total, pairs = total + _summed(pairs, num_items), []
    total = total + _summed(pairs, num_items)
    return scipy.sparse.csr_array(total if directed else total + total.T)


def popularity_scores(sequences: Sequences, num_items: int, extra: Sequences = ()) -> ScoreUsers:
    """Scores every item by its train count, alike for every user."""
    count_I = train_counts(sequences, num_items, extra)
    return lambda user_B: count_I.expand(len(user_B), -1)


def cooccurrence_scores(
    sequences: Sequences,
    num_items: int,
    split: str,
    extra: Sequences = (),
    *,
    window: int | None = 1,
    directed: bool = True,
    num_context: int = 1,
) -> ScoreUsers:
    """Scores items by co-occurrence with the newest ``num_context`` items of the history.

    score(b) = sum_k M[h_k, b] / ((1 + sum_c M[h_k, c]) * (k + 1)), h_0 the newest item, M from
    :func:`cooccurrence_matrix`. Ties, and items that never co-occurred, are ordered by popularity (a term too small
    to overturn a count), as a plain implementation with a fill-up list does.
    """
    matrix = cooccurrence_matrix(sequences, num_items, extra, window=window, directed=directed)
    scale = 1.0 / (1.0 + np.asarray(matrix.sum(1)).ravel())
    rows = scipy.sparse.csr_array(scipy.sparse.diags_array(scale) @ matrix)
    count_I = train_counts(sequences, num_items, extra).numpy()
    fallback_I = 1e-9 * count_I / (1.0 + count_I.max(initial=0.0))

    def score(user_B: Tensor) -> Tensor:
        contexts = [list(history(sequences[user], split))[: -num_context - 1 : -1] for user in user_B.tolist()]
        row_T = np.repeat(np.arange(len(contexts)), [len(context) for context in contexts])
        item_T = np.array([item for context in contexts for item in context], dtype=np.int64)
        weight_T = np.array([1.0 / (age + 1) for context in contexts for age in range(len(context))])
        context_BI = scipy.sparse.coo_array((weight_T, (row_T, item_T)), shape=(len(contexts), num_items)).tocsr()
        dense_BI = scipy.sparse.csr_array(context_BI @ rows).toarray()
        return torch.from_numpy(dense_BI + fallback_I)

    return score


def popularity(
    sequences: Sequences,
    num_items: int,
    split: str,
    protocol: Protocol = STRICT,
    *,
    extra: Sequences = (),
    **ranking: Any,
) -> Tensor:
    """Positions of the popularity baseline. ``ranking``: ``candidates``, ``users``, ``ties`` of ``rank_held_out``."""
    return rank_held_out(
        popularity_scores(sequences, num_items, extra), sequences, num_items, split, protocol, **ranking
    )


def last_item_cooccurrence(
    sequences: Sequences,
    num_items: int,
    split: str,
    protocol: Protocol = STRICT,
    *,
    extra: Sequences = (),
    window: int | None = 1,
    directed: bool = True,
    **ranking: Any,
) -> Tensor:
    """Positions of last-item co-occurrence, by default direct successors of the newest item."""
    score = cooccurrence_scores(sequences, num_items, split, extra, window=window, directed=directed)
    return rank_held_out(score, sequences, num_items, split, protocol, **ranking)


def decayed_cooccurrence(
    sequences: Sequences,
    num_items: int,
    split: str,
    protocol: Protocol = STRICT,
    *,
    extra: Sequences = (),
    window: int | None = None,
    directed: bool = False,
    num_context: int = 10,
    **ranking: Any,
) -> Tensor:
    """Positions of co-occurrence with the newest ``num_context`` items, weighted 1, 1/2, 1/3, ... by age."""
    score = cooccurrence_scores(
        sequences, num_items, split, extra, window=window, directed=directed, num_context=num_context
    )
    return rank_held_out(score, sequences, num_items, split, protocol, **ranking)


def _train_parts(sequences: Sequences, extra: Sequences) -> list[list[int]]:
    return [list(train_part(sequence)) for sequence in sequences] + [list(sequence) for sequence in extra]


def _summed(pairs: list[np.ndarray], num_items: int) -> scipy.sparse.csr_array:
    first, second, weight = np.concatenate(pairs, 1) if pairs else np.zeros((3, 0))
    index = (first.astype(np.int64), second.astype(np.int64))  # float64 holds item numbers exactly
    return scipy.sparse.coo_array((weight, index), shape=(num_items, num_items)).tocsr()


# Baselines from item texts alone: items whose texts stand near those of the history, with and without counts.

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
