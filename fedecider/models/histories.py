"""Histories as people give them: lists of titles or item keys, one or many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedecider.models.item_search import Items, Resolved

History = Sequence[str]


def as_histories(history: Any) -> tuple[bool, list[list[str]]]:
    """Whether there are many, and the histories. An empty list is one empty history."""
    if isinstance(history, str) or not isinstance(history, Sequence):
        raise ValueError(
            f"got the history {history!r}, expected a list of titles or item keys, or a list of such lists"
        )
    texts = [isinstance(entry, str) for entry in history]
    if all(texts):
        return False, [list(history)]
    if any(texts) or not all(isinstance(entry, Sequence) for entry in history):
        raise ValueError("got a history of texts and other things, expected texts alone, or lists of texts alone")
    return True, [list(one) for one in history]


def resolve_history(items: Items, history: History, number: int, count: int) -> list[Resolved]:
    """The items of one history; an error says which of several histories it is in."""
    try:
        return [items.resolve(entry) for entry in history]
    except ValueError as error:
        raise ValueError(f"history {number + 1}: {error}" if count > 1 else str(error)) from error


def exact_history(items: Items, history: Any, unknown: str) -> tuple[list[Resolved], int]:
    """The items of one history of keys, or of titles as they are written, and how many entries are none.

    Nothing is guessed from likeness: of a million histories nobody reads how entries were understood.

    Raises:
        ValueError: it is no list, or with ``unknown`` "refuse" one of its entries is no item.
    """
    if isinstance(history, str) or not isinstance(history, Sequence):
        raise ValueError(f"got the history {str(history)[:100]!r}, expected a list of item keys or titles")
    numbers = [items.exact(entry) for entry in history]
    if unknown == "refuse" and None in numbers:
        raise ValueError(f"got {history[numbers.index(None)]!r} in a history, expected an item key or a whole title")
    found = [Resolved(number) for number in numbers if number is not None]
    return found, len(numbers) - len(found)
