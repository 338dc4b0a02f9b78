"""Item IDs that are one token each: the shortest phrase of an item's own words that no other item has.

A pretrained model reads and writes an ID word by word. A small model from scratch has little to go on but which items
stand near each other in public histories; it generalises much better when an ID is a single decision, with a token
vector of its own (benchmarks/results has the comparison). The ID stays a text of the item's own words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from transformers import PreTrainedTokenizerBase

from idgen.item_ids import IdConfig, ItemIds, assign_item_ids
from idgen.keywords import KeywordConfig, keyword_candidates


def unique_phrases(
    item_keys: Mapping[str, Sequence[str]],
    item_texts: Mapping[str, Sequence[str]],
    keywords: KeywordConfig,
    taken: Iterable[str] = (),
) -> dict[str, list[str]]:
    """Domain -> one phrase per item; no two items of any domains share one, and none is among ``taken``.

    Items are served in the order of domain and key, so file order does not matter; each takes its first keyword
    candidate that is free, or its best one with the first free number.
    """
    places = sorted((domain, key, item) for domain, keys in item_keys.items() for item, key in enumerate(keys))
    texts = [item_texts[domain][item] for domain, _, item in places]
    used = set(taken)
    free: dict[str, int] = {}  # base -> the least number that may be free: those below it are taken for good
    chosen: dict[str, list[str]] = {domain: [""] * len(keys) for domain, keys in item_keys.items()}
    for (domain, _, item), candidates in zip(places, keyword_candidates(texts, keywords), strict=True):
        phrase = next((text for text in candidates if text not in used), None)
        if phrase is None:
            base = candidates[-1] if candidates else "item"
            free[base] = next(number for number in count(free.get(base, 2)) if f"{base} {number}" not in used)
            phrase = f"{base} {free[base]}"
        used.add(phrase)
        chosen[domain][item] = phrase
    return chosen


def phrase_item_ids(
    item_keys: Sequence[str], phrases: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: IdConfig
) -> ItemIds:
    """IDs from phrases that ``tokenizer`` was trained with; uniqueness and round trip are checked as for any ID."""
    once = IdConfig(config.max_id_tokens, max_attempts=1)
    return assign_item_ids(item_keys, lambda items, _: [[phrases[item]] for item in items], tokenizer, once)
