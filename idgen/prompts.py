"""Prompt templates: natural sentences, very short ones, lists, or the history alone.

A template is words and placeholders separated by spaces; a placeholder stands alone as a word. Prompts are put
together from parts (item IDs, words of the template) that were tokenised once. Tokenizers of the T5 family cut at
spaces first, so these are the tokens of the full text too; where a tokenizer has pieces of several words, the parts
decide, and an item ID has the same tokens in every prompt and as a target.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from idgen.config import TemplateSet

HISTORY, DOMAIN = "{history}", "{domain}"


@cache
def load_templates(name: TemplateSet) -> tuple[str, ...]:
    """The templates of a set, each with ``{history}`` once and ``{domain}`` at most once; the target text is the item
    ID alone. Number 0 is the one used for validation and test.

    Ten natural sentences, as many as IDGenRec (SIGIR 2024) uses, worded anew; or one ``compact`` prompt of a few
    words, for small models on CPUs; or the ``history`` alone, or a ``list`` with a heading, which a decoder goes on
    writing. Errors: ``ValueError`` for an unknown set.
    """
    sets = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    if name not in sets:
        raise ValueError(f"got templates {name!r}; expected one of {sorted(sets)}")
    return tuple(sets[name])


def domain_words(name: str) -> str:
    """A domain name as it stands in a prompt: ``movies_tv`` -> ``movies tv``."""
    return " ".join(name.replace("_", " ").replace("-", " ").split()) or "items"


def split_template(template: str, domain: str) -> tuple[str, str]:
    """The words before and after the history, the domain's filled in; either may be empty."""
    before, after = template.replace(DOMAIN, domain_words(domain)).split(HISTORY)
    return before.strip(), after.strip()


def prompt_texts(templates: TemplateSet, domains: Iterable[str]) -> list[str]:
    """Every text that prompts add to the item IDs, and the domains' words apart from those around them: give it to a
    tokenizer that is trained from scratch."""
    texts = {SEPARATOR}
    for domain in domains:
        for template in load_templates(templates):
            texts.update(split_template(template, domain))
            texts.update(part.strip() for part in template.replace(HISTORY, DOMAIN).split(DOMAIN))
            texts.update([domain_words(domain)] if DOMAIN in template else [])
    return sorted(texts - {""})


SEPARATOR = ";"
"""The word between two item IDs of a history, where nothing closes them."""
