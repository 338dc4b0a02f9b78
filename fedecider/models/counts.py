"""What a client counts of its own users, and what may be summed over clients.

The server learns the sum, and so does every client: with two clients the rest is the other client's counts as they
are, with three or more a sum over the others.

Shape legend: I items, E events of all users, P pairs of events of one distance, C clients, R rows of the matrix that
travel together, L numbers of one client in that part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.secure_rounds import protocol_bytes, simulated
from fedecider.federation.secure_sum import unmask

FRACTION_BITS = 16
UNIT = 2.0**-FRACTION_BITS
"""What a stored 1 of ``pair_II`` is worth: 1 / distance is rounded to multiples of it, so that sums and differences of
users are exact in any order."""
MAX_DISTANCE = 20
"""Of two events that are counted as a pair: farther ones weigh next to nothing. Baskets hold many items, and those of
one basket and of the next one are pairs enough."""


class Counts(NamedTuple):
    """What some users' events say."""

    pair_II: scipy.sparse.csr_array
    """int64, symmetric: the sum of 1 / distance over all pairs of events of a user, in units of ``UNIT``."""
    next_II: scipy.sparse.csr_array
    """int64: how often the column followed the row in the next basket, in units of ``UNIT``. Never sent."""
    event_I: np.ndarray
    """int64: events of each item."""

    @property
    def num_items(self) -> int:
        return len(self.event_I)

    def plus(self, other: Counts) -> Counts:
        """Counts of the users of both."""
        return Counts(*(part + theirs for part, theirs in zip(self, other, strict=True)))

    def with_items(self, num_items: int) -> Counts:
        """The same counts with so many more items, behind the others, that nobody has."""
        pair_II, next_II, total = self.pair_II.copy(), self.next_II.copy(), self.num_items + num_items
        pair_II.resize((total, total))
        next_II.resize((total, total))
        return Counts(pair_II, next_II, np.concatenate([self.event_I, np.zeros(num_items, np.int64)]))


def counts_of(pair_II: scipy.sparse.csr_array, event_I: np.ndarray) -> Counts:
    """Counts without successors."""
    return Counts(pair_II, scipy.sparse.csr_array(pair_II.shape, dtype=np.int64), event_I)


def no_counts(num_items: int) -> Counts:
    """Counts of nobody."""
    return counts_of(scipy.sparse.csr_array((num_items, num_items), dtype=np.int64), np.zeros(num_items, np.int64))


def pair_weight(distance: int) -> int:
    """1 / distance of two baskets in units of ``UNIT``; those of one basket weigh as much as neighbours."""
    return round(2**FRACTION_BITS / max(distance, 1))


def count_events(parts: Sequence[Sequence[int]], num_items: int) -> Counts:
    """Counts of users whose events are ``parts``, oldest first; give train parts only.

    C[a, b] = sum over users, and over their pairs of baskets of which one holds a and the other b, of 1 / distance;
    within one basket of different items a and b, 1. Up to `MAX_DISTANCE`; of baskets to the next one alone.
    """
    rows = SequenceArray.of(parts)
    new_E = rows.is_new_basket_E
    basket_E, row_N = np.cumsum(new_E) - 1, rows.row_E[new_E]
    places = (basket_E, rows.value_E)
    has_NI = scipy.sparse.coo_array((np.ones(len(basket_E), np.int64), places), (len(row_N), num_items)).tocsr()
    event_I = np.bincount(rows.value_E, minlength=num_items).astype(np.int64)
    has_NI.data[:] = 1  # an item twice in a basket
    counts = no_counts(num_items)._replace(event_I=event_I)
    piles = [counts.pair_II]
    if rows.basket_E is not None:
        together_II = has_NI.T @ has_NI
        piles.append((together_II - scipy.sparse.diags_array(together_II.diagonal(), dtype=np.int64)) * pair_weight(0))
    for distance in range(1, 1 + (MAX_DISTANCE if rows.basket_E is None else 1)):
        first_P = np.flatnonzero(row_N[:-distance] == row_N[distance:])
        if not len(first_P):
            break
        after_II = scipy.sparse.csr_array(has_NI[first_P].T @ has_NI[first_P + distance])
        if distance == 1:
            counts = counts._replace(next_II=after_II * pair_weight(1))
        piles.append((after_II + after_II.T) * pair_weight(distance))
    return counts._replace(pair_II=scipy.sparse.csr_array(sum(piles[1:], piles[0])))


POPULARITY_FLOOR = 0.1
"""Added to the events of every item: no item is impossible."""


def popularity_probs(counts: Counts) -> np.ndarray:
    """p(b) = (events of b + floor) over their sum: what is likely for somebody of whom nothing is known. (I,)."""
    popularity_I = counts.event_I + POPULARITY_FLOOR
    return popularity_I / popularity_I.sum()


# What may be summed over clients that sell parts of a catalogue.

FEWEST_SELLERS = 3
"""Of an item, or of two that stand in one history, so that their counts are summed: of two sellers each would have the
other's as they are. Where two clients are all there are, that is known and told, and two are enough."""


class SharedItems(NamedTuple):
    """Which of all items of some clients enough of them sell; K clients, N items, S of them that are summed."""

    number_KI: Sequence[np.ndarray]
    """Of each client's own items, their numbers among all, rising."""
    sells_KN: np.ndarray
    """bool."""

    @property
    def fewest(self) -> int:
        return min(len(self.sells_KN), FEWEST_SELLERS)

    @property
    def number_S(self) -> np.ndarray:
        """Numbers among all of the items that are summed."""
        return np.flatnonzero(self.sells_KN.sum(0) >= self.fewest)

    @property
    def num_items(self) -> int:
        return len(self.number_S)

    def _place_I(self, client: int) -> np.ndarray:
        """Of each of its items the place among those that are summed; -1 for others."""
        place_N = np.full(self.sells_KN.shape[1], -1, np.int64)
        place_N[self.number_S] = np.arange(self.num_items)
        return place_N[self.number_KI[client]]

    def sent(self, client: int, counts: Counts) -> Counts:
        """What ``client`` gives to the sum: counts over S items, of pairs those alone that enough clients can have."""
        if self.sells_KN.all():
            return counts_of(counts.pair_II, counts.event_I)
        place_I, pairs = self._place_I(client), counts.pair_II.tocoo()
        row_P, column_P, value_P = place_I[pairs.row], place_I[pairs.col], pairs.data
        sold_KS = self.sells_KN[:, self.number_S]
        kept_P = (row_P >= 0) & (column_P >= 0)
        kept_P[kept_P] = (sold_KS[:, row_P[kept_P]] & sold_KS[:, column_P[kept_P]]).sum(0) >= self.fewest
        places = (row_P[kept_P], column_P[kept_P])
        pair_SS = scipy.sparse.coo_array((value_P[kept_P], places), shape=(self.num_items, self.num_items))
        event_S = np.zeros(self.num_items, np.int64)
        event_S[place_I[place_I >= 0]] = counts.event_I[place_I >= 0]
        return counts_of(scipy.sparse.csr_array(pair_SS), event_S)

    def received(self, client: int, counts: Counts) -> Counts:
        """Counts over S items as those of the client's own: nothing of what it does not sell."""
        if self.sells_KN.all():
            return counts
        place_I, num_items = self._place_I(client), len(self.number_KI[client])
        own_S = np.flatnonzero(place_I >= 0)
        return at_items(items_of(counts, place_I[own_S]), own_S, num_items)


def shared_items(item_keys: Sequence[Sequence[str]]) -> SharedItems:
    """The items of these clients, matched by key."""
    if all(keys == item_keys[0] for keys in item_keys[1:]):
        every = np.arange(len(item_keys[0]))
        return SharedItems([every] * len(item_keys), np.ones((len(item_keys), len(every)), bool))
    number_of = {key: number for number, key in enumerate(sorted(set().union(*item_keys)))}
    numbers = [np.array([number_of[key] for key in keys], np.int64) for keys in item_keys]
    sells_KN = np.zeros((len(item_keys), len(number_of)), bool)
    for client, number_I in enumerate(numbers):
        sells_KN[client, number_I] = True
    return SharedItems(numbers, sells_KN)


# Counts of all clients with one catalogue in one secure sum, from which each takes its own away.

NUMBERS_AT_ONCE = 2**22
"""Numbers of one client that are masked together: bounds the memory, changes no result."""
MOST_SUMMED_ITEMS = 12_288
"""Of whom pairs are summed: of I items a client sends I (I + 1) / 2 numbers. In a larger catalogue events are summed
first, and then the pairs of those items that have most of them."""


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
    if num_items > MOST_SUMMED_ITEMS:
        events = securely_summed_events(counts, seed, round)
        item_P = summed_items(events.total.event_I)
        among = securely_summed([items_of(one, item_P) for one in counts], seed, round)
        total = at_items(among.total, item_P, num_items)._replace(event_I=events.total.event_I)
        return Summed(total, among.bytes_up + events.bytes_up, among.bytes_down + events.bytes_down)
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


def securely_summed_events(counts: Sequence[Counts], seed: int, round: int = 0) -> Summed:
    """The same of their events alone."""
    clients, num_items = range(len(counts)), counts[0].num_items
    parties = simulated(tuple(clients), seed, "events", round)
    total_I = sum(parties.send(client, torch.from_numpy(one.event_I)) for client, one in enumerate(counts))
    assert isinstance(total_I, Tensor)
    total = no_counts(num_items)._replace(event_I=parties.open(total_I, clients).numpy())
    down, up = (8 * num_items + sum(sizes.values()) for sizes in protocol_bytes(parties.rules, 0))
    return Summed(total, up, down)


def summed_items(event_I: np.ndarray) -> np.ndarray:
    """Numbers of the items whose pairs are summed where these are the events of all clients; rising."""
    return np.sort(np.argsort(-event_I, kind="stable")[:MOST_SUMMED_ITEMS])


def items_of(counts: Counts, item_P: np.ndarray) -> Counts:
    """The counts of some items, without successors."""
    return counts_of(scipy.sparse.csr_array(counts.pair_II[item_P][:, item_P]), counts.event_I[item_P])


def at_items(counts: Counts, item_P: np.ndarray, num_items: int) -> Counts:
    """The same counts among more items, of which they are the ``item_P``."""
    pairs, event_I = counts.pair_II.tocoo(), np.zeros(num_items, np.int64)
    event_I[item_P] = counts.event_I
    places = (item_P[pairs.row], item_P[pairs.col])
    pair_II = scipy.sparse.coo_array((pairs.data, places), shape=(num_items, num_items))
    return counts_of(scipy.sparse.csr_array(pair_II), event_I)


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
    return counts_of(scipy.sparse.csr_array(upper_II + scipy.sparse.triu(upper_II, 1).T), event_I)


def without(total: Counts, own: Counts) -> Counts:
    """The counts of the others."""
    pair_II, next_II = total.pair_II - own.pair_II, total.next_II - own.next_II
    pair_II.eliminate_zeros()
    next_II.eliminate_zeros()
    return Counts(scipy.sparse.csr_array(pair_II), scipy.sparse.csr_array(next_II), total.event_I - own.event_I)


def rest_of_sum(total: Counts, own: Counts) -> Counts:
    """The counts of the others in a sum that ``own`` is in: its pairs that were not summed are not in it."""
    if own.num_items > MOST_SUMMED_ITEMS:
        item_P = summed_items(total.event_I)
        own = at_items(items_of(own, item_P), item_P, own.num_items)._replace(event_I=own.event_I)
    return without(total, own)


def _first_rows(num_items: int) -> range:
    return range(0, num_items, max(1, NUMBERS_AT_ONCE // num_items))


def _upper(first: int, num_items: int) -> np.ndarray:
    """(R, I) bool, what rows from ``first`` on send of themselves."""
    below = min(first + _first_rows(num_items).step, num_items)
    return np.triu(np.ones((below - first, num_items), bool), first)
