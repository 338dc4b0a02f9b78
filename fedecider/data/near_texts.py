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

    def sixth_of(self, item_H: np.ndarray) -> tuple[scipy.sparse.csr_array, np.ndarray]:
        """Rows of ``sixth_II`` and of ``far_sixth_I``, float32."""
        return self.sixth_II[item_H].astype(np.float32), self.far_sixth_I[item_H].astype(np.float32)


class NearOnDemand:
    """`NearTexts.sixth_of` for a service: a row is computed when an item is first asked for, and kept."""

    def __init__(self, unit_ID: np.ndarray) -> None:
        self.unit_ID = unit_ID
        self._distinct = distinct_texts(unit_ID)
        self._row_of: dict[int, tuple[np.ndarray, np.ndarray, np.float32]] = {}

    def sixth_of(self, item_H: np.ndarray) -> tuple[scipy.sparse.csr_array, np.ndarray]:
        """(H, I) and (H,), float32; the items rise."""
        new_K = np.array([item for item in item_H.tolist() if item not in self._row_of], np.int64)
        if len(new_K):
            near_KI, far_K = nearest_texts(self.unit_ID, new_K, distinct=self._distinct).sixth_of(new_K)
            for place, item in enumerate(new_K.tolist()):
                part = slice(near_KI.indptr[place], near_KI.indptr[place + 1])
                self._row_of[item] = (near_KI.data[part].copy(), near_KI.indices[part].astype(np.int32), far_K[place])
        rows = [self._row_of[item] for item in item_H.tolist()]
        start_H1 = np.cumsum([0, *(len(data) for data, _, _ in rows)])
        data_S, column_S = (np.concatenate([row[part] for row in rows]) for part in (0, 1))
        near_HI = scipy.sparse.csr_array((data_S, column_S, start_H1), (len(rows), len(self.unit_ID)))
        return near_HI, np.array([far for _, _, far in rows])


class DistinctTexts(NamedTuple):
    """The T different vectors of a catalogue."""

    text_I: np.ndarray
    """Which of them each item has."""
    unit_TD: np.ndarray


def distinct_texts(unit_ID: np.ndarray) -> DistinctTexts:
    """Items of one vector share a row."""
    number_of: dict[bytes, int] = {}
    text_I = np.array([number_of.setdefault(row.tobytes(), len(number_of)) for row in unit_ID])
    return DistinctTexts(text_I, unit_ID[np.unique(text_I, return_index=True)[1]])


class Nearest(NamedTuple):
    """The N items nearest to each of K items."""

    item_KN: torch.Tensor
    """Rising."""
    cosine_KN: torch.Tensor
    far_K2: torch.Tensor
    """Means of max(0, cos)^3 and max(0, cos)^6 over all items but those of ``item_KN`` above 0, float64."""


def nearest_of(
    unit_ID: np.ndarray,
    num_nearest: int,
    item_K: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    distinct: DistinctTexts | None = None,
) -> Nearest:
    """The ``num_nearest`` items with the largest cosines to each of the items ``item_K`` (None: all), themselves among
    them.

    Cost: one product of the different vectors with each other, in blocks. Items of one vector, of which a shop with few
    words has many, are compared together; where not all of them are near enough, those with the lowest numbers are.
    """
    text_I, unit_TD = distinct or distinct_texts(unit_ID)
    vector_TD = torch.from_numpy(unit_TD).to(device)
    by_text_I, count_T = (
        torch.from_numpy(one).to(device) for one in (text_I.argsort(kind="stable"), np.bincount(text_I))
    )
    start_T, num_texts, num_items = count_T.cumsum(0) - count_T, len(vector_TD), len(unit_ID)
    wanted_R, row_K = np.unique(text_I if item_K is None else text_I[item_K], return_inverse=True)
    parts: list[Nearest] = []
    for text_B in torch.from_numpy(wanted_R).split(max(1, MAX_COSINES // num_texts)):
        cosine_BT = vector_TD[text_B.to(device)] @ vector_TD.T
        top_BN, place_BN = cosine_BT.topk(min(num_nearest, num_texts), dim=1)
        count_BN = count_T[place_BN]
        kept_BN = (num_nearest - (count_BN.cumsum(1) - count_BN)).clamp(min=0).minimum(count_BN)
        kept_E = kept_BN.flatten()
        number_E = torch.arange(int(kept_E.sum()), device=device) - (kept_E.cumsum(0) - kept_E).repeat_interleave(
            kept_E
        )
        item_E = by_text_I[start_T[place_BN].flatten().repeat_interleave(kept_E) + number_E]
        item_BN, order_BN = item_E.view(len(text_B), min(num_nearest, num_items)).sort(1)
        value_BN = top_BN.flatten().repeat_interleave(kept_E).view_as(item_BN).gather(1, order_BN)
        far_BT = count_T.float().repeat(len(text_B), 1).scatter_(1, place_BN, (count_BN - kept_BN).float())
        cube_BT = cosine_BT.clamp_(min=0.0) * cosine_BT * cosine_BT
        sums = ((cube_BT * far_BT).sum(1).double(), (cube_BT.square_() * far_BT).sum(1).double())
        num_far_B = (num_items - (value_BN > 0.0).sum(1)).double()
        parts.append(Nearest(item_BN.cpu(), value_BN.cpu(), torch.stack([one / num_far_B for one in sums], 1).cpu()))
    return Nearest(*(torch.cat(of_parts)[row_K] for of_parts in zip(*parts, strict=True)))


def nearest_texts(
    unit_ID: np.ndarray,
    item_K: np.ndarray | None = None,
    num_nearest: int | None = None,
    device: torch.device | str = "cpu",
    distinct: DistinctTexts | None = None,
) -> NearTexts:
    """Each item with the items whose texts are nearest (`nearest_of`), as far as their cosine is above 0.

    ``num_nearest``: without it as many as `MAX_NEAREST` leaves each item, and `MIN_NEAREST` at least.
    ``item_K``: the items whose rows are filled, all without it. ``distinct``: `distinct_texts`, where it is known.
    """
    num_items = len(unit_ID)
    num_nearest = max(MIN_NEAREST, MAX_NEAREST // max(1, num_items)) if num_nearest is None else num_nearest
    item_K = np.arange(num_items) if item_K is None else np.unique(item_K)
    near = nearest_of(unit_ID, num_nearest, item_K, device, distinct)
    far_2I = np.zeros((2, num_items))
    if num_nearest < num_items:
        far_2I[:, item_K] = near.far_K2.numpy().T
    value_KN, item_KN = near.cosine_KN.double().numpy(), near.item_KN.numpy()
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
