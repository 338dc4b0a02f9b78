"""A small catalogue with uneven sequences, shared by the tests of samples and training."""

from __future__ import annotations

import random

from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from idgen.config import SampleConfig
from idgen.item_ids import ItemIds, keyword_item_ids
from idgen.prompts import prompt_texts
from idgen.tasks import Task, build_task
from idgen.tokenizer import train_tokenizer

COLOURS = ["red", "blue", "green", "amber", "violet", "grey", "ochre"]
THINGS = ["lantern", "harbour", "castle", "orchard", "engine"]


def make_domain(name: str = "small_shop", num_items: int = 23, lengths: tuple[int, ...] = (3, 4, 9, 27), seed: int = 0):
    """``num_items`` items with two-word titles; one client per length, and public users one event longer."""
    titles = [f"{COLOURS[n % 7]} {THINGS[n % 5]} {'again' if n >= 20 else ''}".strip() for n in range(num_items)]
    draw = random.Random(seed)

    def events(prefix: str, extra: int) -> Events:
        sequences = [[draw.randrange(num_items) for _ in range(length + extra)] for length in lengths]
        return Events([f"{prefix}{n}" for n in range(len(lengths))], sequences, None)

    return Domain(
        name=name,
        catalogue=Catalogue(
            name,
            keys=[f"{name}{n:03d}" for n in range(num_items)],
            titles=titles,
            texts=[f"title: {title}; categories: {THINGS[n % 5]}" for n, title in enumerate(titles)],
        ),
        clients=events(f"{name}-c", 0),
        public=events(f"{name}-p", 1),
        card={},
    )


def make_tokenizer(domains, vocab_size: int = 400):
    words = [text for domain in domains for text in domain.item_texts]
    words += [text for kind in ("natural", "compact") for text in prompt_texts(kind, [d.name for d in domains])]
    return train_tokenizer(words, vocab_size)


def make_ids(domain, tokenizer) -> ItemIds:
    return keyword_item_ids(domain.item_keys, domain.item_texts, tokenizer)


def make_task(domain, tokenizer, config: SampleConfig, hold_out: bool = True, item_ids: ItemIds | None = None) -> Task:
    """The task of the domain's clients."""
    ids = item_ids or make_ids(domain, tokenizer)
    return build_task(domain, domain.clients, ids, tokenizer, config, hold_out)
