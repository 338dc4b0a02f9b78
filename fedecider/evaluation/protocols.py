"""Evaluation protocols: the leave-last-out split, candidates, training negatives, and the reported round.

The last event is the test item, the last but one the validation item: this file is the only home of that rule. Where
customers buy again, or several items at a time, ``next_basket`` holds out their last baskets and drops no candidate;
``last_month`` holds out what they bought in the last 30 days, and for validation in the 30 days before, by one calendar
for all, so that no training event is later than a held-out one.

The name of the protocol is part of every number. ``paper`` exists to reproduce published
tables of the cross-device track only: its training negatives avoid the held-out items, so that the held-out item is the
one untrained item that is never a negative, and remembering the negatives is enough to find it. ``isolated99`` is the
same but for that: none of the 99 other candidates is a negative either, so remembering finds nothing.

Shape legend: U users, B users of a batch, I items of the catalogue, K candidates of a user, P items of a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedecider.evaluation.metrics import NO_ITEM, NOT_RANKED, positions_from_scores
from fedecider.evaluation.sequences import SequenceArray

Value = TypeVar("Value")

SPLITS = ("valid", "test")
NUM_AFTER = {"valid": 1, "test": 0}
"""Events of a user after the held-out one of each split."""
NUM_HELD_OUT = len(SPLITS)
"""Events of a user that no model may be trained on."""
MIN_EVENTS = NUM_HELD_OUT + 1
"""One training event, one validation item and one test item."""


def check_split(split: str) -> None:
    """``ValueError`` for what is no split."""
    if split not in SPLITS:
        raise ValueError(f"got split {split!r}, expected one of {SPLITS}")


def train_part(sequence: Sequence[Value]) -> Sequence[Value]:
    """All but the held-out events: the only ones a model may be trained on."""
    return sequence[:-NUM_HELD_OUT]


def history(sequence: Sequence[Value], split: str) -> Sequence[Value]:
    """Everything before the held-out event of ``split``: the train part; for test the validation item as well."""
    check_split(split)
    return sequence[: -1 - NUM_AFTER[split]]


def target(sequence: Sequence[Value], split: str) -> Value:
    """The held-out event of ``split``."""
    check_split(split)
    return sequence[-1 - NUM_AFTER[split]]


Sequences = Sequence[Sequence[int]]


def train_parts(sequences: Sequences) -> SequenceArray:
    """`train_part` of every user: all baskets but the last two (all events, where they are in no baskets)."""
    return SequenceArray.of(sequences).without_last(NUM_HELD_OUT)


def histories(sequences: Sequences, split: str) -> SequenceArray:
    """`history` of every user: what lies before the held-out basket of ``split``."""
    check_split(split)
    return SequenceArray.of(sequences).without_last(1 + NUM_AFTER[split])


def targets(sequences: Sequences, split: str) -> SequenceArray:
    """The items of the held-out basket of every user, each once; one item where events are in no baskets."""
    check_split(split)
    return SequenceArray.of(sequences).basket(NUM_AFTER[split])


def with_target(sequences: Sequences, split: str) -> np.ndarray:
    """Numbers of the users with something held out, int64, rising: all, but where the calendar decides."""
    check_split(split)
    rows = SequenceArray.of(sequences)
    return np.unique(rows.row_E[rows.num_after_E == NUM_AFTER[split]])


ScoreUsers = Callable[[Tensor], Tensor]
"""User numbers (B,) int64 -> scores of the whole catalogue (B, I)."""


@dataclass(frozen=True)
class Protocol:
    """One named protocol, as data."""

    name: str
    negatives_avoid: Literal["train", "all", "candidates"]
    """Training negatives are outside the user's train items only; or outside train, valid and test items (a leak); or
    outside these and all sampled candidates of the user, which closes the leak."""
    num_sampled: int | None = None
    """Candidates sampled beside the held-out item; None: the whole catalogue."""
    drop_seen: bool = True
    """Items that the user already had are no candidates."""
    selection: Literal["best_valid", "last"] = "best_valid"
    """Which round is reported; with "last" the best validation round is reported beside it. Public codes report the
    round that is best on test items, which no protocol here does."""
    leaks: bool = False
    baskets: bool = False
    """Events of one order or time are held out together; else every event is a basket of its own."""
    first_day: date | None = None
    """Of the `WINDOW_DAYS` whose purchases are the test; validation has as many days before. None: baskets decide."""


AUTO = "auto"
"""In the place of a protocol: the data decide, before the first round."""
STRICT = Protocol("strict", "train")
NEXT_BASKET = Protocol("next_basket", "train", drop_seen=False, baskets=True)
LAST_MONTH = Protocol("last_month", "train", drop_seen=False, baskets=True)
"""Data say which it is (`fedecider.data.protocol.chosen_protocol`): it is called ``last_month/2014-06-23`` then."""
WINDOW_DAYS = 30
PROTOCOLS = {
    "strict": STRICT,
    "next_basket": NEXT_BASKET,
    "last_month": LAST_MONTH,
    "strict/keep_seen": Protocol("strict/keep_seen", "train", drop_seen=False),
    "strict/sampled99": Protocol("strict/sampled99", "train", num_sampled=99),
    "isolated99": Protocol("isolated99", "candidates", num_sampled=99, selection="last"),
    "paper": Protocol("paper", "all", num_sampled=99, selection="last", leaks=True),
}


def get_protocol(name: str) -> Protocol:
    """The protocol called ``name``; ``ValueError`` with the known names otherwise."""
    kind, _, day = name.partition("/")
    if kind == LAST_MONTH.name and day:
        try:
            return replace(LAST_MONTH, name=name, first_day=date.fromisoformat(day))
        except ValueError as error:
            raise ValueError(f"got protocol {name!r}, expected its first day as in {kind}/2014-06-23") from error
    if name not in PROTOCOLS:
        raise ValueError(f"got protocol {name!r}, expected one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


def stamp(protocol: Protocol, canary: float | None = None) -> str:
    """What must stand under every table: the protocol's name and, when it leaks, what the memoriser gets."""
    if protocol.leaks:
        score = "was not run: do not publish" if canary is None else f"scores hit@10 {canary:.3f}"
        return f"{protocol.name} protocol: LEAKS the held-out item; the memoriser {score}"
    candidates = "whole catalogue" if protocol.num_sampled is None else f"{protocol.num_sampled} sampled candidates"
    candidates += ", no training negatives" if protocol.negatives_avoid == "candidates" else ""
    seen = "items seen by the user dropped" if protocol.drop_seen else "items seen by the user kept"
    return f"protocol: {protocol.name} ({candidates}, {seen})"


def check_sequences(sequences: Sequences, num_items: int) -> None:
    """``ValueError`` unless every user has ``MIN_EVENTS`` events, or baskets, and items are numbered below
    ``num_items``."""
    rows = SequenceArray.of(sequences)
    short_U = train_parts(rows).length_U == 0
    if short_U.any():
        user = int(short_U.argmax())
        what = "events" if rows.basket_E is None else "baskets"
        raise ValueError(
            f"got {rows.num_baskets_U[user]} {what} for user {user}, expected at least {MIN_EVENTS} (train, valid, "
            "test): drop such users when the data are prepared"
        )
    if len(rows) and (rows.value_E.min() < 0 or rows.value_E.max() >= num_items):
        event = int(((rows.value_E < 0) | (rows.value_E >= num_items)).argmax())
        user = int(np.searchsorted(rows.start_U, event, side="right")) - 1
        raise ValueError(
            f"got item numbers {min(rows[user])} to {max(rows[user])} for user {user}, expected 0 to {num_items - 1}"
        )


def held_out(sequences: Sequences, split: str) -> Tensor:
    """Held-out items, int64 (U,): the last event for test, the last but one for valid.

    Of sequences with baskets the items of that basket, each once, (U, T) with `NO_ITEM` behind the last one.
    """
    check_split(split)
    rows = SequenceArray.of(sequences)
    if rows.basket_E is None:
        return torch.from_numpy(rows.last(NUM_AFTER[split]).astype(np.int64))
    return torch.from_numpy(_padded(targets(rows, split)))


def _padded(rows: SequenceArray) -> np.ndarray:
    """Rows as an int64 matrix, `NO_ITEM` behind the last one of each."""
    value_UT = np.full((len(rows), int(rows.length_U.max(initial=1))), NO_ITEM, np.int64)
    value_UT[rows.row_E, np.arange(len(rows.value_E)) - np.repeat(rows.start_U[:-1], rows.length_U)] = rows.value_E
    return value_UT


def is_repeat(sequences: Sequences, split: str) -> Tensor:
    """True for users who already had their held-out item, bool (U,); of baskets item by item, (U, T), False behind the
    last one.

    Under ``drop_seen`` such an item is no candidate: no list without seen items can hold it, so its position is
    ``NOT_RANKED`` for every method alike. Report the share beside the table.
    """
    check_split(split)
    rows = SequenceArray.of(sequences)
    before = rows.without_last(1 + NUM_AFTER[split])
    if rows.basket_E is not None:
        target_UT = held_out(rows, split).numpy()
        width = int(max(rows.value_E.max(initial=0), target_UT.max(initial=0))) + 1
        pairs = before.row_E * width + before.value_E
        return torch.from_numpy(np.isin(np.arange(len(rows))[:, None] * width + target_UT, pairs) & (target_UT >= 0))
    same_E = before.value_E == np.repeat(rows.last(NUM_AFTER[split]), before.length_U)
    return torch.from_numpy(np.bincount(before.row_E[same_E], minlength=len(rows)) > 0)


def candidate_mask(sequences: Sequences, num_items: int, split: str, drop_seen: bool = True) -> Tensor:
    """Candidates of each user, bool (U, I): the catalogue minus train items and, for test, the valid item.

    The test item stays a candidate in validation: removing it would use knowledge of the future.
    With ``drop_seen=False`` the whole catalogue.
    """
    candidate_UI = torch.ones(len(sequences), num_items, dtype=torch.bool)
    if not drop_seen or not sequences:
        return candidate_UI
    check_split(split)
    seen = SequenceArray.of(sequences).without_last(1 + NUM_AFTER[split])
    candidate_UI[torch.from_numpy(seen.row_E), torch.from_numpy(seen.value_E.astype(np.int64))] = False
    return candidate_UI


def sampled_candidates(
    sequences: Sequences, num_items: int, generator: torch.Generator, num_sampled: int = 99
) -> dict[str, Tensor]:
    """Fixed candidates of both splits, int64 (U, 1 + num_sampled): the held-out item, then items the user never had.

    Distinct items, drawn uniformly; validation and test have separate draws. Drawn once per seed for all users, so
    batches and shards of users see the same lists. ``ValueError`` when a user has too few unseen items.
    """
    check_sequences(sequences, num_items)
    candidates: dict[str, Tensor] = {}
    for split in SPLITS:
        drawn = []
        for user, sequence in enumerate(sequences):
            pool_P = _outside(sequence, num_items)
            if len(pool_P) < num_sampled:
                raise ValueError(
                    f"got {len(pool_P)} items that user {user} never touched, expected at least {num_sampled} "
                    "to sample candidates from: use the protocol strict (whole catalogue)"
                )
            drawn.append(pool_P[torch.randperm(len(pool_P), generator=generator)[:num_sampled]])
        sampled_UK = torch.stack(drawn) if drawn else torch.empty(0, num_sampled, dtype=torch.int64)
        candidates[split] = torch.cat([held_out(sequences, split)[:, None], sampled_UK], 1)
    return candidates


def no_negatives(sequences: Sequences, protocol: Protocol, candidates: Mapping[str, Tensor]) -> list[list[int]]:
    """Items that are never training negatives of each user, ascending.

    ``strict``: the TRAIN items only, because the sampler must not know what is held out. ``paper``: the items of all
    splits. ``isolated99``: these and the user's ``candidates`` (of :func:`sampled_candidates`) of both splits.
    """
    avoided = [set(row) for row in (train_parts(sequences) if protocol.negatives_avoid == "train" else sequences)]
    if protocol.negatives_avoid == "candidates":
        for candidate_UK in candidates.values():
            for avoid, candidate_K in zip(avoided, candidate_UK.tolist(), strict=True):
                avoid.update(candidate_K)
    return [sorted(avoid) for avoid in avoided]


def negative_pool(avoided: Sequence[int], num_items: int) -> Tensor:
    """Items that may be training negatives of a user, ascending int64 (P,): all but those of :func:`no_negatives`.

    ``ValueError`` when nothing is left.
    """
    pool_P = _outside(avoided, num_items)
    if len(pool_P) == 0:
        raise ValueError(
            f"got a user with no item left of {num_items} to use as a negative, expected one at least: take another "
            "protocol, or users with fewer items"
        )
    return pool_P


def draw_negatives(pool_P: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """``num`` training negatives, int64 (num,): uniform over the pool, independent, so repeats happen."""
    return pool_P[torch.randint(len(pool_P), (num,), generator=generator)]


USERS_AT_ONCE = 256
"""Whose scores are in memory."""


def rank_held_out(
    score: ScoreUsers,
    sequences: Sequences,
    num_items: int,
    split: str,
    protocol: Protocol = STRICT,
    *,
    candidates: dict[str, Tensor] | None = None,
    users: Tensor | None = None,
) -> Tensor:
    """Positions of the held-out items under ``protocol``, float64, one per entry of ``users`` (None: `with_target`).

    ``score`` gives catalogue scores for user numbers; ``candidates`` comes from :func:`sampled_candidates` and is
    required when the protocol samples. The held-out item of a repeat (see :func:`is_repeat`) is ``NOT_RANKED`` when the
    protocol drops seen items.
    """
    rows = SequenceArray.of(sequences)
    check_sequences(rows, num_items)
    if protocol.num_sampled is not None and candidates is None:
        raise ValueError(
            f"got no candidates, expected those of sampled_candidates(...) for the protocol {protocol.name}"
        )
    users = torch.from_numpy(with_target(rows, split)) if users is None else users
    target_U = held_out(rows, split)
    parts = []
    for user_B in users.split(USERS_AT_ONCE):
        batch = rows.take(user_B)
        score_BI = score(user_B)
        if score_BI.shape != (len(batch), num_items):
            raise ValueError(f"got scores {tuple(score_BI.shape)}, expected {(len(batch), num_items)}")
        if protocol.num_sampled is None:
            mask_BI = candidate_mask(batch, num_items, split, protocol.drop_seen).to(score_BI.device)
            parts.append(positions_from_scores(score_BI, target_U[user_B].to(score_BI.device), mask_BI).cpu())
            continue
        assert candidates is not None
        candidate_BK = candidates[split][user_B].to(score_BI.device)
        first_B = torch.zeros(len(batch), dtype=torch.int64, device=score_BI.device)  # the held-out item is column 0
        position_B = positions_from_scores(score_BI.gather(1, candidate_BK), first_B).cpu()
        if protocol.drop_seen:
            position_B[is_repeat(batch, split)] = NOT_RANKED
        parts.append(position_B)
    return torch.cat(parts) if parts else torch.empty(target_U[:0].shape, dtype=torch.float64)


def chance_hit(sequences: Sequences, num_items: int, split: str, protocol: Protocol, k: int = 10) -> float:
    """Expected hit@k of uniformly random scores: mean over users of min(1, k / candidates); 0 for a dropped repeat.

    Of baskets it is the expected recall@k, whatever their sizes. Users are those `with_target`.
    """
    sequences = SequenceArray.of(sequences).take(with_target(sequences, split))
    if protocol.num_sampled is not None:
        count_U = torch.full((len(sequences),), 1.0 + protocol.num_sampled, dtype=torch.float64)
    else:
        check_split(split)
        seen = SequenceArray.of(sequences).without_last(1 + NUM_AFTER[split])
        num_seen_U = torch.from_numpy(seen.length_U - seen.num_repeats_U)
        count_U = (num_items - num_seen_U * protocol.drop_seen).double()
    chance_U = (k / count_U).clamp(max=1.0)
    if protocol.drop_seen:
        chance_U[is_repeat(sequences, split)] = 0.0
    return float(chance_U.mean())


def _outside(sequence: Sequence[int], num_items: int) -> Tensor:
    inside_I = torch.zeros(num_items, dtype=torch.bool)
    inside_I[torch.tensor(list(sequence), dtype=torch.int64)] = True
    return (~inside_I).nonzero()[:, 0]


MUCH_BY_CHANCE = 0.5
"""Hit@10 of guessing from which on hit@10 is said to say little."""


def few_candidates(chances: Mapping[str, float]) -> list[str]:
    """Name -> expected hit@10 of guessing: a sentence for each where so few items are ranked that it says little."""
    return [
        f"warning: {name}: so few items are left to rank that guessing has hit@10 {chance:.4f}; hit@10 says "
        f"{'nothing' if chance >= 1.0 else 'little'} here: look at ndcg@5 and mrr@5, or give more items"
        for name, chance in chances.items()
        if chance >= MUCH_BY_CHANCE
    ]
