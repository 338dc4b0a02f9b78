"""Readers of the original file formats; each module has ``read(raw, domain, options) -> RawDomain``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedecider.data.readers import amazon, goodbooks, goodreads, movielens, packed
from fedecider.data.readers.table import RawDomain, ReadOptions

SOURCES: dict[str, Callable[[Path, str, ReadOptions], RawDomain]] = {
    "goodreads": goodreads.read,
    "amazon": amazon.read,
    "movielens": movielens.read,
    "goodbooks": goodbooks.read,
    "packed": packed.read,
}
SINGLE_DOMAIN = frozenset({"movielens", "goodbooks"})
"""Sources whose folder holds one domain, with a free name."""
