"""Item ID texts from the words of item texts, without a neural generator: the most telling words of each item."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedecider.bounds import OneOrMore, check
from idgen.words import clean_words

_STOP = "a an and are as at be by for from in into is it its na of on or that the this to was were will with your"
STOP_WORDS = frozenset(_STOP.split())
FIELD_TIERS = {"title": 0, "series": 0, "brand": 1, "author": 1, "categories": 2}  # others, e.g. description: last
LAST_TIER = 3
FIELD_NAME = re.compile(r"(?:^|;\s+)([a-z_]+):\s")


@dataclass(frozen=True)
class KeywordConfig:
    """How an item's words become its ID text.

    Args:
        min_words: The number of words of the first ID that is tried; more are added until unique.
        max_words: The largest number of words of an ID; 2 to 5 is sensible.
        word_order: The order of the words: that in the text, or by the number of items that have the word. "as_written"
            takes the title's first words as they stand, until no other title starts with them: what a pretrained model
            knows.
        lead: What an ID starts with when the item has it: the last category, the series, or the rarest title word that
            another item has too.
    """

    min_words: OneOrMore = 2
    max_words: OneOrMore = 4
    word_order: Literal["title", "rare_first", "common_first", "as_written"] = "rare_first"
    lead: Literal["none", "category", "series", "shared_word"] = "none"

    def __post_init__(self) -> None:
        check(self)
        if self.min_words > self.max_words:
            raise ValueError(f"got min_words {self.min_words}, expected at most max_words {self.max_words}")
        if self.word_order == "as_written" and self.lead != "none":
            raise ValueError(
                f"got word_order as_written with lead {self.lead}, expected lead none: titles stay as they are"
            )


DEFAULT_KEYWORDS = KeywordConfig()


class _Item(NamedTuple):
    fields: dict[str, str]
    words: list[str]  # distinct, stop words dropped, in the order of the text
    tier: dict[str, int]  # of the best field that has the word


def split_fields(item_text: str) -> dict[str, str]:
    """The fields of ``title: ...; brand: ...; ...``; a text without field names counts as a title."""
    parts = FIELD_NAME.split(item_text.strip())
    fields = {"title": parts[0]} if parts[0].strip() else {}
    return fields | {name: value.strip() for name, value in zip(parts[1::2], parts[2::2], strict=True)}


def keyword_candidates(item_texts: Sequence[str], config: KeywordConfig, num_variants: int = 10) -> list[list[str]]:
    """For each item its possible ID texts, best first; an item without any word gets none.

    Title words come before brand, category and description words; inside a field a word weighs its inverse
    document frequency, so words that few items have are the most important. The first candidate has the
    ``min_words`` most important words, the next ones add a word each, the last ones exchange the last word for
    less important ones. Under "as_written" the title's first words are the first candidate, see `_title_starts`.
    """
    items = [_read(text) for text in item_texts]
    item_count = Counter(word for item in items for word in item.words)
    titles = [clean_words(item.fields.get("title", "")) for item in items]
    if config.word_order == "as_written":
        return _title_starts(items, titles, item_count, config, num_variants)
    title_count = Counter(word for title in titles for word in set(title))
    return [_candidates(item, item_count, title_count, config, num_variants) for item in items]


def _read(item_text: str) -> _Item:
    fields = split_fields(item_text)
    tier: dict[str, int] = {}
    for name, value in fields.items():
        for word in clean_words(value):
            tier[word] = min(tier.get(word, LAST_TIER), FIELD_TIERS.get(name, LAST_TIER))
    words = [word for word in tier if word not in STOP_WORDS]
    return _Item(fields, words or list(tier), tier)


def _candidates(
    item: _Item,
    item_count: Mapping[str, int],
    title_count: Mapping[str, int],
    config: KeywordConfig,
    num_variants: int,
) -> list[str]:
    lead = _lead(item, title_count, config.lead)[: config.max_words]
    place = {word: number for number, word in enumerate(item.words)}
    rest = [word for word in item.words if word not in lead]
    ranked = sorted(rest, key=lambda word: (item.tier[word], item_count[word], place[word]))
    order = {
        "title": lambda word: (place[word],),
        "rare_first": lambda word: (item_count[word], place[word]),
        "common_first": lambda word: (-item_count[word], place[word]),
    }[config.word_order]
    most = min(config.max_words - len(lead), len(ranked))
    least = min(max(config.min_words - len(lead), 0), most)
    chosen = [ranked[:number] for number in range(least, most + 1)]
    if most > 0:
        chosen += [[*ranked[: most - 1], word] for word in ranked[most : most + num_variants]]
    texts = (" ".join([*lead, *sorted(words, key=order)]) for words in chosen)
    return list(dict.fromkeys(text for text in texts if text))


def _title_starts(
    items: Sequence[_Item],
    titles: Sequence[list[str]],
    item_count: Mapping[str, int],
    config: KeywordConfig,
    num_variants: int,
) -> list[list[str]]:
    """The shortest start of each title that no other one has, then longer ones, then a word of another field too."""
    written = [title or item.words for item, title in zip(items, titles, strict=True)]
    count = Counter(tuple(words[:number]) for words in written for number in range(1, len(words) + 1))
    found = []
    for item, title in zip(items, written, strict=True):
        words = title[: config.max_words]
        least = min(config.min_words, len(words))
        alone = (number for number in range(least, len(words)) if count[tuple(words[:number])] == 1)
        shortest = next(alone, len(words))
        others = sorted((word for word in item.words if word not in words), key=lambda word: item_count[word])
        starts = [words[:number] for number in range(shortest, len(words) + 1)]
        starts += [[*words[: config.max_words - 1], word] for word in others[:num_variants]]
        found.append([" ".join(start) for start in starts if start])
    return found


def _lead(item: _Item, title_count: Mapping[str, int], kind: str) -> list[str]:
    if kind == "category":
        words = clean_words(item.fields.get("categories", "").rsplit(",", 1)[-1])[:2]
    elif kind == "series":
        words = clean_words(item.fields.get("series", ""))[:2]
    elif kind == "shared_word":
        title = [word for word in clean_words(item.fields.get("title", "")) if word not in STOP_WORDS]
        shared = [word for word in title if title_count[word] >= 2]
        words = [min(shared, key=lambda word: (title_count[word], title.index(word)))] if shared else []
    else:
        words = []
    return [] if words == ["na"] else list(dict.fromkeys(words))
