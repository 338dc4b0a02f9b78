"""Counts and canary behind the interface of the fitted baselines.

The interface gives every row the TRAIN part as context, also when the test item is asked for. The co-occurrence rows of
:mod:`fedecider.baselines.counts` know the validation item by then; a sequence model could too, but SASRec, which stands
beside these rows, is given the TRAIN part like all others.
"""

from __future__ import annotations

from fedecider.baselines.counts import cooccurrence_scores, popularity_scores
from fedecider.baselines.fitting import Pooled, avoided_candidates
from fedecider.bounds import Negatives, OneOrMore, dataclass
from fedecider.evaluation.canary import Draws, memoriser_scores
from fedecider.evaluation.protocols import ScoreUsers
from fedecider.federation.streams import stream
from fedecider.search_space import Space, Whole


@dataclass(frozen=True)
class NoConfig:
    """A baseline without settings."""


@dataclass(frozen=True)
class MemoriserConfig:
    """Settings of the memoriser, a canary that is never tuned.

    Args:
        num_rounds: rounds in which negatives are drawn; those of the run that it stands beside.
        num_negatives: negatives per train event and round.
    """

    num_rounds: OneOrMore = 100
    num_negatives: Negatives = 4


@dataclass(frozen=True)
class DecayedConfig:
    """Settings of decayed co-occurrence.

    Args:
        num_context: newest items of the history that vote, weighted 1, 1/2, 1/3, ...
    """

    num_context: OneOrMore = 10


DECAYED_GRID: tuple[dict, ...] = ({}, {"num_context": 20}, {"num_context": 5}, {"num_context": 50})
DECAYED_SPACE: Space = {"num_context": Whole(1, 200, log=True)}


def fit_popularity(data: Pooled, config: NoConfig) -> ScoreUsers:
    """Train counts."""
    return popularity_scores(data.sequences, data.num_items)


def fit_memoriser(data: Pooled, config: MemoriserConfig) -> ScoreUsers:
    """Minus the times an item was drawn as a negative; under ``paper`` it finds the held-out items: that is its use."""
    generator = stream(data.seed, "memoriser")
    candidates = avoided_candidates(data.sequences, data.num_items, data.protocol, data.seed)
    draws = Draws(config.num_rounds, config.num_negatives)
    return memoriser_scores(data.sequences, data.num_items, data.protocol, generator, draws, candidates)


def fit_last_item_cooccurrence(data: Pooled, config: NoConfig) -> ScoreUsers:
    """Direct successors of the newest train item."""
    return cooccurrence_scores(data.sequences, data.num_items, "valid")


def fit_decayed_cooccurrence(data: Pooled, config: DecayedConfig) -> ScoreUsers:
    """Co-occurrence at any distance, in both directions, with the newest train items."""
    return cooccurrence_scores(
        data.sequences, data.num_items, "valid", window=None, directed=False, num_context=config.num_context
    )
