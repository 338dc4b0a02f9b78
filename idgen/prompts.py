"""Prompt templates: natural sentences, very short ones, lists, or the history alone; each with and without a user.

A template is words and placeholders separated by spaces; a placeholder stands alone as a word. Prompts are put
together from parts (item IDs, words of the template) that were tokenised once. Tokenizers of the T5 family cut at
spaces first, so these are the tokens of the full text too; where a tokenizer has pieces of several words, the parts
decide, and an item ID has the same tokens in every prompt and as a target.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

TemplateSet = Literal["natural", "compact", "history", "list"]
ROW_SETS = ("history", "list")
"""Prompts that a decoder-only model goes on writing: every item is closed, and the next one follows."""

USER, HISTORY, DOMAIN = "{user}", "{history}", "{domain}"
PLACEHOLDERS = (USER, HISTORY, DOMAIN)


class Template(NamedTuple):
    """The two wordings of one prompt; the target text is the item ID alone."""

    user: str
    """Holds ``{user}`` and ``{history}`` once, ``{domain}`` at most once."""
    no_user: str
    """The same for an unknown user: no ``{user}``."""


@cache
def load_templates(name: TemplateSet) -> tuple[Template, ...]:
    """The templates of a set; number 0 is the one used for validation and test.

    Ten natural sentences, as many as IDGenRec (SIGIR 2024) uses, worded anew; or one ``compact`` prompt of a few
    words, for small models on CPUs; or the ``history`` alone, or a ``list`` with a heading, which a decoder goes on
    writing. Errors: ``ValueError`` for an unknown set.
    """
    sets = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    if name not in sets:
        raise ValueError(f"got templates {name!r}; expected one of {sorted(sets)}")
    templates = tuple(Template(**entry) for entry in sets[name])
    for template in templates:
        check_wording(template.user, with_user=True)
        check_wording(template.no_user, with_user=False)
    return templates


def check_wording(wording: str, with_user: bool) -> None:
    """Raise ``ValueError`` unless each placeholder is a word of its own and occurs as often as it must."""
    words = wording.split(" ")
    counts = {placeholder: words.count(placeholder) for placeholder in PLACEHOLDERS}
    rest = [word for word in words if word not in PLACEHOLDERS]
    wanted = f"{HISTORY} once, {USER} {'once' if with_user else 'not at all'}, {DOMAIN} at most once"
    if counts[HISTORY] != 1 or counts[USER] != int(with_user) or counts[DOMAIN] > 1:
        raise ValueError(f"prompt {wording!r}: expected {wanted}")
    if any(not word or "{" in word or "}" in word for word in rest):
        raise ValueError(
            f"prompt {wording!r}: expected words separated by single spaces, with each of {', '.join(PLACEHOLDERS)} "
            "as a word of its own. Put a space before the punctuation"
        )


def domain_words(name: str) -> str:
    """A domain name as it stands in a prompt: ``movies_tv`` -> ``movies tv``."""
    return " ".join(name.replace("_", " ").replace("-", " ").split()) or "items"


def split_wording(wording: str, domain: str) -> tuple[list[str], list[str]]:
    """Parts before and after the history: plain texts and ``{user}``, with the domain's words filled in."""
    before, after = wording.replace(DOMAIN, domain_words(domain)).split(HISTORY)
    return _parts(before), _parts(after)


def render(wording: str, domain: str, history: Sequence[str], separator: str, user: str | None = None) -> str:
    """The prompt as text: item ID texts joined by the separator, in the given order."""
    joined = f" {separator} ".join(history) if separator else " ".join(history)
    before, after = split_wording(wording, domain)
    parts = [*before, joined, *after]
    return " ".join((user or "") if part == USER else part for part in parts)


def prompt_texts(templates: TemplateSet, separator: str, domains: Iterable[str]) -> list[str]:
    """Every text that prompts add to the item IDs: give it to a tokenizer that is trained from scratch."""
    texts = [separator] if separator else []
    for domain in domains:
        for template in load_templates(templates):
            for wording in template:
                before, after = split_wording(wording, domain)
                texts += [part for part in (*before, *after) if part != USER]
    return sorted(set(texts))


def _parts(text: str) -> list[str]:
    """``the list of {user} today`` -> ``["the list of", "{user}", "today"]``."""
    parts: list[str] = []
    for word in text.split():
        if word == USER or not parts or parts[-1] == USER:
            parts.append(word)
        else:
            parts[-1] += " " + word
    return parts
