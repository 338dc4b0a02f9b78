"""Training samples user by user, for training that hides each single user.

Shapes: N samples drawn at a time, W segments a sample has at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from idgen.backbones.family import TokenBatch
from idgen.draws import draw_samples
from idgen.prompts import load_templates
from idgen.rows import Samples, with_targets
from idgen.samples import Task, item_segments, prompts_of, sample_batch, sampled_events
from idgen.segments import lay_out


def samples_by_user(task: Task) -> list[np.ndarray]:
    """Target events of one epoch of every user who has any, ascending; catalogue walks are nobody's and left out.

    Raises:
        ValueError: training samples that cannot be told apart by users, or whose texts depend on several users.
    """
    config = task.config
    if config.pair_share > 0.0 or config.user_wording != "none":
        raise ValueError(
            f"got samples.pair_share {config.pair_share} and user_wording {config.user_wording} with user_privacy, "
            "expected 0 and none: a sample has to be of one user alone"
        )
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
    prompts = with_targets(samples) if config.targets == "every" else samples.prompts
    segment_NW = lay_out(parts, prompts)
    for rows in np.split(np.arange(len(target_N)), np.cumsum([len(targets) for targets in target_lists])[:-1]):
        yield sample_batch(parts, config, segment_NW, samples, prompts.task_B, rows)
