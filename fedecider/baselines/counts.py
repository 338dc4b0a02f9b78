"""Baselines that need no training: popularity, item co-occurrence and neighbours by item texts.

All of them count over train parts only (plus given public sequences), and are ranked by
:func:`fedecider.evaluation.protocols.rank_held_out` like every other model.

Nothing is trained. Where counts are thin, the neighbours of an item are its own series, format variants and franchises.

Shape legend: B users of a batch, U users, I items, E events, T other items in a context, D dimensions, H newest items
of a history.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.baselines import baskets, ease, item_knn
from fedecider.data.near_texts import NearTexts
from fedecider.evaluation import protocols
from fedecider.evaluation.beyond import NUM_LISTED, first_ten
from fedecider.evaluation.metrics import SparseScores, sparse_positions
from fedecider.evaluation.sequences import SequenceArray

MAX_PAIRS = 4_000_000
FARTHEST = 50
"""Events between which a pair still counts: one farther apart weighs less than a fiftieth of direct successors, and a
year of shopping has a thousand times as many of those."""


def train_counts(sequences: protocols.Sequences, num_items: int, extra: protocols.Sequences = ()) -> Tensor:
    """Events per item in the train parts of ``sequences`` and in all of ``extra``. float64 (I,)."""
    item_E = counted_parts(sequences, extra).value_E
    return torch.from_numpy(np.bincount(item_E, minlength=num_items).astype(np.float64))


def cooccurrence_matrix(
    sequences: protocols.Sequences,
    num_items: int,
    extra: protocols.Sequences = (),
    *,
    window: int | None = 1,
    directed: bool = True,
) -> scipy.sparse.csr_array:
    """Sparse (I, I): entry (a, b) sums 1 / distance over the places where b stands up to ``window`` events after a.

    ``window=1, directed=True`` counts direct successors (a first-order Markov chain); ``window=None`` goes as far as
    `FARTHEST`; ``directed=False`` adds the transpose. Train parts of ``sequences`` and all of ``extra``.
    Of baskets counted are the pairs of a basket with the next, and with ``directed=False`` those within a basket, each
    by 1.
    """
    parts = counted_parts(sequences, extra)
    if parts.basket_E is not None:
        within_II, next_II = baskets.basket_pairs(parts, num_items)
        return next_II if directed else scipy.sparse.csr_array(within_II + next_II + next_II.T)
    item_E, owner_E = parts.value_E.astype(np.int64, copy=False), parts.row_E
    longest = int(parts.length_U.max(initial=1))
    total = scipy.sparse.csr_array((num_items, num_items))
    pairs: list[np.ndarray] = []
    for distance in range(1, min(longest - 1, window or FARTHEST) + 1):
        same = owner_E[:-distance] == owner_E[distance:]
        first, second = item_E[:-distance][same], item_E[distance:][same]
        pairs.append(np.stack([first, second, np.full(len(first), 1.0 / distance)]))
        if sum(pair.shape[1] for pair in pairs) > MAX_PAIRS:  # one sparse sum per few million pairs: fast, bounded
            total, pairs = total + _summed(pairs, num_items), []
    total = total + _summed(pairs, num_items)
    return scipy.sparse.csr_array(total if directed else total + total.T)


def popularity_scores(
    sequences: protocols.Sequences, num_items: int, extra: protocols.Sequences = ()
) -> protocols.ScoreUsers:
    """Scores every item by its train count, alike for every user."""
    count_I = train_counts(sequences, num_items, extra)
    return lambda user_B: count_I.expand(len(user_B), -1)


class Votes(NamedTuple):
    """What items give to all others, and what all items have without them."""

    vote_II: scipy.sparse.csr_array
    """What an item of the history gives to each item."""
    other_I: np.ndarray


def cooccurrence_votes(
    sequences: protocols.Sequences,
    num_items: int,
    extra: protocols.Sequences = (),
    *,
    window: int | None = 1,
    directed: bool = True,
) -> Votes:
    """M[a, b] / (1 + sum_c M[a, c]), M from :func:`cooccurrence_matrix`, and the popularity that orders ties."""
    matrix = cooccurrence_matrix(sequences, num_items, extra, window=window, directed=directed)
    scale = 1.0 / (1.0 + np.asarray(matrix.sum(1)).ravel())
    rows = scipy.sparse.csr_array(scipy.sparse.diags_array(scale) @ matrix)
    return Votes(rows, tie_scores(train_counts(sequences, num_items, extra).numpy()))


def tie_scores(count_I: np.ndarray) -> np.ndarray:
    """What orders items that have no other score, by popularity: too small to overturn a count. (I,)."""
    return 1e-9 * count_I / (1.0 + count_I.max(initial=0.0))


def newest_weights(
    sequences: protocols.Sequences, user_B: Tensor, split: str, num_items: int, num_context: int
) -> scipy.sparse.csr_array:
    """1, 1/2, 1/3, ... for the newest ``num_context`` items of each history, or items of as many baskets, (B, I)."""
    rows = protocols.histories(SequenceArray.of(sequences).take(user_B), split)
    newest_E = np.flatnonzero(rows.num_after_E < num_context)[::-1]  # newest first: so an item's weights are added up
    weight_T = 1.0 / (1.0 + rows.num_after_E[newest_E])
    places = (rows.row_E[newest_E], rows.value_E[newest_E])
    return scipy.sparse.coo_array((weight_T, places), shape=(len(rows), num_items)).tocsr()


def voted(context_BI: scipy.sparse.csr_array, votes: Votes) -> SparseScores:
    """The sum of what the items of each history give."""
    return with_others(scipy.sparse.csr_array(context_BI @ votes.vote_II), votes.other_I)


def with_others(vote_BI: scipy.sparse.csr_array, other_I: np.ndarray) -> SparseScores:
    """Votes on top of what every item has."""
    data = vote_BI.data + other_I[vote_BI.indices]
    return SparseScores(scipy.sparse.csr_array((data, vote_BI.indices, vote_BI.indptr), vote_BI.shape), other_I)


def cooccurrence_scores(
    sequences: protocols.Sequences,
    num_items: int,
    split: str,
    extra: protocols.Sequences = (),
    *,
    window: int | None = 1,
    directed: bool = True,
    num_context: int = 1,
) -> protocols.ScoreUsers:
    """Scores items by co-occurrence with the newest ``num_context`` items of the history.

    score(b) = sum_k M[h_k, b] / ((1 + sum_c M[h_k, c]) * (k + 1)), h_0 the newest item, M from
    :func:`cooccurrence_matrix`. Ties, and items that never co-occurred, are ordered by popularity (a term too small
    to overturn a count), as a plain implementation with a fill-up list does.
    """
    votes = cooccurrence_votes(sequences, num_items, extra, window=window, directed=directed)
    return lambda user_B: voted(newest_weights(sequences, user_B, split, num_items, num_context), votes).dense()


def popularity(
    sequences: protocols.Sequences,
    num_items: int,
    split: str,
    protocol: protocols.Protocol = protocols.STRICT,
    *,
    extra: protocols.Sequences = (),
    **ranking: Any,
) -> Tensor:
    """Positions of the popularity baseline. ``ranking``: ``candidates``, ``users``, ``ties`` of ``rank_held_out``."""
    return protocols.rank_held_out(
        popularity_scores(sequences, num_items, extra), sequences, num_items, split, protocol, **ranking
    )


def counted_parts(sequences: protocols.Sequences, extra: protocols.Sequences = ()) -> SequenceArray:
    """Train parts of ``sequences`` and all of ``extra``; with baskets where ``sequences`` have some."""
    both = (protocols.train_parts(sequences), SequenceArray.of(extra))
    numbers = [
        np.arange(len(part.value_E)) if part.basket_E is None else part.basket_E.astype(np.int64) for part in both
    ]
    return SequenceArray.of_lengths(
        np.concatenate([part.length_U for part in both]),
        np.concatenate([part.value_E for part in both]),
        None if both[0].basket_E is None else np.concatenate(numbers),
    )


def _summed(pairs: list[np.ndarray], num_items: int) -> scipy.sparse.csr_array:
    first, second, weight = np.concatenate(pairs, 1) if pairs else np.zeros((3, 0))
    index = (first.astype(np.int64), second.astype(np.int64))  # float64 holds item numbers exactly
    return scipy.sparse.coo_array((weight, index), shape=(num_items, num_items)).tocsr()


NUM_CONTEXT = 10
"""Newest items of a history that vote, weighted 1, 1/2, 1/3, ..."""
TEXT_WEIGHT = 0.3
"""Weight of the text scores beside co-occurrence, fixed for every data set."""


def text_votes(near: NearTexts) -> Votes:
    """max(0, cos(e_a, e_b))^3 of the texts nearest to each, less the mean of the others, which so have 0.

    With weights 1 / (k + 1) of the k-th newest item they are text neighbours: s(b | h) = sum_k max(0, cos(e_{h_k},
    e_b))^3 / (k + 1). A near text counts much more than two half-near ones.
    Source: nearest neighbours in text space, as in content-based recommendation; the exponent and the decay are ours,
    chosen on the validation items of three Amazon domains (movies, CDs, video games).
    """
    return Votes(near.cube_II, np.zeros(len(near.far_cube_I)))


POPULARITY, LAST_ITEM, DECAYED = "popularity", "last-item co-occurrence", "decayed co-occurrence"
COUNTS = (POPULARITY, LAST_ITEM, DECAYED)
"""Rows of the rules that count."""
TEXT, TEXT_AND_COUNTS = "text neighbours", "text neighbours + counts"
OWN_FREQUENCY, LIKE_USERS, TRANSITIONS = "own frequency", "TIFU-KNN", "transitions by text"
REPEATS = (OWN_FREQUENCY, LIKE_USERS, TRANSITIONS)
"""Rows of the rules for customers who buy again, where nothing is dropped and some do."""
ITEM_KNN, EASE = "item-kNN", "EASE"
CLASSICAL = (ITEM_KNN, EASE)
"""Rows in closed form, of sets of items; where :func:`is_small`."""
UNTRAINED = (*COUNTS, TEXT, TEXT_AND_COUNTS, *CLASSICAL, *REPEATS)
USERS_AT_ONCE, FEWER_AT_ONCE = 1024, 256
"""Users whose scores are in memory; fewer of baskets, and where all items have scores."""
MOST_ITEMS = 20_000
"""Of a catalogue with rows in closed form."""
TOO_LARGE = (
    f"no {ITEM_KNN} and {EASE}: every company has them where all have at most {MOST_ITEMS:,} items, and at most "
    f"{ease.MOST:,} items or users"
)
ALL, REPEATED, NEW = "all items", "repeats", "new items"
"""Lists that a rule makes: of the whole catalogue, of what the user bought before, of all else."""


def heuristic_positions(
    sequences: protocols.Sequences,
    num_items: int,
    splits: Sequence[str],
    text: Votes,
    *,
    extra: protocols.Sequences = (),
    drop_seen: bool = True,
    ten: dict[str, Tensor] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Split -> row -> positions (U,), of baskets (U, T), as of `rank_held_out`: one list of :func:`heuristic_lists`."""
    name = NEW if drop_seen else ALL
    return _lists(SequenceArray.of(sequences), num_items, splits, text, extra, (name,), ten)[name]


def heuristic_lists(
    sequences: protocols.Sequences,
    num_items: int,
    splits: Sequence[str],
    text: Votes,
    *,
    extra: protocols.Sequences = (),
    ten: dict[str, Tensor] | None = None,
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """List -> split -> row -> positions of the held-out items, (U,), or (U, T) of baskets.

    Rows are those of ``UNTRAINED``; ``REPEATS`` only where users have items again, ``CLASSICAL`` where data are small.
    Scores are those of :func:`popularity_scores`, :func:`cooccurrence_scores` (direct successors of the newest item,
    and the whole context), ``text``, the sum of both with `TEXT_WEIGHT` and :mod:`fedecider.baselines.baskets`; no
    (U, I) scores are held. Of `REPEATED` and `NEW` the positions of other held-out items are NaN.
    """
    rows = SequenceArray.of(sequences)
    found = _lists(rows, num_items, splits, text, extra, (ALL, REPEATED, NEW), ten)
    for split in splits:
        repeated_U = protocols.is_repeat(rows.take(protocols.with_target(rows, split)), split)
        for name, is_other_U in ((REPEATED, ~repeated_U), (NEW, repeated_U)):
            for position_U in found[name][split].values():
                position_U[is_other_U] = math.nan
    return found


def _lists(
    rows: SequenceArray,
    num_items: int,
    splits: Sequence[str],
    text: Votes,
    extra: protocols.Sequences,
    lists: Sequence[str],
    ten: dict[str, Tensor] | None,
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """``ten`` gets, by row, what the first of ``lists`` begins with for test items (`fedecider.evaluation.beyond`)."""
    protocols.check_sequences(rows, num_items)
    rules, at_once = (
        [_counting(rows, num_items, text, extra)],
        USERS_AT_ONCE if rows.basket_E is None else FEWER_AT_ONCE,
    )
    if is_small(len(rows) + len(extra), num_items):
        rules, at_once = [*rules, _classical(rows, num_items, extra)], FEWER_AT_ONCE
    if set(lists) != {NEW} and protocols.train_parts(rows).num_repeats_U.any():
        rules.append(_repeating(rows, num_items, text, extra))
    found: dict[str, dict[str, dict[str, list[Tensor]]]] = {name: {split: {} for split in splits} for name in lists}
    for split in splits:
        target_U = protocols.held_out(rows, split).numpy()
        for user_B in torch.from_numpy(protocols.with_target(rows, split)).split(at_once):
            seen = protocols.histories(rows.take(user_B), split)
            scores = {row: score for rule in rules for row, score in rule(user_B, split).items()}
            for name, (row, score) in itertools.product(lists, scores.items()):
                dropped = seen if name == NEW else seen[:0]
                score = lifted(score, seen) if name == REPEATED else score
                place_B = sparse_positions(score, target_U[user_B], dropped.row_E, dropped.value_E)
                found[name][split].setdefault(row, []).append(place_B)
                if ten is not None and name == lists[0] and split == "test" and user_B[0] < NUM_LISTED:
                    score_BI = score.dense()
                    score_BI[dropped.row_E, dropped.value_E] = -torch.inf
                    ten[row] = torch.cat([ten.get(row, torch.zeros(0, dtype=torch.int64)), first_ten(score_BI)])
    return {
        name: {split: {row: torch.cat(parts) for row, parts in of_rows.items()} for split, of_rows in of_splits.items()}
        for name, of_splits in found.items()
    }


def lifted(score: SparseScores, seen: SequenceArray) -> SparseScores:
    """The same scores with the items of ``seen`` in front of all others."""
    value_BI, other_I = score
    largest, least = (bound(value_BI.data, initial=bound(other_I)) for bound in (np.max, np.min))
    above_BI = value_BI.copy()
    above_BI.data = value_BI.data - other_I[value_BI.indices]
    seen_BI = scipy.sparse.coo_array((np.ones(len(seen.value_E)), (seen.row_E, seen.value_E)), value_BI.shape).tocsr()
    seen_BI.data[:] = 1.0 + largest - least
    return with_others(scipy.sparse.csr_array(above_BI + seen_BI), other_I)


Rule = Callable[[Tensor, str], dict[str, SparseScores]]
"""User numbers (B,) and a split -> row -> scores."""


def _counting(rows: SequenceArray, num_items: int, text: Votes, extra: protocols.Sequences) -> Rule:
    count_I = train_counts(rows, num_items, extra).numpy()
    last = cooccurrence_votes(rows, num_items, extra)
    decayed = cooccurrence_votes(rows, num_items, extra, window=None, directed=False)

    def scores(user_B: Tensor, split: str) -> dict[str, SparseScores]:
        newest_BI = newest_weights(rows, user_B, split, num_items, 1)
        context_BI = newest_weights(rows, user_B, split, num_items, NUM_CONTEXT)
        counted_BI = scipy.sparse.csr_array(context_BI @ decayed.vote_II)
        text_BI = scipy.sparse.csr_array(context_BI @ text.vote_II)
        both_BI = scipy.sparse.csr_array(counted_BI + TEXT_WEIGHT * text_BI)
        return {
            POPULARITY: SparseScores(scipy.sparse.csr_array(newest_BI.shape), count_I),
            LAST_ITEM: voted(newest_BI, last),
            DECAYED: with_others(counted_BI, decayed.other_I),
            TEXT: with_others(text_BI, text.other_I),
            TEXT_AND_COUNTS: with_others(both_BI, decayed.other_I),
        }

    return scores


def is_small(num_users: int, num_items: int) -> bool:
    """Whether item-kNN and EASE take seconds: at most 20,000 items, and at most 4,000 items or users."""
    return num_items <= MOST_ITEMS and min(num_users, num_items) <= ease.MOST


def _classical(rows: SequenceArray, num_items: int, extra: protocols.Sequences) -> Rule:
    """`fedecider.baselines.item_knn` and `fedecider.baselines.ease` with their defaults; the sets of items are those of
    train parts, and of what lies before the held-out item."""
    matrix_UI = baskets.item_sets(counted_parts(rows, extra), num_items)
    knn = item_knn.ItemKnnConfig()
    neighbour_II = item_knn.neighbour_similarities(matrix_UI, knn.num_neighbours, knn.shrinkage)
    ease_scores = ease.scores_of(matrix_UI, ease.EaseConfig().regularisation)
    other_I = tie_scores(train_counts(rows, num_items, extra).numpy())

    def scores(user_B: Tensor, split: str) -> dict[str, SparseScores]:
        history_BI = baskets.item_sets(protocols.histories(rows.take(user_B), split), num_items)
        near_BI = scipy.sparse.csr_array(history_BI @ neighbour_II.T)
        of_all_BI = scipy.sparse.csr_array(ease_scores(history_BI))
        return {ITEM_KNN: with_others(near_BI, other_I), EASE: with_others(of_all_BI, other_I)}

    return scores


def _repeating(rows: SequenceArray, num_items: int, text: Votes, extra: protocols.Sequences) -> Rule:
    known = counted_parts(rows, extra)
    step = max(1, -(-len(known) // baskets.MAX_ASKED))
    vector_VI = baskets.temporal_frequency(known.take(np.arange(0, len(known), step)), num_items)
    edge_II = baskets.transition_edges(cooccurrence_matrix(rows, num_items, extra))
    cosine_II = text.vote_II.copy()
    cosine_II.data = np.cbrt(text.vote_II.data)
    other_I = tie_scores(train_counts(rows, num_items, extra).numpy())

    def scores(user_B: Tensor, split: str) -> dict[str, SparseScores]:
        history = protocols.histories(rows.take(user_B), split)
        newest_BI = newest_weights(rows, user_B, split, num_items, 1)
        self_B = np.where(user_B.numpy() % step == 0, user_B.numpy() // step, -1)
        values = {
            OWN_FREQUENCY: baskets.own_frequency(history, num_items),
            LIKE_USERS: baskets.like_users(baskets.temporal_frequency(history, num_items), vector_VI, self_B),
            TRANSITIONS: baskets.transitions_by_text(newest_BI, edge_II, cosine_II),
        }
        return {row: with_others(value_BI, other_I) for row, value_BI in values.items()}

    return scores
