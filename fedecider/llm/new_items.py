"""Items that no training has seen: what they need is their texts.

A small decoder starts with the vectors of item texts for a table, one row for the one token of each item. A later item
gets the row that its text would have had: the same encoder, mean and basis, kept by stage 1. Adapters change nothing of
it: their rows for it are zero.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedecider.data.encoders import load_encoder
from fedecider.llm.item_texts import encoder_digest, load_projection
from fedecider.lora.item_table import ItemTable
from fedecider.memory.experts import unit_vectors
from fedecider.memory.memory import Memory, with_items
from idgen.item_ids import IdConfig
from idgen.keywords import KeywordConfig
from idgen.new_items import append_rows
from idgen.phrases import phrase_item_ids, unique_phrases
from idgen.tokenizer import known_phrases, with_phrases
from idgen.words import clean_words

TEXT_FOLDER = "item_texts"
"""In the backbone of a run: what gives later texts their vectors."""


class NewItem(NamedTuple):
    key: str
    title: str
    text: str
    """As the item texts of prepared data: ``title: ...; brand: ...``; letter case and line breaks do not matter."""


class NewTexts(NamedTuple):
    """How a run reads the texts of its items."""

    projection: Path
    encoder: str
    """The name in the run's settings."""
    keywords: KeywordConfig
    prompts: Sequence[str] = ()
    """What prompts add to the items (`idgen.prompts.prompt_texts`): none of its words may become an item."""


class Added(NamedTuple):
    """What goes with a model that has new items."""

    tokenizer: PreTrainedTokenizerBase
    table: ItemTable
    memory: Memory | None


def read_new_items(path: Path) -> list[NewItem]:
    """The items of a .csv or .jsonl file with ``key``, ``title`` and ``text``.

    Raises:
        ValueError: another kind of file, one that cannot be read, a missing or surplus field, or no item.
    """
    fields = NewItem._fields
    if path.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"got new items in {path}, expected a .csv or .jsonl file with {', '.join(fields)}")
    found = []
    with _opened(path) as file:
        try:
            lines = (
                csv.DictReader(file) if path.suffix == ".csv" else (json.loads(line) for line in file if line.strip())
            )
            for number, line in enumerate(lines, 1):
                given = line if isinstance(line, dict) else {}
                if None in given:  # where csv puts what is too much
                    raise ValueError(f"entry {number} has more fields than the header; quote texts that hold commas")
                values = [value for field in fields if isinstance(value := given.get(field), str)]
                if len(values) < len(fields):
                    raise ValueError(f"entry {number} has not all of them as texts")
                found.append(NewItem(*values))
            if not found:
                raise ValueError("it has no entry")
        except (ValueError, RecursionError, csv.Error) as error:
            raise ValueError(f"got new items in {path}, expected {', '.join(fields)} in each entry: {error}") from error
    return found


def _opened(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8-sig", newline="")  # with the mark that spreadsheets write, or without
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}), expected a file of new items") from error


def as_new_item(item: NewItem | Mapping[str, str]) -> NewItem:
    """A new item from a mapping with its fields. ``ValueError`` for anything else."""
    given = item._asdict() if isinstance(item, NewItem) else item
    fields = NewItem._fields
    if (
        not isinstance(given, Mapping)
        or set(given) != set(fields)
        or not all(isinstance(value, str) for value in given.values())
    ):
        raise ValueError(f"got the new item {item!r}, expected the texts {', '.join(fields)}, and no more")
    return NewItem(**given)


def add_items(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    items: ItemTable,
    catalogue: str,
    new_items: Sequence[NewItem],
    texts: NewTexts,
    memory: Memory | None = None,
) -> Added:
    """Add items to a loaded model, in place, behind the others.

    Each gets a phrase of its text that is no token yet and in no prompt for its ID, and for its row what
    `text_projection` of stage 1 makes of the text. Nothing is trained, and scores of other items before softmax stay
    what they were. A memory gets them by their texts as well (`fedecider.memory.memory.with_items`).

    Raises:
        ValueError: a key that is there already, an empty text, IDs of several tokens, a run that keeps no projection,
            an encoder that is not the run's, or TF-IDF, which is fitted on all texts and cannot encode one more.
    """
    _check(items, new_items)
    row_ND, unit_NE = _vectors(catalogue, [_clean(item.text) for item in new_items], texts)
    keys = [item.key for item in new_items]
    phrases = unique_phrases(
        {catalogue: keys},
        {catalogue: [_clean(item.text) for item in new_items]},
        texts.keywords,
        known_phrases(tokenizer) | _word_runs(texts.prompts),
    )[catalogue]
    longer = with_phrases(tokenizer, phrases)
    ids = phrase_item_ids(keys, phrases, longer, IdConfig(max_id_tokens=1))
    longer_memory = None if memory is None else with_items(memory, unit_NE)
    append_rows(model, row_ND)
    table = items._replace(
        keys=[*items.keys, *keys],
        titles=[*items.titles, *(item.title for item in new_items)],
        id_texts=[*items.id_texts, *ids.texts],
        token_ids=[*items.token_ids, *ids.token_ids],
    )
    return Added(longer, table, longer_memory)


def _word_runs(texts: Sequence[str]) -> set[str]:
    """Every run of words in ``texts``."""
    rows = [clean_words(text) for text in texts]
    return {" ".join(words[i:j]) for words in rows for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


def _vectors(catalogue: str, texts: Sequence[str], settings: NewTexts) -> tuple[Tensor, np.ndarray]:
    """(N, D) rows of the table, and (N, E) vectors of a memory."""
    if not settings.projection.is_file():
        raise ValueError(
            f"got new items for a run without {settings.projection.name}, expected a decoder from "
            "scratch (backbone.kind decoder): only there has an item without training a place"
        )
    projection, wanted = load_projection(settings.projection)
    if wanted == "tfidf":
        raise ValueError(
            "got new items for a run with the text encoder tfidf, expected minilm or another sentence encoder: TF-IDF "
            "is fitted on all texts, and another text would change the vectors of all. Run again with such a "
            "pretrain.text_encoder"
        )
    found = encoder_digest(settings.encoder)
    if found != wanted:
        raise ValueError(
            f"got the text encoder {found} ({settings.encoder}), expected {wanted}, with which the run was made: "
            "vectors of two encoders say nothing of each other. Install that encoder, or put its folder in its place"
        )
    text_NE = load_encoder(settings.encoder).encode(texts).float()
    unit_NE = unit_vectors(text_NE.numpy(), projection.mean[catalogue].numpy())
    return projection.rows(catalogue, text_NE), unit_NE


def _check(items: ItemTable, new_items: Sequence[NewItem]) -> None:
    several = next(
        (text for text, tokens in zip(items.id_texts, items.token_ids, strict=True) if len(tokens) > 1), None
    )
    if several is not None:
        raise ValueError(
            f"got new items for a run with item IDs of several tokens, such as {several!r}, expected one token each "
            "(tokenizer_kind phrase): an item without training has no place among words"
        )
    known = set(items.keys)
    for item in new_items:
        if not item.key.strip() or item.key in known:
            raise ValueError(
                f"got the key {item.key!r} for a new item, expected one that no other item has. Leave out items of the "
                "catalogue, and name each new one once"
            )
        known.add(item.key)
        if not clean_words(item.text):
            raise ValueError(
                f"got the text {item.text!r} for the new item {item.key!r}, expected words: write its text"
            )


def _clean(text: str) -> str:
    return " ".join(text.split()).lower()
