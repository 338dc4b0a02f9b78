"""Readers of the original file formats, each ``(raw, domain, options) -> RawDomain``; `raw` is what they stand on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedecider.data.readers import amazon, goodreads, packed, ratings
from fedecider.data.readers.reading import RawDomain, ReadOptions

Read = Callable[[Path, str, ReadOptions], RawDomain]
"""Folder of the raw files, domain, options -> what there is."""
SOURCES: dict[str, Read] = {
    "goodreads": goodreads.read,
    "amazon": amazon.read,
    "movielens": ratings.read_movielens,
    "goodbooks": ratings.read_goodbooks,
    "packed": packed.read,
    "lastfm_tags": ratings.read_lastfm_tags,
    "lastfm_plays": ratings.read_lastfm_plays,
    "filmtrust": ratings.read_filmtrust,
    "amazon_ratings": ratings.read_amazon_ratings,
    "lists": ratings.read_lists,
    "csv": ratings.read_csv_columns,
}
WITHOUT_TEXTS = frozenset({"filmtrust", "amazon_ratings", "lists", "csv"})
"""Sources that know nothing of an item but its key: enough for models of embeddings, not for models of texts."""
SINGLE_DOMAIN = frozenset(
    {"movielens", "goodbooks", "lastfm_tags", "lastfm_plays", "filmtrust", "amazon_ratings", "lists"}
)
"""Sources whose folder holds one domain, with a free name."""
