"""Which items may be recommended: what is to be left out, what alone may come, what is in stock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fedecider.models.item_search import Items


class Allowed(NamedTuple):
    """The items that filters leave."""

    number_A: tuple[int, ...]
    """Rising."""
    notes: tuple[str, ...] = ()
    """What the filters named that is no item."""


def allowed_items(
    items: Items,
    exclude: Iterable[str] | None,
    candidates: Iterable[str] | None,
    stock: Mapping[str, float] | None,
) -> Allowed | None:
    """The items that three filters leave, None where there is no filter; items are named by their keys.

    ``stock``: key -> how many are left; items with none, and items that it does not name, are out of stock.

    Raises:
        ValueError: a filter of another form, or nothing is left.
    """
    if exclude is None and candidates is None and stock is None:
        return None
    left, notes = set(range(len(items))), []
    named: list[tuple[str, Any]] = [("exclude", exclude), ("candidates", candidates)]
    if stock is not None:
        if not isinstance(stock, Mapping):
            raise ValueError(f"got stock {str(stock)[:60]!r}, expected how many are left of each item key: {{'a': 3}}")
        odd = [key for key, count in stock.items() if not isinstance(count, int | float) or count != count]
        if odd:
            raise ValueError(f"got the stock {stock[odd[0]]!r} of {odd[0]!r}, expected how many are left, a number")
        named.append(("stock", [key for key, count in stock.items() if count > 0]))
    for what, keys in named:
        if keys is None:
            continue
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise ValueError(f"got {what} {keys!r}, expected a list of item keys")
        keys = list(keys)
        if any(not isinstance(key, str) for key in keys):
            raise ValueError(f"got {what} {str(keys)[:60]}, expected a list of item keys, which are texts")
        numbers = {number for key in keys if (number := items.number(key)) is not None}
        unknown = [key for key in keys if items.number(key) is None]
        if unknown:
            from fedecider.data.keys import how_keys_differ  # for what is wrong alone

            how = how_keys_differ(unknown, items.keys)
            notes.append(
                f"{len(unknown)} of {len(keys)} keys of {what} are no items, such as {str(unknown[0])[:60]!r}"
                f"{f'; {how}' if how else ''}"
            )
        left = left - numbers if what == "exclude" else left & numbers
    if not left:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise ValueError(f"got filters that leave none of the {len(items)} items{why}, expected one at least")
    return Allowed(tuple(sorted(left)), tuple(notes))
