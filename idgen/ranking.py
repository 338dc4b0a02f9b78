"""Where the held-out items of a task's users stand in the answers of a backbone.

Shape legend: B users of a batch, U users of a task, K beams.
"""

from __future__ import annotations

from itertools import islice

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.evaluation.split import history
from idgen.decode import constrained_beam_search, item_positions
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
    precision: str,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
) -> Tensor:
    """(U,) places in the order of ``users`` (default: all); batches come sorted by length and are put back.

    ``share`` (p, P): every P-th batch from p on alone; users of the others are not ranked.
    """
    position_U = torch.full((len(task.sequences),), NOT_RANKED, dtype=torch.long)
    batches = eval_batches(task, split, ranking.eval_batch_size, users)
    for user_B, input_ids, attention_mask, target_B in islice(batches, share[0], None, share[1]):
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            item_BK, _ = constrained_beam_search(
                model,
                input_ids.to(device),
                attention_mask.to(device),
                trie,
                num_beams=ranking.num_beams,
                length_penalty=ranking.length_penalty,
            )
        seen = [history(task.sequences[user], split) for user in user_B.tolist()] if drop_seen else None
        position_U[user_B] = item_positions(item_BK.cpu(), target_B.cpu(), seen)
    return position_U if users is None else position_U[users]


def eval_users(task: Task, split: str, count: int, generator: torch.Generator) -> Tensor | None:
    """Users to rank: all of them, or for validation a fixed sample in ascending order."""
    num_users = len(task.sequences)
    if split != "valid" or count == 0 or count >= num_users:
        return None
    order = torch.randperm(num_users, generator=generator)
    return order[:count].sort().values
