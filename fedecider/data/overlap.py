"""What companies have in common, from the keys of their items or from exact texts, plain or under a keyed hash.

A company shows one mark an item; nobody needs more than that to say which items are common. The share of its events on
them is told by the company itself, since no mark says how often an item is sold: elsewhere it is not known.

Shape legend: I items of a company, N common items.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np

from fedecider.data.domain import Domain
from fedecider.data.keys import plain_key
from fedecider.data.sellers import once_each
from fedecider.evaluation.protocols import NUM_HELD_OUT
from fedecider.evaluation.sequences import SequenceArray

Way = Literal["keys", "texts"]
"""By what two items are the same one: equal keys (barcodes, ASINs), or equal texts."""
WAYS: tuple[Way, ...] = ("keys", "texts")
PLAIN = "plain"
"""Marks of keys as `plain_key` has them, which tell that two companies write one key in two ways."""
MARKS_FORMAT = 2
"""Raise it when marks are made in another way: those of two formats have nothing in common."""
LEAST_SECRET, LEAST_KINDS = 32, 8
"""Bytes of a secret, and different ones among them: files under it show whether a guess is right, so that words and
short ones are found by trying."""
_MARK = re.compile("[0-9a-f]{64}")
_PROOF = b"the secret of fedecider overlap"
SOME = 0.01
"""So many of the smaller catalogue's keys must be equal but for how they are written, to be worth a word."""
FEW = 4
"""So many companies are told of pair by pair; of more the range stands for the pairs."""


class Common(NamedTuple):
    """What two companies have in common; shares are from 0 to 1."""

    first: str
    second: str
    num_items: int
    item_shares: tuple[float, float]
    """Of the items of the first and of the second."""
    event_share: tuple[float | None, float | None]
    """Of the training events of the first and of the second, those on common items; None where they are not here."""


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


class Marks(NamedTuple):
    """The items of a company under a keyed hash: what it may show to whoever does not have the secret."""

    by: Mapping[str, Sequence[str]]
    """(I,) marks by keys, by texts and by plain keys, each sorted where they come from a file: an order would tell of a
    catalogue."""
    secret: str
    """HMAC of a text that all know: equal where secrets are, since other secrets have no mark in common."""
    event_I: np.ndarray | None = None
    """Training events on every item, in the order of ``by``; None where the company has shown marks alone."""

    def plain(self) -> dict[str, Any]:
        """What a company shows, for a JSON file: no events, and no order."""
        return {"format": MARKS_FORMAT, "secret": self.secret, **{way: sorted(marks) for way, marks in self.by.items()}}


def marks_of(domain: Domain, secret: bytes) -> Marks:
    """The company's own marks, which keep its events."""
    by: dict[str, Sequence[str]] = {way: item_marks(domain, way, secret) for way in WAYS}
    by[PLAIN] = [_hashed(plain_key(key), secret) for key in domain.item_keys]
    return Marks(by, hmac.new(secret, _PROOF, hashlib.sha256).hexdigest(), _counts_of(domain))


def marks_from(content: Mapping[str, Any], source: str) -> Marks:
    """What `Marks.plain` gave.

    Raises:
        ValueError: it is something else; the message names ``source``.
    """
    number = content.get("format")
    if number != MARKS_FORMAT and isinstance(number, int) and _is_mark(content.get("secret")):
        raise ValueError(
            f"got {source} of format {number}, expected {MARKS_FORMAT}: make it again with this version, fedecider "
            "overlap --output"
        )
    shown = (*WAYS, PLAIN)
    lists = [content.get(way) for way in shown]
    listed = [one for one in lists if isinstance(one, list) and one and all(map(_is_mark, one))]
    same = len(listed) == len(shown) and len({len(one) for one in listed}) == 1
    if number != MARKS_FORMAT or not same or not _is_mark(content.get("secret")):
        raise ValueError(f"got {source}, which has no marks of items, expected a file of fedecider overlap --output")
    return Marks(dict(zip(shown, listed, strict=True)), content["secret"])


def _is_mark(one: object) -> bool:
    return isinstance(one, str) and bool(_MARK.fullmatch(one))


def overlap_of_marks(companies: Mapping[str, Marks], by: Way | None = None) -> Overlap:
    """What companies have in common that show marks alone; without ``by`` by keys, or by texts where no key is common.

    Raises:
        ValueError: two of them have other secrets.
    """
    (first, known), *others = companies.items()
    for name, one in others:
        if one.secret != known.secret:
            raise ValueError(
                f"got marks of {first} and of {name} under two secrets, expected one: make them again with the same "
                "--secret_file"
            )
    if by is None:
        keys, texts = (overlap_of_marks(companies, way) for way in WAYS)
        return keys if texts.nothing or not keys.nothing else texts
    marks = {name: one.by[by] for name, one in companies.items()}
    counts = {name: one.event_I for name, one in companies.items()}
    return Overlap(list(companies), by, _pairs(marks, {name: name for name in companies}, counts))


def item_marks(domain: Domain, by: Way = "keys", secret: bytes = b"") -> list[str]:
    """(I,) by what other companies know an item: its key or its text, or with a ``secret`` its HMAC-SHA256 in hex.

    Who has the secret can find out by trial whether a company sells a given item: only the companies may have it, and
    not who compares for them. Texts are compared with single spaces and in lower case, as prepared domains have them.
    """
    named = domain.item_keys if by == "keys" else [" ".join(text.split()).lower() for text in domain.item_texts]
    if not secret:
        return list(named)
    return [_hashed(one, secret) for one in named]


def _hashed(text: str, secret: bytes) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def unlike_keys(keys: Mapping[str, Sequence[str]]) -> str:
    """What is said of companies that write keys in two ways, such as barcodes without the leading zero; or nothing.

    ``keys``: company -> its keys. Two keys of a company that are equal when plain are different items there.
    """
    plain = {}
    for name, own in keys.items():
        marks = [plain_key(key) for key in own]
        plain[name] = {mark: own[place] for mark, place in _places(marks).items()}
    found = []
    for first, second in combinations(keys, 2):
        ours, theirs = plain[first], plain[second]
        pairs = [(ours[one], theirs[one]) for one in ours.keys() & theirs.keys() if ours[one] != theirs[one]]
        if pairs and len(pairs) >= SOME * min(len(keys[first]), len(keys[second])):
            found.append(f"{len(pairs):,} of {first} and {second} ({' and '.join(min(pairs))})")
    return _unlike(found)


def unlike_marks(companies: Mapping[str, Marks]) -> str:
    """The same of companies that show marks alone."""
    found = []
    for first, second in combinations(companies, 2):
        ours, theirs = companies[first].by, companies[second].by
        plain, same = (len(common_items(ours[way], theirs[way])) for way in (PLAIN, "keys"))
        if plain > same and plain - same >= SOME * min(len(ours[PLAIN]), len(theirs[PLAIN])):
            found.append(f"{plain - same:,} of {first} and {second}")
    return _unlike(found)


def _unlike(found: Sequence[str]) -> str:
    if not found:
        return ""
    more = f", and more of {len(found) - FEW} other pairs" if len(found) > FEW else ""
    return (
        "Keys that differ only by leading zeros, letter case, spaces or a .0 at the end are taken for different items: "
        f"{'; '.join(found[:FEW])}{more}. Where they are the same ones, write them alike in all tables and import "
        "again."
    )


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
    """What the clients ``domains`` have in common; without ``by`` by keys, or by texts where no key is common.

    Parts of one catalogue are matched by keys: there an equal text is no common item.
    """
    if by is None:
        found = overlap_of(domains, "keys", secret)
        if not found.nothing or len({domain.catalogue for domain in domains.values()}) < 2:
            return found
        other = overlap_of(domains, "texts", secret)
        return found if other.nothing else other
    once = once_each(domains)
    marks = {name: item_marks(domain, by, secret) for name, domain in once.items()}
    place = {name: domain.items.name for name, domain in domains.items()}
    return Overlap(list(domains), by, _pairs(marks, place, {name: _counts_of(one) for name, one in domains.items()}))


def _counts_of(domain: Domain) -> np.ndarray | None:
    return event_counts(domain) if domain.clients.users else None


def _pairs(
    marks: Mapping[str, Sequence[str]], place: Mapping[str, str], counts: Mapping[str, np.ndarray | None]
) -> list[Common]:
    """``marks`` by catalogue; company -> its catalogue, and its events on every item of it, where they are here."""
    matched: dict[tuple[str, str], np.ndarray] = {}
    pairs = []
    for first, second in combinations(place, 2):
        catalogues = place[first], place[second]
        if catalogues not in matched:
            matched[catalogues] = common_items(*(marks[one] for one in catalogues))
        item_N2 = matched[catalogues]
        of_items = tuple(len(item_N2) / max(1, len(marks[one])) for one in catalogues)
        shares = [_share(counts[name], item_N) for name, item_N in zip((first, second), item_N2.T, strict=True)]
        pairs.append(Common(first, second, len(item_N2), (of_items[0], of_items[1]), (shares[0], shares[1])))
    return pairs


def _share(event_I: np.ndarray | None, item_N: np.ndarray) -> float | None:
    return None if event_I is None else float(event_I[item_N].sum() / max(event_I.sum(), 1))


def overlap_sentences(overlap: Overlap, only_items: bool, has_pool: bool) -> list[str]:
    """What is said before training: who shares items with whom, and what that lets one hope for.

    ``only_items``: nothing but rows of items is learnt, so that nothing else can be gained from others; ``has_pool``:
    public users are there, from whom all start.
    """
    if not overlap.pairs:
        return []
    hope = _hope(only_items, has_pool)
    if overlap.nothing:
        return [f"{_listed(overlap.names, 'and')} have no common items: {hope}."]
    sentences, by = [], "" if overlap.by == "keys" else " by their texts"
    every = [share for pair in overlap.pairs for share in pair.item_shares]
    if len(overlap.names) > 2 and not overlap.apart:
        who = _listed(overlap.names, "and") if len(overlap.names) <= FEW else f"{len(overlap.names)} companies"
        between = " to ".join(dict.fromkeys(_percent(end(every)) for end in (min, max)))
        share = "sell the same items" if min(every) == 1.0 else f"share {between} of their items{by}, in each pair"
        sentences.append(f"{who} {share}: joining can help.")
    else:
        common = [
            f"{pair.first} shares {_own(pair, 0)} with {pair.second}{by}, {pair.second} {_own(pair, 1)}"
            for pair in overlap.pairs
            if pair.num_items
        ]
        sentences.append(f"{'; '.join(common)}: joining can help.")
    if overlap.apart:
        verb = "share" if len(overlap.apart) > 1 else "shares"
        sentences.append(f"{_listed(overlap.apart, 'and')} {verb} none: {hope}.")
    return sentences


def own_sentence(overlap: Overlap, name: str, only_items: bool, has_pool: bool) -> str:
    """The same for one company, which knows its own events alone; empty where there is no other."""
    common, none = [], []
    for pair in overlap.of(name):
        side = 0 if pair.first == name else 1
        other = (pair.second, pair.first)[side]
        if pair.num_items:
            common.append(f"{_own(pair, side)} with {other}")
        else:
            none.append(other)
    if not common:
        return f"{name} shares no item with {_listed(none, 'or')}: {_hope(only_items, has_pool)}." if none else ""
    by = "" if overlap.by == "keys" else " by their texts"
    rest = f"; none with {_listed(none, 'or')}" if none else ""
    return f"{name} shares{by} {', '.join(common)}{rest}: joining can help."


def _own(pair: Common, side: int) -> str:
    """What a pair has in common of the items, and where it is known of the sales, of its first or second company."""
    sales = pair.event_share[side]
    in_brackets = "" if sales is None else f" ({_percent(sales)} of its sales)"
    return f"{_percent(pair.item_shares[side])} of its items{in_brackets}"


def _hope(only_items: bool, has_pool: bool) -> str:
    ways = [*([] if only_items else ["shared model layers"]), *(["public users"] if has_pool else [])]
    return f"joining rarely helps, and only through {' and '.join(ways)}" if ways else "joining cannot help"


def _listed(names: Sequence[str], word: str) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


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
