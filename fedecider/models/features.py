"""The features of an ensemble: what a client knows of every item behind a history, beside what its model says.

A customer's own events stay in all counts, when weights are fitted, tested and served: who asks cannot be told apart
from who was counted, and one rule for all three is one list for all three.

Shape legend: B histories of a block, I items, E events of all of them, T of them that count, H their items, each once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.data.near_texts import NearTexts, nearest_texts
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

    ``near``: the neighbours of all items that vote (`near_of`).
    """
    num_items = knowledge.counts.num_items
    counts, num_rows = knowledge.counts, len(histories)
    age_E = histories.num_after_E
    event_I = counts.event_I + POPULARITY_FLOOR
    popularity_I = event_I / event_I.sum()

    def shares(weight_T: np.ndarray, is_there_E: np.ndarray) -> scipy.sparse.csr_array:
        """(B, I) that sum to 1 a row."""
        places = (histories.row_E[is_there_E], histories.value_E[is_there_E])
        weight_BI = scipy.sparse.coo_array((weight_T, places), shape=(num_rows, num_items)).tocsr()
        return scipy.sparse.csr_array(scipy.sparse.diags_array(1.0 / weight_BI.sum(1)) @ weight_BI)

    def votes(weight_BI: scipy.sparse.csr_array, count_II: scipy.sparse.csr_array) -> np.ndarray:
        scale_I = 1.0 / (np.asarray(count_II.sum(1)).ravel() * UNIT + PRIOR)
        scaled_BI = scipy.sparse.csr_array(weight_BI @ scipy.sparse.diags_array(scale_I))
        vote_BI = (scaled_BI @ count_II).toarray() * UNIT
        vote_BI += (PRIOR * np.asarray(scaled_BI.sum(1)).ravel())[:, None] * popularity_I
        return vote_BI

    is_near_E = age_E < NUM_CONTEXT
    context_BI, own_BI = shares(1.0 / (1.0 + age_E[is_near_E]), is_near_E), shares(DECAY**age_E, age_E >= 0)
    text_BI = (context_BI @ near.sixth_II).toarray()
    text_BI += (context_BI @ near.far_sixth_I)[:, None] + TEXT_FLOOR
    follower_BI = votes(own_BI, counts.next_II)
    row_H, item_H = own_BI.nonzero()
    seen_BI = torch.zeros(num_rows, num_items, dtype=torch.bool)
    seen_BI[row_H, item_H] = True
    habit_BI = torch.zeros(num_rows, num_items)
    habit_BI[row_H, item_H] = torch.from_numpy(np.log(own_BI.data + follower_BI[row_H, item_H])).float()
    value = {TEXT: text_BI, COUNTS: votes(context_BI, counts.pair_II), FOLLOWERS: follower_BI}
    value[SUCCESSORS] = votes(shares(np.ones(int((age_E == 0).sum())), age_E == 0), counts.next_II)
    value[POPULARITY] = np.tile(popularity_I, (num_rows, 1))
    of_new = {}
    for name, part_BI in value.items():
        part_BI /= part_BI.mean(1, keepdims=True)
        if name in COUNTED and knowledge.num_new:
            part_BI[:, -knowledge.num_new :] = 1.0
        of_new[name] = torch.from_numpy(np.log(part_BI, out=part_BI)).float().masked_fill_(seen_BI, 0.0)
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
