"""A recommender that was trained by a run, to use from Python.

>>> rec = Recommender.from_pretrained("runs/demo", "crime")
>>> for item in rec.recommend(["The Silent Harbour", "The Last Ledger"], k=10): print(item.title, item.score)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import torch
from peft import PeftModel

from fedecider.data.catalogue import NewItem
from fedecider.data.near_texts import NearOnDemand
from fedecider.models.allowed_items import Allowed, allowed_items
from fedecider.models.answers import Answer, HistoryItem, Repeats, Scored, check_k, recommendations
from fedecider.models.histories import (
    History,
    ResolvedHistory,
    as_histories,
    as_sequences,
    exact_history,
    resolve_history,
)
from fedecider.models.item_search import Items
from fedecider.models.item_table import read_item_ids
from fedecider.models.loaded import Loaded, adapted, best, ready_to_rank, search_without_history
from fedecider.models.new_items import Later, add_to, as_new_item, load_unsold
from fedecider.models.source import NO_HISTORY_ENSEMBLE, find_source, most_popular
from fedecider.running.machine import checked_device
from idgen.backbone import load_backbone
from idgen.tasks import Task
from idgen.tokenizer import load_tokenizer

NO_HISTORY_MODEL = "no history was given: the items that the model finds likely whoever asks"
NO_HISTORY_REPEATS = "no history was given: nothing was bought before"


BATCH = 256
"""Histories of `Recommender.recommend_many` that are answered together."""


class ForCustomer(NamedTuple):
    """What `Recommender.recommend_many` gives for one customer."""

    customer: str
    answer: Answer | None
    """None where the history could not be read."""
    error: str = ""
    """Why not, in a sentence."""


class Recommender:
    """Next items for histories of titles or item keys, by the adapter of one domain.

    One object serves any number of threads, one call after the other.
    """

    def __init__(self, loaded: Loaded, device: torch.device) -> None:
        """Made by `from_pretrained`."""
        self._loaded, self._device = loaded, device
        self._lock = RLock()
        self._near: NearOnDemand | None = None

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        domain: str | None = None,
        *,
        device: str | torch.device = "cpu",
        ensemble: bool = True,
        new_items: Sequence[NewItem | Mapping[str, str]] = (),
        revision: str | None = None,
    ) -> Recommender:
        """The recommender of one domain.

        Args:
            source: An output directory, the folder of one adapter in it, what `fedecider.Result.export` wrote, or its
                name on the hub. Under HF_HUB_OFFLINE=1 a name is looked up in the local cache of the hub alone.
            domain: The domain; needed where the source has several.
            device: The device, cpu or cuda.
            ensemble: If true, rank with the private part of the client's ensemble where the source has one.
            new_items: Items that came after the training, see `add_items`.
            revision: Branch, tag or commit of a hub name.

        Raises:
            FileNotFoundError: there is no such source or domain.
            ValueError: a file was changed after the export or is damaged, the parts do not belong together, there is no
                such device, no domain is named where there are several, or new items cannot be added.
        """
        device = checked_device(device)
        found = find_source(source, revision)
        place = found.place(found.choose(domain), private=ensemble)
        table = read_item_ids(place.adapter)
        tokenizer = load_tokenizer(place.backbone)
        base = load_backbone(place.backbone, tokenizer, place.inference.quantize, device)
        loaded = adapted(base, tokenizer, found, place, table, device, ensemble)
        made, added = cls(loaded, device), [as_new_item(item) for item in new_items]
        unsold, known = load_unsold(place.ensemble), {item.key for item in added}
        unsold = unsold.take([number for number, item in enumerate(unsold.items) if item.key not in known])
        for items in (unsold, Later(added)):
            made._add(items)
        return made

    @property
    def domain(self) -> str:
        """The domain whose adapter is in place."""
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
    def has_ensemble(self) -> bool:
        """Whether the private part of the client's ensemble ranks beside the model."""
        return self._loaded.ensemble is not None

    @property
    def alpha(self) -> dict[str, float]:
        """Each domain's share of the absolute fusion weights; empty for methods without."""
        return self._loaded.place.inference.alpha_shares

    @property
    def num_beams(self) -> int:
        """Beams of the search, at least; it takes more where k and the history need them."""
        return self._loaded.place.inference.ranking.num_beams

    @property
    def model(self) -> PeftModel:
        """Backbone and adapter."""
        return self._loaded.model

    @property
    def tokenizer(self) -> Any:
        """That of the backbone, in which item IDs are written."""
        return self._loaded.tokenizer

    @property
    def task(self) -> Task:
        """The catalogue as the model sees it: item IDs, their trie, the parts of prompts."""
        return self._loaded.task

    def recommend(
        self,
        history: History | Sequence[History],
        k: int = 10,
        repeats: Repeats = "learned",
        *,
        exclude: Iterable[str] | None = None,
        candidates: Iterable[str] | None = None,
        stock: Mapping[str, float] | None = None,
    ) -> Any:
        """The k best next items for one history, an `Answer`, or for each of many, a list of them.

        A history is a list of titles or item keys, oldest first, as `Items.resolve` understands them; a list in it is
        one basket, and a list of nothing but lists is many histories. For an empty one the most popular items of the
        ensemble's counts are taken; without an ensemble, what the model finds likely without a history, where its
        prompts have words of their own. A history among many has the items that it has alone, and their scores but for
        the rounding of sums.

        Args:
            history: One, or many.
            k: How many items; less come where there are no more.
            repeats: What becomes of items of the history: the weights of the ensemble decide (``learned``, "what
                next"), they are left out (``drop``, "something new"), or nothing else comes (``only``, "buy again").
                Without an ensemble ``learned`` is what the protocol of the run does: leave them out, or not.
            exclude: Keys of items that are not recommended.
            candidates: Keys of the items that alone may be recommended.
            stock: Key -> how many are left: items with none, and items that it does not name, are not recommended.

        Raises:
            ValueError: k below 1, another word as ``repeats``, an entry that is no item or may be several, an empty
                history where nothing is known without one, or filters that leave no item.
        """
        check_k(k, repeats)
        many, histories = as_histories(history)
        with self._lock:
            items, count = self.items, len(histories)
            allowed = allowed_items(items, exclude, candidates, stock)
            resolved = [resolve_history(items, one, number, count) for number, one in enumerate(histories)]
            answers = self._answers(resolved, k, repeats, allowed)
        return answers if many else answers[0]

    def similar(
        self,
        item: str,
        k: int = 10,
        *,
        exclude: Iterable[str] | None = None,
        candidates: Iterable[str] | None = None,
        stock: Mapping[str, float] | None = None,
    ) -> Answer:
        """The k items whose texts are nearest to that of ``item``, a title or an item key; a score is a cosine.

        Raises:
            ValueError: k below 1, no such item, no ensemble, which holds the vectors of texts, or filters that leave
                no other item.
        """
        check_k(k)
        with self._lock:
            ensemble, found = self._loaded.ensemble, self.items.resolve(item)
            if ensemble is None:
                raise ValueError(
                    "got similar items of a recommender without an ensemble, expected one with it: it holds the "
                    "vectors of the item texts"
                )
            allowed = allowed_items(self.items, exclude, candidates, stock)
            unit_ID = torch.as_tensor(ensemble.knowledge.unit_ID)
            cosine_I = (unit_ID @ unit_ID[found.number]).tolist()
            number_A = range(len(cosine_I)) if allowed is None else allowed.number_A
            order = sorted((one for one in number_A if one != found.number), key=lambda one: -cosine_I[one])
            if not order:
                raise ValueError("got filters that leave the item alone, expected one other item at least")
            notes = [*(() if allowed is None else allowed.notes), *([found.note] if found.note else [])]
            scored = [Scored(one, cosine_I[one], {}) for one in order[:k]]
            return replace(self._answer(scored, [found.number], notes), alpha={})

    def recommend_many(
        self,
        histories: Mapping[str, Any] | Iterable[tuple[str, Any]],
        k: int = 10,
        repeats: Repeats = "learned",
        *,
        exclude: Iterable[str] | None = None,
        candidates: Iterable[str] | None = None,
        stock: Mapping[str, float] | None = None,
        unknown: str = "refuse",
    ) -> Iterator[ForCustomer]:
        """What `recommend` answers for each customer, in their order, while the next ones are still read.

        A history that cannot be read gets its error, and no other one suffers. Entries are item keys, or titles as the
        catalogue writes them: nothing is guessed.

        Args:
            histories: Customer -> history, or such pairs; never held as a whole.
            unknown: An entry that is no item makes a history unreadable (``refuse``), or is left out with a note
                (``skip``).
            k: As for `recommend`, and so are all others.

        Raises:
            ValueError: k below 1, another word as ``unknown``, or filters that leave no item: before the first answer.
        """
        check_k(k, repeats)
        if unknown not in ("refuse", "skip"):
            raise ValueError(f"got unknown {unknown!r}, expected refuse or skip")
        if not isinstance(histories, Iterable) or isinstance(histories, str):
            raise ValueError(f"got histories {histories!r:.100}, expected customer -> history, or such pairs")
        allowed = allowed_items(self.items, exclude, candidates, stock)
        pairs = iter(histories.items() if isinstance(histories, Mapping) else histories)
        return self._many(pairs, k, repeats, allowed, unknown)

    def _many(
        self, pairs: Iterator[tuple[str, Any]], k: int, repeats: Repeats, allowed: Allowed | None, unknown: str
    ) -> Iterator[ForCustomer]:
        for batch in iter(lambda: list(islice(pairs, BATCH)), []):
            found: dict[int, tuple[ResolvedHistory, int]] = {}
            errors: dict[int, str] = {}
            with self._lock:
                for row, (_, history) in enumerate(batch):
                    try:
                        found[row] = exact_history(self.items, history, unknown)
                    except ValueError as error:
                        errors[row] = str(error)
                answers = self._each(found, k, repeats, allowed, errors)
            for row, (customer, _) in enumerate(batch):
                yield ForCustomer(customer, answers.get(row), errors.get(row, ""))

    def _each(
        self,
        found: Mapping[int, tuple[ResolvedHistory, int]],
        k: int,
        repeats: Repeats,
        allowed: Allowed | None,
        errors: dict[int, str],
    ) -> dict[int, Answer]:
        """Row -> its answer. Where all of them together fail, each is asked for alone, and fails alone."""
        try:
            given = self._answers([one for one, _ in found.values()], k, repeats, allowed)
            answers = dict(zip(found, given, strict=True))
        except ValueError as error:
            if len(found) == 1:
                errors[next(iter(found))] = str(error)
                return {}
            parts = (self._each({row: one}, k, repeats, allowed, errors) for row, one in found.items())
            return {row: answer for part in parts for row, answer in part.items()}
        for row, (_, num_unknown) in found.items():
            if num_unknown:
                note = f"{num_unknown} entries of the history are no items and were left out"
                answers[row] = replace(answers[row], notes=(note, *answers[row].notes))
        return answers

    def add_items(self, new_items: Sequence[NewItem | Mapping[str, str]]) -> None:
        """Let items be recommended and stand in histories that came after the training, by their texts alone.

        Each has ``key``, ``title`` and ``text``. The ensemble, which never counted one of them, knows their texts.

        Raises:
            ValueError: one of them cannot be added (`fedecider.models.new_items.add_items`); then none is.
        """
        if isinstance(new_items, str | Mapping) or not isinstance(new_items, Sequence):
            raise ValueError(f"got new items {str(new_items)[:200]!r}, expected a list of them")
        with self._lock:
            self._add(Later([as_new_item(item) for item in new_items]))

    def _add(self, added: Later) -> None:
        now = self._loaded
        if added.items:
            longer = add_to(now.place, now.model, now.tokenizer, now.table, added, now.ensemble)
            parts = (longer.tokenizer, longer.table, longer.ensemble, self._device)
            self._loaded = ready_to_rank(now.source, now.place, now.model, *parts)

    def _answers(
        self,
        resolved: Sequence[ResolvedHistory],
        k: int,
        repeats: Repeats,
        allowed: Allowed | None,
    ) -> list[Answer]:
        loaded, number_A = self._loaded, None if allowed is None else allowed.number_A
        asked = [row for row, one in enumerate(resolved) if one.entries]
        rows = as_sequences([resolved[row] for row in asked])
        found = (
            dict(zip(asked, best(loaded, rows, k, repeats, number_A, self._near_texts()), strict=True)) if asked else {}
        )
        nobody, why = ([], "") if len(asked) == len(resolved) else self._without_history(k, repeats, number_A)
        answers = []
        for row, (entries, _) in enumerate(resolved):
            scored, seen = found.get(row, nobody), [entry.number for entry in entries]
            notes = [*(() if allowed is None else allowed.notes), *(entry.note for entry in entries if entry.note)]
            if not entries:
                notes.append(why)
            elif repeats == "only" and len(scored) < k:
                notes.append(f"{len(scored)} items that may come were bought before, and repeats only gives no others")
            if repeats != "only" and len(scored) < k:
                notes.append(f"{len(scored)} items in place of {k}: all others may not come, or were bought before")
            answers.append(self._answer(scored, seen, notes))
        return answers

    def _near_texts(self) -> NearOnDemand | None:
        ensemble = self._loaded.ensemble
        if ensemble is None:
            return None
        if self._near is None or self._near.unit_ID is not ensemble.knowledge.unit_ID:
            self._near = NearOnDemand(ensemble.knowledge.unit_ID)
        return self._near

    def _without_history(self, k: int, repeats: Repeats, number_A: Sequence[int] | None) -> tuple[list[Scored], str]:
        loaded = self._loaded
        if repeats == "only":
            return [], NO_HISTORY_REPEATS
        if loaded.ensemble is not None:
            return most_popular(loaded.ensemble, k, number_A), NO_HISTORY_ENSEMBLE
        try:
            return search_without_history(
                loaded.model, loaded.task, loaded.place.inference.ranking, k, number_A
            ), NO_HISTORY_MODEL
        except ValueError as error:
            raise ValueError(
                "got an empty history, expected titles or item keys, oldest first: there is no ensemble that knows "
                f"what is popular, and prompts of this model are empty without a history (templates "
                f"{loaded.task.config.templates})"
            ) from error

    def _answer(self, scored: Sequence[Scored], seen: Sequence[int], notes: Sequence[str]) -> Answer:
        keys, titles = self.items.keys, self.items.titles
        return Answer(
            items=recommendations(scored, keys, titles),
            history=tuple(HistoryItem(keys[item], titles[item]) for item in seen),
            alpha=self.alpha,
            notes=tuple(notes),
        )
