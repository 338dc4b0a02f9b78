"""Which events are one basket: those of one order number or, where there are none, of one user at one time.

Shape legend: E events, O order numbers, B baskets.
"""

from __future__ import annotations

import numpy as np

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.readers.reading import RawEvents, finer_than_seconds
from fedecider.evaluation.sequences import SequenceArray

SAME_ORDER = "further rows of an item in one order"
MOST_DAYS = 31
"""Rows of one order number that lie further apart are no one order."""
FEW = 0.1
"""Share of order numbers with something odd up to which the column is taken for one of order numbers."""


def by_time(times: SequenceArray) -> np.ndarray:
    """(E,) int64 baskets by equal times, as fine as they are known; an event of unknown time is one of its own."""
    exact_E = times.value_E if times.fine_E is None else times.fine_E
    return np.where(times.value_E == UNKNOWN_TIME, -1 - np.arange(len(exact_E)), exact_E)


def with_orders(events: RawEvents, column: str, guessed: bool = False) -> tuple[RawEvents, list[str]]:
    """Events whose order numbers have become baskets, each called by the number of its first row, and what is odd.

    A basket is of one user: an order number of two is two baskets. Rows without an order number, and those of one whose
    rows lie more than `MOST_DAYS` apart, are one basket where they have one time. An item counts once in a basket.

    Where they are odd and the column was ``guessed`` they are left out, which is said.

    Raises:
        ValueError: more than a share of `FEW` of the order numbers belong to several users, or lie far apart.
    """
    if guessed:
        try:
            return with_orders(events, column)
        except ValueError as error:
            text = str(error).removeprefix("got ").partition(", expected")[0]
            return events._replace(basket_E=None, orders=()), [
                f"{text}: they are not used, events of one time are a basket"
            ]
    if events.basket_E is None:
        return events, []
    user_E, order_E, time_E, number_E = events.user_E, events.basket_E, events.time_E, np.arange(len(events.user_E))
    has_order_E = order_E >= 0
    first_E = _first_rows(np.where(has_order_E, order_E, -1 - number_E), user_E)
    span_E = np.zeros(len(number_E), np.int64)  # of a basket, at the place of its first row
    np.maximum.at(span_E, first_E, time_E)
    earliest_E = time_E.copy()
    np.minimum.at(earliest_E, first_E, time_E)
    days_E = (span_E - earliest_E) // 86_400
    firsts = np.flatnonzero((first_E == number_E) & has_order_E)
    is_far_E = has_order_E & (days_E[first_E] > MOST_DAYS)
    notes = []
    shared = np.flatnonzero(np.bincount(order_E[firsts], minlength=1) > 1)
    if len(shared):
        users = [events.users[user] for user in user_E[firsts[order_E[firsts] == shared[0]][:2]].tolist()]
        example = f"belong to several customers, such as {events.orders[shared[0]]} to {users[0]} and {users[1]}"
        notes.append(_odd(len(shared), events, column, example, "each customer's rows are a basket of their own"))
    far = np.unique(order_E[is_far_E])
    if len(far):
        days = int(days_E[first_E[order_E == far[0]]].max())
        example = f"have rows more than {MOST_DAYS} days apart, such as {events.orders[far[0]]} with {days} days"
        notes.append(_odd(len(far), events, column, example, "of these, the rows of one time are a basket"))
    exact_E = events.order_E if events.order_E is not None and finer_than_seconds(events) else time_E
    by_order_E = has_order_E & ~is_far_E
    other_E = np.where(time_E == UNKNOWN_TIME, -1 - number_E, exact_E)
    basket_E = _first_rows(np.where(by_order_E, order_E, other_E), by_order_E, user_E)
    kept_E = _first_rows(events.item_E, basket_E) == number_E
    events.dropped.add(SAME_ORDER, events=int((~kept_E).sum()))
    kept = events._replace(
        user_E=user_E[kept_E],
        item_E=events.item_E[kept_E],
        time_E=time_E[kept_E],
        order_E=None if events.order_E is None else events.order_E[kept_E],
        basket_E=basket_E[kept_E],
        orders=(),
    )
    return kept, notes


def _odd(num: int, events: RawEvents, column: str, example: str, done: str) -> str:
    """A note on ``num`` order numbers; ``ValueError`` where they are too many."""
    text = f"{num:,} of {len(events.orders):,} order numbers (column {column!r}) {example}"
    if num > FEW * len(events.orders):
        raise ValueError(
            f"got {text}, expected numbers of one purchase each: does this column hold order numbers? Where they start "
            "anew, make them different, such as year and number in one column; or leave order out: rows of a customer "
            "at one time are a basket then"
        )
    return f"WARNING: {text}: {done}"


def _first_rows(*columns: np.ndarray) -> np.ndarray:
    """(E,) int64: the first row that has the same values in all columns."""
    import pandas as pd  # only here: --help does without

    code_E = np.zeros(len(columns[0]), np.int64)  # numbered in the order of first rows
    for column in columns:
        own_E, values = pd.factorize(column)
        code_E, _ = pd.factorize(code_E * len(values) + own_E)
    first_C = np.flatnonzero(~pd.Series(code_E).duplicated().to_numpy())
    return first_C[code_E]
