"""Words that a field of the text has in every item of a catalogue: they tell no item from another, and are left out.

A text of own tables is ``title: ...; category: ...``. Left out they change neither vectors nor IDs nor prompts, where a
column that says the same of everything is there or not. Titles stay whole: they are what an item is called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

ConstantWords = Mapping[str, Collection[str]]
"""Field -> its words."""
CARD = "constant_words"
"""Where they stand in a data card."""
AROUND = ",.;:|/>&()-"


def constant_words(texts: Sequence[str]) -> dict[str, list[str]]:
    """What every one of ``texts`` has in a field; nothing of fewer than two, or where one would be empty."""
    fields = [dict(_fields(text)) for text in texts if text]
    if len(fields) < 2:
        return {}
    names = set.intersection(*map(set, fields)) - {"title", ""}
    common = {name: set.intersection(*({*map(_bare, one[name].split())} for one in fields)) for name in sorted(names)}
    found = {
        name: list(dict.fromkeys(filter(words.__contains__, map(_bare, fields[0][name].split()))))
        for name, words in common.items()
        if words
    }
    return found if all(_without(text, found) for text in texts if text) else {}


def without_constant(text: str, words: ConstantWords) -> str:
    """``text`` without these words in their fields; as it is where nothing would be left."""
    return _without(text, words) or text


def in_words(words: ConstantWords) -> str:
    """For a note: what was left out."""
    return "; ".join(f"{' '.join(of_field)} ({name})" for name, of_field in words.items())


def _without(text: str, words: ConstantWords) -> str:
    kept = []
    for name, value in _fields(text):
        if name in words:
            value = " ".join(word for word in value.split() if _bare(word) not in words[name]).strip(AROUND + " ")
        if value:
            kept.append(f"{name}: {value}" if name else value)
    return "; ".join(kept)


def _fields(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split("; "):
        name, colon, value = part.partition(": ")
        yield (name, value) if colon else ("", part)


def _bare(word: str) -> str:
    return word.strip(AROUND) or word
