"""The model as the memory asks it: log-probabilities of items, and its beams, for any histories.

Shape legend: B histories, M items of each, K beams, S input tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedecider.bounds import Precision
from fedecider.memory.memory import Histories, ModelScores
from idgen.candidates import trie_log_probs
from idgen.decode import constrained_beam_search
from idgen.precision import autocast
from idgen.ranking_config import RankingConfig
from idgen.samples import Task, encode_histories


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

    def log_probs(histories: Histories, item_BM: Tensor, temperature: float) -> Tensor:
        score_BM = torch.empty(item_BM.shape, dtype=torch.float64)
        for rows in batches(histories):
            with autocast(device, precision):
                asked = (*prompts(histories, rows), trie, item_BM[rows].to(device), temperature)
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
                    found_BK, _ = constrained_beam_search(
                        model, *asked, num_beams=num_beams, length_penalty=ranking.length_penalty
                    )
                item_BK[rows, :num_beams] = found_BK.cpu()
        return item_BK

    return ModelScores(log_probs, beams if trie.max_length > 1 else None)
