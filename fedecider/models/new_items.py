"""Items that no training has seen, added to a loaded model: what they need is their texts.

A later item has an ID of the run's kind. Where IDs are words or codes their tokens are known. A small model whose
items have tokens of their own starts with the vectors of item texts for a table: a later item gets the row that its
text would have had, by the same encoder, mean and basis, kept by stage 1. Adapters change nothing of it: their rows for
it are zero.

Items that nobody has bought yet lie in a company's private folder, with the vectors of their texts: a recommender adds
them whenever it is loaded, and the first update in which one is sold gives it a place among those that are counted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedecider.data.catalogue import NewItem
from fedecider.data.constant_words import ConstantWords, without_constant
from fedecider.data.encoders import KEYS, load_encoder
from fedecider.data.near_texts import unit_vectors
from fedecider.models.ensemble import Ensemble, with_items
from fedecider.models.item_table import ItemTable
from fedecider.models.item_texts import CODEBOOK_FILE, PROJECTION_FILE, encoder_digest, load_codebook, load_projection
from fedecider.models.source import Place
from fedecider.running.damage import damage_names
from idgen.backbones.small_t5 import with_flags
from idgen.config import Words
from idgen.id_generator import IDGenerator, build_id_generator, make_item_ids
from idgen.item_ids import ItemIds, later_item_words, phrase_item_ids, unique_phrases, with_item_words
from idgen.new_items import append_rows
from idgen.prompts import prompt_texts
from idgen.semantic_ids import semantic_item_ids, semantic_texts
from idgen.text_vectors import TextProjection
from idgen.tokenizer import clean_words, known_phrases, with_phrases

TEXT_FOLDER = "item_texts"
"""In the backbone of a run: what gives later texts their vectors and semantic IDs."""
GENERATOR_FOLDER = "id_generator"
"""In the backbone of a run, where item IDs come from an ID generator: what gives later texts their IDs."""


UNSOLD_FILE = "new_items.parquet"
"""In a company's private folder: its items without an event."""


class Later(NamedTuple):
    """Items that came after the training."""

    items: Sequence[NewItem]
    text_NE: Tensor | None = None
    """Vectors of their texts, where they were encoded before."""

    def take(self, numbers: Sequence[int]) -> Later:
        assert self.text_NE is not None
        return Later([self.items[number] for number in numbers], self.text_NE[list(numbers)])


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
    text_NE: Tensor | None = None
    """Vectors of the new items' texts, where they were encoded before."""
    dense_head: bool = False
    """Whether IDs end with a token of their own item."""
    constant: ConstantWords = {}  # noqa: RUF012 (never written to)
    """Left out of the texts of its items."""


class Added(NamedTuple):
    """What goes with a model that has new items."""

    tokenizer: PreTrainedTokenizerBase
    table: ItemTable
    ensemble: Ensemble | None
    row_ND: Tensor | None = None
    """Rows of the new items, where items have tokens of their own."""


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
    """Add items to a loaded model, in place, behind the others; without a model to all that goes with it.

    Each gets an ID of the run's kind that no other item has: from the ID generator, from its keywords, or codes of the
    run's codebook. These have known tokens, and no row is added. Where every ID is one token, the new token is a phrase
    of the item's text that is no token yet and in no prompt; with a dense head it is the next free word of
    `idgen.item_ids.item_words`. Its row is what `text_projection` of stage 1 makes of the text. Nothing is trained, so
    logits of other items stay what they were. An ensemble places new items by their texts too
    (`fedecider.models.ensemble.with_items`).

    Raises:
        ValueError: a key exists already, or a text is empty. The run does not keep what its kind of IDs or its ensemble
            needs. The encoder is another one than the run's. Or it is TF-IDF where vectors are needed: that is fitted
            on all texts and cannot encode one more.
    """
    keys, found = [item.key for item in new_items], _checked_texts(items, new_items, texts)
    row_ND, has_rows = None, _has_rows(texts, items)
    if has_rows:
        row_ND, unit_NE = _rows(catalogue, found, texts)
    elif ensemble is not None:
        unit_NE = _units(catalogue, found, texts)
    known = known_phrases(tokenizer)
    if has_rows and not texts.dense_head:
        runs = known | _word_runs(texts.prompts)
        phrases = unique_phrases({catalogue: keys}, {catalogue: found}, texts.words, runs)[catalogue]
        tokenizer = with_phrases(tokenizer, phrases)
        ids = phrase_item_ids(keys, phrases, tokenizer, max_id_tokens=1)
    elif texts.ids == "semantic":
        ids = _semantic(keys, found, tokenizer, items, texts)
    else:
        writer = _generator(tokenizer, texts) if texts.ids == "generator" else None
        taken = [tokens[:-1] if texts.dense_head else tokens for tokens in items.token_ids]
        ids = make_item_ids(keys, found, tokenizer, writer, texts.words, taken=taken)
    if texts.dense_head:
        own = later_item_words(items.id_texts[0].split()[-1], len(keys), known)
        tokenizer = with_phrases(tokenizer, own)
        ids = with_item_words(ids, own, tokenizer)
    longer_ensemble = None if ensemble is None else with_items(ensemble, unit_NE)
    if model is not None and row_ND is not None:
        append_rows(model, row_ND)
    return Added(tokenizer, _longer(items, new_items, ids), longer_ensemble, row_ND)


def add_to(
    place: Place,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    items: ItemTable,
    new: Later,
    ensemble: Ensemble | None,
) -> Added:
    """`add_items` as the run of ``place`` reads texts."""
    catalogue = items.catalogue or place.domain
    prompts = prompt_texts(place.inference.samples.templates, [catalogue])
    texts = _texts_of(place)._replace(prompts=prompts, text_NE=new.text_NE)
    return add_items(model, tokenizer, items, catalogue, new.items, texts, ensemble)


def _texts_of(place: Place) -> NewTexts:
    asked = place.inference
    dense_head, constant = asked.samples.dense_head, asked.constant_words
    return NewTexts(
        place.backbone, asked.ids, asked.text_encoder, asked.words, dense_head=dense_head, constant=constant
    )


def encoded_items(place: Place, items: ItemTable, new_items: Sequence[NewItem]) -> Later:
    """New items with the vectors of their texts, for a run with an ensemble. ``ValueError`` as `add_items`."""
    texts = _texts_of(place)
    found = _checked_texts(items, new_items, texts)
    _, wanted = _projection(texts, _has_rows(texts, items))
    return Later(new_items, _encoded(found, texts, wanted))


def takes_new_items(place: Place, items: ItemTable) -> str:
    """Why a run with an ensemble cannot have new items, in a sentence; empty where it can."""
    try:
        texts = _texts_of(place)
        _check_encoder(texts, _projection(texts, _has_rows(texts, items))[1])
    except ValueError as error:
        return str(error)
    return ""


def save_unsold(unsold: Later, private: Path) -> None:
    """Write a company's items without an event; none leave no file."""
    import pyarrow as pa  # only where it is read or written: --help does without
    import pyarrow.parquet

    if unsold.items:
        assert unsold.text_NE is not None
        columns = dict(zip(NewItem._fields, map(list, zip(*unsold.items, strict=True)), strict=True))
        vectors = pa.FixedSizeListArray.from_arrays(unsold.text_NE.float().flatten().numpy(), unsold.text_NE.shape[1])
        pa.parquet.write_table(pa.table({**columns, "vector": vectors}), private / UNSOLD_FILE)


def load_unsold(private: Path | None) -> Later:
    """What `save_unsold` wrote there. ``ValueError`` for a damaged file."""
    path = (private or Path()) / UNSOLD_FILE
    if private is None or not path.is_file():
        return Later([], torch.zeros(0, 0))
    import pyarrow as pa
    import pyarrow.parquet

    with damage_names(path):
        try:
            table = pa.parquet.read_table(path).combine_chunks()
        except pa.ArrowException as error:
            raise ValueError(error) from error
        items = [as_new_item(row) for row in table.select(list(NewItem._fields)).to_pylist()]
        vectors = table.column("vector").combine_chunks()
        text_NE = torch.from_numpy(vectors.flatten().to_numpy().copy()).view(len(items), vectors.type.list_size)
        return Later(items, text_NE)


AGAIN = "Run again, or leave out the new items"
ALONE = ", or load it without its ensemble (ensemble false)"


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


def _has_rows(texts: NewTexts, items: ItemTable) -> bool:
    """Whether every item has a token of its own, whose row is the item's vector."""
    return texts.dense_head or (texts.ids == "item" and all(len(tokens) == 1 for tokens in items.token_ids))


def _projection(texts: NewTexts, has_rows: bool) -> tuple[TextProjection, str]:
    """What gives new texts their rows and their places in an ensemble, and the digest of its encoder."""
    path = texts.backbone / TEXT_FOLDER / PROJECTION_FILE
    projection, wanted = load_projection(path) if path.is_file() else (None, "")
    if has_rows and (projection is None or not projection.basis_ED.shape[1]):
        raise ValueError(
            "got new items for a run of another backbone, whose IDs are one token each, expected a decoder from "
            "scratch (backbone.kind decoder): only there has a new token a place. Train with pretrain.ids generator, "
            "keywords or semantic, whose tokens are known"
        )
    if projection is None:
        raise ValueError(
            f"got new items for a run with an ensemble and without {path}, expected the means of its item texts. "
            f"{AGAIN}{ALONE}"
        )
    return projection, wanted


def _rows(catalogue: str, found: Sequence[str], texts: NewTexts) -> tuple[Tensor, np.ndarray]:
    """(N, D) rows of the table, and (N, E) vectors of an ensemble."""
    projection, wanted = _projection(texts, True)
    text_NE = _encoded(found, texts, wanted)
    row_ND = projection.rows(catalogue, text_NE)
    config = texts.backbone / "config.json"
    is_t5 = texts.dense_head and json.loads(config.read_text(encoding="utf-8"))["model_type"] == "t5"
    return with_flags(row_ND) if is_t5 else row_ND, unit_vectors(text_NE.numpy(), projection.mean[catalogue].numpy())


def _units(catalogue: str, found: Sequence[str], texts: NewTexts) -> np.ndarray:
    """(N, E) vectors of an ensemble."""
    projection, wanted = _projection(texts, False)
    return unit_vectors(_encoded(found, texts, wanted, ALONE).numpy(), projection.mean[catalogue].numpy())


def _encoded(found: Sequence[str], texts: NewTexts, wanted: str, advice: str = "") -> Tensor:
    """(N, E) vectors by the encoder whose `encoder_digest` is ``wanted``, or those from before."""
    if texts.text_NE is not None:
        return texts.text_NE
    _check_encoder(texts, wanted, advice)
    return load_encoder(texts.encoder).encode(found).float()


def _check_encoder(texts: NewTexts, wanted: str, advice: str = "") -> None:
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


def _checked_texts(items: ItemTable, new_items: Sequence[NewItem], texts: NewTexts) -> list[str]:
    """What is read of new items, their keys where those of the run are read; ``ValueError`` for what cannot be one."""
    found = [
        item.key if texts.encoder == KEYS else without_constant(_clean(item.text), texts.constant) for item in new_items
    ]
    known = set(items.keys)
    for item, text in zip(new_items, found, strict=True):
        if not item.key.strip() or item.key in known:
            raise ValueError(
                f"got the key {item.key!r} for a new item, expected one that no other item has. Leave out items of the "
                "catalogue, and name each new one once"
            )
        known.add(item.key)
        if not clean_words(text):
            raise ValueError(
                f"got the text {item.text!r} for the new item {item.key!r}, expected words: write its text"
            )
    return found


def _clean(text: str) -> str:
    return " ".join(text.split()).lower()
