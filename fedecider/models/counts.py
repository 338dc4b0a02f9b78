"""What a client counts of its own users: transitions, decayed contexts, and what may be summed over clients.

Seen items have probability 0 and every expert sums to 1 over the others. A user who is known is taken out of all that
is counted: what they did themselves says nothing about what others would do next.

The server learns the sum, and so does every client: with two clients the rest is the other client's counts as they
are, with three or more a sum over the others.

Shape legend: I items, P pairs of one distance, E events of all users, B histories, T newest items of all of them, D
dimensions, K distinct items, E events of users who are left out, F of them that a voting item is, P pairs of these
with the others of their user, C clients, R rows of the matrix that travel together, L = numbers of one client in that
part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.evaluation.protocols import NUM_HELD_OUT, history, target, train_part
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.secure_rounds import protocol_bytes, simulated
from fedecider.federation.secure_sum import unmask

NUM_CONTEXT = 10
"""Newest items of a history that vote, weighted 1, 1/2, 1/3, ...: older ones have next to no weight."""
CALIBRATION_SHARE = 0.1
"""Of a client's users: the weights are fitted on their train events, and no adapter is trained on them. A model is
overrated by users whom it has seen."""
MAX_CONTEXTS = 2000
"""Train events of a client on which the weights are fitted: far more than there are weights."""

# What a hybrid is asked: histories with their next items; and on which train events its weights are fitted.


class Contexts(NamedTuple):
    """Histories, oldest first, the item that followed each, and whose events they are."""

    histories: list[list[int]]
    targets: list[int]
    left_out: list[list[int]]
    """Events that are taken out of all counts before this context is scored: the user's own; empty for none."""


def calibration_users(sequences: Sequence[Sequence[int]], share: float, generator: torch.Generator) -> list[int]:
    """Rows of the users whose train events fit the weights and train no adapter: a draw, rising, of at least one.

    Drawn are users with two different train events: others give nothing to fit on.

    Raises:
        ValueError: there are not two such users, one to fit on and one to train on.
    """
    parts = SequenceArray.of(sequences).without_last(NUM_HELD_OUT)
    is_other_E = parts.value_E != parts.value_E[np.repeat(parts.start_U[:-1], parts.length_U)]
    drawn = np.flatnonzero(np.bincount(parts.row_E[is_other_E], minlength=len(parts))).tolist()
    if len(drawn) < 2:
        raise ValueError(
            f"got {len(drawn)} users with two different train events, expected two for a hybrid, one to fit its "
            "weights on and one to train on: prepare the data with more users or a larger min_length, or set "
            "hybrid.kind to none"
        )
    order = torch.randperm(len(drawn), generator=generator).tolist()
    return sorted(drawn[place] for place in order[: max(1, round(share * len(drawn)))])


def training_contexts(
    sequences: Sequence[Sequence[int]], generator: torch.Generator, max_contexts: int = MAX_CONTEXTS
) -> Contexts:
    """Every event of each user's train part from the second on, behind the events before it, with the user left out.

    Events that the user had before are left out too: seen items are no candidates. Of more than ``max_contexts`` a draw
    of ``generator``, in order. Held-out events are not read.
    """
    parts = SequenceArray.of(sequences).without_last(NUM_HELD_OUT)
    row_E, is_context_E = parts.row_E, parts.is_first_E
    is_context_E[parts.start_U[:-1][parts.length_U > 0]] = False
    places = np.flatnonzero(is_context_E)
    chosen = places[torch.randperm(len(places), generator=generator)[:max_contexts].sort().values.numpy()]
    picked = [(int(row_E[event]), int(event - parts.start_U[row_E[event]])) for event in chosen]
    return Contexts(
        [parts[user][:place] for user, place in picked],
        [parts[user][place] for user, place in picked],
        [parts[user] for user, _ in picked],
    )


def held_out_contexts(sequences: Sequence[Sequence[int]], split: str) -> Contexts:
    """What each user is asked in ``split``, with the user left out of the counts of train parts."""
    return Contexts(
        [list(history(sequence, split)) for sequence in sequences],
        [target(sequence, split) for sequence in sequences],
        [list(train_part(sequence)) for sequence in sequences],
    )


def new_contexts(histories: Sequence[Sequence[int]]) -> Contexts:
    """Histories of readers who are in no count; nothing is known of what follows (target -1)."""
    return Contexts([list(items) for items in histories], [-1] * len(histories), [[] for _ in histories])


# Counts of events and of pairs of events, in whole numbers: sums and differences of users are exact in any order.

FRACTION_BITS = 16
UNIT = 2.0**-FRACTION_BITS
"""What a stored 1 of ``pair_II`` is worth: 1 / distance is rounded to multiples of it."""
MAX_PAIRS = 4_000_000


class Counts(NamedTuple):
    """What some users' events say."""

    pair_II: scipy.sparse.csr_array
    """int64, symmetric: the sum of 1 / distance over all pairs of events of a user, in units of ``UNIT``."""
    event_I: np.ndarray
    """int64: events of each item."""

    @property
    def num_items(self) -> int:
        return len(self.event_I)

    def plus(self, other: Counts) -> Counts:
        """Counts of the users of both."""
        return Counts(scipy.sparse.csr_array(self.pair_II + other.pair_II), self.event_I + other.event_I)

    def with_items(self, num_items: int) -> Counts:
        """The same counts with so many more items, behind the others, that nobody has."""
        pair_II, total = self.pair_II.copy(), self.num_items + num_items
        pair_II.resize((total, total))
        return Counts(pair_II, np.concatenate([self.event_I, np.zeros(num_items, np.int64)]))


def no_counts(num_items: int) -> Counts:
    """Counts of nobody."""
    return Counts(scipy.sparse.csr_array((num_items, num_items), dtype=np.int64), np.zeros(num_items, np.int64))


def pair_weight(distance_P: np.ndarray) -> np.ndarray:
    """1 / distance of pairs of events in units of ``UNIT``, int64."""
    return np.rint(2**FRACTION_BITS / distance_P).astype(np.int64)


def count_events(parts: Sequence[Sequence[int]], num_items: int) -> Counts:
    """Counts of users whose events are ``parts``, oldest first; give train parts only.

    The pairs are those of `fedecider.baselines.counts.cooccurrence_matrix` with ``window=None, directed=False``.
    """
    rows = SequenceArray.of(parts)
    item_E = rows.value_E
    sums, pending, num_pending = [no_counts(num_items).pair_II], [], 0
    for distance, place_P in rows.pairs():
        for part_P in np.split(place_P, range(MAX_PAIRS, len(place_P), MAX_PAIRS)):
            weight = pair_weight(np.full(len(part_P), distance))
            pending.append((item_E[part_P], item_E[part_P + distance], weight))
            num_pending += len(weight)
            if num_pending > MAX_PAIRS:  # one sparse sum per few million pairs
                _add(sums, _summed(pending, num_items))
                pending, num_pending = [], 0
    sums.append(_summed(pending, num_items))
    while len(sums) > 1:
        sums.append(sums.pop() + sums.pop())
    (total,) = sums
    return Counts(scipy.sparse.csr_array(total + total.T), np.bincount(item_E, minlength=num_items).astype(np.int64))


def _add(sums: list[scipy.sparse.csr_array], new: scipy.sparse.csr_array) -> None:
    """Put ``new`` on a pile of sums, of which each is at least twice as large as the next: few pairs are added often.

    A single sum would be gone through as a whole for every few million pairs.
    """
    sums.append(new)
    while len(sums) > 1 and sums[-2].nnz < 2 * sums[-1].nnz:
        sums.append(sums.pop() + sums.pop())


def _summed(pending: Sequence[tuple[np.ndarray, ...]], num_items: int) -> scipy.sparse.csr_array:
    first, second, weight = (
        np.concatenate([pairs[column] for pairs in pending]) if pending else np.zeros(0, np.int64)
        for column in range(3)
    )
    return scipy.sparse.coo_array((weight, (first, second)), shape=(num_items, num_items)).tocsr()


# The experts that know no language model: each gives a distribution over the items that a history does not hold.

POPULARITY_FLOOR = 0.1
"""Added to the events of every item: no item is impossible."""
PRIOR = 10.0
"""m: counts of pairs that the popularity stands for behind every voting item."""
AGREEING_POWER = 3.0
"""Exponent of the cosine where texts are to agree with counts."""


class Newest(NamedTuple):
    """The newest items of each history that vote."""

    row_T: np.ndarray
    item_T: np.ndarray
    weight_T: np.ndarray
    """1 / (age + 1), age 0 the newest."""
    unseen_BI: np.ndarray
    """bool: the items that a history does not hold."""


class Near(NamedTuple):
    """How near the texts of the voting items are to all items."""

    vote_BK: scipy.sparse.csr_array
    """Weights of the voting items of each history."""
    cos_KI: np.ndarray
    """float32: max(0, cos) with every item."""


class Evidence(NamedTuple):
    """What the counts say about each history, before it is known how far they are trusted."""

    newest: Newest
    pair_TI: scipy.sparse.csr_array
    """Counts of pairs of each voting item with unseen items, the left-out user taken away."""
    total_T: np.ndarray
    """Counts of pairs of each voting item with any item: who had all that goes with it votes less."""
    popularity_BI: np.ndarray
    """Shares of the events of unseen items."""


def newest_items(histories: Sequence[Sequence[int]], num_items: int, num_context: int) -> Newest:
    """Which items vote, and which are no candidates. ``ValueError`` for an empty history or items out of range."""
    for items in histories:
        if not items or min(items) < 0 or max(items) >= num_items:
            raise ValueError(f"got history {list(items)[:20]}, expected item numbers from 0 to {num_items - 1}")
    voting = [list(items)[: -num_context - 1 : -1] for items in histories]
    unseen_BI = np.ones((len(voting), num_items), bool)
    for row, items in enumerate(histories):
        unseen_BI[row, list(items)] = False
    return Newest(
        np.repeat(np.arange(len(voting)), [len(items) for items in voting]),
        np.array([item for items in voting for item in items], np.int64),
        np.array([1.0 / (age + 1) for items in voting for age in range(len(items))]),
        unseen_BI,
    )


def evidence(counts: Counts, contexts: Contexts, num_context: int = NUM_CONTEXT) -> Evidence:
    """Counts behind each history, without the pairs and events of the user who is left out."""
    num_items = counts.num_items
    newest = newest_items(contexts.histories, num_items, num_context)
    pair_TI = counts.pair_II[newest.item_T]
    event_BI = np.repeat(counts.event_I[None], len(contexts.histories), 0)
    if any(contexts.left_out):
        pair_TI = pair_TI - _leave_out(contexts.left_out, newest, event_BI)
    total_T = np.asarray(pair_TI.sum(1)).ravel() * UNIT
    pair_TI = scipy.sparse.coo_array(pair_TI)
    kept = newest.unseen_BI[newest.row_T[pair_TI.row], pair_TI.col]
    places = (pair_TI.row[kept], pair_TI.col[kept])
    kept_TI = scipy.sparse.coo_array((pair_TI.data[kept] * UNIT, places), shape=pair_TI.shape).tocsr()
    popularity_BI = np.where(newest.unseen_BI, event_BI + POPULARITY_FLOOR, 0.0)
    popularity_BI /= np.maximum(popularity_BI.sum(1, keepdims=True), POPULARITY_FLOOR)
    return Evidence(newest, kept_TI, total_T, popularity_BI)


def _leave_out(left_out: Sequence[Sequence[int]], newest: Newest, event_BI: np.ndarray) -> scipy.sparse.csr_array:
    """(T, I) pairs of the users who are left out; their events are taken out of ``event_BI``."""
    num_items = event_BI.shape[1]
    item_E = np.fromiter((item for events in left_out for item in events), dtype=np.int64)
    length_B = np.array([len(events) for events in left_out])
    first_B, row_E = np.cumsum(length_B) - length_B, np.repeat(np.arange(len(left_out)), length_B)
    np.subtract.at(event_BI, (row_E, item_E), 1)
    # the events of its user that are the voting item, F of them, and behind each all events of the user, P in all
    key_E = row_E * num_items + item_E
    order_E, key_T = np.argsort(key_E, kind="stable"), newest.row_T * num_items + newest.item_T
    low_T, high_T = (np.searchsorted(key_E, key_T, side, sorter=order_E) for side in ("left", "right"))
    vote_F, place_F = _ranges(low_T, high_T - low_T)
    event_F = order_E[place_F]
    first_F, length_F = first_B[row_E[event_F]], length_B[row_E[event_F]]
    ends = np.searchsorted(length_F.cumsum(), np.arange(MAX_PAIRS, length_F.sum(), MAX_PAIRS))
    pair_TI = scipy.sparse.csr_array((len(newest.item_T), num_items), dtype=np.int64)
    for part_F in np.split(np.arange(len(event_F)), ends):  # one sparse sum per few million pairs
        of_P, other_P = _ranges(first_F[part_F], length_F[part_F])
        distance_P = np.abs(other_P - event_F[part_F][of_P])
        apart_P = distance_P > 0
        places = (vote_F[part_F][of_P[apart_P]], item_E[other_P[apart_P]])
        weight_P = pair_weight(distance_P[apart_P])
        pair_TI = pair_TI + scipy.sparse.coo_array((weight_P, places), shape=pair_TI.shape).tocsr()
    return scipy.sparse.csr_array(pair_TI)


def _ranges(first_N: np.ndarray, length_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers first, first + 1, ... of all ranges one after the other, and before them whose range each is in."""
    range_P = np.repeat(np.arange(len(first_N)), length_N)
    before_N = np.cumsum(length_N) - length_N
    return range_P, np.arange(len(range_P)) + (first_N - before_N)[range_P]


def known(found: Evidence) -> np.ndarray:
    """How much is counted of each history's newest item: what histories are told apart by. (B,)."""
    first_B = np.searchsorted(found.newest.row_T, np.arange(len(found.popularity_BI)))
    return found.total_T[first_B]


def count_probs(found: Evidence, exponent: float) -> np.ndarray:
    """p(b | h) = s(b)^exponent, s(b) = sum_k w_k (C[h_k, b] + m pop_b) / (C[h_k, .] + m) for unseen items b, over its
    sum. (B, I).

    An item of which little is counted says little, and the popularity speaks in its place. Votes of ten items make s
    flatter than what users do next; the exponent takes that back.
    """
    row_T, weight_T = found.newest.row_T, found.newest.weight_T
    num_rows = len(found.popularity_BI)
    scale_T = weight_T / (found.total_T + PRIOR)
    vote_BT = scipy.sparse.coo_array((scale_T, (row_T, np.arange(len(row_T)))), shape=(num_rows, len(row_T))).tocsr()
    backed_B = np.bincount(row_T, PRIOR * scale_T, num_rows)
    summed_BI = (vote_BT @ found.pair_TI).toarray() + backed_B[:, None] * found.popularity_BI
    return normalised(summed_BI**exponent if exponent != 1.0 else summed_BI, found.newest)


def unit_vectors(vector_ID: np.ndarray, mean_D: np.ndarray | None = None) -> np.ndarray:
    """Vectors of the item texts, centred over the catalogue, of length 1 (0 stays 0), float32.

    ``mean_D``: the mean of the catalogue, for texts that came later.
    """
    centred_ID = vector_ID.astype(np.float64) - (vector_ID.astype(np.float64).mean(0) if mean_D is None else mean_D)
    length_I1 = np.linalg.norm(centred_ID, axis=1, keepdims=True)
    return (centred_ID / np.maximum(length_I1, 1e-12)).astype(np.float32)


def near_texts(unit_ID: np.ndarray, newest: Newest) -> Near:
    """Cosines of the voting items with all items, for experts of any power."""
    known_K, place_T = np.unique(newest.item_T, return_inverse=True)
    shape = (len(newest.unseen_BI), len(known_K))
    vote_BK = scipy.sparse.coo_array((newest.weight_T, (newest.row_T, place_T)), shape=shape).tocsr()
    return Near(vote_BK, np.maximum(unit_ID[known_K] @ unit_ID.T, np.float32(0.0)))


def text_votes(near: Near, newest: Newest, power: float) -> np.ndarray:
    """s(b) = sum_k w_k max(0, cos(e_{h_k}, e_b))^power over unseen items (`text_neighbour_scores`). (B, I)."""
    raised_KI = _raised(near.cos_KI, power).astype(np.float64)
    return np.where(newest.unseen_BI, near.vote_BK @ raised_KI, 0.0)


def _raised(number_KI: np.ndarray, power: float) -> np.ndarray:
    """``number_KI`` to the power 3 or 6 by products, which take a tenth of the time of ``np.power``."""
    assert power in (3.0, 6.0), power
    cube_KI = number_KI * number_KI * number_KI
    return cube_KI if power == 3.0 else cube_KI * cube_KI


def text_probs(near: Near, newest: Newest, power: float) -> np.ndarray:
    """:func:`text_votes` over their sum; uniform where no text is near. (B, I)."""
    return normalised(text_votes(near, newest, power), newest)


def agreement_probs(found: Evidence, near: Near) -> np.ndarray:
    """p(b | h) proportional to sqrt(p_counts(b | h) p_text(b | h)): what both find likely. (B, I)."""
    text_BI = text_probs(near, found.newest, AGREEING_POWER)
    return normalised(np.sqrt(count_probs(found, 1.0) * text_BI), found.newest)


def uniform_probs(newest: Newest) -> np.ndarray:
    """The floor: all unseen items alike. (B, I)."""
    return normalised(np.zeros(newest.unseen_BI.shape), newest)


def normalised(score_BI: np.ndarray, newest: Newest) -> np.ndarray:
    """Rows over their sums; rows of zeros become uniform over the unseen items, or stay 0 where there are none."""
    total_B1 = score_BI.sum(1, keepdims=True)
    unseen_BI = newest.unseen_BI.astype(np.float64)
    uniform_BI = unseen_BI / np.maximum(unseen_BI.sum(1, keepdims=True), 1.0)
    return np.where(total_B1 > 0, score_BI / np.maximum(total_B1, np.finfo(np.float64).tiny), uniform_BI)


def popularity_probs(counts: Counts) -> np.ndarray:
    """p(b) = (events of b + floor) over their sum: what is likely for somebody of whom nothing is known. (I,)."""
    popularity_I = counts.event_I + POPULARITY_FLOOR
    return popularity_I / popularity_I.sum()


# Counts of all clients with one catalogue in one secure sum, from which each takes its own away.

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
