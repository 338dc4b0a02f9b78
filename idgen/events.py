"""Which training samples there are: the table of all events, windows over it, and random draws of histories.

Shapes: N samples, E events of all users, H history length, P training parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedecider.evaluation.protocols import NUM_HELD_OUT
from fedecider.evaluation.sequences import SequenceArray
from idgen.config import SampleConfig

PAIR_SHARE = 0.25
"""Of the training samples, where there are pairs."""
PAIR_WINDOW = 5
"""The largest distance of the two items of a pair; distance d is drawn with weight 1 / d."""
CROP_RATE = 0.3
"""Where there are pairs, training histories are cut to a geometric length with this stopping probability."""


class EventTable(NamedTuple):
    """All events of all users, user after user, oldest first. Samples name an event: their target."""

    item_E: np.ndarray
    task_E: np.ndarray
    user_E: np.ndarray
    first_E: np.ndarray
    """Number of the user's first event."""
    train_end_E: np.ndarray
    """One past the user's last event of the training part."""
    end_E: np.ndarray
    """One past the user's last event."""
    basket_first_E: np.ndarray | None = None
    """Number of the first event of the event's basket; None: every event is a basket of its own."""
    basket_end_E: np.ndarray | None = None
    """One past the last event of its basket."""


class Draw(NamedTuple):
    """Samples before they become tokens; histories are numbers of events, newest first, -1 behind the oldest."""

    target_N: np.ndarray
    history_NH: np.ndarray
    template_N: np.ndarray


def event_table(sequences: Sequence[Sequence[int]], hold_out: bool) -> EventTable:
    """Lay the users' events out. ``hold_out``: the last two baskets of each user are no part of the training part."""
    rows = SequenceArray.of(sequences)
    length_U, first_U = rows.length_U, rows.start_U[:-1]
    train_U = rows.without_last(NUM_HELD_OUT).length_U if hold_out else length_U
    number = np.int32 if len(rows.value_E) < 2**31 else np.int64  # 24 bytes an event, 48 with the larger ones
    users_U, train_end_U = np.arange(len(rows), dtype=number), (first_U + train_U).astype(number)
    first_E = np.repeat(first_U.astype(number), length_U)
    return EventTable(
        item_E=rows.value_E,
        task_E=np.zeros(len(first_E), number),
        user_E=np.repeat(users_U, length_U),
        first_E=first_E,
        train_end_E=np.repeat(train_end_U, length_U),
        end_E=np.repeat(rows.start_U[1:].astype(number), length_U),
        **({} if rows.basket_E is None else _basket_ends(rows, number)),
    )


def _basket_ends(rows: SequenceArray, number: Any) -> dict[str, np.ndarray]:
    start_N: np.ndarray = np.append(np.flatnonzero(rows.is_new_basket_E), len(rows.value_E)).astype(number)
    size_N = np.diff(start_N)
    return {"basket_first_E": np.repeat(start_N[:-1], size_N), "basket_end_E": np.repeat(start_N[1:], size_N)}


def shuffled(events: EventTable, rng: np.random.Generator) -> EventTable:
    """The items of each basket in random order, which means nothing; the table itself where there are no baskets."""
    if events.basket_first_E is None:
        return events
    order_E = np.lexsort((rng.random(len(events.item_E)), events.basket_first_E))
    return events._replace(item_E=events.item_E[order_E])


def without_last_targets(events: EventTable, users: Collection[int]) -> EventTable:
    """The table without the last basket of the training parts of ``users``."""
    cut_E = np.isin(events.user_E, np.fromiter(users, events.user_E.dtype, len(users)))
    last_E = events.train_end_E - 1
    last_E = last_E if events.basket_first_E is None else events.basket_first_E[last_E]
    return events._replace(train_end_E=np.where(cut_E, last_E, events.train_end_E))


def merge_events(tables: Sequence[EventTable]) -> EventTable:
    """One table of several tasks: tasks and events are renumbered, users and items keep their numbers."""
    if len(tables) == 1:
        return tables[0]
    shifts = np.cumsum([0, *(len(table.item_E) for table in tables)])[:-1]
    if any(table.basket_first_E is not None for table in tables):
        tables = [table if table.basket_first_E is not None else _single(table) for table in tables]
    shifted = [
        table._replace(
            task_E=table.task_E + number,
            first_E=table.first_E + shift,
            train_end_E=table.train_end_E + shift,
            end_E=table.end_E + shift,
            basket_first_E=None if table.basket_first_E is None else table.basket_first_E + shift,
            basket_end_E=None if table.basket_end_E is None else table.basket_end_E + shift,
        )
        for number, (table, shift) in enumerate(zip(tables, shifts, strict=True))
    ]
    columns = zip(*shifted, strict=True)
    return EventTable._make(None if column[0] is None else np.concatenate(column) for column in columns)


def _single(events: EventTable) -> EventTable:
    """The table with every event as a basket of its own, which is what one without baskets means."""
    event_E = np.arange(len(events.item_E), dtype=events.first_E.dtype)
    return events._replace(basket_first_E=event_E, basket_end_E=event_E + 1)


def is_target(events: EventTable) -> np.ndarray:
    """Bool (E,): events of the training part with a history, which is what lies before their basket."""
    event_E = np.arange(len(events.item_E))
    before_E = event_E if events.basket_first_E is None else events.basket_first_E
    return (before_E > events.first_E) & (event_E < events.train_end_E)


def next_basket(events: EventTable, event_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random event of the basket behind that of each event, -1 where the training part has none."""
    assert events.basket_end_E is not None
    next_N = events.basket_end_E[event_N]
    is_there_N = next_N < events.train_end_E[event_N]
    next_N = np.where(is_there_N, next_N, 0)
    size_N = events.basket_end_E[next_N] - next_N
    return np.where(is_there_N, next_N + (rng.random(size_N.shape) * size_N).astype(np.int64), -1)


def window_ends(events: EventTable, longest: int, cost_E: np.ndarray, room: int) -> np.ndarray:
    """Last targets of windows that cover every training part, the newest events first; in ascending order.

    A window has at most ``longest`` + 1 events, which cost at most ``room`` tokens together; two always fit. Two
    windows of a user share one event, the last target of the one being the first item of the other: behind a first
    item every event with a history is a target once. With baskets, windows in which no item has a basket behind it are
    left out (IDs of several tokens: in which none begins).
    """
    is_one_token = bool(cost_E.max(initial=1) == 1)
    total_E1 = np.concatenate([[0], np.cumsum(cost_E)])
    first_P, end_P = _training_parts(events)
    ends = []
    while len(first_P):  # one window of every part that is not covered yet
        left_P = end_P > first_P
        first_P, end_P = first_P[left_P], end_P[left_P]
        fits_P = np.searchsorted(total_E1, total_E1[end_P + 1] - room)  # the earliest start within the room
        start_P = np.minimum(np.maximum(np.maximum(first_P, end_P - longest), fits_P), end_P - 1)
        if events.basket_end_E is not None:
            last_P = events.train_end_E[start_P] - 1 if is_one_token else end_P
            ends.append(end_P[events.basket_end_E[start_P] <= last_P])
        else:
            ends.append(end_P)
        end_P = start_P
    return np.sort(np.concatenate([np.zeros(0, np.int64), *ends]))


def _training_parts(events: EventTable) -> tuple[np.ndarray, np.ndarray]:
    """First and last event of every training part that is not empty, int64."""
    starts = np.flatnonzero(events.first_E == np.arange(len(events.item_E)))
    ends = events.train_end_E[starts].astype(np.int64)
    return starts[ends > starts], ends[ends > starts] - 1


def histories(events: EventTable, target_N: np.ndarray, longest: int) -> np.ndarray:
    """Events before each target, newest first, -1 behind the oldest one, (N, H)."""
    history_NH = target_N[:, None] - 1 - np.arange(longest)
    return np.where(history_NH >= events.first_E[target_N][:, None], history_NH, -1)


def draw_samples(
    events: EventTable, target_N: np.ndarray, num_templates: int, config: SampleConfig, rng: np.random.Generator
) -> Draw:
    """Templates and augmentations of training samples. A row reads on event by event; else a history ends before the
    basket of its target."""
    first_E = None if config.is_row else events.basket_first_E
    history_NH = histories(events, target_N if first_E is None else first_E[target_N], config.max_history)
    if config.pairs:
        kept_N = rng.geometric(CROP_RATE, len(history_NH))
        history_NH = np.where(np.arange(history_NH.shape[1]) < kept_N[:, None], history_NH, -1)
    if config.item_dropout > 0:
        history_NH = _thinned(history_NH, config.item_dropout, rng)
    if config.pairs:
        target_N, history_NH = _with_pairs(events, target_N, history_NH, rng)
    return Draw(target_N, history_NH, rng.integers(num_templates, size=len(target_N)))


def _thinned(history_NH: np.ndarray, probability: float, rng: np.random.Generator) -> np.ndarray:
    """Leave out items at random; a history that would lose all keeps all. The rest moves up."""
    kept_NH = (history_NH >= 0) & (rng.random(history_NH.shape) >= probability)
    kept_NH = np.where(kept_NH.any(1, keepdims=True), kept_NH, history_NH >= 0)
    thinned_NH = np.where(kept_NH, history_NH, -1)
    return np.take_along_axis(thinned_NH, np.argsort(~kept_NH, axis=1, kind="stable"), 1)


def _with_pairs(
    events: EventTable, target_N: np.ndarray, history_NH: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Replace some samples by pairs of near events of one training part: any of its events is the target.

    A drawn pair that would leave the training part is not used; its sample stays as it was.
    """
    distance = np.arange(1, PAIR_WINDOW + 1)
    offset_N = rng.choice(distance, len(target_N), p=(1 / distance) / (1 / distance).sum())
    sign_N = np.where(rng.random(len(target_N)) < 0.5, 1, -1)
    trainable = np.flatnonzero(np.arange(len(events.item_E)) < events.train_end_E)
    centre_N = trainable[rng.integers(len(trainable), size=len(target_N))]
    near_N = centre_N + sign_N * offset_N
    chosen_N = rng.random(len(target_N)) < PAIR_SHARE
    chosen_N &= (near_N >= events.first_E[centre_N]) & (near_N < events.train_end_E[centre_N])
    pair_NH = np.full_like(history_NH, -1)
    pair_NH[:, 0] = near_N
    return np.where(chosen_N, centre_N, target_N), np.where(chosen_N[:, None], pair_NH, history_NH)
