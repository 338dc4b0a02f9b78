"""What describes the items of a run beside who took them: vectors of their texts, or a table of numbers.

Shape legend: I items, F attributes.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedecider.data.encoders import load_encoder
from fedecider.data.interactions import Interactions
from fedecider.data.store import file_sha256
from fedecider.running.plain import content_key


def item_attributes(data: Interactions, config: Any) -> Tensor:
    """(I, F) float64, by a method's settings ``attributes`` and ``text_encoder``.

    Texts are of unit length under TF-IDF; numbers of a file are taken as they are. An item without the chosen fields
    has the vector of an empty text.

    Raises:
        ValueError: the data have no such fields, or the file lacks an item or has something else than numbers.
    """
    if config.attributes.endswith(".csv"):
        return numbers_of(Path(config.attributes), data.item_keys)
    return load_encoder(config.text_encoder).encode(chosen_texts(data, config.attributes))


def attribute_digest(data: Interactions, config: Any) -> str:
    """What decides :func:`item_attributes`, whose errors about the data come here too; nothing is encoded."""
    if config.attributes.endswith(".csv"):
        numbers_of(Path(config.attributes), data.item_keys)
        return file_sha256(Path(config.attributes))
    return content_key([config.text_encoder, chosen_texts(data, config.attributes)])


def has_attributes(data: Interactions) -> bool:
    """Whether any item has a text."""
    return any(data.texts)


def chosen_texts(data: Interactions, names: str = "") -> list[str]:
    """The text of each item, of the fields ``names``; without names all but the title, or the title where there is no
    other.

    Raises:
        ValueError: no item has any of these fields.
    """
    if not has_attributes(data):
        raise ValueError(
            f"got data set {data.name!r} whose items have no texts, expected attributes of the items: put the file of "
            "titles and genres beside the events, or give --attributes items.csv"
        )
    fields = [fields_of(text) for text in data.texts]
    known = list(dict.fromkeys(name for of_item in fields for name in of_item))
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(
            f"got attributes {names!r}, expected fields that items of {data.name!r} have ({', '.join(known)}), or the "
            "path of a csv file"
        )
    wanted = wanted or [name for name in known if name != "title"] or known
    return [" ".join(of_item[name] for name in wanted if name in of_item) for of_item in fields]


def fields_of(text: str) -> dict[str, str]:
    """Field -> value of an item text such as ``title: heat; genres: action, crime``."""
    parts = [part.partition(": ") for part in text.split("; ") if part]
    return {name if mark else "text": value if mark else name for name, mark, value in parts}


def numbers_of(path: Path, item_keys: Sequence[str]) -> Tensor:
    """(I, F) float64 numbers of a csv file: a header, then a line an item, its key first."""
    if not path.is_file():
        raise ValueError(f"got attributes {path}, expected a csv file: there is none")
    with path.open(newline="", encoding="utf-8") as file:
        _, *lines = csv.reader(file) if path.stat().st_size else [[]]
    row_of = {line[0]: line[1:] for line in lines if line}
    missing = [key for key in item_keys if key not in row_of]
    if missing:
        raise ValueError(
            f"got no line for item {missing[0]!r} in {path} ({len(missing)} of {len(item_keys)} are missing), expected "
            "a header, and a line for each item with its key first"
        )
    try:
        value_IF = np.array([row_of[key] for key in item_keys], np.float64)
    except ValueError as error:
        raise ValueError(f"got {path} with {error}, expected equally many numbers for each item") from error
    if not value_IF.shape[1] or not np.isfinite(value_IF).all():
        raise ValueError(f"got {path} without numbers or with ones that are not finite, expected numbers in columns")
    return torch.from_numpy(value_IF)
