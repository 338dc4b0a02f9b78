"""Baselines that need no training: popularity, item co-occurrence and neighbours by item texts.

All of them count over train parts only (plus given public sequences), and are ranked by
:func:`fedecider.evaluation.protocols.rank_held_out` like every other model.

Nothing is trained. Where counts are thin, the neighbours of an item are its own series, format variants and franchises.

Shape legend: B users of a batch, U users, I items, E events, T other items in a context, D dimensions, H newest items
of a history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.data.near_texts import NearTexts, nearest_texts, unit_vectors
from fedecider.evaluation import protocols
from fedecider.evaluation.metrics import SparseScores, sparse_positions
from fedecider.evaluation.sequences import SequenceArray

MAX_PAIRS = 4_000_000
FARTHEST = 50
"""Events between which a pair still counts: one farther apart weighs less than a fiftieth of direct successors, and a
year of shopping has a thousand times as many of those."""


def train_counts(sequences: protocols.Sequences, num_items: int, extra: protocols.Sequences = ()) -> Tensor:
    """Events per item in the train parts of ``sequences`` and in all of ``extra``. float64 (I,)."""
    parts = _train_parts(sequences, extra)
    items = [item for part in parts for item in part]
    return torch.bincount(torch.tensor(items, dtype=torch.int64), minlength=num_items).to(torch.float64)


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
    """
    parts = _train_parts(sequences, extra)
    item_E = np.fromiter((item for part in parts for item in part), dtype=np.int64)
    owner_E = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    longest = max((len(part) for part in parts), default=1)
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
    count_I = train_counts(sequences, num_items, extra).numpy()
    return Votes(rows, 1e-9 * count_I / (1.0 + count_I.max(initial=0.0)))


def newest_weights(
    sequences: protocols.Sequences, user_B: Tensor, split: str, num_items: int, num_context: int
) -> scipy.sparse.csr_array:
    """1, 1/2, 1/3, ... for the newest ``num_context`` items of each history, (B, I)."""
    rows = protocols.histories(SequenceArray.of(sequences).take(user_B), split)
    contexts = [context[: -num_context - 1 : -1] for context in rows]
    row_T = np.repeat(np.arange(len(contexts)), [len(context) for context in contexts])
    item_T = np.array([item for context in contexts for item in context], dtype=np.int64)
    weight_T = np.array([1.0 / (age + 1) for context in contexts for age in range(len(context))])
    return scipy.sparse.coo_array((weight_T, (row_T, item_T)), shape=(len(contexts), num_items)).tocsr()


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


def _train_parts(sequences: protocols.Sequences, extra: protocols.Sequences) -> list[list[int]]:
    return [*protocols.train_parts(sequences), *map(list, extra)]


def _summed(pairs: list[np.ndarray], num_items: int) -> scipy.sparse.csr_array:
    first, second, weight = np.concatenate(pairs, 1) if pairs else np.zeros((3, 0))
    index = (first.astype(np.int64), second.astype(np.int64))  # float64 holds item numbers exactly
    return scipy.sparse.coo_array((weight, index), shape=(num_items, num_items)).tocsr()


NUM_CONTEXT = 10
"""Newest items of a history that vote, weighted 1, 1/2, 1/3, ..."""
TEXT_WEIGHT = 0.3
"""Weight of the text scores beside co-occurrence, fixed for every data set."""


def text_votes(near: NearTexts) -> Votes:
    """max(0, cos(e_a, e_b))^3 of the texts nearest to each, less the mean of the others, which so have 0."""
    return Votes(near.cube_II, np.zeros(len(near.far_cube_I)))


def text_neighbour_scores(
    vector_ID: Tensor, sequences: protocols.Sequences, split: str, *, num_context: int = NUM_CONTEXT
) -> protocols.ScoreUsers:
    """s(b | h) = sum_k max(0, cos(e_{h_k}, e_b))^3 / (k + 1), h_0 the newest item, e centred over the catalogue.

    ``vector_ID``: one vector per item text, of any length. Texts that are far from an item's own have one value for it,
    their mean (`fedecider.data.near_texts.nearest_texts`), and what all items have is left out. A near text counts much
    more than two half-near ones.
    Source: nearest neighbours in text space, as in content-based recommendation; the exponent and the decay are ours,
    chosen on the validation items of three Amazon domains (movies, CDs, video games).
    """
    votes = text_votes(nearest_texts(unit_vectors(vector_ID.numpy())))
    return lambda user_B: voted(newest_weights(sequences, user_B, split, len(vector_ID), num_context), votes).dense()


def text_and_count_scores(
    vector_ID: Tensor,
    sequences: protocols.Sequences,
    split: str,
    extra: protocols.Sequences = (),
    *,
    text_weight: float = TEXT_WEIGHT,
) -> protocols.ScoreUsers:
    """Decayed co-occurrence plus ``text_weight`` times :func:`text_neighbour_scores`; one weight for every data set.

    Events counted: train parts of ``sequences`` and all of ``extra``.
    """
    text = text_neighbour_scores(vector_ID, sequences, split)
    counts = cooccurrence_scores(
        sequences, len(vector_ID), split, extra, window=None, directed=False, num_context=NUM_CONTEXT
    )
    return lambda user_B: counts(user_B) + text_weight * text(user_B)


POPULARITY, LAST_ITEM, DECAYED = "popularity", "last-item co-occurrence", "decayed co-occurrence"
COUNTS = (POPULARITY, LAST_ITEM, DECAYED)
"""Rows of the rules that count."""
TEXT, TEXT_AND_COUNTS = "text neighbours", "text neighbours + counts"
UNTRAINED = (*COUNTS, TEXT, TEXT_AND_COUNTS)
USERS_AT_ONCE = 1024


def heuristic_positions(
    sequences: protocols.Sequences,
    num_items: int,
    splits: Sequence[str],
    text: Votes,
    *,
    extra: protocols.Sequences = (),
    drop_seen: bool = True,
) -> dict[str, dict[str, Tensor]]:
    """Split -> row -> positions (U,) as of `rank_held_out`, for all of ``UNTRAINED``.

    Scores are those of :func:`popularity_scores`, :func:`cooccurrence_scores` (direct successors of the newest item,
    and the whole context), ``text`` and :func:`text_and_count_scores`; no (U, I) or (B, I) scores are held.
    """
    sequences = SequenceArray.of(sequences)
    protocols.check_sequences(sequences, num_items)
    count_I = train_counts(sequences, num_items, extra).numpy()
    last = cooccurrence_votes(sequences, num_items, extra)
    decayed = cooccurrence_votes(sequences, num_items, extra, window=None, directed=False)
    found: dict[str, dict[str, list[Tensor]]] = {split: {row: [] for row in UNTRAINED} for split in splits}
    for split in splits:
        target_U, seen_U = protocols.held_out(sequences, split), protocols.histories(sequences, split)
        for user_B in torch.arange(len(sequences)).split(USERS_AT_ONCE):
            newest_BI = newest_weights(sequences, user_B, split, num_items, 1)
            context_BI = newest_weights(sequences, user_B, split, num_items, NUM_CONTEXT)
            counted_BI = scipy.sparse.csr_array(context_BI @ decayed.vote_II)
            text_BI = scipy.sparse.csr_array(context_BI @ text.vote_II)
            scores = {
                POPULARITY: SparseScores(scipy.sparse.csr_array(newest_BI.shape), count_I),
                LAST_ITEM: voted(newest_BI, last),
                DECAYED: with_others(counted_BI, decayed.other_I),
                TEXT: with_others(text_BI, text.other_I),
                TEXT_AND_COUNTS: with_others(
                    scipy.sparse.csr_array(counted_BI + TEXT_WEIGHT * text_BI), decayed.other_I
                ),
            }
            seen = seen_U.take(user_B if drop_seen else user_B[:0])
            row_N, item_N, target_B = seen.row_E, seen.value_E.astype(np.int64), target_U[user_B].numpy()
            for row, score in scores.items():
                found[split][row].append(sparse_positions(score, target_B, row_N, item_N))
    return {split: {row: torch.cat(parts) for row, parts in rows.items()} for split, rows in found.items()}
