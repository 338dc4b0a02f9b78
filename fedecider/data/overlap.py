"""What companies have in common, from the keys of their items or from exact texts, plain or under a keyed hash.

A company shows one mark an item; nobody needs more than that to say which items are common. The share of its events on
them is told by the company itself, since no mark says how often an item is sold.

Shape legend: I items of a company, N common items.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np

from fedecider.data.domain import Domain
from fedecider.evaluation.protocols import NUM_HELD_OUT
from fedecider.evaluation.sequences import SequenceArray

Way = Literal["keys", "texts"]
"""By what two items are the same one: equal keys (barcodes, ASINs), or equal texts."""
FEW = 4
"""So many companies are told of pair by pair; of more the range stands for the pairs."""


class Common(NamedTuple):
    """What two companies have in common; shares are from 0 to 1."""

    first: str
    second: str
    num_items: int
    item_share: float
    """Of the items that either of them sells."""
    event_share: tuple[float, float]
    """Of the training events of the first and of the second, those on common items."""


class Overlap(NamedTuple):
    """What companies have in common, pair by pair."""

    names: Sequence[str]
    by: Way
    pairs: Sequence[Common]

    def of(self, name: str) -> list[Common]:
        """The pairs in which ``name`` is."""
        return [pair for pair in self.pairs if name in (pair.first, pair.second)]

    @property
    def nothing(self) -> bool:
        """Whether no two companies have an item in common."""
        return not any(pair.num_items for pair in self.pairs)

    @property
    def apart(self) -> list[str]:
        """Those that have no item in common with anybody."""
        return [name for name in self.names if not any(pair.num_items for pair in self.of(name))]


def item_marks(domain: Domain, by: Way = "keys", secret: bytes = b"") -> list[str]:
    """(I,) by what other companies know an item: its key or its text, or with a ``secret`` its HMAC-SHA256 in hex.

    Who has the secret can find out by trial whether a company sells a given item: only the companies may have it, and
    not who compares. Texts are compared with single spaces and in lower case, as prepared domains have them.
    """
    named = domain.item_keys if by == "keys" else [" ".join(text.split()).lower() for text in domain.item_texts]
    if not secret:
        return list(named)
    return [hmac.new(secret, one.encode(), hashlib.sha256).hexdigest() for one in named]


def common_items(first: Sequence[str], second: Sequence[str]) -> np.ndarray:
    """(N, 2) item numbers of the first company and of the second, ascending in the first: `item_marks` that both have.

    A mark that one company has twice, such as a text of two items, is nobody's: which of them is meant cannot be told.
    """
    places = [_places(marks) for marks in (first, second)]
    both = [(place, places[1][mark]) for mark, place in places[0].items() if mark in places[1]]
    return np.array(sorted(both), np.int64).reshape(-1, 2)


def event_counts(domain: Domain) -> np.ndarray:
    """(I,) training events of the client users on every item."""
    parts = SequenceArray.of(domain.clients.sequences).without_last(NUM_HELD_OUT)
    return np.bincount(parts.value_E, minlength=len(domain.item_keys))


def overlap_of(domains: Mapping[str, Domain], by: Way | None = None, secret: bytes = b"") -> Overlap:
    """What the clients ``domains`` have in common; without ``by`` by keys, or by texts where no key is common."""
    if by is None:
        found = overlap_of(domains, "keys", secret)
        other = overlap_of(domains, "texts", secret) if found.nothing and len(domains) > 1 else found
        return found if other.nothing else other
    alike: dict[str, str] = {}  # a domain -> the first one with its items: silos are compared once
    for name, domain in domains.items():
        same = (one for one in set(alike.values()) if _same_items(domains[one], domain))
        alike[name] = next(same, name)
    marks = {name: item_marks(domains[name], by, secret) for name in dict.fromkeys(alike.values())}
    count = {name: event_counts(domain) for name, domain in domains.items()}
    matched: dict[tuple[str, str], np.ndarray] = {}
    pairs = []
    for first, second in combinations(domains, 2):
        both = alike[first], alike[second]
        if both not in matched:
            matched[both] = common_items(*(marks[one] for one in both))
        item_N2 = matched[both]
        either = len(domains[first].item_keys) + len(domains[second].item_keys) - len(item_N2)
        shares = [
            float(count[name][item_N].sum() / max(count[name].sum(), 1))
            for name, item_N in zip((first, second), item_N2.T, strict=True)
        ]
        pairs.append(Common(first, second, len(item_N2), len(item_N2) / either, (shares[0], shares[1])))
    return Overlap(list(domains), by, pairs)


def overlap_sentences(overlap: Overlap, only_items: bool, has_pool: bool) -> list[str]:
    """What is said before training: who shares items with whom, and what that lets one hope for.

    ``only_items``: nothing but rows of items is learnt, so that nothing else can be gained from others; ``has_pool``:
    public users are there, from whom all start.
    """
    if not overlap.pairs:
        return []
    ways = [*([] if only_items else ["layers that all share"]), *(["the pool"] if has_pool else [])]
    hope = f"can gain only through {' and '.join(ways)}" if ways else "can gain nothing"
    if overlap.nothing:
        return [f"No two of {', '.join(overlap.names)} share an item: each {hope}."]
    sentences, what = [], "items" if overlap.by == "keys" else "items, by their texts"
    if len(overlap.names) > FEW and not overlap.apart:
        ends = [_percent(end(pair.item_share for pair in overlap.pairs)) for end in (min, max)]
        between = " to ".join(dict.fromkeys(ends))
        sentences.append(f"{len(overlap.names)} companies share {between} of {what}, pair by pair: joining can help.")
    else:
        told = [
            f"{pair.first} and {pair.second} share {_percent(pair.item_share)} of {what} "
            f"({_percent(pair.event_share[0])} of {pair.first}'s sales, "
            f"{_percent(pair.event_share[1])} of {pair.second}'s)"
            for pair in overlap.pairs
            if pair.num_items
        ]
        sentences.append(f"{'; '.join(told)}: joining can help.")
    if overlap.apart:
        several = len(overlap.apart) > 1
        who = f"{', '.join(overlap.apart[:-1])} and {overlap.apart[-1]}" if several else overlap.apart[0]
        sentences.append(f"{who} {'share' if several else 'shares'} none: {'they' if several else 'it'} {hope}.")
    return sentences


def _same_items(first: Domain, second: Domain) -> bool:
    return (first.item_keys, first.item_texts) == (second.item_keys, second.item_texts)


def _percent(share: float) -> str:
    """Whole percents, but never 0 % or 100 % of what is more than nothing and less than all."""
    if 0.0 < share < 0.005:
        return "under 1 %"
    return "over 99 %" if 0.995 <= share < 1.0 else f"{100 * share:.0f} %"


def _places(marks: Sequence[str]) -> dict[str, int]:
    """Mark -> the item that alone has it."""
    found: dict[str, int] = {}
    twice = set()
    for place, mark in enumerate(marks):
        if mark in found:
            twice.add(mark)
        found[mark] = place
    return {mark: place for mark, place in found.items() if mark not in twice}
