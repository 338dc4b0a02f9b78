"""The most popular items of a domain, for those who say nothing of what they like: from the counts of the memory alone.

No model is loaded, and no library of models imported, which would take most of the time.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fedecider.llm.answers import Answer, Scored, check_k, recommendations
from fedecider.llm.pretrained_folder import find_source
from fedecider.lora.item_table import read_item_ids
from fedecider.memory.experts import popularity_probs
from fedecider.memory.memory import Memory
from fedecider.memory.store import load_memory

POPULARITY = "popularity"
NO_HISTORY_MEMORY = "no history was given: the items with most events in the counts of the memory"


def most_popular(memory: Memory, k: int) -> list[Scored]:
    """The k items with most events in the counts of a memory, whoever asks."""
    prob_I = popularity_probs(memory.counts)
    best = np.argsort(-prob_I, kind="stable")[:k]
    return [Scored(int(item), math.log(prob_I[item]), {POPULARITY: 1.0}) for item in best]


def popular_items(source: str | Path, domain: str | None, k: int) -> tuple[str, Answer] | None:
    """The domain, and what ``Recommender.from_pretrained(source, domain).recommend([], k)`` answers.

    None where the source has no memory: then a model is needed.

    Raises:
        FileNotFoundError: there is no such source or domain.
        ValueError: as `fedecider.llm.recommender.Recommender.from_pretrained`, or k below 1.
    """
    check_k(k)
    found = find_source(source)
    place = found.place(found.choose(domain))
    table = read_item_ids(place.adapter)
    if place.memory is None:
        return None
    scored = most_popular(load_memory(place.memory, table.keys), k)
    items = recommendations(scored, table.keys, table.titles)
    return place.domain, Answer(items, (), place.recipe.alpha_shares, (NO_HISTORY_MEMORY,))
