"""Unique item IDs: candidates in, one ID per item out, whatever wrote the candidates; and what can be said of them.

A pretrained model reads and writes an ID word by word. A small model from scratch has little to go on but which items
stand near each other in public histories; it generalises much better when an ID is a single decision, with a token
vector of its own (benchmarks/results has the comparison). The ID stays a text of the item's own words.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from idgen.config import TITLE_WORDS, Words
from idgen.keywords import keyword_candidates, split_fields
from idgen.tokenizer import clean_words, decode_ids, encode_ids

NUM_EXAMPLES = 20  # of a report


class ItemIds(NamedTuple):
    """IDs in item-number order; ``token_ids`` without the end token."""

    texts: list[str]
    token_ids: list[list[int]]
    report: dict[str, Any]
    """What `assign_item_ids` counts; with item texts what `quality` says too."""


MAX_ID_TOKENS = 40
"""The length of the longest ID in tokens, without the end token."""


def assign_item_ids(
    item_keys: Sequence[str],
    candidates: Sequence[Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    max_id_tokens: int = MAX_ID_TOKENS,
    taken: Iterable[Sequence[int]] = (),
    item_texts: Sequence[str] | None = None,
) -> ItemIds:
    """Give every item an ID text that is unique as a token sequence.

    ``candidates``: the possible ID texts of every item, best first. ``taken``: token sequences that no ID may have.
    Items are served in the order of their keys, so the order of the input does not matter: all that can have their
    first candidate get it, then the others the first of theirs that is free and valid (words only,
    decode(encode(text)) == text, no special token, at most ``max_id_tokens``). Items left without one get the shortest
    free suffix: a number, else a short hash of the key. ``report``: num_items; num_collisions, items whose first
    candidate went to another one; num_collisions_left, which is 0; num_suffixes; mean and max of words and tokens; with
    ``item_texts`` also `quality`.
    Source: IDGenRec (SIGIR 2024). Differs from the paper: uniqueness of token sequences instead of strings, no
    dependence on file order, a bounded search, no empty IDs.
    Raises ValueError for no items, duplicate keys, or an ID that cannot be written within ``max_id_tokens``.
    """
    if not item_keys or len(set(item_keys)) != len(item_keys):
        raise ValueError(
            f"got {len(item_keys)} item keys, {len(set(item_keys))} of them distinct; expected at least one and no "
            "duplicates. Check the prepared data"
        )
    if len(candidates) != len(item_keys):
        raise ValueError(f"got candidates of {len(candidates)} items for {len(item_keys)} keys; expected as many")
    known: dict[str, tuple[int, ...] | None] = {}  # text -> its tokens, None when it cannot be an ID
    used = {tuple(tokens) for tokens in taken}
    text_of: dict[int, str] = {}
    order = sorted(range(len(item_keys)), key=lambda item: item_keys[item])
    first = [_tidy(texts[0]) if texts else "" for texts in candidates]
    _learn(known, first, tokenizer, max_id_tokens)
    for item in order:
        tokens = known[first[item]]
        if tokens is not None and tokens not in used:
            used.add(tokens)
            text_of[item] = first[item]
    later = [item for item in order if item not in text_of]
    num_collisions = sum(known[first[item]] is not None for item in later)
    suffixed = []
    for item in later:
        texts = [_tidy(text) for text in candidates[item]]
        _learn(known, texts, tokenizer, max_id_tokens)
        valid = [text for text in texts if known[text] is not None]
        text = next((text for text in valid if known[text] not in used), "")
        if not text:
            base = valid[0] if valid else "item"
            text = _with_suffix(base, item_keys[item], known, used, tokenizer, max_id_tokens)
            suffixed.append(item)
        used.add(known[text] or ())
        text_of[item] = text
    texts = [text_of[item] for item in range(len(item_keys))]
    token_ids = [list(known[text] or ()) for text in texts]
    report = {
        "num_items": len(texts),
        "num_collisions": num_collisions,
        "num_collisions_left": len(texts) - len(set(map(tuple, token_ids))),
        "num_suffixes": len(suffixed),
        **_lengths("words", [len(text.split()) for text in texts]),
        **_lengths("tokens", list(map(len, token_ids))),
    }
    if item_texts is not None:
        report |= quality(texts, item_texts, set(suffixed))
    return ItemIds(texts, token_ids, report)


def _lengths(name: str, numbers: Sequence[int]) -> dict[str, float]:
    return {f"mean_{name}": sum(numbers) / len(numbers), f"max_{name}": max(numbers)}


def quality(id_texts: Sequence[str], item_texts: Sequence[str], suffixed: Collection[int] = ()) -> dict[str, Any]:
    """What can be said of ID texts beside the texts of their items.

    own_word_share: of all words of IDs those that stand in the text of their item; a suffix, which ``suffixed`` items
    have for a last word, and IDs of items without any word are left out (num_without_words). repeat_share: IDs with a
    word twice. category_share: of the items of a category, which is the last entry of the field categories, those whose
    ID begins with the category's most frequent first word; None where no two items have one. examples: (title, ID) of
    items evenly spaced over the catalogue.
    """
    num_words = num_own = num_repeats = num_wordless = 0
    firsts: dict[str, Counter[str]] = {}
    for item, (id_text, item_text) in enumerate(zip(id_texts, item_texts, strict=True)):
        words, fields = id_text.split(), split_fields(item_text)
        own = {word for value in fields.values() for word in clean_words(value)}
        num_repeats += len(set(words)) < len(words)
        category = re.split(r"[,|>]", fields.get("categories", ""))[-1].strip()
        if category:
            firsts.setdefault(category, Counter())[words[0]] += 1
        if not own:
            num_wordless += 1
            continue
        written = words[:-1] if item in suffixed else words
        num_words += len(written)
        num_own += sum(word in own for word in written)
    shared = [count for count in firsts.values() if count.total() > 1]
    total = sum(count.total() for count in shared)
    num_shown = min(NUM_EXAMPLES, len(id_texts))
    shown = [number * len(id_texts) // num_shown for number in range(num_shown)]
    return {
        "own_word_share": num_own / num_words if num_words else None,
        "num_without_words": num_wordless,
        "repeat_share": num_repeats / len(id_texts),
        "category_share": sum(max(count.values()) for count in shared) / total if total else None,
        "examples": [[split_fields(item_texts[item]).get("title", item_texts[item]), id_texts[item]] for item in shown],
    }


def keyword_item_ids(
    item_keys: Sequence[str],
    item_texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    words: Words = TITLE_WORDS,
    taken: Iterable[Sequence[int]] = (),
) -> ItemIds:
    """Item IDs from the items' own words, without a neural generator, through the rules of `assign_item_ids`.

    ``words``: how many an ID has, and whether they are the most telling ones or the title's first. Not in a paper.
    """
    candidates = keyword_candidates(item_texts, words)
    return assign_item_ids(item_keys, candidates, tokenizer, taken=taken, item_texts=item_texts)


def _tidy(text: str) -> str:
    return " ".join(clean_words(text))


def _learn(
    known: dict[str, tuple[int, ...] | None],
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    max_id_tokens: int,
) -> None:
    """Encode the texts not seen before and note whether they can be IDs."""
    new = [text for text in dict.fromkeys(texts) if text not in known]
    special = set(tokenizer.all_special_ids)
    token_ids = encode_ids(tokenizer, new)
    for text, tokens, back in zip(new, token_ids, decode_ids(tokenizer, token_ids), strict=True):
        fits = 0 < len(tokens) <= max_id_tokens and not special.intersection(tokens)
        known[text] = tuple(tokens) if fits and back == text and text else None


def _with_suffix(
    base: str,
    key: str,
    known: dict[str, tuple[int, ...] | None],
    used: set[tuple[int, ...]],
    tokenizer: PreTrainedTokenizerBase,
    max_id_tokens: int,
) -> str:
    """The base with the first free number, else with a hash; words of the base give way where there is no room."""
    words = base.split()
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    suffixes = [str(number) for number in range(2, 100)] + [digest[:length] for length in range(4, 33, 4)]
    for suffix in suffixes:
        if suffix in words:
            continue
        for num_words in range(len(words), -1, -1):
            text = " ".join([*words[:num_words], suffix])
            _learn(known, [text], tokenizer, max_id_tokens)
            if known[text] is not None and known[text] not in used:
                return text
            if known[text] is not None:
                break  # it fits but is taken: the next suffix, rather than fewer words
    raise ValueError(
        f"no free ID for item {key!r} within {max_id_tokens} tokens (tried {base!r} with numbers and hashes); "
        "expected room for a suffix. Raise max_id_tokens"
    )


def unique_phrases(
    item_keys: Mapping[str, Sequence[str]],
    item_texts: Mapping[str, Sequence[str]],
    words: Words,
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
    for (domain, _, item), candidates in zip(places, keyword_candidates(texts, words), strict=True):
        phrase = next((text for text in candidates if text not in used), None)
        if phrase is None:
            base = candidates[-1] if candidates else "item"
            free[base] = next(number for number in count(free.get(base, 2)) if f"{base} {number}" not in used)
            phrase = f"{base} {free[base]}"
        used.add(phrase)
        chosen[domain][item] = phrase
    return chosen


OWN_WORD = "item"
"""What the word of an own token begins with; its number follows."""


def item_words(item_keys: Mapping[str, Sequence[str]], item_texts: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Catalogue -> a word for each item that no other item has and that stands in no item text: item0, item1, ...

    They are numbered in the order of catalogue and key.
    """
    words = {word for texts in item_texts.values() for text in texts for word in clean_words(text)}
    start = OWN_WORD
    while any(word.startswith(start) for word in words):
        start += OWN_WORD[-1]
    places = sorted((name, key, item) for name, keys in item_keys.items() for item, key in enumerate(keys))
    chosen = {name: [""] * len(keys) for name, keys in item_keys.items()}
    for number, (name, _, item) in enumerate(places):
        chosen[name][item] = f"{start}{number}"
    return chosen


def later_item_words(word: str, num_items: int, taken: Collection[str]) -> list[str]:
    """Words for later items, numbered on behind those of ``taken`` that are like ``word``, one of `item_words`."""
    start = word.rstrip("0123456789")
    numbers = [int(text[len(start) :]) for text in taken if re.fullmatch(re.escape(start) + "[0-9]+", text)]
    return [f"{start}{max(numbers) + 1 + number}" for number in range(num_items)]


def with_item_words(ids: ItemIds, words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> ItemIds:
    """``ids`` that end with a token of their own, whose texts are ``words``: one token each of ``tokenizer``."""
    own = encode_ids(tokenizer, words)
    assert all(len(tokens) == 1 for tokens in own), "the tokenizer was trained with these words"
    texts = [f"{text} {word}" for text, word in zip(ids.texts, words, strict=True)]
    return ids._replace(texts=texts, token_ids=[[*ids.token_ids[item], *own[item]] for item in range(len(own))])


def phrase_item_ids(
    item_keys: Sequence[str],
    phrases: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_id_tokens: int = MAX_ID_TOKENS,
    item_texts: Sequence[str] | None = None,
) -> ItemIds:
    """IDs from phrases that ``tokenizer`` was trained with; uniqueness and round trip are checked as for any ID."""
    candidates = [[phrase] for phrase in phrases]
    return assign_item_ids(item_keys, candidates, tokenizer, max_id_tokens, item_texts=item_texts)
