"""Where the held-out items of a task's users stand in the answers of a backbone.

Shape legend: B users of a batch, U users of a task, K beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from fedecider.bounds import OneOrMore, ZeroOrMore, at_least, check
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.evaluation.split import history
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
        prior_weight: The share of what a title has of probability whoever asks that is taken off its score; above 0 it
            keeps a pretrained model from recommending the titles that are common in general. The paper has 0.
        num_eval_users: The number of users of a client in the validation of every round, drawn once; 0 takes all. The
            test takes all.
        eval_batch_size: The number of users that are decoded together.
    """

    num_beams: Annotated[int, at_least(1, most=10_000)] = 20
    length_penalty: Annotated[float, at_least(0, hint="0 ranks by likelihood")] = 0.0
    prior_weight: Annotated[float, at_least(0, most=2)] = 0.0
    num_eval_users: ZeroOrMore = 0
    eval_batch_size: OneOrMore = 32

    def __post_init__(self) -> None:
        check(self)


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
