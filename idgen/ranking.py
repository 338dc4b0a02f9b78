"""Where the held-out items of a task's users stand in the answers of a backbone.

Shapes: B users of a batch, U users of a task, K beams, I items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from fedecider.bounds import Precision
from fedecider.evaluation.metrics import catalogue_positions, not_ranked
from fedecider.evaluation.protocols import held_out, histories, with_target
from fedecider.evaluation.sequences import SequenceArray
from idgen.decode import constrained_beam_search, item_positions
from idgen.item_scores import catalogue_rows, catalogue_scores
from idgen.precision import autocast
from idgen.ranking_config import RankingConfig
from idgen.samples import eval_batches
from idgen.tasks import Split, Task


class RankingContext(NamedTuple):
    """How users are ranked, whatever the model and the task."""

    ranking: RankingConfig = RankingConfig()
    drop_seen: bool = True
    """Whether items of the history are no candidates."""
    precision: Precision = "fp32"
    device: torch.device = torch.device("cpu")


def rank_task(
    model: PreTrainedModel | PeftModel,
    task: Task,
    split: Split,
    users: Tensor | None,
    context: RankingContext,
    share: tuple[int, int] = (0, 1),
) -> Tensor:
    """(U,) float64 places, of baskets (U, T), in the order of ``users`` (default: all); batches come sorted by length
    and are put back.

    Exact over the whole catalogue where items have tokens of their own (`Trie.has_own_tokens`), a place in the list of
    the beams else.
    ``share`` (p, P): every P-th batch from p on alone; users of the others are not ranked.
    """

    def seen(user_B: Tensor) -> list[Sequence[int]] | None:
        return list(histories(rows.take(user_B), split)) if context.drop_seen else None

    rows = SequenceArray.of(task.sequences)
    position_U = not_ranked(held_out(rows, split))
    if task.trie.has_own_tokens:
        for block in catalogue_blocks(model, task, split, users, context, share):
            position_U[block.user_B] = catalogue_positions(block.score_BI, block.target_B, seen(block.user_B))
    else:
        trie = task.trie.to(context.device)
        for user_B, prompt, target_B in _prompts(task, split, users, context, share):
            with autocast(context.device, context.precision):
                item_BK, _ = constrained_beam_search(model, *prompt, trie, num_beams=context.ranking.num_beams)
            position_U[user_B] = item_positions(item_BK.cpu(), target_B, seen(user_B)).double()
    return position_U if users is None else position_U[users]


class ScoredUsers(NamedTuple):
    """Some users with the scores of all items, where every ID is one token."""

    user_B: Tensor
    target_B: Tensor
    score_BI: Tensor
    """On the model's device: log-probabilities, but for a constant of each user."""


def catalogue_blocks(
    model: Any,
    task: Task,
    split: Split,
    users: Tensor | None,
    context: RankingContext,
    share: tuple[int, int] = (0, 1),
) -> Iterator[ScoredUsers]:
    """The users of `rank_task`, a block after the other, each read once; at most `MAX_LOGITS` scores at a time."""
    trie = task.trie.to(context.device)
    rows_ID = catalogue_rows(model, trie)
    for user_B, prompt, target_B in _prompts(task, split, users, context, share):
        for rows_B, score_BI in catalogue_scores(model, *prompt, trie, context.precision, rows_ID):
            yield ScoredUsers(user_B[rows_B], target_B[rows_B], score_BI)


def _prompts(
    task: Task,
    split: Split,
    users: Tensor | None,
    context: RankingContext,
    share: tuple[int, int],
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor], Tensor]]:
    """Numbers of users, their prompts on the device, their targets."""
    batches, device = eval_batches(task, split, context.ranking.eval_batch_size, users), context.device
    for user_B, input_ids, attention_mask, target_B in islice(batches, share[0], None, share[1]):
        yield user_B, (input_ids.to(device), attention_mask.to(device)), target_B


def eval_users(task: Task, split: str, count: int, generator: torch.Generator) -> Tensor | None:
    """Users to rank: all with a target, or for validation a fixed sample in ascending order; None: all there are."""
    user_N = torch.from_numpy(with_target(task.sequences, split))
    if split != "valid" or count == 0 or count >= len(user_N):
        return None if len(user_N) == len(task.sequences) else user_N
    order = torch.randperm(len(user_N), generator=generator)
    return user_N[order[:count].sort().values]
