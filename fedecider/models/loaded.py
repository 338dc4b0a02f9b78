"""A recommender as it is loaded from a folder: what of it ranks, and how.

Shape legend: B histories, M items of each, K beams, S input tokens, B histories of a batch, K items of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import islice
from typing import Any, NamedTuple

import torch
from peft import PeftModel

from fedecider.data.near_texts import NearOnDemand
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.answers import Repeats, Scored
from fedecider.models.client_model import model_scores
from fedecider.models.ensemble import Ensemble, ModelScores, best_items
from fedecider.models.ensemble_files import load_ensemble
from fedecider.models.export import load_adapter
from fedecider.models.item_search import Items
from fedecider.models.item_table import ITEM_FILE, ItemTable
from fedecider.models.later_rows import with_rows
from fedecider.models.source import Place, Source
from fedecider.running.damage import damage_names
from idgen.decode import top_items
from idgen.item_ids import ItemIds
from idgen.ranking import RankingContext
from idgen.ranking_config import RankingConfig
from idgen.samples import empty_prompt
from idgen.tasks import Task, catalogue_task


class Loaded(NamedTuple):
    """One domain's model, ready to rank."""

    source: Source
    place: Place
    model: PeftModel
    tokenizer: Any
    table: ItemTable
    items: Items
    task: Task
    ensemble: Ensemble | None
    """None where there is none, or it is not wanted."""
    scores: ModelScores
    """What the ensemble asks of the model."""


def adapted(
    base: Any,
    tokenizer: Any,
    source: Source,
    place: Place,
    table: ItemTable,
    device: torch.device,
    wants_ensemble: bool,
) -> Loaded:
    """``base`` with the adapter of ``place``, ready to rank."""
    ensemble = load_ensemble(place.ensemble, table.keys) if wants_ensemble and place.ensemble is not None else None
    model = load_adapter(base, place.adapter).to(device).eval()
    tokenizer = with_rows(model, tokenizer, place.adapter, table)
    return ready_to_rank(source, place, model, tokenizer, table, ensemble, device)


def ready_to_rank(
    source: Source,
    place: Place,
    model: PeftModel,
    tokenizer: Any,
    table: ItemTable,
    ensemble: Ensemble | None,
    device: torch.device,
) -> Loaded:
    """``model`` with the trie of its items and what the ensemble asks of it."""
    with damage_names(place.adapter / ITEM_FILE):
        catalogue, item_ids = table.catalogue or place.domain, _checked_ids(table, len(tokenizer))
        task = catalogue_task(catalogue, item_ids, tokenizer, place.inference.samples)
    scores = model_scores(model, task, RankingContext(place.inference.ranking, device=device))
    items = Items(table.keys, table.titles)
    return Loaded(source, place, model, tokenizer, table, items, task, ensemble, scores)


def _checked_ids(table: ItemTable, num_tokens: int) -> ItemIds:
    """The item IDs of a export. ``ValueError`` when one of them has a token that the tokenizer does not have."""
    largest = max(token for tokens in table.token_ids for token in tokens)
    if largest >= num_tokens:
        raise ValueError(f"token {largest} of a tokenizer with {num_tokens} tokens")
    return ItemIds(list(table.id_texts), [list(tokens) for tokens in table.token_ids], {})


DIRECT = 500
"""Items that may be recommended up to which each is scored; among more, beams are searched first."""


def best(
    loaded: Loaded,
    histories: SequenceArray,
    k: int,
    repeats: Repeats,
    number_A: Sequence[int] | None = None,
    near: NearOnDemand | None = None,
) -> list[list[Scored]]:
    """The k best items of each history, by the ensemble where there is one, else by the model alone.

    ``number_A``: the items that alone may come; None: all. Scores stay those in the whole catalogue. Of the model
    alone "learned" is what the protocol of the run does.
    """
    scores, ensemble = loaded.scores, loaded.ensemble
    if ensemble is None and repeats == "learned" and loaded.place.inference.drop_seen:
        repeats = "drop"
    allowed = set(range(len(loaded.items)) if number_A is None else number_A)
    every_I = torch.arange(len(loaded.items))
    allowed_I = None if number_A is None else torch.isin(every_I, torch.tensor(number_A))

    def beside(asked: SequenceArray, scores: ModelScores, room: int) -> list[list[Scored]]:
        assert ensemble is not None
        lists = best_items(ensemble, asked, scores, room, repeats, allowed_I, near)
        return [[Scored(one.item, one.log_prob, one.adds) for one in items] for items in lists]

    def exact(asked: SequenceArray) -> list[list[Scored]]:
        if ensemble is None:
            return _direct(scores, asked, k, [_may_come(allowed, items, repeats) for items in asked])
        each = scores._replace(beams=scores.beams and (lambda asked, _: torch.tensor([sorted(allowed)] * len(asked))))
        return beside(asked, each, k)

    few = number_A is not None and (len(allowed) <= DIRECT or scores.beams is None)
    if few or (ensemble is None and repeats == "only"):
        return exact(histories)
    room = k + min(len(loaded.items) - len(allowed), 4 * k)  # beside items that may not come
    if ensemble is None:
        wide = _search(scores, histories, room, repeats == "drop")
    else:
        wide = beside(histories, scores, room)
    found = [[one for one in items if one.item in allowed][:k] for items in wide]
    return found if number_A is None else _completed(found, histories, k, allowed, repeats, exact)


def _may_come(allowed: Set[int], seen: Sequence[int], repeats: Repeats) -> list[int]:
    """Those of the allowed items that come behind a history, in the order of their numbers."""
    if repeats == "learned":
        return sorted(allowed)
    return sorted(allowed - set(seen) if repeats == "drop" else allowed & set(seen))


def _completed(
    found: list[list[Scored]],
    histories: SequenceArray,
    k: int,
    allowed: Set[int],
    repeats: Repeats,
    exact: Callable[[SequenceArray], list[list[Scored]]],
) -> list[list[Scored]]:
    """Histories with too short a list are asked again for every item that may come."""
    for row, seen in enumerate(histories):  # one by one: every one of them asks for most of the catalogue
        if len(found[row]) < k and len(found[row]) < len(_may_come(allowed, seen, repeats)):
            (found[row],) = exact(histories[row : row + 1])
    return found


def _direct(
    scores: ModelScores, histories: SequenceArray, k: int, candidates: Sequence[Sequence[int]]
) -> list[list[Scored]]:
    """The best of some items of each history, every one of which is scored."""
    rows = [torch.tensor(items, dtype=torch.int64) for items in candidates]
    item_BM = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    if not item_BM.shape[1]:
        return [[] for _ in candidates]
    score_BM, found = scores.log_probs(list(histories), item_BM), []
    for items, score_M in zip(candidates, score_BM, strict=True):
        place_M = torch.argsort(-score_M[: len(items)], stable=True).tolist()
        found.append([Scored(items[place], float(score_M[place]), {}) for place in place_M[:k]])
    return found


def _search(scores: ModelScores, histories: SequenceArray, k: int, drop_seen: bool) -> list[list[Scored]]:
    """The k best items of each history under the model alone, by beams with room for those that are dropped."""
    assert scores.search is not None
    lists = []
    item_BK, score_BK = scores.search(histories, k)
    for seen, items, values in zip(histories, item_BK.tolist(), score_BK.tolist(), strict=True):
        dropped = {-1, *(seen if drop_seen else ())}
        ranked = (Scored(item, value, {}) for item, value in zip(items, values, strict=True))
        lists.append([one for one in ranked if one.item not in dropped][:k])
    return lists


def search_without_history(
    model: Any, task: Task, ranking: RankingConfig, k: int, number_A: Sequence[int] | None = None
) -> list[Scored]:
    """The k best items, of ``number_A`` alone where it is given, behind the words of the prompt alone.

    Raises:
        ValueError: the templates have no words but the history.
    """
    device = next(model.parameters()).device
    input_ids, attention_mask = empty_prompt(task)
    item_1K, score_1K = top_items(
        model,
        input_ids.to(device),
        attention_mask.to(device),
        task.trie.to(device),
        num_beams=ranking.beams_for(k, 0, len(task.trie)) if number_A is None else len(task.trie),
    )
    found = zip(item_1K[0].tolist(), score_1K[0].tolist(), strict=True)
    allowed = None if number_A is None else set(number_A)
    kept = (Scored(item, score, {}) for item, score in found if item >= 0 and (allowed is None or item in allowed))
    return list(islice(kept, k))
