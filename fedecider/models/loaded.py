"""A recommender as it is loaded from a folder: what of it ranks, and how.

Shape legend: B histories, M items of each, K beams, S input tokens, B histories of a batch, K items of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import islice
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor

from fedecider.data.near_texts import NearTexts
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.answers import Scored
from fedecider.models.client_model import model_scores
from fedecider.models.ensemble import Ensemble, Histories, ModelScores, best_items
from fedecider.models.ensemble_files import load_ensemble
from fedecider.models.export import load_adapter
from fedecider.models.item_search import Items
from fedecider.models.item_table import ITEM_FILE, ItemTable
from fedecider.models.source import Place, Source
from fedecider.running.damage import damage_names
from idgen.decode import constrained_beam_search
from idgen.item_ids import ItemIds
from idgen.ranking import RankingContext
from idgen.ranking_config import RankingConfig
from idgen.samples import empty_prompt, encode_histories
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
    """The item IDs of a hand-over. ``ValueError`` when one of them has a token that the tokenizer does not have."""
    largest = max(token for tokens in table.token_ids for token in tokens)
    if largest >= num_tokens:
        raise ValueError(f"token {largest} of a tokenizer with {num_tokens} tokens")
    return ItemIds(list(table.id_texts), [list(tokens) for tokens in table.token_ids], {})


DIRECT = 500
"""Items that may be recommended up to which each is scored; among more, beams are searched first."""


def search_allowed(
    loaded: Loaded, histories: Histories, k: int, drop_seen: bool, number_A: Sequence[int] | None
) -> list[list[Scored]]:
    """`search` among the items ``number_A``; None: all."""
    model, task, ranking = loaded.model, loaded.task, loaded.place.inference.ranking
    if number_A is None:
        return search(model, task, ranking, histories, k, drop_seen)

    def exact(asked: Histories) -> list[list[Scored]]:
        return _direct(loaded.scores, asked, k, drop_seen, number_A)

    if len(number_A) <= DIRECT or task.trie.max_length == 1:
        return exact(histories)
    wide = search(model, task, ranking, histories, _room(loaded, k, number_A), drop_seen)
    allowed = set(number_A)
    found = [[one for one in items if one.item in allowed][:k] for items in wide]
    return _completed(found, histories, k, allowed, drop_seen, exact)


def mix_allowed(
    loaded: Loaded,
    ensemble: Ensemble,
    histories: Histories,
    k: int,
    number_A: Sequence[int] | None,
    near: NearTexts | None = None,
) -> list[list[Scored]]:
    """`mix` among the items ``number_A``; None: all. Scores stay those in the whole catalogue."""
    scores = loaded.scores
    if number_A is None:
        return mix(ensemble, scores, histories, k, near=near)
    allowed_I = torch.zeros(len(loaded.items), dtype=torch.bool)
    allowed_I[list(number_A)] = True
    item_1A = torch.tensor(number_A)[None]
    each = scores if scores.beams is None else scores._replace(beams=lambda asked, _: item_1A.repeat(len(asked), 1))

    def exact(asked: Histories) -> list[list[Scored]]:
        return mix(ensemble, each, asked, k, allowed_I, near)

    if len(number_A) <= DIRECT or scores.beams is None:
        return exact(histories)
    wide = mix(ensemble, scores, histories, _room(loaded, k, number_A), allowed_I, near)
    found = [items[:k] for items in wide]
    return _completed(found, histories, k, set(number_A), True, exact)


def _room(loaded: Loaded, k: int, number_A: Sequence[int]) -> int:
    """For the ``k`` best beside some that may not be recommended."""
    return k + min(len(loaded.items) - len(number_A), 4 * k)


def _completed(
    found: list[list[Scored]],
    histories: Histories,
    k: int,
    allowed: Set[int],
    drop_seen: bool,
    exact: Callable[[Histories], list[list[Scored]]],
) -> list[list[Scored]]:
    """Histories with too short a list are asked again for every item that may come."""
    left = (len(allowed - set(seen)) if drop_seen else len(allowed) for seen in histories)
    short = [row for row, (items, most) in enumerate(zip(found, left, strict=True)) if len(items) < min(k, most)]
    for row in short:  # one by one: every one of them asks for most of the catalogue
        (found[row],) = exact([histories[row]])
    return found


def _direct(
    scores: ModelScores, histories: Histories, k: int, drop_seen: bool, number_A: Sequence[int]
) -> list[list[Scored]]:
    """Every one of some items is scored."""
    item_BA = torch.tensor(number_A).expand(len(histories), -1)
    score_BA, found = scores.log_probs(histories, item_BA), []
    for seen, score_A in zip(histories, score_BA, strict=True):
        place_A = torch.argsort(-score_A, stable=True).tolist()
        dropped = set(seen) if drop_seen else set()
        ranked = (Scored(number_A[place], float(score_A[place]), {}) for place in place_A)
        found.append([one for one in ranked if one.item not in dropped][:k])
    return found


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


def search_without_history(
    model: Any, task: Task, ranking: RankingConfig, k: int, number_A: Sequence[int] | None = None
) -> list[Scored]:
    """The k best items, of ``number_A`` alone where it is given, behind the words of the prompt alone.

    Raises:
        ValueError: the templates have no words but the history.
    """
    device = next(model.parameters()).device
    input_ids, attention_mask = empty_prompt(task)
    item_1K, score_1K = constrained_beam_search(
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


def mix(
    ensemble: Ensemble,
    scores: ModelScores,
    histories: Histories,
    k: int,
    allowed_I: Tensor | None = None,
    near: NearTexts | None = None,
) -> list[list[Scored]]:
    """The k best items of each history in the mixture of an ensemble; items of the history are no candidates, nor are
    those that ``allowed_I`` (I,) leaves out. ``near``: where it is known, of all items."""
    lists = best_items(ensemble, SequenceArray.of(histories), scores, k, "drop", allowed_I, near)
    return [[Scored(best.item, best.log_prob, best.adds) for best in items] for items in lists]
