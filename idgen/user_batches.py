"""Training samples user by user, for training that hides each single user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from idgen.backbones.family import TokenBatch, labels_of
from idgen.events import (
    draw_samples,
)
from idgen.prompts import load_templates
from idgen.samples import Samples, item_segments, prompts_of, sample_batch, sampled_events, with_targets
from idgen.segments import lay_out
from idgen.tasks import Task, parents_of


def samples_by_user(task: Task) -> list[np.ndarray]:
    """Target events of one epoch of every user who has any, ascending; synthetic histories are nobody's and left out.

    Raises:
        ValueError: training samples that cannot be told apart by users, or whose texts depend on several users.
    """
    config = task.config
    if config.pairs:
        raise ValueError("got samples.pairs with user_privacy, expected false: a sample has to be of one user alone")
    target_N = sampled_events(task.parts, task.train, config)[0]
    starts = np.flatnonzero(np.diff(task.train.user_E[target_N])) + 1
    return np.split(target_N, starts) if len(target_N) else []


def user_batches(task: Task, target_lists: Sequence[np.ndarray], generator: torch.Generator) -> Iterator[TokenBatch]:
    """One batch for each of ``target_lists`` (:func:`samples_by_user`), drawn and laid out as in `train_batches`."""
    if not target_lists:
        return
    rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
    parts, events, config = task.parts, task.train, task.config
    target_N = np.concatenate(target_lists)
    draw = draw_samples(events, target_N, len(load_templates(config.templates)), config, rng)
    nobody_N = np.zeros(len(target_N), dtype=bool)
    samples = Samples(prompts_of(parts, events, draw), item_segments(parts, events, draw.target_N), nobody_N)
    prompts = with_targets(samples) if config.is_row else samples.prompts
    segment_NW, nodes = lay_out(parts, prompts), parents_of([task])
    for rows in np.split(np.arange(len(target_N)), np.cumsum([len(targets) for targets in target_lists])[:-1]):
        batch = sample_batch(parts, config, segment_NW, samples, prompts.task_B, rows)
        yield batch if nodes is None else batch | nodes.batch(labels_of(batch), torch.from_numpy(prompts.task_B[rows]))
