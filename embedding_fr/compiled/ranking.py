"""Ranking of held-out items, compiled: one pass over each client's scores.

Shape legend: C clients of a block, I items, T seen items of a client.
"""

from __future__ import annotations

from fedecider.federation.compiling import compiled


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
