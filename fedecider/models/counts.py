"""What a client counts of its own users: transitions, decayed contexts, and what may be summed over clients.

Seen items have probability 0 and every expert sums to 1 over the others. A user who is known is taken out of all that
is counted: what they did themselves says nothing about what others would do next.

The server learns the sum, and so does every client: with two clients the rest is the other client's counts as they
are, with three or more a sum over the others.

Shape legend: I items, P pairs of one distance, E events of all users, B histories, T newest items of all of them, D
dimensions, K items whose neighbours are asked for, N seen items of all histories, S items of all histories that
something is known of, M some of them, X those that the left-out user has, E experts, E events of users who are left
out, F of them that a voting item is, P pairs of these with the others of their user, C clients, R rows of the matrix
that travel together, L = numbers of one client in that part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.data.near_texts import NearTexts
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
"""Pairs of events in one sparse sum: about 100 MB of numbers."""


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
COUNT_EXPONENT = 1.5
"""Of counts before they become probabilities: chosen, as the powers of the cosines are, on validation items of two
Amazon pools and of the sample."""


class Newest(NamedTuple):
    """The newest items of each history that vote."""

    row_T: np.ndarray
    item_T: np.ndarray
    weight_T: np.ndarray
    """1 / (age + 1), age 0 the newest."""
    seen_N: np.ndarray
    """int64, rising: places row * I + item of the items that a history holds."""
    num_rows: int
    num_items: int

    @property
    def unseen_BI(self) -> np.ndarray:
        """bool: the items that a history does not hold."""
        unseen_BI = np.ones((self.num_rows, self.num_items), bool)
        unseen_BI.flat[self.seen_N] = False
        return unseen_BI

    @property
    def num_unseen_B(self) -> np.ndarray:
        return self.num_items - np.bincount(self.seen_N // self.num_items, minlength=self.num_rows)


class Evidence(NamedTuple):
    """What the counts say about each history, before it is known how far they are trusted."""

    newest: Newest
    pair_TI: scipy.sparse.csr_array
    """Counts of pairs of each voting item with unseen items, the left-out user taken away."""
    total_T: np.ndarray
    """Counts of pairs of each voting item with any item: who had all that goes with it votes less."""
    event_I: np.ndarray
    """Events of each item, with the floor."""
    less_X: np.ndarray
    """Places row * I + item of unseen items that the left-out user has, rising."""
    less_event_X: np.ndarray
    """The user's events of them."""

    @property
    def popularity_B(self) -> np.ndarray:
        """What popularities are divided by: the events of unseen items."""
        row_N, item_N = np.divmod(self.newest.seen_N, self.newest.num_items)
        seen_B = np.bincount(row_N, self.event_I[item_N], self.newest.num_rows)
        less_B = np.bincount(self.less_X // self.newest.num_items, self.less_event_X, self.newest.num_rows)
        return np.maximum(self.event_I.sum() - seen_B - less_B, POPULARITY_FLOOR)


def newest_items(histories: Sequence[Sequence[int]], num_items: int, num_context: int) -> Newest:
    """Which items vote, and which are no candidates. ``ValueError`` for an empty history or items out of range."""
    for items in histories:
        if not len(items) or min(items) < 0 or max(items) >= num_items:
            raise ValueError(f"got history {list(items)[:20]}, expected item numbers from 0 to {num_items - 1}")
    voting = [list(items)[: -num_context - 1 : -1] for items in histories]
    item_N = np.fromiter((item for items in histories for item in items), np.int64)
    row_N = np.repeat(np.arange(len(histories)), [len(items) for items in histories])
    return Newest(
        np.repeat(np.arange(len(voting)), [len(items) for items in voting]),
        np.array([item for items in voting for item in items], np.int64),
        np.array([1.0 / (age + 1) for items in voting for age in range(len(items))]),
        np.unique(row_N * num_items + item_N),
        len(voting),
        num_items,
    )


def evidence(counts: Counts, contexts: Contexts, num_context: int = NUM_CONTEXT) -> Evidence:
    """Counts behind each history, without the pairs and events of the user who is left out."""
    num_items = counts.num_items
    newest = newest_items(contexts.histories, num_items, num_context)
    seen_BI = ~newest.unseen_BI
    pair_TI = counts.pair_II[newest.item_T]
    total_T = np.asarray(pair_TI.sum(1)).ravel()
    pair_TI = _unseen(pair_TI, newest, seen_BI)
    less_X, less_event_X = np.zeros(0, np.int64), np.zeros(0, np.int64)
    if any(map(len, contexts.left_out)):
        left_TI, own_E = _leave_out(contexts.left_out, newest)
        total_T = total_T - np.asarray(left_TI.sum(1)).ravel()
        left_TI = _unseen(left_TI, newest, seen_BI)
        if left_TI.nnz:
            pair_TI = scipy.sparse.csr_array(pair_TI - left_TI)
        less_X, less_event_X = np.unique(own_E[~seen_BI.flat[own_E]], return_counts=True)
    shares_TI = scipy.sparse.csr_array((pair_TI.data * UNIT, pair_TI.indices, pair_TI.indptr), pair_TI.shape)
    return Evidence(newest, shares_TI, total_T * UNIT, counts.event_I + POPULARITY_FLOOR, less_X, less_event_X)


def _unseen(pair_TI: scipy.sparse.csr_array, newest: Newest, seen_BI: np.ndarray) -> scipy.sparse.csr_array:
    """The pairs with items that the history does not hold."""
    vote_P = np.repeat(np.arange(len(newest.row_T)), np.diff(pair_TI.indptr))
    kept_P = ~seen_BI[newest.row_T[vote_P], pair_TI.indices]
    start = np.concatenate([[0], np.bincount(vote_P[kept_P], minlength=len(newest.row_T)).cumsum()])
    return scipy.sparse.csr_array((pair_TI.data[kept_P], pair_TI.indices[kept_P], start), pair_TI.shape)


def _leave_out(left_out: Sequence[Sequence[int]], newest: Newest) -> tuple[scipy.sparse.csr_array, np.ndarray]:
    """(T, I) pairs of the users who are left out, and the places row * I + item of all their events."""
    num_items = newest.num_items
    item_E = np.fromiter((item for events in left_out for item in events), dtype=np.int64)
    length_B = np.array([len(events) for events in left_out])
    first_B, row_E = np.cumsum(length_B) - length_B, np.repeat(np.arange(len(left_out)), length_B)
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
    return scipy.sparse.csr_array(pair_TI), key_E


def _ranges(first_N: np.ndarray, length_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers first, first + 1, ... of all ranges one after the other, and before them whose range each is in."""
    range_P = np.repeat(np.arange(len(first_N)), length_N)
    before_N = np.cumsum(length_N) - length_N
    return range_P, np.arange(len(range_P)) + (first_N - before_N)[range_P]


def known(found: Evidence) -> np.ndarray:
    """How much is counted of each history's newest item: what histories are told apart by. (B,)."""
    first_B = np.searchsorted(found.newest.row_T, np.arange(found.newest.num_rows))
    return found.total_T[first_B]


EXPERTS = ("counts", "text", "agreement", "uniform")


class ExpertProbs(NamedTuple):
    """p_e(b | h) of the experts that know no language model, E of them as in ``EXPERTS``; 0 for seen items.

    Of most items none of them knows anything. What is not stored has ``base_BE``, for counts times ``popularity_I``,
    and for agreement ``far_B`` times ``agreeing_I`` more.
    """

    place_S: Tensor
    """Places row * I + item of unseen items, each once."""
    row_S: Tensor
    prob_SE: Tensor
    base_BE: Tensor
    popularity_I: Tensor
    far_B: Tensor
    agreeing_I: Tensor
    seen_N: Tensor
    """Places of seen items."""

    def to(self, device: torch.device) -> ExpertProbs:
        return ExpertProbs(*(part.to(device) for part in self))

    def mixture(self, weight_BE: Tensor) -> Tensor:
        """sum_e w_be p_e(i | h_b), (B, I) float64 on the device of the parts."""
        base_BE = weight_BE * self.base_BE
        total_BI = base_BE[:, 1:].sum(1, keepdim=True).addcmul(base_BE[:, :1], self.popularity_I)
        if bool(self.far_B.any()):
            far_B1 = (weight_BE[:, EXPERTS.index("agreement")] * self.far_B)[:, None]
            total_BI.addcmul_(far_B1, self.agreeing_I)
        total_1 = total_BI.view(-1)
        total_1[self.place_S] = (self.prob_SE * weight_BE[self.row_S]).sum(1)
        total_1[self.seen_N] = 0.0
        return total_BI

    def each(self) -> dict[str, Tensor]:
        """Expert -> (B, I)."""
        one_EE = torch.eye(len(EXPERTS), dtype=torch.float64, device=self.base_BE.device)
        return {name: self.mixture(one_EE[number].expand_as(self.base_BE)) for number, name in enumerate(EXPERTS)}

    def at(self, item_BN: Tensor) -> dict[str, Tensor]:
        """Expert -> (B, N): what `each` holds of some items of each history, without the others."""
        num_rows, num_items, device = len(self.base_BE), len(self.popularity_I), self.base_BE.device
        item_BN = item_BN.to(device)
        number_P = torch.full((num_rows * num_items,), -1, dtype=torch.int32, device=device)
        number_P[self.place_S] = torch.arange(len(self.place_S), dtype=torch.int32, device=device)
        number_P[self.seen_N] = -2
        number_BN = number_P[item_BN + num_items * torch.arange(num_rows, device=device)[:, None]].long()
        found = {}
        for number, name in enumerate(EXPERTS):
            base_B1 = self.base_BE[:, number, None]
            prob_BN = base_B1 * self.popularity_I[item_BN] if name == "counts" else base_B1.expand(item_BN.shape)
            if name == "agreement":
                prob_BN = prob_BN + self.far_B[:, None] * self.agreeing_I[item_BN]
            if len(self.prob_SE):
                prob_BN = torch.where(number_BN >= 0, self.prob_SE[number_BN.clamp(min=0), number], prob_BN)
            found[name] = prob_BN * (number_BN > -2)
        return found


def expert_probs(found: Evidence, near: NearTexts) -> ExpertProbs:
    """The four experts, each a distribution over the unseen items.

    - counts: proportional to s(b)^`COUNT_EXPONENT`, s(b) = sum_k w_k (C[h_k, b] + m pop_b) / (C[h_k, .] + m). An item
      of which little is counted says little, and the popularity speaks in its place. Votes of ten items make s flatter
      than what users do next; the exponent takes that back.
    - text: proportional to sum_k w_k max(0, cos(e_{h_k}, e_b))^6.
    - agreement: proportional to sqrt(s(b) t(b)), t as text with the third power: what both find likely.
    - uniform.

    Texts that are far from h_k have the mean of all such. Text and agreement are uniform where no text is near.
    """
    assert COUNT_EXPONENT == 1.5, "a product with the root takes a tenth of the time of np.power"
    newest, num_items, num_rows = found.newest, found.newest.num_items, found.newest.num_rows
    row_T, weight_T = newest.row_T, newest.weight_T
    scale_T = weight_T / (found.total_T + PRIOR)
    vote_BT = scipy.sparse.coo_array((scale_T, (row_T, np.arange(len(row_T)))), shape=(num_rows, len(row_T))).tocsr()
    context_BI = scipy.sparse.coo_array((weight_T, (row_T, newest.item_T)), shape=(num_rows, num_items)).tocsr()
    stored = [
        _stored(vote_BT @ found.pair_TI),
        _stored(context_BI @ near.cube_II),
        _stored(context_BI @ near.sixth_II),
        (found.less_X, found.less_event_X),
    ]
    # the places that anything is stored at, each once, in the order in which they come
    number_P = np.full(num_rows * num_items, -1, np.int32)
    number_P[newest.seen_N] = -2
    places, num_places = [], 0
    for place_M, _ in stored:
        new_M = place_M[number_P[place_M] == -1]
        number_P[new_M] = np.arange(num_places, num_places + len(new_M))
        places.append(new_M)
        num_places += len(new_M)
    place_S = np.concatenate(places)
    value_4S = np.zeros((len(stored), num_places))
    for value_S, (place_M, value_M) in zip(value_4S, stored, strict=True):
        number_M = number_P[place_M]
        value_S[number_M[number_M >= 0]] = value_M[number_M >= 0]
    count_S, agreeing_S, text_S, less_S = value_4S
    row_S, item_S = np.divmod(place_S, num_items)

    backed_B = np.bincount(row_T, PRIOR * scale_T, num_rows) / found.popularity_B
    vote_S = count_S + backed_B[row_S] * (found.event_I[item_S] - less_S)
    counted_S, popularity_I = vote_S * np.sqrt(vote_S), found.event_I * np.sqrt(found.event_I)
    row_N, item_N = np.divmod(newest.seen_N, num_items)

    def of_the_rest(value_I: np.ndarray) -> np.ndarray:
        """The sum over the items that are neither seen nor stored, (B,)."""
        rest_B = value_I.sum() - np.bincount(row_N, value_I[item_N], num_rows)
        return np.maximum(rest_B - np.bincount(row_S, value_I[item_S], num_rows), 0.0)

    base_B = backed_B * np.sqrt(backed_B)
    total_B = np.bincount(row_S, counted_S, num_rows) + base_B * of_the_rest(popularity_I)
    total_B = np.maximum(total_B, np.finfo(np.float64).tiny)
    uniform_B = 1.0 / np.maximum(newest.num_unseen_B, 1.0)
    far_text_B, far_agreeing_B = context_BI @ near.far_sixth_I, context_BI @ near.far_cube_I
    text_S, text_B, far_text_B = _normalised(
        text_S + far_text_B[row_S], row_S, far_text_B, of_the_rest(np.ones(num_items)), uniform_B
    )
    agreeing_I = np.sqrt(found.event_I)
    agreeing_S, agreeing_B, far_agreeing_B = _normalised(
        np.sqrt(vote_S * (agreeing_S + far_agreeing_B[row_S])),
        row_S,
        np.sqrt(backed_B * far_agreeing_B),
        of_the_rest(agreeing_I),
        uniform_B,
    )
    return ExpertProbs(
        torch.from_numpy(place_S),
        torch.from_numpy(row_S),
        torch.from_numpy(np.stack([counted_S / total_B[row_S], text_S, agreeing_S, uniform_B[row_S]], 1)),
        torch.from_numpy(np.stack([base_B / total_B, text_B + far_text_B, agreeing_B, uniform_B], 1)),
        torch.from_numpy(popularity_I),
        torch.from_numpy(far_agreeing_B),
        torch.from_numpy(agreeing_I),
        torch.from_numpy(newest.seen_N),
    )


def _stored(value_BI: scipy.sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
    """Places row * I + item of what is stored, and the values."""
    num_rows, num_items = value_BI.shape
    row_S = np.repeat(np.arange(num_rows, dtype=np.int64), np.diff(value_BI.indptr))
    return row_S * num_items + value_BI.indices, value_BI.data


def _normalised(
    value_S: np.ndarray, row_S: np.ndarray, far_B: np.ndarray, rest_B: np.ndarray, uniform_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values over their sum a row, what all items have in a row without any, and ``far_B`` over the same sum.

    ``rest_B``: how often ``far_B`` stands in that sum.
    """
    total_B = np.bincount(row_S, value_S, len(uniform_B)) + far_B * rest_B
    base_B, total_B = np.where(total_B > 0.0, 0.0, uniform_B), np.maximum(total_B, np.finfo(np.float64).tiny)
    return np.where(base_B[row_S] > 0.0, base_B[row_S], value_S / total_B[row_S]), base_B, far_B / total_B


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
            return counts
        place_I, pairs = self._place_I(client), counts.pair_II.tocoo()
        row_P, column_P, value_P = place_I[pairs.row], place_I[pairs.col], pairs.data
        sold_KS = self.sells_KN[:, self.number_S]
        kept_P = (row_P >= 0) & (column_P >= 0)
        kept_P[kept_P] = (sold_KS[:, row_P[kept_P]] & sold_KS[:, column_P[kept_P]]).sum(0) >= self.fewest
        places = (row_P[kept_P], column_P[kept_P])
        pair_SS = scipy.sparse.coo_array((value_P[kept_P], places), shape=(self.num_items, self.num_items))
        event_S = np.zeros(self.num_items, np.int64)
        event_S[place_I[place_I >= 0]] = counts.event_I[place_I >= 0]
        return Counts(scipy.sparse.csr_array(pair_SS), event_S)

    def received(self, client: int, counts: Counts) -> Counts:
        """Counts over S items as those of the client's own: nothing of what it does not sell."""
        if self.sells_KN.all():
            return counts
        place_I, num_items = self._place_I(client), len(self.number_KI[client])
        own_S = np.flatnonzero(place_I >= 0)
        pairs = counts.pair_II[place_I[own_S]][:, place_I[own_S]].tocoo()
        places = (own_S[pairs.row], own_S[pairs.col])
        event_I = np.zeros(num_items, np.int64)
        event_I[own_S] = counts.event_I[place_I[own_S]]
        pair_II = scipy.sparse.coo_array((pairs.data, places), shape=(num_items, num_items))
        return Counts(scipy.sparse.csr_array(pair_II), event_I)


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
