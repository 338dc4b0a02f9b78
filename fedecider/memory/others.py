"""Counts of all clients with one catalogue in one secure sum, from which each takes its own away.

The server learns the sum, and so does every client: with two clients the rest is the other client's counts as they
are, with three or more a sum over the others.

Shape legend: C clients, I items, R rows of the matrix that travel together, L = numbers of one client in that part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import scipy
import torch

from fedecider.federation.secure_simulation import protocol_bytes, simulated
from fedecider.federation.secure_sum import unmask
from fedecider.memory.counts import Counts

NUMBERS_AT_ONCE = 2**22
"""Numbers of one client that are masked together: bounds the memory, changes no result."""


class Summed(NamedTuple):
    """What a secure sum of counts gave."""

    total: Counts
    bytes_up: int
    """Masked numbers that one client sends, its key and shares."""
    bytes_down: int
    """The sum as one client gets it: the numbers that are not 0, with their places, and keys and shares
    of the others."""


def securely_summed(counts: Sequence[Counts], seed: int, round: int = 0) -> Summed:
    """The sum over clients, exactly: counts are whole numbers, and masks are taken off to the last bit.

    Every client sends the upper triangle of its pairs (a pair of an item with itself included) and its events, int64,
    masked with all other clients (:mod:`fedecider.federation.secure_sum`). ``ValueError`` for fewer than two clients.
    """
    if len(counts) < 2:
        raise ValueError(f"got counts of {len(counts)} client, expected two or more: there is nothing to sum")
    num_items, clients = counts[0].num_items, range(len(counts))
    parties = simulated(tuple(clients), seed, "counts", round)
    secrets = parties.secrets(clients)
    rows, part = max(1, NUMBERS_AT_ONCE // num_items), 0
    upper: list[scipy.sparse.csr_array] = []

    def total_of(value_CL: np.ndarray) -> np.ndarray:
        nonlocal part
        part += 1
        sent = reduce(torch.add, (parties.send(one, torch.from_numpy(value_CL[one]), part) for one in clients))
        return unmask(parties.rules, parties.keys, secrets, sent, part).numpy()

    for first in range(0, num_items, rows):
        below = min(first + rows, num_items)
        keep = np.triu(np.ones((below - first, num_items), bool), first)
        summed_L = total_of(np.stack([one.pair_II[first:below].toarray()[keep] for one in counts]))
        dense_RI = np.zeros(keep.shape, np.int64)
        dense_RI[keep] = summed_L
        upper.append(scipy.sparse.csr_array(dense_RI))
    upper_II = scipy.sparse.csr_array(scipy.sparse.vstack(upper, format="csr"))
    pair_II = scipy.sparse.csr_array(upper_II + scipy.sparse.triu(upper_II, 1).T)
    total = Counts(pair_II, total_of(np.stack([one.event_I for one in counts])))
    sent = num_items * (num_items + 1) // 2 + num_items
    down, up = (sum(sizes.values()) for sizes in protocol_bytes(parties.rules, 0))
    return Summed(total, 8 * sent + up, 16 * int(upper_II.nnz) + 8 * num_items + down)


def without(total: Counts, own: Counts) -> Counts:
    """The counts of the others."""
    rest_II = scipy.sparse.csr_array(total.pair_II - own.pair_II)
    rest_II.eliminate_zeros()
    return Counts(rest_II, total.event_I - own.event_I)
