"""Counts over items, compiled: pairs of a client's items, and the scores above those of held-out items.

Shape legend: C clients of a block, T items of the largest client or seen items of a client, I items, K counts.
"""

from __future__ import annotations

import math

from fedecider.federation.compiled_rows import compiled


@compiled
def add_pairs(item_CT, count_C, scale_C, reach, steps, ordered, square_II):
    """Add what each client counts for its pairs to the lower triangle, diagonal included, of ``square_II``.

    The first ``count_C[c]`` of ``item_CT[c]`` are a client's items, oldest first, all different. A pair d places apart
    counts ``scale / (1 + d / reach)``, rounded down to a multiple of ``1 / steps``. With ``ordered`` the strict upper
    triangle gets the same numbers, with + where the item with the lower number came first and - where it came last.
    """
    for c in range(len(item_CT)):
        scale = scale_C[c]
        for later in range(count_C[c]):
            item = item_CT[c, later]
            for earlier in range(later + 1):
                other = item_CT[c, earlier]
                value = math.floor(scale * (1.0 / (1.0 + (later - earlier) / reach)) * steps) / steps
                low, high = min(item, other), max(item, other)
                square_II[high, low] += value
                if ordered and low < high:
                    square_II[low, high] += value if other < item else -value


@compiled
def count_scores(score_CI, target_C, seen_CT, count_CK):
    """Into ``count_CK`` (C, 3): how many scores lie above that of the target, equal it (its own too), and are NaN.

    Items ``seen_CT`` (numbers of I and more pad) are left out.
    """
    num_items = score_CI.shape[1]
    for c in range(len(score_CI)):
        scores, own = score_CI[c], score_CI[c, target_C[c]]
        above, equal, invalid = 0, 0, 0
        for i in range(num_items):
            above += scores[i] > own
            equal += scores[i] == own
            invalid += scores[i] != scores[i]
        for item in seen_CT[c]:
            if item < num_items:
                above -= scores[item] > own
                equal -= scores[item] == own
                invalid -= scores[item] != scores[item]
        count_CK[c, 0], count_CK[c, 1], count_CK[c, 2] = above, equal, invalid
