"""The memoriser: a scorer that learns nothing and finds the held-out item all the same where a protocol leaks.

Shape legend: B users of a batch, P items that may be negatives, I items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.evaluation import protocols
from fedecider.evaluation.metrics import catalogue_positions


class Draws(NamedTuple):
    """How many training negatives the memoriser sees."""

    num_rounds: int = 100
    num_negatives: int = 4
    """For each train event of a round."""
    random_ties: bool = True
    """Whether items drawn equally often are in random order: with few draws large blocks of items tie, and the expected
    position inside a block would put a memoriser that knows nothing below chance."""


def memoriser_scores(
    sequences: protocols.Sequences,
    num_items: int,
    protocol: protocols.Protocol,
    generator: torch.Generator,
    draws: Draws = Draws(),
    candidates: Mapping[str, Tensor] | None = None,
) -> protocols.ScoreUsers:
    """Scores an item by minus the times it was drawn as a training negative of the user.

    No model and no collaboration: whatever it finds beyond chance is a leak of the protocol. Every user has a stream of
    its own, so batches do not change the draws. Where seen items are kept as candidates, the user's own train items,
    never negatives, come first: it is then above chance by the repeats. ``candidates``: those of the users, which a
    protocol may keep out of the negatives.
    """
    avoided = protocols.no_negatives(sequences, protocol, candidates or {})
    num_trained_U = protocols.train_parts(sequences).length_U.tolist()
    seed_U = torch.randint(2**62, (len(sequences),), generator=generator).tolist()

    def score(user_B: Tensor) -> Tensor:
        score_BI = torch.zeros(len(user_B), num_items, dtype=torch.float64)
        for row, user in enumerate(user_B.tolist()):
            pool_P = protocols.negative_pool(avoided[user], num_items)
            num = draws.num_rounds * draws.num_negatives * num_trained_U[user]
            own = torch.Generator().manual_seed(seed_U[user])
            score_BI[row] = -torch.bincount(protocols.draw_negatives(pool_P, num, own), minlength=num_items).to(
                score_BI
            )
            if draws.random_ties:
                score_BI[row] += torch.rand(num_items, generator=own, dtype=torch.float64)
        return score_BI

    return score


def memoriser(
    sequences: protocols.Sequences,
    num_items: int,
    split: str,
    protocol: protocols.Protocol = protocols.STRICT,
    *,
    generator: torch.Generator,
    draws: Draws = Draws(),
    candidates: dict[str, Tensor] | None = None,
) -> Tensor:
    """Positions of the memoriser canary: chance under a sound protocol, near the top under a leaking one.

    Float64 (U,), 0-based, of the held-out items of ``split`` (valid or test); the other arguments are those of
    `memoriser_scores`.
    """
    score = memoriser_scores(sequences, num_items, protocol, generator, draws, candidates)
    return protocols.rank_held_out(score, sequences, num_items, split, protocol, candidates=candidates)


def memoriser_positions(
    sequences: protocols.Sequences,
    num_items: int,
    splits: Sequence[str],
    protocol: protocols.Protocol = protocols.STRICT,
    *,
    generator: torch.Generator,
    batch_size: int = 64,
) -> dict[str, Tensor]:
    """Split -> what :func:`memoriser` gives with a generator of this state; every user is drawn once."""
    protocols.check_sequences(sequences, num_items)
    score = memoriser_scores(sequences, num_items, protocol, generator)
    found: dict[str, list[Tensor]] = {split: [] for split in splits}
    target_U = {split: protocols.held_out(sequences, split) for split in splits}
    seen_U = {split: protocols.histories(sequences, split) for split in splits}
    for user_B in torch.arange(len(sequences)).split(batch_size):
        score_BI = score(user_B)
        for split, parts in found.items():
            seen = list(seen_U[split].take(user_B)) if protocol.drop_seen else None
            parts.append(catalogue_positions(score_BI, target_U[split][user_B], seen))
    return {split: torch.cat(parts)[protocols.with_target(sequences, split)] for split, parts in found.items()}
