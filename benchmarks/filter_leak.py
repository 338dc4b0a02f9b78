"""The leak of a filter: what a scorer that learns nothing gains where a user's whole list is filtered before the split.

    python benchmarks/filter_leak.py --data data/beauty --work runs/filter_leak

The filter is that of LISRec's public code (KDD 2026; ConsRec in its preprint): a graph of a user's items with an edge
where the cosine of their text vectors is above 0.3; the largest connected component stays, all else goes. There the
validation and test items are in that graph. Here the same filter is also applied to what is known before the test item
alone. Differs from that code: vectors of MiniLM, not of a T5 trained on the purchases; the order of events stays (the
code writes one time for all events of a user).

Shape legend: D dimensions, E events of one user, I items, U users.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import scipy
import torch
from provenance import heading
from speed import put_section
from torch import Tensor

from fedecider.baselines.counts import (
    NUM_CONTEXT,
    POPULARITY,
    TEXT,
    Votes,
    newest_weights,
    popularity_scores,
    text_votes,
    voted,
)
from fedecider.data.filtering import k_core
from fedecider.data.near_texts import nearest_texts, unit_vectors
from fedecider.data.store import load_domains
from fedecider.evaluation.metrics import user_metrics
from fedecider.evaluation.protocols import rank_held_out
from fedecider.evaluation.sequences import SequenceArray
from fedecider.evaluation.statistics import mean_interval, paired_difference
from fedecider.models.item_texts import encoded_texts
from fedecider.running.command import run

PAGE = Path(__file__).with_name("results") / "leaderboard.md"
TITLE = "The leak of a filter"
THRESHOLDS, K_CORE = "0.3,0.5", 5
"""The public code has 0.3, of its own vectors, and needs 5 events of a user and of an item after the filter."""
METRICS = ("hit@10", "ndcg@10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/beauty"), help="prepared data of one domain")
    parser.add_argument("--work", type=Path, default=Path("runs/filter_leak"), help="text vectors are kept there")
    parser.add_argument("--thresholds", default=THRESHOLDS, help="cosines above which two texts are near")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page whose section is replaced")
    args = parser.parse_args()
    torch.set_num_threads(1)
    first_lines = heading("filter_leak.py", 1)
    ((name, domain),) = load_domains(args.data).items()
    vector_ID = encoded_texts({name: domain}, "auto", str(args.work))[name].numpy()
    unit_ID = vector_ID / np.maximum(np.linalg.norm(vector_ID, axis=1, keepdims=True), 1e-12)
    sequences, near = domain.clients.arrays().sequences, nearest_texts(unit_vectors(vector_ID))
    given = row("as it is", sequences, text_votes(near))
    sets = [(at, compared(given, unit_ID, at)) for at in map(float, args.thresholds.split(","))]
    body = "\n".join([*page(name, given, sets, unit_ID), "", *first_lines])
    put_section(args.output, TITLE, body)
    print(body)


class Row(NamedTuple):
    """Users under one way of filtering."""

    title: str
    user_U: np.ndarray
    """Their numbers in the data as they are, rising."""
    lists: SequenceArray
    """Their items."""
    votes: Votes
    """What a text gives to each other one."""
    positions: dict[str, Tensor]
    """Scorer -> (U,)."""

    def of(self, title: str, user_N: np.ndarray) -> Row:
        """The same figures of some users only."""
        place_N = np.searchsorted(self.user_U, user_N)
        positions = {scorer: position_U[place_N] for scorer, position_U in self.positions.items()}
        return Row(title, user_N, self.lists.take(place_N), self.votes, positions)

    def near(self, unit_ID: np.ndarray, threshold: float) -> float:
        """Share of test items that have a cosine above ``threshold`` with an item before them."""
        return fmean(bool((unit_ID[own[:-1]] @ unit_ID[own[-1]] > threshold).any()) for own in self.lists)


def component(unit_ED: np.ndarray, threshold: float) -> np.ndarray:
    """Members of the largest connected component of the graph of vectors with cosines above ``threshold``, (E,) bool.

    Nobody where no two are near; of components of one size the one that begins first.
    """
    near_EE = unit_ED @ unit_ED.T > threshold
    number_E = scipy.sparse.csgraph.connected_components(near_EE, directed=False)[1]
    size_E = np.bincount(number_E)[number_E]
    return (number_E == number_E[size_E.argmax()]) & (size_E > 1) if len(size_E) else near_EE.any(1)


def filtered(sequences: SequenceArray, unit_ID: np.ndarray, threshold: float, num_spared: int) -> SequenceArray:
    """The lists with what `component` keeps of all but the last ``num_spared`` events, which stay."""
    kept = []
    for items in sequences:
        known_E = np.array(items[: len(items) - num_spared], np.int64)
        kept.append([*known_E[component(unit_ID[known_E], threshold)].tolist(), *items[len(known_E) :]])
    return SequenceArray.of(kept)


def compared(given: Row, unit_ID: np.ndarray, threshold: float) -> list[Row]:
    """Histories filtered; whole lists filtered, and between the two the same users with their lists as they are."""
    sequences = given.lists
    history = filtered(sequences, unit_ID, threshold, num_spared=1)
    emptied_U = history.length_U == 1  # no two items before the test item are near: they stay
    kept = [own if emptied else one for own, one, emptied in zip(sequences, history, emptied_U, strict=True)]
    honest = row("history alone", SequenceArray.of(kept), given.votes)
    whole = filtered(sequences, unit_ID, threshold, num_spared=0)
    leaking = row("whole list", whole.keep(k_core(whole.row_E, whole.value_E, K_CORE, K_CORE)), given.votes)
    return [honest, given.of("as it is, users of the next row", leaking.user_U), leaking]


def row(title: str, sequences: SequenceArray, votes: Votes) -> Row:
    """Users with events, whose last ones are ranked among all items."""
    user_U, num_items = np.flatnonzero(sequences.length_U), len(votes.other_I)
    lists = sequences.take(user_U)
    scorers = {
        TEXT: lambda user_B: voted(newest_weights(lists, user_B, "test", num_items, NUM_CONTEXT), votes).dense(),
        POPULARITY: popularity_scores(lists, num_items),
    }
    positions = {scorer: rank_held_out(score, lists, num_items, "test") for scorer, score in scorers.items()}
    return Row(title, user_U, lists, votes, positions)


def page(name: str, given: Row, sets: Sequence[tuple[float, list[Row]]], unit_ID: np.ndarray) -> list[str]:
    """The section without its heading."""
    columns = [(scorer, metric) for scorer in (TEXT, POPULARITY) for metric in METRICS]
    middle = np.median((unit_ID * np.roll(unit_ID, len(unit_ID) // 2, 0)).sum(1))
    lines = [
        f"{name.capitalize()}, leave last out. The public code of LISRec (KDD 2026; ConsRec in its preprint) makes a "
        "graph of all items of a user, validation and test items among them, with an edge where the cosine of two "
        "texts is above 0.3. Its largest component is the new list, which is then split; users and items with fewer "
        f"than {K_CORE} events left go. So a test item is near an item of its history by construction, but for items "
        "that go later. (It also writes one time for all events of a user; here their order stays.) Here the "
        f"vectors are MiniLM's, in which two texts of this catalogue have a median cosine of {middle:.2f}, so that 0.3 "
        "removes little. Nothing is trained: text neighbours rank by the same vectors, popularity does not read them. "
        "`near`: test items with a cosine above the threshold to an item before them. `history alone`: the same "
        "filter of all items before the test item, which stays. All rows rank the whole catalogue; the code ranks what "
        "is left.",
        "",
        f"| threshold | filter | users | near | {' | '.join(f'{scorer} {metric}' for scorer, metric in columns)} |",
        f"|---|---|---:|---:|{'---:|' * len(columns)}",
    ]
    for threshold, one in [("", given), *((f"{at:g}", one) for at, rows in sets for one in rows)]:
        near = f"{one.near(unit_ID, float(threshold)):.1%}" if threshold else ""
        figures = [cell(value(one, scorer, metric)) for scorer, metric in columns]
        lines.append(f"| {' | '.join([threshold, one.title, f'{len(one.user_U):,}', near, *figures])} |")
    lines.append("")
    for at, (honest, same_users, leaking) in sets:
        num_left, num_changed = len(leaking.user_U), (leaking.lists.last() != same_users.lists.last()).sum()
        lines.append(
            f"- {at:g}: the filter of whole lists drops {len(given.user_U) - num_left:,} users; of the others "
            f"{num_changed:,} get another test item. Text neighbours, ndcg@10, paired over users: history alone "
            f"{gain(honest, given)}, whole list {gain(leaking, same_users)}."
        )
    return lines


def value(one: Row, scorer: str, metric: str) -> Tensor:
    """(U,) figures of the users."""
    return user_metrics(one.positions[scorer], (10,))[metric]


def gain(first: Row, second: Row) -> str:
    """ndcg@10 of text neighbours, first less second, with the interval over users."""
    found = paired_difference(value(first, TEXT, "ndcg@10"), value(second, TEXT, "ndcg@10")).interval
    return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def cell(value_U: Tensor) -> str:
    """A mean over users with its interval."""
    found = mean_interval(value_U)
    return f"{found.mean:.4f} [{found.low:.4f}, {found.high:.4f}]"


if __name__ == "__main__":
    sys.exit(run(main))
