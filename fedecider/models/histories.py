"""Histories as people give them: lists of titles or item keys, or of baskets of them; one history or many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.item_search import Items, Resolved

Entry = str | Sequence[str]
"""A title or item key, which is a basket of its own, or a list of them, which is one basket."""
History = Sequence[Entry]
EXPECTED = "expected a list of titles or item keys, of which those of one basket may be a list"


class ResolvedHistory(NamedTuple):
    """The items of a history, oldest first."""

    entries: list[Resolved]
    baskets: list[int]
    """Of each entry the number of its basket."""


def as_histories(history: Any) -> tuple[bool, list[list[Entry]]]:
    """Whether there are many, and the histories. An empty list is one empty history.

    A list of nothing but lists is many histories: one history of nothing but baskets stands in a list of its own.
    """
    if not _is_list(history):
        raise ValueError(f"got the history {str(history)[:100]!r}, {EXPECTED}, or a list of such lists")
    many = bool(history) and all(map(_is_list, history))
    found = [list(one) for one in (history if many else [history])]
    for one in found:
        if not all(isinstance(entry, str) for entry in chain.from_iterable(_baskets(one))):
            raise ValueError(f"got a history of texts and other things, {EXPECTED}, or a list of such lists")
    return many, found


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _baskets(history: Sequence[Any]) -> list[Sequence[Any]]:
    return [entry if _is_list(entry) else [entry] for entry in history]


def resolve_history(items: Items, history: History, number: int, count: int) -> ResolvedHistory:
    """The items of one history; an error says which of several histories it is in."""
    baskets = _baskets(history)
    try:
        entries = [items.resolve(entry) for basket in baskets for entry in basket]
    except ValueError as error:
        raise ValueError(f"history {number + 1}: {error}" if count > 1 else str(error)) from error
    return ResolvedHistory(entries, [place for place, basket in enumerate(baskets) for _ in basket])


def exact_history(items: Items, history: Any, unknown: str) -> tuple[ResolvedHistory, int]:
    """The items of one history of keys, or of titles as they are written, and how many entries are none.

    Nothing is guessed from likeness: of a million histories nobody reads how entries were understood.

    Raises:
        ValueError: it is no list, or with ``unknown`` "refuse" one of its entries is no item.
    """
    if not _is_list(history):
        raise ValueError(f"got the history {str(history)[:100]!r}, {EXPECTED}")
    found = [(place, entry, items.exact(entry)) for place, basket in enumerate(_baskets(history)) for entry in basket]
    missing = [entry for _, entry, number in found if number is None]
    if unknown == "refuse" and missing:
        raise ValueError(f"got {missing[0]!r} in a history, expected an item key or a whole title")
    known = [(place, Resolved(number)) for place, _, number in found if number is not None]
    return ResolvedHistory([entry for _, entry in known], [place for place, _ in known]), len(missing)


def as_sequences(histories: Sequence[ResolvedHistory]) -> SequenceArray:
    """Item numbers in their baskets, each once in a basket."""
    rows = SequenceArray.of([[entry.number for entry in one.entries] for one in histories])
    rows = rows.with_baskets(np.fromiter(chain.from_iterable(one.baskets for one in histories), np.int64))
    return rows.keep(rows.is_first_in_basket_E)
