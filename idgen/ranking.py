"""Where the held-out items of a task's users stand in the answers of a backbone.

Shape legend: B users of a batch, U users of a task, K beams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from fedecider.evaluation.metrics import NOT_RANKED
from idgen.decode import constrained_beam_search, item_positions
from idgen.samples import Split, Task, eval_batches
from idgen.trie import Trie


@dataclass(frozen=True)
class RankingConfig:
    """How recommendations are decoded and counted.

    Args:
        num_beams: The number of beams of the constrained search; items beyond them count as not ranked. Items of the
            history take beams too before they are dropped. A run needs at least 20, since it reports hit@20.
        length_penalty: The score is log-probability / length ** length_penalty; 0 ranks by likelihood, 1 is IDGenRec's.
        num_eval_users: The number of users of a client in the validation of every round, drawn once; 0 takes all. The
            test takes all.
        eval_batch_size: The number of users that are decoded together.
    """

    num_beams: int = 20
    length_penalty: float = 0.0
    num_eval_users: int = 0
    eval_batch_size: int = 32

    def __post_init__(self) -> None:
        if self.num_beams < 1 or self.eval_batch_size < 1 or self.num_eval_users < 0:
            raise ValueError(
                f"got num_beams {self.num_beams}, eval_batch_size {self.eval_batch_size} and num_eval_users "
                f"{self.num_eval_users}, expected at least 1, 1 and 0"
            )
        if self.length_penalty < 0:
            raise ValueError(f"got length_penalty {self.length_penalty}, expected 0 (likelihood) or more")


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
) -> Tensor:
    """(U,) places in the order of ``users`` (default: all); batches come sorted by length and are put back."""
    cut = {"valid": -2, "test": -1}[split]
    position_U = torch.full((len(task.sequences),), NOT_RANKED, dtype=torch.long)
    for user_B, input_ids, attention_mask, target_B in eval_batches(task, split, ranking.eval_batch_size, users):
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            item_BK, _ = constrained_beam_search(
                model,
                input_ids.to(device),
                attention_mask.to(device),
                trie,
                num_beams=ranking.num_beams,
                length_penalty=ranking.length_penalty,
            )
        seen = [task.sequences[user][:cut] for user in user_B.tolist()] if drop_seen else None
        position_U[user_B] = item_positions(item_BK.cpu(), target_B.cpu(), seen)
    return position_U if users is None else position_U[users]


def eval_users(task: Task, split: str, count: int, generator: torch.Generator) -> Tensor | None:
    """Users to rank: all of them, or for validation a fixed sample in ascending order."""
    num_users = len(task.sequences)
    if split != "valid" or count == 0 or count >= num_users:
        return None
    order = torch.randperm(num_users, generator=generator)
    return order[:count].sort().values
