"""Items that no training has seen, added to a loaded model: what they need is their texts.

A later item has an ID of the run's kind. Where IDs are words or codes their tokens are known. A small decoder of one
token an item starts with the vectors of item texts for a table: a later item gets the row that its text would have had,
by the same encoder, mean and basis, kept by stage 1. Adapters change nothing of it: their rows for it are zero.
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

from fedecider.data.catalogue import NewItem
from fedecider.data.encoders import load_encoder
from fedecider.data.near_texts import unit_vectors
from fedecider.models.ensemble import Ensemble, with_items
from fedecider.models.item_table import ItemTable
from fedecider.models.item_texts import CODEBOOK_FILE, PROJECTION_FILE, encoder_digest, load_codebook, load_projection
from fedecider.models.source import Place
from idgen.config import Words
from idgen.id_generator import IDGenerator, build_id_generator, make_item_ids
from idgen.item_ids import ItemIds, phrase_item_ids, unique_phrases
from idgen.new_items import append_rows
from idgen.prompts import prompt_texts
from idgen.semantic_ids import semantic_item_ids, semantic_texts
from idgen.tokenizer import clean_words, known_phrases, with_phrases

TEXT_FOLDER = "item_texts"
"""In the backbone of a run: what gives later texts their vectors and semantic IDs."""
GENERATOR_FOLDER = "id_generator"
"""In the backbone of a run, where item IDs come from an ID generator: what gives later texts their IDs."""


class NewTexts(NamedTuple):
    """How a run reads the texts of its items."""

    backbone: Path
    """The folder, with what gives later texts their vectors and IDs."""
    ids: str
    """What item IDs are made of (``pretrain.ids``)."""
    encoder: str
    """The name in the run's settings."""
    words: Words
    prompts: Sequence[str] = ()
    """What prompts add to the items (`idgen.prompts.prompt_texts`): none of its words may become an item."""


class Added(NamedTuple):
    """What goes with a model that has new items."""

    tokenizer: PreTrainedTokenizerBase
    table: ItemTable
    ensemble: Ensemble | None


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
    ensemble: Ensemble | None = None,
) -> Added:
    """Add items to a loaded model, in place, behind the others.

    Each gets an ID of the run's kind that no other item has: from the ID generator, from its keywords, or codes of the
    run's codebook. These have known tokens, and no row is added. Where every ID is one token, the new token is a phrase
    of the item's text that is no token yet and in no prompt; its row is what `text_projection` of stage 1 makes of the
    text. Nothing is trained, so logits of other items stay what they were. An ensemble places new items by their texts
    too (`fedecider.models.ensemble.with_items`).

    Raises:
        ValueError: a key exists already, or a text is empty. The run does not keep what its kind of IDs or its ensemble
            needs. The encoder is another one than the run's. Or it is TF-IDF where vectors are needed: that is fitted
            on all texts and cannot encode one more.
    """
    _check(items, new_items)
    keys, found = [item.key for item in new_items], [_clean(item.text) for item in new_items]
    if texts.ids == "item" and all(len(tokens) == 1 for tokens in items.token_ids):
        row_ND, unit_NE = _rows(catalogue, found, texts)
        known = known_phrases(tokenizer) | _word_runs(texts.prompts)
        phrases = unique_phrases({catalogue: keys}, {catalogue: found}, texts.words, known)[catalogue]
        tokenizer = with_phrases(tokenizer, phrases)
        ids = phrase_item_ids(keys, phrases, tokenizer, max_id_tokens=1)
        longer_ensemble = None if ensemble is None else with_items(ensemble, unit_NE)
        append_rows(model, row_ND)
        return Added(tokenizer, _longer(items, new_items, ids), longer_ensemble)
    longer_ensemble = None if ensemble is None else with_items(ensemble, _units(catalogue, found, texts))
    if texts.ids == "semantic":
        ids = _semantic(keys, found, tokenizer, items, texts)
    else:
        writer = _generator(tokenizer, texts) if texts.ids == "generator" else None
        ids = make_item_ids(keys, found, tokenizer, writer, texts.words, taken=items.token_ids)
    return Added(tokenizer, _longer(items, new_items, ids), longer_ensemble)


def add_to(
    place: Place,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    items: ItemTable,
    new_items: Sequence[NewItem],
    ensemble: Ensemble | None,
) -> Added:
    """`add_items` as the run of ``place`` reads texts; ``model`` is read where every ID is one token."""
    catalogue, asked = items.catalogue or place.domain, place.inference
    prompts = prompt_texts(asked.samples.templates, [catalogue])
    texts = NewTexts(place.backbone, asked.ids, asked.text_encoder, asked.words, prompts)
    return add_items(model, tokenizer, items, catalogue, new_items, texts, ensemble)


AGAIN = "Run again, or leave out the new items"


def _generator(tokenizer: PreTrainedTokenizerBase, texts: NewTexts) -> IDGenerator:
    folder = texts.backbone / GENERATOR_FOLDER
    if not folder.is_dir():
        raise ValueError(
            f"got new items for a run without {folder}, expected the ID generator that wrote its item IDs. {AGAIN}"
        )
    return build_id_generator(str(folder), tokenizer, words=texts.words)


def _semantic(
    keys: Sequence[str],
    found: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    items: ItemTable,
    texts: NewTexts,
) -> ItemIds:
    path = texts.backbone / TEXT_FOLDER / CODEBOOK_FILE
    if not path.is_file():
        raise ValueError(
            f"got new items for a run without {path}, expected the codebook that gave its items their codes. {AGAIN}"
        )
    codebook, wanted = load_codebook(path)
    id_texts = semantic_texts(codebook, keys, _encoded(found, texts, wanted), taken=items.id_texts)
    return semantic_item_ids(keys, id_texts, tokenizer, found)


def _longer(items: ItemTable, new_items: Sequence[NewItem], ids: ItemIds) -> ItemTable:
    return items._replace(
        keys=[*items.keys, *(item.key for item in new_items)],
        titles=[*items.titles, *(item.title for item in new_items)],
        id_texts=[*items.id_texts, *ids.texts],
        token_ids=[*items.token_ids, *ids.token_ids],
    )


def _word_runs(texts: Sequence[str]) -> set[str]:
    """Every run of words in ``texts``."""
    rows = [clean_words(text) for text in texts]
    return {" ".join(words[i:j]) for words in rows for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


def _rows(catalogue: str, found: Sequence[str], texts: NewTexts) -> tuple[Tensor, np.ndarray]:
    """(N, D) rows of the table, and (N, E) vectors of an ensemble."""
    path = texts.backbone / TEXT_FOLDER / PROJECTION_FILE
    projection, wanted = load_projection(path) if path.is_file() else (None, "")
    if projection is None or not projection.basis_ED.shape[1]:
        raise ValueError(
            "got new items for a run of another backbone, whose IDs are one token each, expected a decoder from "
            "scratch (backbone.kind decoder): only there has a new token a place. Train with pretrain.ids generator, "
            "keywords or semantic, whose tokens are known"
        )
    text_NE = _encoded(found, texts, wanted)
    return projection.rows(catalogue, text_NE), unit_vectors(text_NE.numpy(), projection.mean[catalogue].numpy())


def _units(catalogue: str, found: Sequence[str], texts: NewTexts) -> np.ndarray:
    """(N, E) vectors of an ensemble."""
    path, alone = texts.backbone / TEXT_FOLDER / PROJECTION_FILE, ", or load it without its ensemble (ensemble false)"
    if not path.is_file():
        raise ValueError(
            f"got new items for a run with an ensemble and without {path}, expected the means of its item texts. "
            f"{AGAIN}{alone}"
        )
    projection, wanted = load_projection(path)
    return unit_vectors(_encoded(found, texts, wanted, alone).numpy(), projection.mean[catalogue].numpy())


def _encoded(found: Sequence[str], texts: NewTexts, wanted: str, advice: str = "") -> Tensor:
    """(N, E) vectors by the encoder whose `encoder_digest` is ``wanted``."""
    if wanted == "tfidf":
        raise ValueError(
            "got new items for a run with the text encoder tfidf, expected minilm or another sentence encoder: TF-IDF "
            "is fitted on all texts, and another text would change the vectors of all. Run again with such a "
            f"pretrain.text_encoder{advice}"
        )
    digest = encoder_digest(texts.encoder)
    if digest != wanted:
        raise ValueError(
            f"got the text encoder {digest} ({texts.encoder}), expected {wanted}, with which the run was made: "
            "vectors of two encoders say nothing of each other. Install that encoder, or put its folder in its place"
            f"{advice}"
        )
    return load_encoder(texts.encoder).encode(found).float()


def _check(items: ItemTable, new_items: Sequence[NewItem]) -> None:
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
