"""Training of the backbone on public data, and the public users whose last items choose the step that is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fedecider.evaluation.metrics import user_metrics
from fedecider.evaluation.protocols import MIN_EVENTS
from fedecider.evaluation.sequences import SequenceArray
from idgen.backbones.family import TokenBatch
from idgen.candidates import candidates_of, with_candidates
from idgen.config import BackboneTraining
from idgen.losses import sequence_loss
from idgen.optimizer import STAGE_ONE_COURSE, parameter_groups, row_gradients
from idgen.ranking import RankingContext, rank_task
from idgen.ranking_config import RankingConfig
from idgen.samples import num_batches, train_batches
from idgen.tasks import Task, _as_list
from idgen.training import NEGATIVES, NUM_VALIDATIONS, Execution, Optimisation, epoch_generator, train_model


def train_backbone(
    model: PreTrainedModel,
    tasks: Task | Sequence[Task],
    config: BackboneTraining,
    execution: Execution,
    validation: Sequence[HeldOut] = (),
) -> list[dict[str, Any]]:
    """Train what is not frozen on the mixed training samples of ``tasks``, in place; logs as in `train_model`.

    ``validation``: users whose last items choose the step that is kept (`hold_out`); without any it is the last one.
    FeDecider (WWW 2026), appendix B.2: the base model is fine-tuned on data of users outside all clients. Differs from
    it: the choice of the step.
    """
    token_I = compared_tokens(tasks, model.config.vocab_size)
    candidates = candidates_of(tasks, token_I)

    def batches(epoch: int) -> Iterator[TokenBatch]:
        found = train_batches(tasks, config.batch_size, epoch_generator(execution.seed, epoch))
        if candidates is None:
            dense = any(task.config.dense_head for task in _as_list(tasks))
            return ({**batch, "catalogue": token_I} for batch in found) if dense else found
        drawn = epoch_generator(execution.seed, epoch, NEGATIVES)
        return (with_candidates(batch, candidates, drawn) for batch in found)

    def validate() -> Tensor:
        ranking = RankingConfig(eval_batch_size=VALIDATION_BATCH)
        gains = []
        for task, user_U in validation:
            drop_seen = SequenceArray.of(task.sequences).basket_E is None  # who buys baskets buys again
            context = RankingContext(ranking, drop_seen, config.precision, execution.device)
            gains.append(user_metrics(rank_task(model, task, "test", user_U, context), (10,))["ndcg@10"])
        return torch.cat(gains)

    with row_gradients(model, candidates is not None):
        return train_model(
            model,
            batches,
            partial(sequence_loss, model),
            parameter_groups(model, config.learning_rate, STAGE_ONE_COURSE, config.table_lr_multiplier),
            Optimisation(config, STAGE_ONE_COURSE, num_steps(tasks, config)),
            execution,
            validate if validation else None,
        )


def compared_tokens(tasks: Task | Sequence[Task], vocab_size: int) -> Tensor:
    """What a target is compared with, rising: the items' own tokens of all catalogues beside the words of IDs, else all
    tokens."""
    tasks = _as_list(tasks)
    if not all(task.config.dense_head for task in tasks):
        return torch.arange(vocab_size)
    return torch.cat([task.item_tokens() for task in tasks]).unique()


def num_steps(tasks: Task | Sequence[Task], config: BackboneTraining) -> int:
    """Steps of `train_backbone`."""
    return config.max_steps or config.epochs * num_batches(tasks, config.batch_size)


MOST_VALIDATED, LEAST_VALIDATED = 1000, 50
"""Users; with fewer the last step is kept."""
VALIDATED_OF = 4
"""One public user of so many at most: each costs the training its newest event."""
VALIDATION_SHARE = 0.1
"""Of the time of a training, about."""
ONE_TOKEN_COST, BEAM_COST = 2.0, 5.0
"""Samples that are trained on in the time in which a user is ranked: over all items at once, or by beams."""
VALIDATION_BATCH = 100


class HeldOut(NamedTuple):
    """Users of a task who choose the step that is kept."""

    task: Task
    """Ranks their last events."""
    user_U: Tensor


def hold_out(tasks: Sequence[Task], config: BackboneTraining, seed: int) -> tuple[list[Task], list[HeldOut]]:
    """``tasks`` without the last events of some users, drawn by ``seed``; and these users, to choose a step by.

    Both as they were, and empty, where there are fewer than `LEAST_VALIDATED` for them: one of `VALIDATED_OF` users
    with three events, and as many as can be ranked in `VALIDATION_SHARE` of the time of the training.
    """
    tasks = list(tasks)
    found = [np.flatnonzero(SequenceArray.of(task.training_sequences).num_baskets_U >= MIN_EVENTS) for task in tasks]
    cost = ONE_TOKEN_COST if all(task.trie.has_own_tokens for task in tasks) else BEAM_COST
    affordable = VALIDATION_SHARE * num_steps(tasks, config) * config.batch_size / cost / (NUM_VALIDATIONS + 1)
    count = min(MOST_VALIDATED, sum(map(len, found)) // VALIDATED_OF, int(affordable))
    if count < LEAST_VALIDATED:
        return tasks, []
    task_N = np.repeat(np.arange(len(tasks)), list(map(len, found)))
    drawn_N = np.sort(np.random.default_rng(seed).choice(len(task_N), count, replace=False))
    users = [np.concatenate(found)[drawn_N[task_N[drawn_N] == number]] for number in range(len(tasks))]
    pairs = list(zip(tasks, users, strict=True))
    whole = [HeldOut(task._replace(hold_out=True), torch.from_numpy(user_U)) for task, user_U in pairs if len(user_U)]
    return [task.without_last(user_U) for task, user_U in pairs], whole
