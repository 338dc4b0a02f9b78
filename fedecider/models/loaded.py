"""A recommender as it is loaded from a folder: where it lies, new items, how it ranks.

A small decoder starts with the vectors of item texts for a table, one row for the one token of each item. A later item
gets the row that its text would have had: the same encoder, mean and basis, kept by stage 1. Adapters change nothing of
it: their rows for it are zero.

Shape legend: B histories, M items of each, K beams, S input tokens, B histories of a batch, K items of one.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedecider.bounds import Precision
from fedecider.data.encoders import load_encoder, unit_vectors
from fedecider.models.counts import new_contexts
from fedecider.models.export import load_adapter
from fedecider.models.histories import Items, Scored
from fedecider.models.hybrid import Histories, Hybrid, ModelScores, load_hybrid, rank, with_items
from fedecider.models.item_table import ITEM_FILE, ItemTable
from fedecider.models.item_texts import encoder_digest, load_projection
from fedecider.models.source import Place, Source, file_hashes
from fedecider.running.run_folder import damage_names
from idgen.decode import constrained_beam_search, stable_topk
from idgen.id_generator import build_id_generator, make_item_ids
from idgen.item_ids import ItemIds, Words, phrase_item_ids, unique_phrases
from idgen.new_items import append_rows
from idgen.precision import autocast
from idgen.ranking import catalogue_rows, catalogue_scores, trie_log_probs, with_prior
from idgen.ranking_config import RankingConfig
from idgen.samples import Task, catalogue_task, empty_prompt, encode_histories
from idgen.tokenizer import clean_words, known_phrases, with_phrases

# The model as the hybrid asks it: log-probabilities of items, and its beams, for any histories.


def model_scores(
    model: Any, task: Task, ranking: RankingConfig, precision: Precision, device: torch.device
) -> ModelScores:
    """``model`` as it is loaded when it is asked. Where every ID is one token the whole catalogue costs one step."""
    trie = task.trie.to(device)

    def batches(histories: Histories) -> list[np.ndarray]:
        """Histories of similar length together, so that prompts need little padding."""
        order = np.argsort([len(items) for items in histories], kind="stable")
        size = ranking.eval_batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def prompts(histories: Histories, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        input_ids_BS, attention_mask_BS = encode_histories(task, [histories[row] for row in rows])
        return input_ids_BS.to(device), attention_mask_BS.to(device)

    def log_probs(histories: Histories, item_BM: Tensor | None) -> Tensor:
        if item_BM is None:
            kind = torch.float32 if trie.score_N is None else torch.float64
            score_BI = torch.empty(len(histories), len(trie), dtype=kind, device=device)
            rows_ID = catalogue_rows(model, trie)
            for rows in batches(histories):
                for part, score_RI in catalogue_scores(model, *prompts(histories, rows), trie, precision, rows_ID):
                    score_BI[rows[part]] = score_RI
            return score_BI
        score_BM = torch.empty(item_BM.shape, dtype=torch.float64)
        for rows in batches(histories):
            with autocast(device, precision):
                asked = (*prompts(histories, rows), trie, item_BM[rows].to(device))
                score_BM[rows] = trie_log_probs(model, *asked).cpu()
        return score_BM

    def beams(histories: Histories, k: int) -> Tensor:
        room = [ranking.beams_for(k, len(set(items)), len(trie)) if k else ranking.num_beams for items in histories]
        item_BK = torch.full((len(histories), max(room)), -1)
        for num_beams in sorted(set(room)):  # apart: nobody's answer depends on who else is asked for
            alike = np.flatnonzero(np.array(room) == num_beams)
            for part in batches([histories[row] for row in alike.tolist()]):
                rows = alike[part]
                with autocast(device, precision):
                    asked = (*prompts(histories, rows), trie)
                    found_BK, _ = constrained_beam_search(model, *asked, num_beams=num_beams)
                item_BK[rows, :num_beams] = found_BK.cpu()
        return item_BK

    return ModelScores(log_probs, beams if trie.max_length > 1 else None)


# Items that no training has seen: what they need is their texts.

TEXT_FOLDER = "item_texts"
"""In the backbone of a run: what gives later texts their vectors."""
GENERATOR_FOLDER = "id_generator"
"""In the backbone of a run, where item IDs come from an ID generator: what gives later texts their IDs."""


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
    words: Words
    prompts: Sequence[str] = ()
    """What prompts add to the items (`idgen.prompts.prompt_texts`): none of its words may become an item."""
    generator: Path | None = None
    """The folder of the ID generator; None where no generator wrote the IDs."""


class Added(NamedTuple):
    """What goes with a model that has new items."""

    tokenizer: PreTrainedTokenizerBase
    table: ItemTable
    hybrid: Hybrid | None


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
    hybrid: Hybrid | None = None,
) -> Added:
    """Add items to a loaded model, in place, behind the others.

    Where an ID generator wrote the IDs each gets another one of it, of words of its own text, which are tokens already:
    no row is added. Else it gets a phrase of its text that is no token yet and in no prompt for its ID, and for its row
    what `text_projection` of stage 1 makes of the text. Nothing is trained, and scores of other items before softmax
    stay what they were. A hybrid gets them by their texts as well (`fedecider.models.hybrid.with_items`).

    Raises:
        ValueError: a key that is there already, an empty text, IDs of several tokens without an ID generator, a run
            that keeps no projection where a row or a hybrid needs it, an encoder that is not the run's, or TF-IDF,
            which is fitted on all texts and cannot encode one more.
    """
    _check(items, new_items, texts.generator is not None)
    if texts.generator is not None:
        return _written(tokenizer, items, catalogue, new_items, texts, hybrid)
    row_ND, unit_NE = _vectors(catalogue, [_clean(item.text) for item in new_items], texts)
    keys = [item.key for item in new_items]
    phrases = unique_phrases(
        {catalogue: keys},
        {catalogue: [_clean(item.text) for item in new_items]},
        texts.words,
        known_phrases(tokenizer) | _word_runs(texts.prompts),
    )[catalogue]
    longer = with_phrases(tokenizer, phrases)
    ids = phrase_item_ids(keys, phrases, longer, max_id_tokens=1)
    longer_hybrid = None if hybrid is None else with_items(hybrid, unit_NE)
    append_rows(model, row_ND)
    return Added(longer, _longer(items, new_items, ids), longer_hybrid)


def _written(
    tokenizer: PreTrainedTokenizerBase,
    items: ItemTable,
    catalogue: str,
    new_items: Sequence[NewItem],
    texts: NewTexts,
    hybrid: Hybrid | None,
) -> Added:
    """New items with IDs of the ID generator, under the constraint of all others (`idgen.id_generator`)."""
    found = [_clean(item.text) for item in new_items]
    longer_hybrid = None if hybrid is None else with_items(hybrid, _vectors(catalogue, found, texts)[1])
    generator = build_id_generator(str(texts.generator), tokenizer, words=texts.words)
    keys = [item.key for item in new_items]
    ids = make_item_ids(keys, found, tokenizer, generator, taken=items.token_ids)
    return Added(tokenizer, _longer(items, new_items, ids), longer_hybrid)


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


def _vectors(catalogue: str, texts: Sequence[str], settings: NewTexts) -> tuple[Tensor, np.ndarray]:
    """(N, D) rows of the table, and (N, E) vectors of a hybrid."""
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


def _check(items: ItemTable, new_items: Sequence[NewItem], are_written: bool) -> None:
    several = next(
        (text for text, tokens in zip(items.id_texts, items.token_ids, strict=True) if len(tokens) > 1), None
    )
    if several is not None and not are_written:
        raise ValueError(
            f"got new items for a run with item IDs of several tokens, such as {several!r}, expected one token each "
            "(ids item), or an ID generator: an item without training has no place among words"
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


# One domain's model with its adapter on a backbone, its items and its hybrid: all that ranks.


class Loaded(NamedTuple):
    """One domain's model, ready to rank."""

    source: Source
    place: Place
    model: PeftModel
    tokenizer: Any
    table: ItemTable
    items: Items
    task: Task
    hybrid: Hybrid | None
    """None where there is none, or it is not wanted."""
    scores: ModelScores
    """What the hybrid asks of the model."""
    num_added: int
    """Items that came after the training."""


def adapted(
    base: Any,
    tokenizer: Any,
    source: Source,
    place: Place,
    table: ItemTable,
    device: torch.device,
    wants_hybrid: bool,
) -> Loaded:
    """``base`` with the adapter of ``place``, ready to rank."""
    hybrid = load_hybrid(place.hybrid, table.keys) if wants_hybrid and place.hybrid is not None else None
    model = load_adapter(base, place.adapter).to(device).eval()
    return ready_to_rank(source, place, model, tokenizer, table, hybrid, device)


def ready_to_rank(
    source: Source,
    place: Place,
    model: PeftModel,
    tokenizer: Any,
    table: ItemTable,
    hybrid: Hybrid | None,
    device: torch.device,
) -> Loaded:
    """``model`` with the trie of its items and what the hybrid asks of it."""
    ranking = place.inference.ranking
    with damage_names(place.adapter / ITEM_FILE):
        catalogue, item_ids = table.catalogue or place.domain, _checked_ids(table, len(tokenizer))
        task = catalogue_task(catalogue, item_ids, tokenizer, place.inference.samples)
    with model.disable_adapter():  # the student, whose prior counts for every client
        task = with_prior(task, model, ranking.prior_correction, device)
    scores = model_scores(model, task, ranking, "fp32", device)
    items = Items(table.keys, table.titles)
    return Loaded(source, place, model, tokenizer, table, items, task, hybrid, scores, 0)


def _checked_ids(table: ItemTable, num_tokens: int) -> ItemIds:
    """The item IDs of a hand-over. ``ValueError`` when one of them has a token that the tokenizer does not have."""
    largest = max(token for tokens in table.token_ids for token in tokens)
    if largest >= num_tokens:
        raise ValueError(f"token {largest} of a tokenizer with {num_tokens} tokens")
    return ItemIds(list(table.id_texts), [list(tokens) for tokens in table.token_ids], {})


def check_same_base(now: Place, wanted: Place) -> None:
    """``ValueError`` where an adapter was trained on another backbone than the one that is loaded."""
    same_place = wanted.backbone.resolve() == now.backbone.resolve()
    same_format = wanted.inference.quantize == now.inference.quantize
    if not same_format or not (same_place or file_hashes(wanted.backbone) == file_hashes(now.backbone)):
        raise ValueError(
            f"got the adapter in {wanted.adapter}, which needs another backbone than the one in {now.backbone}, "
            "expected one that was trained on it. Load it with from_pretrained"
        )


# The best items for histories of item numbers: under a model, and under a hybrid with it.


def search(
    model: Any, task: Task, ranking: RankingConfig, histories: Histories, k: int, drop_seen: bool
) -> list[list[Scored]]:
    """The k best items of each history under the model alone, by beam search.

    Histories are searched together where they need the same number of beams, which has room for the items that may have
    to be dropped; so nobody's answer depends on who else is asked for.
    """
    by_beams: dict[int, list[int]] = {}
    for row, seen in enumerate(histories):
        num_beams = ranking.beams_for(k, len(set(seen)), len(task.trie))
        by_beams.setdefault(num_beams, []).append(row)
    found: list[list[Scored]] = [[] for _ in histories]
    device = next(model.parameters()).device
    for num_beams, rows in by_beams.items():
        rows.sort(key=lambda row: len(histories[row]))  # so that prompts need little padding
        for start in range(0, len(rows), ranking.eval_batch_size):
            batch = rows[start : start + ranking.eval_batch_size]
            input_ids, attention_mask = encode_histories(task, [histories[row] for row in batch])
            item_BK, score_BK = constrained_beam_search(
                model,
                input_ids.to(device),
                attention_mask.to(device),
                task.trie.to(device),
                num_beams=num_beams,
            )
            for row, items, scores in zip(batch, item_BK.tolist(), score_BK.tolist(), strict=True):
                dropped = {-1, *(histories[row] if drop_seen else ())}
                ranked = [Scored(item, score, {}) for item, score in zip(items, scores, strict=True)]
                found[row] = [one for one in ranked if one.item not in dropped][:k]
    return found


def search_without_history(model: Any, task: Task, ranking: RankingConfig, k: int) -> list[Scored]:
    """The k best items behind the words of the prompt alone, without what a prior takes off.

    Raises:
        ValueError: the templates have no words but the history.
    """
    device = next(model.parameters()).device
    input_ids, attention_mask = empty_prompt(task)
    item_1K, score_1K = constrained_beam_search(
        model,
        input_ids.to(device),
        attention_mask.to(device),
        task.trie.scored(None).to(device),
        num_beams=ranking.beams_for(k, 0, len(task.trie)),
    )
    found = zip(item_1K[0].tolist(), score_1K[0].tolist(), strict=True)
    return [Scored(item, score, {}) for item, score in found if item >= 0][:k]


def mix(hybrid: Hybrid, scores: ModelScores, histories: Histories, k: int) -> list[list[Scored]]:
    """The k best items of each history in the mixture of a hybrid; items of the history are no candidates."""
    found = []
    for ranked in rank(hybrid, new_contexts(histories), scores, k):
        prob_BK, place_BK = stable_topk(ranked.prob_BM, k)
        item_BK = ranked.item_BM.gather(1, place_BK)
        part_EBK = {name: part_BK.tolist() for name, part_BK in ranked.parts(place_BK).items()}
        for row, (items, probs) in enumerate(zip(item_BK.tolist(), prob_BK.tolist(), strict=True)):
            found.append(
                [
                    Scored(item, math.log(prob), _shares({name: part[row][place] for name, part in part_EBK.items()}))
                    for place, (item, prob) in enumerate(zip(items, probs, strict=True))
                    if prob > 0.0
                ]
            )
    return found


def _shares(parts: dict[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()}
