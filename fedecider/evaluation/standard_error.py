"""Choices on validation items by the rule of one standard error (Breiman et al., 1984): noise moves nothing.

Shape legend: N choices, K clients, U users of a client.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def clearly_above(first_KU: Sequence[np.ndarray], second_KU: Sequence[np.ndarray]) -> bool:
    """Whether the first figures are higher than the second ones by more than one standard error.

    Both hold a figure of every user, client by client, and the same users stand in the same places. The difference is
    the mean over clients of the mean over their users, its standard error ``sqrt(sum_k s_k^2 / U_k) / K`` with the
    sample variance s_k^2 of the differences of client k. Of a client with fewer than two users it cannot be told, and
    the answer is no. A client needs to tell two numbers for it.
    """
    difference_KU = [first_U - second_U for first_U, second_U in zip(first_KU, second_KU, strict=True)]
    if any(len(one_U) < 2 for one_U in difference_KU):
        return False
    mean = np.mean([one_U.mean() for one_U in difference_KU])
    variance = np.sum([one_U.var(ddof=1) / len(one_U) for one_U in difference_KU]) / len(difference_KU) ** 2
    return bool(mean > np.sqrt(variance))


def clearly_best(gain_NKU: Sequence[Sequence[np.ndarray]]) -> int:
    """Number of the best of N choices by their mean over clients, among those that are `clearly_above` the first.

    The first is what is taken where nothing speaks against it: 0 where no other is clearly above it.
    """
    clear = [number for number in range(1, len(gain_NKU)) if clearly_above(gain_NKU[number], gain_NKU[0])]
    return max(clear, key=lambda number: np.mean([gain_U.mean() for gain_U in gain_NKU[number]]), default=0)


def first_not_beaten(gain_NKU: Sequence[Sequence[np.ndarray]]) -> int:
    """Number of the choice that is left when each of N, in order of preference, gives way to a later one only where
    that is `clearly_above` it.
    """
    held = 0
    for number in range(1, len(gain_NKU)):
        if clearly_above(gain_NKU[number], gain_NKU[held]):
            held = number
    return held
