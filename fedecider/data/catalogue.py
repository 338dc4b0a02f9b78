"""What is sold: items by number, each with key, title and text; domains that sell the same hold one object."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from fedecider.data.content import update_json


class NewItem(NamedTuple):
    """An item that no event is of, such as one that came after the training."""

    key: str
    """Unique in the catalogue."""
    title: str
    text: str
    """As the item texts of prepared data: ``title: ...; brand: ...``; letter case and line breaks do not matter."""


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Items that have one ID, one vector and one row each, whoever sells them: catalogues are compared by identity.

    Raises:
        ValueError: fewer than two items, keys that are not sorted and unique, or an item without a text of one line.
    """

    name: str
    """What prompts call it; one catalogue of a federation has it."""
    keys: list[str]
    """Sorted; an item number is an index into this list."""
    titles: list[str]
    texts: list[str]
    """What the ID generator reads, such as ``title: ...; brand: ...``, lower case, one line. Where no item has one, the
    keys stand for them, and for empty titles."""
    own_keys: list[str] | None = None
    """What the company that sells them calls the items, where the same goods have other keys at others; None: keys."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        if not any(self.texts):
            named = [title or key for title, key in zip(self.titles, self.keys, strict=True)]
            object.__setattr__(self, "titles", named)
            object.__setattr__(self, "texts", list(self.keys))
        _check_order(self)
        _check_texts(self)

    @property
    def has_texts(self) -> bool:
        """Whether any item has another text than its key."""
        return self.texts != self.keys

    @cached_property
    def number_of(self) -> dict[str, int]:
        """Key -> item number."""
        return {key: number for number, key in enumerate(self.keys)}

    @cached_property
    def content_key(self) -> str:
        """Hexadecimal SHA-256 of all items, whatever the name."""
        digest = hashlib.sha256()
        own = () if self.own_keys is None else (self.own_keys,)
        update_json(digest, (self.keys, self.titles, self.texts, *own))
        return digest.hexdigest()

    def part(self, name: str, numbers: Iterable[int]) -> Catalogue:
        """The items ``numbers``, ascending, in the same words."""
        chosen = list(numbers)
        columns = (self.keys, self.titles, self.texts, *(() if self.own_keys is None else (self.own_keys,)))
        return Catalogue(name, *([column[number] for number in chosen] for column in columns))


def union(name: str, parts: Sequence[Catalogue]) -> Catalogue:
    """All items of ``parts``, matched by key; one that several have has title and text of the first of them, but for
    parts without texts."""
    about: dict[str, tuple[str, str]] = {}
    for part in sorted(parts, key=lambda part: not part.has_texts):
        for key, title, text in zip(part.keys, part.titles, part.texts, strict=True):
            about.setdefault(key, (title, text))
    keys = sorted(about)
    return Catalogue(name, keys, [about[key][0] for key in keys], [about[key][1] for key in keys])


def _check_sizes(catalogue: Catalogue) -> None:
    keys = catalogue.keys
    if not len(keys) == len(catalogue.titles) == len(catalogue.texts):
        raise ValueError(
            f"domain {catalogue.name!r}: got {len(keys)} item keys, {len(catalogue.titles)} titles and "
            f"{len(catalogue.texts)} item texts; expected the same number of each."
        )
    if len(keys) < 2:
        raise ValueError(
            f"domain {catalogue.name!r} has {len(keys)} item(s); expected at least 2. "
            "Lower k_core or min_length, or give more raw data."
        )


def _check_order(catalogue: Catalogue) -> None:
    for before, after in pairwise(catalogue.keys):
        if before == after:
            raise ValueError(f"domain {catalogue.name!r}: duplicate item key {after!r}; expected each key once.")
        if before > after:
            raise ValueError(f"domain {catalogue.name!r}: item keys are not sorted ({after!r} follows {before!r}).")


def _check_texts(catalogue: Catalogue) -> None:
    bad = [key for key, text in zip(catalogue.keys, catalogue.texts, strict=True) if not text.strip()]
    if bad:
        raise ValueError(
            f"domain {catalogue.name!r}: {len(bad)} items without text, such as {bad[0]!r}; "
            "expected a title or another text field for each item."
        )
    torn = [key for key, text in zip(catalogue.keys, catalogue.texts, strict=True) if "\n" in text]
    if torn:
        raise ValueError(f"domain {catalogue.name!r}: the text of item {torn[0]!r} has line breaks; expected one line.")
