"""The experts that know no language model: each gives a distribution over the items that a history does not hold.

Seen items have probability 0 and every expert sums to 1 over the others. A user who is known is taken out of all that
is counted: what they did themselves says nothing about what others would do next.

Shape legend: B histories, T newest items of all of them, I items, D dimensions, K distinct items, E events of users who
are left out, F of them that a voting item is, P pairs of these with the others of their user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy

from fedecider.memory.contexts import Contexts
from fedecider.memory.counts import MAX_PAIRS, UNIT, Counts, pair_weight

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


class Near(NamedTuple):
    """How near the texts of the voting items are to all items."""

    vote_BK: scipy.sparse.csr_array
    """Weights of the voting items of each history."""
    cos_KI: np.ndarray
    """float32: max(0, cos) with every item."""


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
    item_E = np.fromiter((item for events in left_out for item in events), dtype=np.int64)
    length_B = np.array([len(events) for events in left_out])
    first_B, row_E = np.cumsum(length_B) - length_B, np.repeat(np.arange(len(left_out)), length_B)
    np.subtract.at(event_BI, (row_E, item_E), 1)
    # the events of its user that are the voting item, F of them, and behind each all events of the user, P in all
    key_E = row_E * num_items + item_E
    order_E, key_T = np.argsort(key_E, kind="stable"), newest.row_T * num_items + newest.item_T
    low_T, high_T = (np.searchsorted(key_E, key_T, side, sorter=order_E) for side in ("left", "right"))
    vote_F, place_F = _ranges(low_T, high_T - low_T)
    event_F = order_E[place_F]
    first_F, length_F = first_B[row_E[event_F]], length_B[row_E[event_F]]
    ends = np.searchsorted(length_F.cumsum(), np.arange(MAX_PAIRS, length_F.sum(), MAX_PAIRS))
    pair_TI = scipy.sparse.csr_array((len(newest.item_T), num_items), dtype=np.int64)
    for part_F in np.split(np.arange(len(event_F)), ends):  # one sparse sum per few million pairs
        of_P, other_P = _ranges(first_F[part_F], length_F[part_F])
        distance_P = np.abs(other_P - event_F[part_F][of_P])
        apart_P = distance_P > 0
        places = (vote_F[part_F][of_P[apart_P]], item_E[other_P[apart_P]])
        weight_P = pair_weight(distance_P[apart_P])
        pair_TI = pair_TI + scipy.sparse.coo_array((weight_P, places), shape=pair_TI.shape).tocsr()
    return scipy.sparse.csr_array(pair_TI)


def _ranges(first_N: np.ndarray, length_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers first, first + 1, ... of all ranges one after the other, and before them whose range each is in."""
    range_P = np.repeat(np.arange(len(first_N)), length_N)
    before_N = np.cumsum(length_N) - length_N
    return range_P, np.arange(len(range_P)) + (first_N - before_N)[range_P]


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


def unit_vectors(vector_ID: np.ndarray, mean_D: np.ndarray | None = None) -> np.ndarray:
    """Vectors of the item texts, centred over the catalogue, of length 1 (0 stays 0), float32.

    ``mean_D``: the mean of the catalogue, for texts that came later.
    """
    centred_ID = vector_ID.astype(np.float64) - (vector_ID.astype(np.float64).mean(0) if mean_D is None else mean_D)
    length_I1 = np.linalg.norm(centred_ID, axis=1, keepdims=True)
    return (centred_ID / np.maximum(length_I1, 1e-12)).astype(np.float32)


def near_texts(unit_ID: np.ndarray, newest: Newest) -> Near:
    """Cosines of the voting items with all items, for experts of any power."""
    known_K, place_T = np.unique(newest.item_T, return_inverse=True)
    shape = (len(newest.unseen_BI), len(known_K))
    vote_BK = scipy.sparse.coo_array((newest.weight_T, (newest.row_T, place_T)), shape=shape).tocsr()
    return Near(vote_BK, np.maximum(unit_ID[known_K] @ unit_ID.T, np.float32(0.0)))


def text_votes(near: Near, newest: Newest, power: float) -> np.ndarray:
    """s(b) = sum_k w_k max(0, cos(e_{h_k}, e_b))^power over unseen items (`text_neighbour_scores`). (B, I)."""
    raised_KI = _raised(near.cos_KI, power).astype(np.float64)
    return np.where(newest.unseen_BI, near.vote_BK @ raised_KI, 0.0)


def _raised(number_KI: np.ndarray, power: float) -> np.ndarray:
    """``number_KI`` to a power; multiples of 3 by products, which take a tenth of the time of ``np.power``."""
    if power not in (3.0, 6.0):
        return number_KI ** np.float32(power)
    cube_KI = number_KI * number_KI * number_KI
    return cube_KI if power == 3.0 else cube_KI * cube_KI


def text_probs(near: Near, newest: Newest, power: float) -> np.ndarray:
    """:func:`text_votes` over their sum; uniform where no text is near. (B, I)."""
    return normalised(text_votes(near, newest, power), newest)


def agreement_probs(found: Evidence, near: Near) -> np.ndarray:
    """p(b | h) proportional to sqrt(p_counts(b | h) p_text(b | h)): what both find likely. (B, I)."""
    text_BI = text_probs(near, found.newest, AGREEING_POWER)
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
