"""Sums of item pairs over clients, compiled: what a client with n items costs grows with n^2, not with the catalogue.

Shape legend: C clients of a block, T items of the largest client, I items.
"""

from __future__ import annotations

import math

from fedecider.federation.compiling import compiled


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
