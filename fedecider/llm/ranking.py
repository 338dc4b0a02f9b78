"""The best items for histories of item numbers: under a model, and under a memory with it.

Shape legend: B histories of a batch, K items of one.
"""

from __future__ import annotations

import math
from typing import Any

from fedecider.llm.answers import Scored
from fedecider.memory.contexts import new_contexts
from fedecider.memory.memory import Histories, Memory, ModelScores, rank
from idgen.decode import constrained_beam_search, stable_topk
from idgen.ranking_config import RankingConfig
from idgen.samples import Task, empty_prompt, encode_histories


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
                length_penalty=ranking.length_penalty,
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
        length_penalty=ranking.length_penalty,
    )
    found = zip(item_1K[0].tolist(), score_1K[0].tolist(), strict=True)
    return [Scored(item, score, {}) for item, score in found if item >= 0][:k]


def mix(memory: Memory, scores: ModelScores, histories: Histories, k: int) -> list[list[Scored]]:
    """The k best items of each history in the mixture of a memory; items of the history are no candidates."""
    found = []
    for ranked in rank(memory, new_contexts(histories), scores, k):
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
