"""Where the held-out items of a task's users stand in the answers of a backbone.

Shape legend: B users of a batch, U users of a task, K beams, I items.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from fedecider.bounds import Precision
from fedecider.evaluation.metrics import NOT_RANKED, positions_from_scores
from fedecider.evaluation.split import history
from idgen.candidates import trie_log_probs
from idgen.decode import constrained_beam_search, item_positions
from idgen.precision import autocast
from idgen.ranking_config import RankingConfig
from idgen.samples import Split, Task, eval_batches
from idgen.trie import Trie


def rank_task(
    model: PreTrainedModel | PeftModel,
    task: Task,
    trie: Trie,
    split: Split,
    users: Tensor | None,
    ranking: RankingConfig,
    drop_seen: bool,
    precision: Precision,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
) -> Tensor:
    """(U,) float64 places in the order of ``users`` (default: all); batches come sorted by length and are put back.

    Exact over the whole catalogue where every ID is one token (`ranks_all`), a place in the list of the beams else.
    ``share`` (p, P): every P-th batch from p on alone; users of the others are not ranked.
    """
    position_U = torch.full((len(task.sequences),), NOT_RANKED, dtype=torch.float64)
    batches = eval_batches(task, split, ranking.eval_batch_size, users)
    for user_B, input_ids, attention_mask, target_B in islice(batches, share[0], None, share[1]):
        seen = [history(task.sequences[user], split) if drop_seen else [] for user in user_B.tolist()]
        prompt = (input_ids.to(device), attention_mask.to(device), trie)
        with autocast(device, precision):
            if ranks_all(trie):
                item_BI = torch.arange(len(trie), device=device).expand(len(user_B), -1)
                found_B = _exact_positions(trie_log_probs(model, *prompt, item_BI).cpu(), target_B.cpu(), seen)
            else:
                item_BK, _ = constrained_beam_search(
                    model, *prompt, num_beams=ranking.num_beams, length_penalty=ranking.length_penalty
                )
                found_B = item_positions(item_BK.cpu(), target_B.cpu(), seen).double()
        position_U[user_B] = found_B
    return position_U if users is None else position_U[users]


def ranks_all(trie: Trie) -> bool:
    """Whether one step scores every item, so that no beams are needed: where every ID is one token."""
    return trie.max_length == 1


def _exact_positions(score_BI: Tensor, target_B: Tensor, seen: Sequence[Sequence[int]]) -> Tensor:
    candidate_BI = torch.ones_like(score_BI, dtype=torch.bool)
    for row, items in enumerate(seen):
        candidate_BI[row, torch.tensor(items, dtype=torch.long)] = False
    return positions_from_scores(score_BI, target_B, candidate_BI)


def eval_users(task: Task, split: str, count: int, generator: torch.Generator) -> Tensor | None:
    """Users to rank: all of them, or for validation a fixed sample in ascending order."""
    num_users = len(task.sequences)
    if split != "valid" or count == 0 or count >= num_users:
        return None
    order = torch.randperm(num_users, generator=generator)
    return order[:count].sort().values
