"""Leave-last-out, the one split of this project: the last event is the test item, the last but one the validation item.

The only home of this rule. It imports nothing, so that the data room can use it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

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
