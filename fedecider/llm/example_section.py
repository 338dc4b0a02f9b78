"""A few real histories with recommendations: a first section for the top of a page, and one with the rest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from fedecider.report.page import PageTable, Section

Examples = Mapping[str, Sequence[Mapping[str, Any]]]
"""Domain -> examples, as ``examples.json`` has them."""
FIRST = 3
"""So many stand before the tables."""


def example_sections(per_row: Mapping[str, Examples]) -> tuple[list[Section], list[Section]]:
    """The first examples, and those for further down; both empty where there are none.

    ``per_row``: row -> its examples; the rows have the same users, drawn by the seed.
    """
    given = {label: examples for label, examples in per_row.items() if examples}
    by_domain = [
        [
            _table({label: examples[name][number] for label, examples in given.items()}, f"{name}, user {number + 1}")
            for number in range(len(found))
        ]
        for name, found in next(iter(given.values()), {}).items()
    ]
    tables = [table for table in chain(*zip_longest(*by_domain)) if table is not None]
    if not tables:
        return [], []
    text = (
        "Users drawn at random before anything was decoded: what they had last, the oldest first, and what was "
        f"recommended by {' and '.join(given)}, the best first. ✓ marks the held-out item, which the user took next. "
        "These are real histories, without user keys; think before you publish them."
    )
    more = f"As in the section Examples: {len(tables) - FIRST} more users."
    rest = [Section("More examples", [more], tables[FIRST:])] if tables[FIRST:] else []
    return [Section("Examples", [text], tables[:FIRST])], rest


def _table(examples: Mapping[str, Mapping[str, Any]], name: str) -> PageTable:
    first = next(iter(examples.values()))
    found = {label: _place(example["position"]) for label, example in examples.items()}
    said = "; ".join(f"{label}: {place}" if len(found) > 1 else place for label, place in found.items())
    older = first["num_history"] - len(first["history"])
    had = f"had (and {older} before)" if older else "had"
    lists = [[_title(item) for item in example["recommended"]] for example in examples.values()]
    columns = zip_longest(first["history"], *lists, fillvalue="")
    rows = [[str(number), *cells] for number, cells in enumerate(columns, 1)]
    labels = ["recommended"] if len(examples) == 1 else [f"recommended by {label}" for label in examples]
    return PageTable(("no.", had, *labels), rows, f"{name} took “{first['held_out']}” next: {said}")


def _place(position: int | None) -> str:
    return "not among the returned items" if position is None else f"found at place {position + 1}"


def _title(item: Mapping[str, Any]) -> str:
    return f"✓ {item['title']}" if item["held_out"] else item["title"]
