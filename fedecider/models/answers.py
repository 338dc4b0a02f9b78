"""What a recommender answers, as plain frozen values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

Repeats = Literal["learned", "drop", "only"]
"""What becomes of items that the history holds: the weights of the ensemble decide ("what next"), they are left out
("something new"), or nothing else comes ("buy again")."""


class Scored(NamedTuple):
    """An item with its score."""

    item: int
    score: float
    features: dict[str, float]
    """Feature -> what it adds to the log-score; empty without an ensemble."""


@dataclass(frozen=True)
class Recommendation:
    """One recommended item."""

    key: str
    title: str
    score: float
    """Log-probability: of the item's ID; with an ensemble, of the item in the whole catalogue."""
    features: Mapping[str, float]
    """With an ensemble: what each feature adds to the item's log-score, its weight times its value; else empty."""


@dataclass(frozen=True)
class HistoryItem:
    """An entry of a history as it was understood."""

    key: str
    title: str


@dataclass(frozen=True)
class Answer:
    """The recommendations for one history; iterating gives its items."""

    items: tuple[Recommendation, ...]
    """The best first; less than were asked for where there are no more."""
    history: tuple[HistoryItem, ...]
    """Oldest first."""
    alpha: Mapping[str, float]
    """Each domain's share of the absolute fusion weights of the adapter; empty for methods without."""
    notes: tuple[str, ...]
    """Sentences about what was done otherwise than asked, such as an entry that was not written as in the catalogue."""

    def __iter__(self) -> Iterator[Recommendation]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Recommendation:
        return self.items[place]

    def to_dict(self) -> dict[str, Any]:
        """The same as dictionaries and lists, ready for JSON."""
        found = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def recommendations(scored: Sequence[Scored], keys: Sequence[str], titles: Sequence[str]) -> tuple[Recommendation, ...]:
    """Items of a catalogue by their keys and titles."""
    return tuple(Recommendation(keys[one.item], titles[one.item], one.score, one.features) for one in scored)


def check_k(k: int, repeats: str = "learned") -> None:
    """``ValueError`` for a number of recommendations that is none, or an unknown ``repeats``."""
    if type(k) is not int or k < 1:
        raise ValueError(f"got k {k!r}, expected a whole number of at least 1")
    if repeats not in get_args(Repeats):
        raise ValueError(f"got repeats {repeats!r}, expected {', '.join(get_args(Repeats))}")
