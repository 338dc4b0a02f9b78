"""Random draws of a round, compiled: number by number those of :mod:`embedding_fr.examples`.

Shape legend: C clients of a block, B examples of a client, E epochs, T train items, A avoided items.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedecider.federation.compiled_rows import compiled

COLUMN = (1 << 24) - 1
"""Low bits of a sort key: the column it stands for (a client has at most 16 million examples)."""
_STEP, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


class Known(NamedTuple):
    """Of each client the train items and those that are never drawn, ascending."""

    train_CT: np.ndarray
    num_train_C: np.ndarray
    avoid_CA: np.ndarray
    num_avoid_C: np.ndarray


@compiled
def counter_draw(key, number):
    """Draw ``number`` (from 0) of a stream: :func:`fedecider.federation.streams.counter_draws`."""
    value = key + (number + 1) * _STEP
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return (value ^ ((value >> 31) & 0x1FFFFFFFF)) & 0x7FFFFFFFFFFFFFFF


@compiled
def draw_items(known, key_C, count_C, num_items, item_CB):
    """The items of :func:`embedding_fr.examples.draw_examples`: train items, negatives, ``num_items``."""
    draws = np.empty(item_CB.shape[1], np.int64)
    below = np.empty(known.avoid_CA.shape[1], np.int64)
    for client in range(len(item_CB)):
        positives, count, avoided = known.num_train_C[client], count_C[client], known.num_avoid_C[client]
        item_CB[client, :positives] = known.train_CT[client, :positives]
        item_CB[client, count:] = num_items
        for j in range(avoided):
            below[j] = known.avoid_CA[client, j] - j  # allowed items below the avoided one
        draw, place = draws[positives:count], item_CB[client, positives:count]
        for x in range(len(draw)):
            draw[x] = ((counter_draw(key_C[client], positives + x) >> 31) * (num_items - avoided)) >> 32
            place[x] = 0
        left = avoided
        while left > 1:  # one level of all searches after the other, without a branch: the processor does eight at once
            half = left >> 1
            for x in range(len(draw)):
                place[x] += half if below[np.uint64(place[x] + half - 1)] <= draw[x] else 0
            left -= half
        for x in range(len(draw)):
            place[x] += draw[x] + (avoided > 0 and below[np.uint64(place[x])] <= draw[x])


@compiled
def number_rows(key_CB, num_items, row_CB, place_CB):
    """From sorted keys ``item << 32 | example``: distinct items of each client (-1 pads), the place of each example
    among them. -> the largest number of rows; padded examples share one.
    """
    largest = 0
    for client in range(len(key_CB)):
        row, last = -1, -1
        for i in range(key_CB.shape[1]):
            item = key_CB[client, i] >> 32
            if item != last:
                row, last = row + 1, item
                row_CB[client, row] = item if item < num_items else -1
            place_CB[client, key_CB[client, i] & 0xFFFFFFFF] = row
        row_CB[client, row + 1 :] = -1
        largest = max(largest, row + 1)
    return largest


@compiled
def order_keys(key_C, count_C, first_epoch, key_CEB):
    """The sort keys of :func:`embedding_fr.examples.shuffled` for the epochs from ``first_epoch`` on."""
    for client in range(len(key_C)):
        for number in range(key_CEB.shape[1]):
            first = (first_epoch + number) << 32
            for column in range(count_C[client]):
                key_CEB[client, number, column] = (counter_draw(key_C[client], first + column) >> 1 & ~COLUMN) | column
            key_CEB[client, number, count_C[client] :] = 1 << 62
