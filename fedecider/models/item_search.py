"""Items by what people type: keys, titles with other case or a typing error, beginnings of titles.

A title that is not written as in the catalogue is taken for an item only where no other one may be meant; else the
answer is an error with the titles that come near.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from rapidfuzz import fuzz, process

NUM_SUGGESTIONS = 5
ACCEPTED = 92.0
"""Likeness in percent from which a title with typing errors is taken for an item, where no other one is near."""
LEAD = 6.0
"""By so many percent the next title must be less alike."""
MOST_PARTS = 8
"""Titles of more parts than that are known by their first ones."""
WORDS_OF_PART = 3
"""Words with which a part of a title stands for the title, at least: fewer name a series as well."""
SHORTEST = 10
"""Letters and spaces of a title that may have typing errors, at least: of shorter ones every letter tells."""
ROMAN = {"i": "1", "ii": "2", "iii": "3", "iv": "4", "v": "5", "vi": "6", "vii": "7", "viii": "8", "ix": "9", "x": "10"}
LONGEST = 200
"""Letters and spaces of a search, at most; what stands behind them is not read. One letter may stand for many."""
LONG = 40
"""Searches of more letters and spaces are compared word by word: by parts of words they would take seconds."""
LEAST = 40.0
"""Likeness in percent of a suggestion, at least."""
INSIDE, LIKE = 0.9, 0.8
"""Scores of a search: of a phrase inside a title, and the largest one of a title that is only like the query."""


class Match(NamedTuple):
    """An item that a search found."""

    key: str
    title: str
    score: float
    """1: the title begins with the query; 0.95 and 0.9: one of its words does, or it stands inside; less: it is like
    it."""


class Resolved(NamedTuple):
    """The item that an entry means."""

    number: int
    note: str = ""
    """A sentence where the entry was not written as in the catalogue."""


class Items:
    """The keys and titles of a catalogue, in item-number order, and what they are found by.

    What a look-up needs is worked out once, by `prepare` or when it is first asked for; the object does not change
    afterwards.
    """

    def __init__(self, keys: Sequence[str], titles: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self.titles = tuple(titles)

    def __len__(self) -> int:
        return len(self.keys)

    def prepare(self, others: Iterable[Items] = ()) -> None:
        """Compute now what look-ups need, so that none of them waits for it, nor several threads do it at once.

        ``others``: those of an equal catalogue lend what they have.
        """
        for other in others:
            if (other.keys, other.titles) == (self.keys, self.titles):
                vars(self).update(vars(other))
        for name, value in vars(type(self)).items():
            if isinstance(value, cached_property):
                getattr(self, name)

    def resolve(self, entry: str) -> Resolved:
        """The item of a key or a title. Spaces around it are ignored, and letter case too unless a title needs it.

        Without an exact match, the only title that is close enough is taken. Close are titles with the same words but
        for accents, punctuation, brackets at the end, or missing parts; then titles with small typing errors. Numbers
        must agree: volume 2 is not volume 3.

        Raises:
            ValueError: no item, or several that may be meant; the message names them.
        """
        if not isinstance(entry, str):
            raise ValueError(f"got {entry!r} in a history, expected a title or an item key")
        wanted = entry.strip()
        if not wanted:
            raise ValueError("got an empty title in a history, expected a title or an item key")
        named = self._numbers_of_title.get(wanted.casefold(), [])
        named = sorted(named, key=lambda number: self.titles[number].strip() != wanted)  # stable
        if wanted in self._number_of_key:
            number = self._number_of_key[wanted]
            others = [self.keys[other] for other in named if other != number]
            both = f"{wanted!r} is a key and the title of {', '.join(others[:NUM_SUGGESTIONS])}; the item of that key, "
            return Resolved(number, f"{both}{self.titles[number]!r}, was taken" if others else "")
        if named:
            several = f"{len(named)} items have the title {wanted!r}; {self.keys[named[0]]} was taken"
            return Resolved(named[0], several if len(named) > 1 else "")
        for found in self._written_otherwise(wanted):
            if len(found) == 1:
                return Resolved(found[0], f"{wanted!r} was taken for {self.titles[found[0]]!r}")
            if found:
                raise ValueError(
                    f"got title {wanted!r}, which fits {len(found)} titles, expected one of them: "
                    f"{self._quoted(found)}; write the whole title or the item key"
                )
        near = self._near(wanted)
        raise ValueError(
            f"got title {wanted!r}, expected one of the {len(self)} titles or item keys in item_ids.json; "
            + (f"the closest are {self._quoted(near)}" if near else "none comes near")
        )

    def number(self, key: Any) -> int | None:
        """Of the item with exactly this key."""
        return self._number_of_key.get(key) if isinstance(key, str) else None

    def exact(self, entry: Any) -> int | None:
        """Of the item with this key, or else the first one with this title as it is written."""
        if (number := self.number(entry)) is not None or not isinstance(entry, str):
            return number
        named = self._numbers_of_title.get(entry.strip().casefold(), [])
        return next((one for one in named if self.titles[one].strip() == entry.strip()), None)

    def search(self, query: str, limit: int = 10) -> list[Match]:
        """Up to ``limit`` items for what somebody has typed so far, the best first.

        Keys and titles that begin with it, then titles of which a word does, or that hold it, shorter ones first; then
        those that are like it. Nothing for a query without a letter or digit. Of a long query the first ``LONGEST``
        letters are read.
        """
        if not isinstance(query, str):
            raise ValueError(f"got the search {query!r}, expected a text")
        if limit < 1:
            raise ValueError(f"got limit {limit}, expected at least 1")
        wanted = plain(query[:LONGEST])[:LONGEST].strip()
        if not wanted:
            return []
        found: list[tuple[float, int, int]] = []
        for number, title in enumerate(self._plain):
            if title.startswith(wanted) or self.keys[number].startswith(query.strip()):
                found.append((-1.0, len(title), number))
            elif wanted in title:
                found.append((-(INSIDE + 0.05 * (f" {wanted}" in title)), len(title), number))
        scores = {number: -score for score, _, number in sorted(found)[:limit]}
        if len(scores) < limit:
            scorer = fuzz.WRatio if len(wanted) <= LONG else fuzz.token_set_ratio
            near = process.extract(wanted, self._plain, scorer=scorer, limit=4 * limit, score_cutoff=LEAST)
            near.sort(key=lambda one: (-one[1], -fuzz.ratio(wanted, one[0]), one[2]))
            for _, score, number in near:
                scores.setdefault(number, LIKE * score / 100.0)
        return [Match(self.keys[number], self.titles[number], scores[number]) for number in list(scores)[:limit]]

    def _written_otherwise(self, wanted: str) -> Iterator[Sequence[int]]:
        """Items that ``wanted`` may mean, from the safest kind of likeness on; lazily, since later kinds cost more."""
        words = _sorted_words(plain(wanted))
        if not words:
            return
        yield self._numbers_of_words.get(words, [])
        of_part = self._numbers_of_part.get(words, [])
        yield of_part if len(of_part) > 1 or self._stands_for(words, of_part) else []
        yield self._misspelt(plain(wanted)) if len(plain(wanted)) >= SHORTEST else []

    def _stands_for(self, words: str, of_part: Sequence[int]) -> bool:
        """Whether part of a title names the one item that has it, and no series, as the words in brackets often do."""
        return any(
            len(words.split()) >= WORDS_OF_PART
            and (words in _parts(_without_brackets(self.titles[number])) or any(map(str.isdigit, words)))
            for number in of_part
        )

    def _misspelt(self, wanted: str) -> list[int]:
        """The one item whose title is nearly ``wanted``, or nothing."""
        best: dict[int, float] = {}
        for titles in (self._plain, self._bare):
            for _, score, number in process.extract(
                wanted, titles, scorer=fuzz.ratio, score_cutoff=ACCEPTED - LEAD, limit=4
            ):
                best[number] = max(score, best.get(number, 0.0))
        ordered = sorted(best, key=lambda number: (-best[number], number))
        if not ordered or best[ordered[0]] < ACCEPTED:
            return []
        first = ordered[0]
        alone = len(ordered) == 1 or best[ordered[1]] <= best[first] - LEAD
        told_apart = (_what_tells(self._plain[first]), _what_tells(self._bare[first]))
        return [first] if alone and _what_tells(wanted) in told_apart else []

    def _near(self, wanted: str) -> list[int]:
        return [self._number_of_key[match.key] for match in self.search(wanted, NUM_SUGGESTIONS)]

    def _quoted(self, numbers: Sequence[int]) -> str:
        shown = ", ".join(f"{self.titles[number]!r} ({self.keys[number]})" for number in numbers[:NUM_SUGGESTIONS])
        return f"[{shown}{', ...' if len(numbers) > NUM_SUGGESTIONS else ''}]"

    @cached_property
    def _number_of_key(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self.keys)}

    @cached_property
    def _numbers_of_title(self) -> dict[str, list[int]]:
        return _grouped((title.strip().casefold(), number) for number, title in enumerate(self.titles))

    @cached_property
    def _plain(self) -> list[str]:
        return [plain(title) for title in self.titles]

    @cached_property
    def _bare(self) -> list[str]:
        """Titles without what stands in brackets at their ends."""
        return [plain(_without_brackets(title)) for title in self.titles]

    @cached_property
    def _numbers_of_words(self) -> dict[str, list[int]]:
        """The words of titles, and of titles without what stands in brackets at their ends, in any order."""
        pairs = (
            (_sorted_words(text), number) for texts in (self._plain, self._bare) for number, text in enumerate(texts)
        )
        return _grouped(pairs)

    @cached_property
    def _numbers_of_part(self) -> dict[str, list[int]]:
        """The words of one part or more that follow each other."""
        return _grouped((part, number) for number, title in enumerate(self.titles) for part in _parts(title))


def plain(text: str) -> str:
    """Words of letters and digits, small, without accents and apostrophes, parted by single spaces."""
    folded = unicodedata.normalize("NFKD", text.casefold())
    folded = "".join(letter for letter in folded if not unicodedata.combining(letter) and letter not in "'’")
    return " ".join(re.findall(r"[^\W_]+", folded.replace("&", " and ")))


def _sorted_words(text: str) -> str:
    return " ".join(sorted(text.split()))


def _what_tells(text: str) -> tuple[list[str], int]:
    """What tells titles apart by a single letter: the numbers in a plain text, and how many words are plural."""
    words = [ROMAN.get(word, word) for word in text.split()]
    numbers = sorted(word for word in words if any(letter.isdigit() for letter in word))
    return numbers, sum(word.endswith("s") for word in words)


def _without_brackets(title: str) -> str:
    """A title without what stands in brackets at its end; the whole title where nothing would be left."""
    bare = re.sub(r"(\s*[(\[{][^()\[\]{}]*[)\]}])+\s*$", "", title)
    return bare if plain(bare) else title


def _parts(title: str) -> set[str]:
    """The sorted words of parts of a title that follow each other; parts end at brackets, colons, commas, dashes."""
    parts = [words for part in re.split(r"[:;,(){}\[\]|/]|\s[-–—]\s", title) if (words := plain(part))][:MOST_PARTS]
    places = combinations(range(len(parts) + 1), 2)
    return {_sorted_words(" ".join(parts[first:last])) for first, last in places}


def _grouped(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Text -> the numbers that have it, rising, each once; no entry for an empty text."""
    found: dict[str, list[int]] = {}
    for text, number in pairs:
        if text:
            found.setdefault(text, []).append(number)
    return {text: sorted(set(numbers)) for text, numbers in found.items()}
