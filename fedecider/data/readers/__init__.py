"""Readers of the original file formats; each module has ``read(raw, domain, options) -> RawDomain``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedecider.data.readers import (
    amazon,
    amazon_ratings,
    csv_columns,
    filmtrust,
    goodbooks,
    goodreads,
    lastfm,
    lists,
    movielens,
    packed,
)
from fedecider.data.readers.table import RawDomain, ReadOptions

Read = Callable[[Path, str, ReadOptions], RawDomain]
"""Folder of the raw files, domain, options -> what there is."""
SOURCES: dict[str, Read] = {
    "goodreads": goodreads.read,
    "amazon": amazon.read,
    "movielens": movielens.read,
    "goodbooks": goodbooks.read,
    "packed": packed.read,
    "lastfm_tags": lastfm.read_tags,
    "lastfm_plays": lastfm.read_plays,
    "filmtrust": filmtrust.read,
    "amazon_ratings": amazon_ratings.read,
    "lists": lists.read,
    "csv": csv_columns.read,
}
WITHOUT_TEXTS = frozenset({"filmtrust", "amazon_ratings", "lists", "csv"})
"""Sources that know nothing of an item but its key: enough for models of embeddings, not for models of texts."""
SINGLE_DOMAIN = frozenset(
    {"movielens", "goodbooks", "lastfm_tags", "lastfm_plays", "filmtrust", "amazon_ratings", "lists"}
)
"""Sources whose folder holds one domain, with a free name."""
