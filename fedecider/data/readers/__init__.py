"""Readers of the original file formats, each ``(raw, domain, options) -> RawDomain``; `raw` is what they stand on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from fedecider.data.readers.layouts import LAYOUTS, read
from fedecider.data.readers.reading import RawDomain, ReadOptions

Read = Callable[[Path, str, ReadOptions], RawDomain]
"""Folder of the raw files, domain, options -> what there is."""
SOURCES: dict[str, Read] = {name: partial(read, name) for name in LAYOUTS}
WITHOUT_TEXTS = frozenset(name for name, source in LAYOUTS.items() if not source.items)
"""Sources that know nothing of an item but its key: enough for models of embeddings, not for models of texts."""
SINGLE_DOMAIN = frozenset(LAYOUTS) - {"goodreads", "amazon", "packed"}
"""Sources whose folder holds one domain, with a free name."""
