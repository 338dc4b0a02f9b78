"""Which texts of a catalogue are near: a table of all items where it is small, a sparse one beyond.

Shape legend: D dimensions, I items, K of them whose neighbours are looked for, T rows of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy
import torch

MAX_NEAREST, MIN_NEAREST = 2**23, 100
"""Cosines that are kept of a catalogue, and at least of each item, itself among them: all of them up to 2,896 items,
703 of 11,924, 100 from 83,886 on. Far texts say little one by one, but there are many: their mean stands for each."""
MAX_COSINES = 2**24
"""Cosines at a time: bounds memory, changes no result."""


def unit_vectors(vector_ID: np.ndarray, mean_D: np.ndarray | None = None) -> np.ndarray:
    """Vectors of the item texts, centred over the catalogue, of length 1 (0 stays 0), float32.

    ``mean_D``: the mean of the catalogue, for texts that came later.
    """
    centred_ID = vector_ID.astype(np.float64) - (vector_ID.astype(np.float64).mean(0) if mean_D is None else mean_D)
    length_I1 = np.linalg.norm(centred_ID, axis=1, keepdims=True)
    return (centred_ID / np.maximum(length_I1, 1e-12)).astype(np.float32)


class NearTexts(NamedTuple):
    """Powers of max(0, cosine) of each item's text with all others: near ones one by one, far ones by their mean."""

    cube_II: scipy.sparse.csr_array
    """max(0, cos)^3 of the near ones less ``far_cube_I`` of the row, float64, columns rising."""
    sixth_II: scipy.sparse.csr_array
    """max(0, cos)^6 less ``far_sixth_I``, at the same places."""
    far_cube_I: np.ndarray
    """Mean of max(0, cos)^3 over what is not stored in the row; 0 where all above 0 is stored."""
    far_sixth_I: np.ndarray


def nearest_texts(
    unit_ID: np.ndarray,
    item_K: np.ndarray | None = None,
    num_nearest: int | None = None,
    device: torch.device | str = "cpu",
) -> NearTexts:
    """Each item with the ``num_nearest`` items whose texts are nearest, as far as their cosine is above 0.

    ``num_nearest``: without it as many as `MAX_NEAREST` leaves each item, and `MIN_NEAREST` at least.
    ``item_K``: the items whose rows are filled, all without it. Cost: one product of the vectors with each other, in
    blocks.
    """
    num_items = len(unit_ID)
    num_nearest = max(MIN_NEAREST, MAX_NEAREST // max(1, num_items)) if num_nearest is None else num_nearest
    item_K = np.arange(num_items) if item_K is None else np.unique(item_K)
    unit_ID_there = torch.from_numpy(unit_ID).to(device)
    values, items, means = [], [], []
    for item_T in torch.from_numpy(item_K).split(max(1, MAX_COSINES // max(1, num_items))):
        cosine_TI = unit_ID_there[item_T.to(device)] @ unit_ID_there.T
        top_TN, place_TN = cosine_TI.topk(min(num_nearest, num_items), dim=1, sorted=False)
        place_TN, order_TN = place_TN.sort(1)
        items.append(place_TN.cpu())
        values.append(top_TN.gather(1, order_TN).cpu())
        if num_nearest < num_items:
            far_TI = cosine_TI.clamp_(min=0.0).scatter_(1, place_TN, 0.0)
            num_far_T = (num_items - (values[-1] > 0.0).sum(1)).double()
            cube_TI = far_TI * far_TI * far_TI
            sums = (cube_TI.sum(1), cube_TI.square_().sum(1))
            means.append(torch.stack([of_T.double().cpu() / num_far_T for of_T in sums]))
    far_2I = np.zeros((2, num_items))
    if means:
        far_2I[:, item_K] = torch.cat(means, 1).numpy()
    value_KN, item_KN = torch.cat(values).double().numpy(), torch.cat(items).numpy()
    kept_KN = value_KN > 0.0
    start_I1 = np.zeros(num_items + 1, np.int64)
    start_I1[item_K + 1] = kept_KN.sum(1)
    value_S = value_KN[kept_KN]
    cube_S = value_S * value_S * value_S  # products take a tenth of the time of np.power
    far_2S = np.repeat(far_2I, np.diff(start_I1.cumsum()), axis=1)
    cube_II, sixth_II = (
        scipy.sparse.csr_array((value_S - far_S, item_KN[kept_KN], start_I1.cumsum()), (num_items, num_items))
        for value_S, far_S in zip((cube_S, cube_S**2), far_2S, strict=True)
    )
    return NearTexts(cube_II, sixth_II, *far_2I)
