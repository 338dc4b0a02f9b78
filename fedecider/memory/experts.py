"""The experts that know no language model: each gives a distribution over the items that a history does not hold.

Seen items have probability 0 and every expert sums to 1 over the others. A user who is known is taken out of all that
is counted: what they did themselves says nothing about what others would do next.

Shape legend: B histories, T newest items of all of them, I items, D dimensions, K distinct items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy

from fedecider.memory.contexts import Contexts
from fedecider.memory.counts import UNIT, Counts, count_events

POPULARITY_FLOOR = 0.1
"""Added to the events of every item: no item is impossible."""
PRIOR = 10.0
"""m: counts of pairs that the popularity stands for behind every voting item."""
AGREEING_POWER = 3.0
"""Exponent of the cosine where texts are to agree with counts."""


class Newest(NamedTuple):
    """The newest items of each history that vote."""

    row_T: np.ndarray
    item_T: np.ndarray
    weight_T: np.ndarray
    """1 / (age + 1), age 0 the newest."""
    unseen_BI: np.ndarray
    """bool: the items that a history does not hold."""


class Evidence(NamedTuple):
    """What the counts say about each history, before it is known how far they are trusted."""

    newest: Newest
    pair_TI: scipy.sparse.csr_array
    """Counts of pairs of each voting item with unseen items, the left-out user taken away."""
    total_T: np.ndarray
    """Counts of pairs of each voting item with any item: who had all that goes with it votes less."""
    popularity_BI: np.ndarray
    """Shares of the events of unseen items."""


def newest_items(histories: Sequence[Sequence[int]], num_items: int, num_context: int) -> Newest:
    """Which items vote, and which are no candidates. ``ValueError`` for an empty history or items out of range."""
    for items in histories:
        if not items or min(items) < 0 or max(items) >= num_items:
            raise ValueError(f"got history {list(items)[:20]}, expected item numbers from 0 to {num_items - 1}")
    voting = [list(items)[: -num_context - 1 : -1] for items in histories]
    unseen_BI = np.ones((len(voting), num_items), bool)
    for row, items in enumerate(histories):
        unseen_BI[row, list(items)] = False
    return Newest(
        np.repeat(np.arange(len(voting)), [len(items) for items in voting]),
        np.array([item for items in voting for item in items], np.int64),
        np.array([1.0 / (age + 1) for items in voting for age in range(len(items))]),
        unseen_BI,
    )


def evidence(counts: Counts, contexts: Contexts, num_context: int) -> Evidence:
    """Counts behind each history, without the pairs and events of the user who is left out."""
    num_items = counts.num_items
    newest = newest_items(contexts.histories, num_items, num_context)
    pair_TI = counts.pair_II[newest.item_T]
    event_BI = np.repeat(counts.event_I[None], len(contexts.histories), 0)
    if any(contexts.left_out):
        pair_TI = pair_TI - _leave_out(contexts.left_out, newest, event_BI)
    total_T = np.asarray(pair_TI.sum(1)).ravel() * UNIT
    pair_TI = scipy.sparse.coo_array(pair_TI)
    kept = newest.unseen_BI[newest.row_T[pair_TI.row], pair_TI.col]
    places = (pair_TI.row[kept], pair_TI.col[kept])
    kept_TI = scipy.sparse.coo_array((pair_TI.data[kept] * UNIT, places), shape=pair_TI.shape).tocsr()
    popularity_BI = np.where(newest.unseen_BI, event_BI + POPULARITY_FLOOR, 0.0)
    popularity_BI /= np.maximum(popularity_BI.sum(1, keepdims=True), POPULARITY_FLOOR)
    return Evidence(newest, kept_TI, total_T, popularity_BI)


def _leave_out(left_out: Sequence[Sequence[int]], newest: Newest, event_BI: np.ndarray) -> scipy.sparse.csr_array:
    """(T, I) pairs of the users who are left out; their events are taken out of ``event_BI``."""
    num_items = event_BI.shape[1]
    last_T = np.searchsorted(newest.row_T, np.arange(len(left_out) + 1))
    parts, before, own = [], None, None
    for row, events in enumerate(left_out):
        if events != before or own is None:  # contexts of one user follow each other
            before, own = events, count_events([events], num_items)
        parts.append(own.pair_II[newest.item_T[last_T[row] : last_T[row + 1]]])
        event_BI[row] -= own.event_I
    return scipy.sparse.csr_array(scipy.sparse.vstack(parts, format="csr"))


def known(found: Evidence) -> np.ndarray:
    """How much is counted of each history's newest item: what histories are told apart by. (B,)."""
    first_B = np.searchsorted(found.newest.row_T, np.arange(len(found.popularity_BI)))
    return found.total_T[first_B]


def count_probs(found: Evidence, exponent: float) -> np.ndarray:
    """p(b | h) = s(b)^exponent, s(b) = sum_k w_k (C[h_k, b] + m pop_b) / (C[h_k, .] + m) for unseen items b, over its
    sum. (B, I).

    An item of which little is counted says little, and the popularity speaks in its place. Votes of ten items make s
    flatter than what users do next; the exponent takes that back.
    """
    row_T, weight_T = found.newest.row_T, found.newest.weight_T
    num_rows = len(found.popularity_BI)
    scale_T = weight_T / (found.total_T + PRIOR)
    vote_BT = scipy.sparse.coo_array((scale_T, (row_T, np.arange(len(row_T)))), shape=(num_rows, len(row_T))).tocsr()
    backed_B = np.bincount(row_T, PRIOR * scale_T, num_rows)
    summed_BI = (vote_BT @ found.pair_TI).toarray() + backed_B[:, None] * found.popularity_BI
    return normalised(summed_BI**exponent if exponent != 1.0 else summed_BI, found.newest)


def unit_vectors(vector_ID: np.ndarray) -> np.ndarray:
    """Vectors of the item texts, centred over the catalogue, of length 1 (0 stays 0), float32."""
    centred_ID = vector_ID.astype(np.float64) - vector_ID.astype(np.float64).mean(0)
    length_I1 = np.linalg.norm(centred_ID, axis=1, keepdims=True)
    return (centred_ID / np.maximum(length_I1, 1e-12)).astype(np.float32)


def text_votes(unit_ID: np.ndarray, newest: Newest, power: float) -> np.ndarray:
    """s(b) = sum_k w_k max(0, cos(e_{h_k}, e_b))^power over unseen items (`text_neighbour_scores`). (B, I)."""
    known_K, place_T = np.unique(newest.item_T, return_inverse=True)
    near_KI = np.maximum(unit_ID[known_K] @ unit_ID.T, np.float32(0.0)) ** np.float32(power)
    shape = (len(newest.unseen_BI), len(known_K))
    vote_BK = scipy.sparse.coo_array((newest.weight_T, (newest.row_T, place_T)), shape=shape).tocsr()
    return np.where(newest.unseen_BI, vote_BK @ near_KI.astype(np.float64), 0.0)


def text_probs(unit_ID: np.ndarray, newest: Newest, power: float) -> np.ndarray:
    """:func:`text_votes` over their sum; uniform where no text is near. (B, I)."""
    return normalised(text_votes(unit_ID, newest, power), newest)


def agreement_probs(found: Evidence, unit_ID: np.ndarray) -> np.ndarray:
    """p(b | h) proportional to sqrt(p_counts(b | h) p_text(b | h)): what both find likely. (B, I)."""
    text_BI = text_probs(unit_ID, found.newest, AGREEING_POWER)
    return normalised(np.sqrt(count_probs(found, 1.0) * text_BI), found.newest)


def uniform_probs(newest: Newest) -> np.ndarray:
    """The floor: all unseen items alike. (B, I)."""
    return normalised(np.zeros(newest.unseen_BI.shape), newest)


def normalised(score_BI: np.ndarray, newest: Newest) -> np.ndarray:
    """Rows over their sums; rows of zeros become uniform over the unseen items, or stay 0 where there are none."""
    total_B1 = score_BI.sum(1, keepdims=True)
    unseen_BI = newest.unseen_BI.astype(np.float64)
    uniform_BI = unseen_BI / np.maximum(unseen_BI.sum(1, keepdims=True), 1.0)
    return np.where(total_B1 > 0, score_BI / np.maximum(total_B1, np.finfo(np.float64).tiny), uniform_BI)


def popularity_probs(counts: Counts) -> np.ndarray:
    """p(b) = (events of b + floor) over their sum: what is likely for somebody of whom nothing is known. (I,)."""
    popularity_I = counts.event_I + POPULARITY_FLOOR
    return popularity_I / popularity_I.sum()
