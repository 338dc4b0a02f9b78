"""The features of an ensemble: what a client knows of every item behind a history, beside what its model says.

A customer's own events stay in all counts, when weights are fitted, tested and served: who asks cannot be told apart
from who was counted, and one rule for all three is one list for all three.

Shape legend: B histories of a block, I items, E events of all of them, T of them that count, H their items, each once,
S items of each history.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.data.near_texts import NearOnDemand, NearTexts, nearest_texts
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.counts import POPULARITY_FLOOR, UNIT, Counts

MODEL, TEXT, COUNTS, SUCCESSORS = "model", "text", "counts", "successors"
FOLLOWERS, POPULARITY = "followers", "popularity"
BOUGHT, HABIT = "bought before", "habit"
NEW = (MODEL, TEXT, COUNTS, SUCCESSORS, FOLLOWERS, POPULARITY)
"""Features of items that a customer has not bought yet, each the log of how much more an item has than all on average;
0 for the others, of which `BOUGHT` and `HABIT` speak. With one weight for both, what finds new items would order the
old ones."""
FEATURES = (*NEW, BOUGHT, HABIT)
COUNTED = (COUNTS, SUCCESSORS, FOLLOWERS, POPULARITY)
"""Features that have nothing to say of an item that came after the counts: it has as much as all on average."""

NUM_CONTEXT = 10
"""Newest baskets of a history that vote, weighted 1, 1/2, 1/3, ...: older ones have next to no weight."""
PRIOR = 10.0
"""m: counts of pairs that the popularity stands for behind every voting item."""
TEXT_FLOOR = 1e-3
"""Added to the votes of texts, which are 1 at most: a text that is far from all has not minus infinity."""
DECAY = 0.97
"""Of a customer's own baskets, for every one that came after."""


class Knowledge(NamedTuple):
    """What features are made of. It holds counts of real users."""

    counts: Counts
    unit_ID: np.ndarray
    """Vectors of the published item texts (`fedecider.data.near_texts.unit_vectors`)."""
    num_new: int = 0
    """Items at the end of the catalogue that came after the counts."""


class Block(NamedTuple):
    """Some histories with all features but that of the model."""

    seen_BI: Tensor
    """bool: the items that a history holds."""
    value: dict[str, Tensor]
    """Feature -> (B, I) float32."""


class Votes(NamedTuple):
    """What the items of some histories give to all others, float32."""

    vote_HI: scipy.sparse.csr_array
    backed_H: np.ndarray
    """What popularity, or the mean of far texts, stands for beside it."""

    def of(self, weight_BH: scipy.sparse.csr_array, other_I: np.ndarray | float) -> np.ndarray:
        """(B, I): the weighted sum of what the items of each history give; ``other_I`` times what stands beside."""
        vote_BI: np.ndarray = (weight_BH @ self.vote_HI).toarray()
        vote_BI += (weight_BH @ self.backed_H)[:, None] * other_I
        return vote_BI


class Tables(NamedTuple):
    """What features of some histories are read from, worked out once for all of them."""

    item_H: np.ndarray
    """The items of the histories, rising."""
    text: Votes
    pair: Votes
    successor: Votes
    popularity_I: np.ndarray
    num_new: int


def tables_of(knowledge: Knowledge, near: NearTexts | NearOnDemand, histories: SequenceArray) -> Tables:
    """The tables of the items in ``histories``; ``near``: the neighbours of all items that vote (`near_of`)."""
    counts, item_H = knowledge.counts, np.unique(histories.value_E)
    event_I = counts.event_I + POPULARITY_FLOOR

    def votes(count_II: scipy.sparse.csr_array) -> Votes:
        count_HI = count_II[item_H]
        scale_H = 1.0 / (np.asarray(count_HI.sum(1)).ravel() * UNIT + PRIOR)
        value_S = count_HI.data * np.repeat(scale_H * UNIT, np.diff(count_HI.indptr))
        vote_HI = scipy.sparse.csr_array(
            (value_S.astype(np.float32), count_HI.indices, count_HI.indptr), count_HI.shape
        )
        return Votes(vote_HI, (PRIOR * scale_H).astype(np.float32))

    text = Votes(*near.sixth_of(item_H))
    popularity_I = (event_I / event_I.sum()).astype(np.float32)
    return Tables(item_H, text, votes(counts.pair_II), votes(counts.next_II), popularity_I, knowledge.num_new)


def block_of(knowledge: Knowledge, near: NearTexts, histories: SequenceArray) -> Block:
    """The features of every item behind each history; h_k are its items, w_k = 1 / (1 + baskets behind that of h_k).

    Of new items log(v_b / mean v), with v_b for

    - text: floor + sum_k w_k max(0, cos(h_k, b))^6 / sum_k w_k;
    - counts: sum_k w_k (C[h_k, b] + m pop_b) / (C[h_k, .] + m), C of `Counts.pair_II`;
    - successors: the mean over the items a of the last basket of (N[a, b] + m pop_b) / (N[a, .] + m), N of
      `Counts.next_II`;
    - followers: q_b = sum_a s_a (N[a, b] + m pop_b) / (N[a, .] + m), s_a the share of item a in all of the customer's
      own purchases, a basket weighing `DECAY`^age;
    - popularity: pop_b, shares of events.

    And of all items

    - bought before: 1 or 0;
    - habit: log(s_b + q_b), of items bought before.
    """
    return features_of(tables_of(knowledge, near, histories), histories)


def features_of(tables: Tables, histories: SequenceArray) -> Block:
    """`block_of` of some of the histories that ``tables`` are of."""
    age_E, column_E = histories.num_after_E, np.searchsorted(tables.item_H, histories.value_E)
    popularity_I, shape = tables.popularity_I, (len(histories), len(tables.item_H))

    def shares(weight_T: np.ndarray, is_there_E: np.ndarray) -> scipy.sparse.csr_array:
        """(B, H) that sum to 1 a row."""
        places = (histories.row_E[is_there_E], column_E[is_there_E])
        weight_BH = scipy.sparse.coo_array((weight_T, places), shape=shape).tocsr()
        weight_BH.data *= np.repeat(1.0 / weight_BH.sum(1), np.diff(weight_BH.indptr))
        return weight_BH.astype(np.float32)

    is_near_E, is_last_E = age_E < NUM_CONTEXT, age_E == 0
    context_BH, own_BH = shares(1.0 / (1.0 + age_E[is_near_E]), is_near_E), shares(DECAY**age_E, age_E >= 0)
    follower_BI = tables.successor.of(own_BH, popularity_I)
    row_S, column_S = own_BH.nonzero()
    item_S = tables.item_H[column_S]
    seen_BI = torch.zeros(follower_BI.shape, dtype=torch.bool)
    seen_BI[row_S, item_S] = True
    habit_BI = torch.zeros(follower_BI.shape)
    habit_BI[row_S, item_S] = torch.from_numpy(np.log(own_BH.data + follower_BI[row_S, item_S]))
    last_BH = shares(np.ones(int(is_last_E.sum())), is_last_E)
    value = {
        TEXT: tables.text.of(context_BH, 1.0) + np.float32(TEXT_FLOOR),
        COUNTS: tables.pair.of(context_BH, popularity_I),
        FOLLOWERS: follower_BI,
        SUCCESSORS: tables.successor.of(last_BH, popularity_I),
        POPULARITY: popularity_I[None],
    }
    of_new = {}
    for name, part_BI in value.items():
        part_BI = part_BI / part_BI.mean(1, keepdims=True, dtype=np.float64).astype(np.float32)
        if name in COUNTED and tables.num_new:
            part_BI[:, -tables.num_new :] = 1.0
        log_BI = torch.from_numpy(np.log(part_BI, out=part_BI)).expand(seen_BI.shape)
        of_new[name] = log_BI.masked_fill(seen_BI, 0.0)
    return Block(seen_BI, {**of_new, BOUGHT: seen_BI.float(), HABIT: habit_BI})


def near_of(knowledge: Knowledge, histories: SequenceArray) -> NearTexts:
    """The nearest texts of the items that vote in ``histories``."""
    return nearest_texts(knowledge.unit_ID, np.unique(histories.value_E[histories.num_after_E < NUM_CONTEXT]))


def check_histories(histories: SequenceArray, num_items: int) -> None:
    """``ValueError`` for an empty history or items out of range."""
    item_E = histories.value_E
    is_wrong_E = (item_E < 0) | (item_E >= num_items)
    if is_wrong_E.any() or not histories.length_U.all():
        row = int(histories.row_E[is_wrong_E.argmax()]) if is_wrong_E.any() else int(histories.length_U.argmin())
        raise ValueError(f"got history {histories[row][:20]}, expected item numbers from 0 to {num_items - 1}")
