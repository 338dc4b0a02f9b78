"""Synthetic histories: histories and targets drawn from published item texts alone, without a single interaction.

Shape legend: I items, K neighbours, N histories, H items of a history, D dimensions, B items of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedecider.data.near_texts import nearest_of


class Neighbours(NamedTuple):
    """The items whose texts stand nearest to each item's, itself not among them."""

    item_IK: np.ndarray
    share_IK: np.ndarray
    """Running sums of the probabilities, 1 in the last column."""


def nearest_items(vector_ID: Tensor, count: int = 20, temperature: float = 0.1) -> Neighbours:
    """The ``count`` nearest items by cosine with probabilities softmax(cos / temperature); fewer in a small catalogue.

    Raises:
        ValueError: a catalogue of one item has no neighbours.
    """
    if len(vector_ID) < 2:
        raise ValueError(f"got a catalogue of {len(vector_ID)} item, expected two or more: none has a neighbour")
    unit_ID = normalize(vector_ID.float(), dim=1)
    near = nearest_of(unit_ID.numpy(), count + 1)
    cosine_IN = near.cosine_KN.masked_fill(near.item_KN == torch.arange(len(unit_ID))[:, None], -torch.inf)
    cosine_IK, place_IK = cosine_IN.topk(cosine_IN.shape[1] - 1, dim=1)
    item_IK = near.item_KN.gather(1, place_IK)
    share_IK = torch.softmax(cosine_IK.double() / temperature, 1).cumsum(1)
    share_IK[:, -1] = 1.0
    return Neighbours(item_IK.numpy(), share_IK.numpy())


def draw_synthetic(
    neighbours: Neighbours, num: int, rng: np.random.Generator, *, longest: int = 5, random_share: float = 0.25
) -> list[list[int]]:
    """``num`` sequences of items, the target last: a uniform target behind 1 to ``longest`` of its neighbours.

    Each item of the history is with probability ``random_share`` any item of the catalogue instead: a model that trusts
    every item of a history would not survive real ones. All items are targets equally often, so that no item of the
    catalogue is unknown to a model that has seen few users.
    """
    num_items = len(neighbours.item_IK)
    target_N = rng.integers(num_items, size=num)
    length_N = rng.integers(1, longest + 1, size=num)
    place_NH = (rng.random((num, longest, 1)) >= neighbours.share_IK[target_N][:, None]).sum(2)
    near_NH = np.take_along_axis(neighbours.item_IK[target_N], place_NH, 1)
    any_NH = rng.integers(num_items, size=(num, longest))
    history_NH = np.where(rng.random((num, longest)) < random_share, any_NH, near_NH)
    return [
        [*history[:length], target]
        for history, length, target in zip(history_NH.tolist(), length_N.tolist(), target_N.tolist(), strict=True)
    ]
