"""Candidates for ID texts without a neural generator: the most telling words of each item text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from idgen.config import TITLE_WORDS, Words
from idgen.tokenizer import clean_words

_STOP = "a an and are as at be by for from in into is it its na of on or that the this to was were will with your"
STOP_WORDS = frozenset(_STOP.split())
FIELD_TIERS = {"title": 0, "series": 0, "brand": 1, "author": 1, "categories": 2}  # others, e.g. description: last
LAST_TIER = 3
FIELD_NAME = re.compile(r"(?:^|;\s+)([a-z_]+):\s")


class _Item(NamedTuple):
    fields: dict[str, str]
    words: list[str]  # distinct, stop words dropped, in the order of the text
    tier: dict[str, int]  # of the best field that has the word


def split_fields(item_text: str) -> dict[str, str]:
    """The fields of ``title: ...; brand: ...; ...``; a text without field names counts as a title."""
    parts = FIELD_NAME.split(item_text.strip())
    fields = {"title": parts[0]} if parts[0].strip() else {}
    return fields | {name: value.strip() for name, value in zip(parts[1::2], parts[2::2], strict=True)}


def keyword_candidates(
    item_texts: Sequence[str], config: Words = TITLE_WORDS, num_variants: int = 10
) -> list[list[str]]:
    """For each item its possible ID texts, best first; an item without any word gets none.

    Title words come before brand, category and description words; inside a field a word weighs its inverse
    document frequency, so words that few items have are the most important. The first candidate has the
    ``least`` most important words, the next ones add a word each, the last ones exchange the last word for less
    important ones. Under ``as_written`` the title's first words are the first candidate, see `_title_starts`.
    """
    items = [_read(text) for text in item_texts]
    item_count = Counter(word for item in items for word in item.words)
    if config.as_written:
        titles = [clean_words(item.fields.get("title", "")) for item in items]
        return _title_starts(items, titles, item_count, config, num_variants)
    return [_candidates(item, item_count, config, num_variants) for item in items]


def _read(item_text: str) -> _Item:
    fields = split_fields(item_text)
    tier: dict[str, int] = {}
    for name, value in fields.items():
        for word in clean_words(value):
            tier[word] = min(tier.get(word, LAST_TIER), FIELD_TIERS.get(name, LAST_TIER))
    words = [word for word in tier if word not in STOP_WORDS]
    return _Item(fields, words or list(tier), tier)


def own_words(item_text: str) -> tuple[list[str], list[str]]:
    """The distinct words of the fields of a text, in its order: those that tell something, and the stop words.

    A text of stop words alone has these as its telling words. Names of fields are no words of an item.
    """
    item = _read(item_text)
    return item.words, [word for word in item.tier if word not in item.words]


def _candidates(item: _Item, item_count: Mapping[str, int], config: Words, num_variants: int) -> list[str]:
    place = {word: number for number, word in enumerate(item.words)}
    ranked = sorted(item.words, key=lambda word: (item.tier[word], item_count[word], place[word]))
    most = min(config.most, len(ranked))
    chosen = [ranked[:number] for number in range(min(config.least, most), most + 1)]
    if most > 0:
        chosen += [[*ranked[: most - 1], word] for word in ranked[most : most + num_variants]]
    texts = (" ".join(sorted(words, key=lambda word: place[word])) for words in chosen)
    return list(dict.fromkeys(text for text in texts if text))


def _title_starts(
    items: Sequence[_Item],
    titles: Sequence[list[str]],
    item_count: Mapping[str, int],
    config: Words,
    num_variants: int,
) -> list[list[str]]:
    """The shortest start of each title that no other one has, then longer ones, then a word of another field too."""
    written = [title or item.words for item, title in zip(items, titles, strict=True)]
    count = Counter(tuple(words[:number]) for words in written for number in range(1, len(words) + 1))
    found = []
    for item, title in zip(items, written, strict=True):
        words = title[: config.most]
        least = min(config.least, len(words))
        alone = (number for number in range(least, len(words)) if count[tuple(words[:number])] == 1)
        shortest = next(alone, len(words))
        others = sorted((word for word in item.words if word not in words), key=lambda word: item_count[word])
        starts = [words[:number] for number in range(shortest, len(words) + 1)]
        starts += [[*words[: config.most - 1], word] for word in others[:num_variants]]
        found.append([" ".join(start) for start in starts if start])
    return found
