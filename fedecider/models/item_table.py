"""The files of an adapter folder, and the table of its items: key, title, ID text and token IDs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

CONFIG_FILE = "adapter_config.json"
ITEM_FILE = "item_ids.json"
WEIGHTS_FILE = "adapter_model.safetensors"
LOCAL_BACKBONE = "../../backbone"
"""The backbone of an output directory, seen from ``adapters/<domain>/``."""


class ItemTable(NamedTuple):
    """The items that a client's model can recommend, in item-number order."""

    keys: Sequence[str]
    titles: Sequence[str]
    id_texts: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    """Without the end token; the trie is built from these."""
    catalogue: str = ""
    """What prompts call it where that is not the domain's name, as for silos."""

    def columns(self) -> dict[str, Sequence[Any]]:
        """What every item has."""
        return {name: value for name, value in self._asdict().items() if name != "catalogue"}


def read_item_ids(folder: Path) -> ItemTable:
    """The item table of an adapter folder.

    Raises:
        ValueError: the file is damaged, or it was written for other adapter weights.
    """
    path = folder / ITEM_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries, recorded = content["items"], content["adapter_sha256"]
        table = ItemTable(
            keys=list(entries),
            titles=[entry["title"] for entry in entries.values()],
            id_texts=[entry["id"] for entry in entries.values()],
            token_ids=[entry["tokens"] for entry in entries.values()],
            catalogue=content.get("catalogue", ""),
        )
        check_items(table)
        _check_entries(table)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"got a damaged {path} ({error}), expected the file that the export wrote; export again"
        ) from error
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"no {folder / WEIGHTS_FILE} beside its item table, expected both; export again")
    actual = _digest(folder / WEIGHTS_FILE)
    if actual != recorded:
        raise ValueError(
            f"got adapter weights {actual[:12]} beside an item table for {recorded[:12]} in {folder}, expected the "
            "pair of one export; item IDs of another run would recommend other items"
        )
    return table


def lengthen(folder: Path, items: ItemTable) -> None:
    """Put a table with more items into the place of that in ``folder``."""
    end_token = json.loads((folder / ITEM_FILE).read_text(encoding="utf-8"))["eos_token_id"]
    write_items(folder, items, end_token)


def write_items(folder: Path, items: ItemTable, end_token: int | None) -> None:
    """Write the table beside the weights in ``folder``, whose digest it holds; ``end_token`` closes an ID."""
    entries = {
        key: {"title": title, "id": id_text, "tokens": list(tokens)}
        for key, title, id_text, tokens in zip(*items.columns().values(), strict=True)
    }
    content = {
        **({"catalogue": items.catalogue} if items.catalogue else {}),
        "adapter_sha256": _digest(folder / WEIGHTS_FILE),
        "eos_token_id": end_token,
        "items": entries,
    }
    (folder / ITEM_FILE).write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def check_items(items: ItemTable) -> None:
    """``ValueError`` for columns of different sizes, no item, or a key that stands twice."""
    sizes = {name: len(column) for name, column in items.columns().items()}
    if len(set(sizes.values())) != 1 or not items.keys:
        raise ValueError(f"got item columns of sizes {sizes}, expected equal ones of at least 1; rebuild the item IDs")
    if len(set(items.keys)) != len(items.keys):
        raise ValueError("got duplicate item keys, expected each once; prepare the domain again")


def _check_entries(items: ItemTable) -> None:
    if not isinstance(items.catalogue, str):
        raise ValueError("the name of the catalogue is no text")
    for key, title, id_text, tokens in zip(*items.columns().values(), strict=True):
        if not isinstance(title, str) or not isinstance(id_text, str):
            raise ValueError(f"title or ID of {key!r} is no text")
        if not tokens or not all(type(token) is int and token >= 0 for token in tokens):
            raise ValueError(f"tokens of {key!r} are no list of numbers from 0 on")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
