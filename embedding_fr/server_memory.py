"""The memory of a server's step against what is available, before the first round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from embedding_fr.methods import METHODS
from fedecider.running.machine import check_memory, has_room


def check_server_memory(name: str, config: Any, num_items: int, log: Callable[[str], None] = lambda text: None) -> None:
    """Compare what the server of the method ``name`` takes at its peak with what is there; ``log`` hears of much.

    It covers the CPU. With a GPU the sum is made on the CPU all the same, and the solution takes up to four squares
    on the GPU, about which torch speaks up itself.

    Raises:
        ValueError: it does not fit; the text names the settings that would, the smallest change first.
    """
    server_bytes = METHODS[name].server_bytes
    if server_bytes is not None:
        needed, form = server_bytes(num_items, config), f"{name} with {num_items:,} items as it is set"
        check_memory(needed, form, lambda: smaller_form(name, config, num_items), log)


def smaller_form(name: str, config: Any, num_items: int) -> str:
    """What to set so that the server's step fits, in words."""
    entry = METHODS[name]
    assert entry.server_bytes is not None
    least = entry.server_bytes(num_items, config)
    for changes in entry.smaller_server:
        try:
            needed = entry.server_bytes(num_items, replace(config, **changes))
        except ValueError:  # such as top_k beside rank
            continue
        if has_room(needed):
            return f"{' '.join(f'--{k} {v}' for k, v in changes.items())} takes {needed / 1e9:,.1f} GB"
        least = min(least, needed)
    return f"no setting takes less than {least / 1e9:,.1f} GB, so take fewer items (--min_item_events)"
