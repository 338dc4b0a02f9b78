"""Counts of all clients with one catalogue in one secure sum, from which each takes its own away.

The server learns the sum, and so does every client: with two clients the rest is the other client's counts as they
are, with three or more a sum over the others.

Shape legend: C clients, I items, R rows of the matrix that travel together, L = numbers of one client in that part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

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

    Every client sends all parts of its counts (`part_of`), masked with all other clients
    (:mod:`fedecider.federation.secure_sum`). ``ValueError`` for fewer than two clients.
    """
    if len(counts) < 2:
        raise ValueError(f"got counts of {len(counts)} client, expected two or more: there is nothing to sum")
    num_items, clients = counts[0].num_items, range(len(counts))
    parties = simulated(tuple(clients), seed, "counts", round)
    secrets = parties.secrets(clients)

    def opened(part: int) -> Tensor:
        sent = (parties.send(client, part_of(counts[client], part), part) for client in clients)
        return unmask(parties.rules, parties.keys, secrets, reduce(torch.add, sent), part)

    total = joined(map(opened, range(1, num_parts(num_items) + 1)), num_items)
    num_pairs = scipy.sparse.triu(total.pair_II).nnz
    sent = num_items * (num_items + 1) // 2 + num_items
    down, up = (sum(sizes.values()) for sizes in protocol_bytes(parties.rules, 0))
    return Summed(total, 8 * sent + up, 16 * num_pairs + 8 * num_items + down)


def num_parts(num_items: int) -> int:
    """Parts in which counts travel, the events last."""
    return 1 + len(_first_rows(num_items))


def part_of(counts: Counts, part: int) -> Tensor:
    """Part 1, 2, ... of what a client sends, int64 (L,): rows of the upper triangle of its pairs, then its events.

    A pair of an item with itself is in the triangle.
    """
    firsts = _first_rows(counts.num_items)
    if part > len(firsts):
        return torch.from_numpy(counts.event_I)
    first = firsts[part - 1]
    keep_RI = _upper(first, counts.num_items)
    return torch.from_numpy(counts.pair_II[first : first + len(keep_RI)].toarray()[keep_RI])


def part_size(num_items: int, part: int) -> int:
    """L of that part."""
    firsts = _first_rows(num_items)
    return num_items if part > len(firsts) else int(_upper(firsts[part - 1], num_items).sum())


def joined(parts: Iterable[Tensor], num_items: int) -> Counts:
    """The counts of which these are all parts, in their order; a part is read when the one before is put away."""
    upper, given = [], iter(parts)
    for first in _first_rows(num_items):
        keep_RI = _upper(first, num_items)
        dense_RI = np.zeros(keep_RI.shape, np.int64)
        dense_RI[keep_RI] = next(given).numpy()
        upper.append(scipy.sparse.csr_array(dense_RI))
    return of_upper(scipy.sparse.csr_array(scipy.sparse.vstack(upper, format="csr")), next(given).numpy())


def of_upper(upper_II: scipy.sparse.csr_array, event_I: np.ndarray) -> Counts:
    """The counts with these pairs on and above the diagonal."""
    return Counts(scipy.sparse.csr_array(upper_II + scipy.sparse.triu(upper_II, 1).T), event_I)


def without(total: Counts, own: Counts) -> Counts:
    """The counts of the others."""
    rest_II = scipy.sparse.csr_array(total.pair_II - own.pair_II)
    rest_II.eliminate_zeros()
    return Counts(rest_II, total.event_I - own.event_I)


def _first_rows(num_items: int) -> range:
    return range(0, num_items, max(1, NUMBERS_AT_ONCE // num_items))


def _upper(first: int, num_items: int) -> np.ndarray:
    """(R, I) bool, what rows from ``first`` on send of themselves."""
    below = min(first + _first_rows(num_items).step, num_items)
    return np.triu(np.ones((below - first, num_items), bool), first)
