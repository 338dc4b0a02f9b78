"""A recommender that was trained by a run, to use from Python.

>>> rec = Recommender.from_pretrained("runs/demo", "crime")
>>> for item in rec.recommend(["The Silent Harbour", "The Last Ledger"], k=10): print(item.title, item.score)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, overload

import torch
from peft import PeftModel
from torch import Tensor

from fedecider.llm.answers import Answer, HistoryItem, Recommendation
from fedecider.llm.item_texts import PROJECTION_FILE
from fedecider.llm.model_scores import model_scores
from fedecider.llm.new_items import TEXT_FOLDER, NewItem, NewTexts, add_items
from fedecider.llm.pretrained_folder import Place, Source, file_hashes, find_source
from fedecider.llm.ranking import Scored, mix, most_popular, search, search_without_history
from fedecider.llm.titles import Items, Resolved
from fedecider.lora.export import ITEM_FILE, ItemTable, load_adapter, read_item_ids, without_adapters
from fedecider.memory.memory import Memory, ModelScores
from fedecider.memory.store import load_memory
from fedecider.running.damage import damage_names
from fedecider.running.launch import checked_device
from idgen.backbone import cut_table, load_backbone
from idgen.candidates import with_prior
from idgen.item_ids import ItemIds
from idgen.new_items import append_rows
from idgen.samples import Task, catalogue_task
from idgen.tokenizer import load_tokenizer

SEEN_STAYS_OUT = "the memory leaves out items of the history, also with exclude_seen false"
UNCOUNTED = "ranked by the model alone: the memory has never counted the added items"
NO_HISTORY_MEMORY = "no history was given: the items with most events in the counts of the memory"
NO_HISTORY_MODEL = "no history was given: the items that the model finds likely whoever asks"

History = Sequence[str]


class _Loaded(NamedTuple):
    """One domain's model, ready to rank."""

    source: Source
    place: Place
    model: PeftModel
    tokenizer: Any
    table: ItemTable
    items: Items
    task: Task
    memory: Memory | None
    """None where there is none, or it is not wanted."""
    scores: ModelScores
    """What the memory asks of the model."""
    num_added: int
    """Items that came after the training."""


class Recommender:
    """Next items for histories of titles or item keys, by the adapter of one domain.

    One object serves any number of threads, one call after the other.
    """

    def __init__(self, loaded: _Loaded, num_tokens: int, device: torch.device, memory: bool) -> None:
        """Made by `from_pretrained`. ``num_tokens``: of the backbone as it was handed over."""
        self._loaded, self._num_tokens, self._device, self._memory = loaded, num_tokens, device, memory
        self._lock = RLock()

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        domain: str | None = None,
        *,
        device: str | torch.device = "cpu",
        memory: bool = True,
        new_items: Sequence[NewItem | Mapping[str, str]] = (),
        revision: str | None = None,
    ) -> Recommender:
        """The recommender of one domain.

        Args:
            source: A run folder, the folder of one adapter in it, a folder that `save_pretrained` wrote, or the name of
                one on the hub. Under HF_HUB_OFFLINE=1 a name is looked up in the local cache of the hub alone.
            domain: The domain; needed where the source has several.
            device: The device, cpu or cuda.
            memory: If true, rank with the client's private memory where the source has one.
            new_items: Items that came after the training, see `add_items`.
            revision: Branch, tag or commit of a hub name.

        Raises:
            FileNotFoundError: there is no such source or domain.
            ValueError: a file was changed after the export or is damaged, the parts do not belong together, there is no
                such device, no domain is named where there are several, or new items cannot be added.
        """
        device = checked_device(device)
        found = find_source(source, revision)
        place = found.place(found.choose(domain))
        table = read_item_ids(place.adapter)
        tokenizer = load_tokenizer(place.backbone)
        base = load_backbone(place.backbone, tokenizer, place.recipe.quantize, device)
        loaded = _adapted(base, tokenizer, found, place, table, device, memory)
        made = cls(loaded, len(tokenizer), device, memory)
        if new_items:
            made.add_items(new_items)
        return made

    @property
    def domain(self) -> str:
        return self._loaded.place.domain

    @property
    def domains(self) -> list[str]:
        """All domains of the source."""
        return self._loaded.source.domains

    @property
    def items(self) -> Items:
        """The items that can be recommended, and how they are found by what people type."""
        return self._loaded.items

    @property
    def has_memory(self) -> bool:
        """Whether the client's private memory ranks beside the model."""
        return self._memory_in_use is not None

    @property
    def alpha(self) -> dict[str, float]:
        """Each domain's share of the absolute fusion weights; empty for methods without."""
        return self._loaded.place.recipe.alpha_shares

    @property
    def num_beams(self) -> int:
        """Beams of the search, at least; it takes more where k and the history need them."""
        return self._loaded.place.recipe.ranking.num_beams

    @property
    def length_penalty(self) -> float:
        return self._loaded.place.recipe.ranking.length_penalty

    @property
    def model(self) -> PeftModel:
        """Backbone and adapter."""
        return self._loaded.model

    @property
    def tokenizer(self) -> Any:
        return self._loaded.tokenizer

    @property
    def task(self) -> Task:
        """The catalogue as the model sees it: item IDs, their trie, the parts of prompts."""
        return self._loaded.task

    @overload
    def recommend(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self, history: History, k: int = 10, exclude_seen: bool = True
    ) -> Answer: ...

    @overload
    def recommend(self, history: Sequence[History], k: int = 10, exclude_seen: bool = True) -> list[Answer]: ...

    def recommend(
        self, history: History | Sequence[History], k: int = 10, exclude_seen: bool = True
    ) -> Answer | list[Answer]:
        """The k best next items for one history, or for each of many, which the model reads together.

        A history is a list of titles or item keys, oldest first, as `Items.resolve` understands them. For an empty one
        the most popular items of the memory's counts are taken; without a memory, what the model finds likely without a
        history, where its prompts have words of their own. A history among many has the items that it has alone, and
        their scores but for the rounding of sums. ``exclude_seen``: leave out items of the history; a memory always
        does.

        Raises:
            ValueError: k below 1, an entry that is no item or may be several, or an empty history where nothing is
                known without one.
        """
        if type(k) is not int or k < 1:
            raise ValueError(f"got k {k}, expected a whole number of at least 1")
        many, histories = _as_histories(history)
        with self._lock:
            answers = self._answers(histories, k, exclude_seen)
        return answers if many else answers[0]

    def add_items(self, new_items: Sequence[NewItem | Mapping[str, str]]) -> None:
        """Let items be recommended and stand in histories that came after the training, by their texts alone.

        Each has ``key``, ``title`` and ``text``. The memory, which never counted one of them, is not asked any more.

        Raises:
            ValueError: one of them cannot be added (`fedecider.llm.new_items.add_items`); then none is.
        """
        with self._lock:
            now, added = self._loaded, [_new_item(item) for item in new_items]
            place = now.place
            projection = place.backbone / TEXT_FOLDER / PROJECTION_FILE
            texts = NewTexts(projection, place.recipe.text_encoder, place.recipe.keywords)
            catalogue = now.table.catalogue or place.domain
            tokenizer, table = add_items(now.model, now.tokenizer, now.table, catalogue, added, texts)
            ready = _ready(now.source, place, now.model, tokenizer, table, now.memory, self._device)
            self._loaded = ready._replace(num_added=now.num_added + len(added))

    def load_adapter(
        self, source: str | Path, domain: str | None = None, *, revision: str | None = None
    ) -> Recommender:
        """Put another adapter in place, with its items and memory, on the backbone that is loaded; returns itself.

        ``source``: a domain of the present source, or another source as for `from_pretrained`. Items that were added
        are gone afterwards.

        Raises:
            FileNotFoundError: there is no such source or domain.
            ValueError: as `from_pretrained`, or the adapter needs another backbone; what was loaded stays in place.
        """
        with self._lock:
            now = self._loaded
            if domain is None and str(source) in now.source.domains:
                found, domain = now.source, str(source)
            else:
                found = find_source(source, revision)
            place = found.place(found.choose(domain))
            _check_same_base(now.place, place)
            table, tokenizer = read_item_ids(place.adapter), load_tokenizer(place.backbone)
            base, added_ND = self._bare_base()
            try:
                self._loaded = _adapted(base, tokenizer, found, place, table, self._device, self._memory)
            except BaseException:
                model = load_adapter(without_adapters(base), now.place.adapter).to(self._device).eval()
                if len(added_ND):
                    append_rows(model, added_ND)
                kept = _ready(now.source, now.place, model, now.tokenizer, now.table, now.memory, self._device)
                self._loaded = kept._replace(num_added=now.num_added)
                raise
        return self

    @property
    def _memory_in_use(self) -> Memory | None:
        return None if self._loaded.num_added else self._loaded.memory

    def _bare_base(self) -> tuple[Any, Tensor]:
        """The backbone as it was handed over, taken out of the model, and the rows of items that were added."""
        base = without_adapters(self._loaded.model)
        added_ND = base.get_input_embeddings().weight.detach()[self._num_tokens :].clone()
        cut_table(base, self._num_tokens)
        return base, added_ND

    def _answers(self, histories: Sequence[History], k: int, exclude_seen: bool) -> list[Answer]:
        loaded, memory = self._loaded, self._memory_in_use
        resolved = [
            _resolved(loaded.items, history, number, len(histories)) for number, history in enumerate(histories)
        ]
        seen = [[entry.number for entry in entries] for entries in resolved]
        asked = [row for row, items in enumerate(seen) if items]
        given, ranking = [seen[row] for row in asked], loaded.place.recipe.ranking
        if memory is not None:
            scored = mix(memory, loaded.scores, given, k)
        else:
            scored = search(loaded.model, loaded.task, ranking, given, k, exclude_seen)
        found: dict[int, list[Scored]] = dict(zip(asked, scored, strict=True))
        nobody, why = ([], "") if len(asked) == len(seen) else self._without_history(memory, k)
        common = [UNCOUNTED] if loaded.memory is not None and memory is None else []
        answers = []
        for row, entries in enumerate(resolved):
            notes = [entry.note for entry in entries if entry.note]
            if not entries:
                notes.append(why)
            elif memory is not None and not exclude_seen:
                notes.append(SEEN_STAYS_OUT)
            answers.append(self._answer(found.get(row, nobody), seen[row], [*notes, *common]))
        return answers

    def _without_history(self, memory: Memory | None, k: int) -> tuple[list[Scored], str]:
        loaded = self._loaded
        if memory is not None:
            return most_popular(memory, k), NO_HISTORY_MEMORY
        try:
            return search_without_history(loaded.model, loaded.task, loaded.place.recipe.ranking, k), NO_HISTORY_MODEL
        except ValueError as error:
            raise ValueError(
                "got an empty history, expected titles or item keys, oldest first: there is no memory that knows what "
                f"is popular, and prompts of this model are empty without a history (templates "
                f"{loaded.task.config.templates})"
            ) from error

    def _answer(self, scored: Sequence[Scored], seen: Sequence[int], notes: Sequence[str]) -> Answer:
        keys, titles = self.items.keys, self.items.titles
        return Answer(
            items=tuple(Recommendation(keys[one.item], titles[one.item], one.score, one.experts) for one in scored),
            history=tuple(HistoryItem(keys[item], titles[item]) for item in seen),
            alpha=self.alpha,
            notes=tuple(notes),
        )


def _adapted(
    base: Any,
    tokenizer: Any,
    source: Source,
    place: Place,
    table: ItemTable,
    device: torch.device,
    wants_memory: bool,
) -> _Loaded:
    """``base`` with the adapter of ``place``, ready to rank."""
    memory = load_memory(place.memory, table.keys) if wants_memory and place.memory is not None else None
    model = load_adapter(base, place.adapter).to(device).eval()
    return _ready(source, place, model, tokenizer, table, memory, device)


def _ready(
    source: Source,
    place: Place,
    model: PeftModel,
    tokenizer: Any,
    table: ItemTable,
    memory: Memory | None,
    device: torch.device,
) -> _Loaded:
    ranking = place.recipe.ranking
    with damage_names(place.adapter / ITEM_FILE):
        catalogue, item_ids = table.catalogue or place.domain, _checked_ids(table, len(tokenizer))
        task = catalogue_task(catalogue, item_ids, tokenizer, place.recipe.samples)
    with model.disable_adapter():  # the student, whose prior counts for every client
        task = with_prior(task, model, ranking.prior_weight, device)
    scores = model_scores(model, task, ranking, "fp32", device)
    items = Items(table.keys, table.titles)
    return _Loaded(source, place, model, tokenizer, table, items, task, memory, scores, 0)


def _checked_ids(table: ItemTable, num_tokens: int) -> ItemIds:
    """The item IDs of a hand-over. ``ValueError`` when one of them has a token that the tokenizer does not have."""
    largest = max(token for tokens in table.token_ids for token in tokens)
    if largest >= num_tokens:
        raise ValueError(f"token {largest} of a tokenizer with {num_tokens} tokens")
    return ItemIds(list(table.id_texts), [list(tokens) for tokens in table.token_ids], {})


def _check_same_base(now: Place, wanted: Place) -> None:
    """``ValueError`` where an adapter was trained on another backbone than the one that is loaded."""
    same_place = wanted.backbone.resolve() == now.backbone.resolve()
    same_format = wanted.recipe.quantize == now.recipe.quantize
    if not same_format or not (same_place or file_hashes(wanted.backbone) == file_hashes(now.backbone)):
        raise ValueError(
            f"got the adapter in {wanted.adapter}, which needs another backbone than the one in {now.backbone}, "
            "expected one that was trained on it. Load it with from_pretrained"
        )


def _as_histories(history: Any) -> tuple[bool, list[list[str]]]:
    """Whether there are many, and the histories. An empty list is one empty history."""
    if isinstance(history, str) or not isinstance(history, Sequence):
        raise ValueError(
            f"got the history {history!r}, expected a list of titles or item keys, or a list of such lists"
        )
    texts = [isinstance(entry, str) for entry in history]
    if all(texts):
        return False, [list(history)]
    if any(texts) or not all(isinstance(entry, Sequence) for entry in history):
        raise ValueError("got a history of texts and other things, expected texts alone, or lists of texts alone")
    return True, [list(one) for one in history]


def _resolved(items: Items, history: Sequence[str], number: int, count: int) -> list[Resolved]:
    """The items of one history; an error says which of several histories it is in."""
    try:
        return [items.resolve(entry) for entry in history]
    except ValueError as error:
        raise ValueError(f"history {number + 1}: {error}" if count > 1 else str(error)) from error


def _new_item(item: NewItem | Mapping[str, str]) -> NewItem:
    given = item._asdict() if isinstance(item, NewItem) else item
    fields = NewItem._fields
    if not isinstance(given, Mapping) or set(given) != set(fields) or not all(map(_is_text, given.values())):
        raise ValueError(f"got the new item {item!r}, expected the texts {', '.join(fields)}, and no more")
    return NewItem(**given)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
