"""What lists show of a catalogue, beside whether they hold the next purchase.

Shape legend: U users, B users of a batch, I items, K items of a list.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIST_LENGTH = 10
NUM_LISTED = 2_000
"""Customers of a company whose lists are looked at, the same of every row: coverage grows with their number."""
BEST_SELLING = 0.2
"""Share of the items that sell best and so are no long tail."""


def first_ten(score_BI: Tensor) -> Tensor:
    """The ten best items of each row, int64 (B, K), the best first; -1 where only minus infinity is left."""
    value_BK, item_BK = score_BI.topk(min(LIST_LENGTH, score_BI.shape[1]))
    return item_BK.masked_fill(value_BK == -torch.inf, -1).cpu()


def list_figures(item_UK: Tensor, count_I: Tensor) -> dict[str, float]:
    """``coverage``: share of the catalogue that is in anybody's ten (Adomavicius and Kwon, 2012, call it aggregate
    diversity); ``long_tail``: share of the places of all lists that hold an item outside the 20 % of the items with the
    most train events, ``count_I`` (after Abdollahpouri et al., 2019, who take items outside 80 % of the events)."""
    shown_P = item_UK[:NUM_LISTED].flatten()
    shown_P = shown_P[shown_P >= 0]
    order_I = count_I.argsort(descending=True, stable=True)
    is_tail_I = torch.ones(len(count_I), dtype=torch.bool)
    is_tail_I[order_I[: round(BEST_SELLING * len(count_I))]] = False
    return {
        "coverage": len(shown_P.unique()) / len(count_I),
        "long_tail": float(is_tail_I[shown_P].double().mean()) if len(shown_P) else 0.0,
    }
