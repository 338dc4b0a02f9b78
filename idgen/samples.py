"""Batches of training and evaluation samples: windows over users' histories and synthetic ones, put into prompts.

Shapes: B samples of a batch, N samples drawn at a time, E events of all users, H history length, S input tokens,
T target tokens, W segments a sample has at most, K tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedecider.evaluation.protocols import check_split, held_out
from fedecider.evaluation.protocols import histories as known_events
from fedecider.evaluation.sequences import SequenceArray
from idgen.backbones.family import TokenBatch, labels_of
from idgen.config import SampleConfig
from idgen.events import (
    Draw,
    EventTable,
    draw_samples,
    event_table,
    histories,
    is_target,
    next_basket,
    shuffled,
    window_ends,
)
from idgen.prompts import load_templates
from idgen.segments import NOTHING, PromptParts, Prompts, join, lay_out, num_tokens
from idgen.synthetic import Neighbours, draw_synthetic
from idgen.tasks import Split, Task, _as_list, merge_tasks, parents_of
from idgen.trie import IGNORED_LABEL

SYNTHETIC = -1
"""Stands for a synthetic history among the events that are targets."""
LONGEST_SYNTHETIC = 5


class Samples(NamedTuple):
    """N samples drawn for training."""

    prompts: Prompts
    target_N: np.ndarray
    """Segment of the target's item ID."""
    synthetic_N: np.ndarray
    """Bool: synthetic histories, waiting to be drawn or there."""


def with_synthetic(
    samples: Samples, neighbours: Sequence[Neighbours | None], parts: PromptParts, rng: np.random.Generator
) -> Samples:
    """Put synthetic histories into the places that wait for them, each from a task drawn uniformly from the K tasks.

    They have template 0. Raises ``ValueError`` where a task has no neighbours.
    """
    prompts, target_N = samples.prompts, samples.target_N.copy()
    task_N, history_NH = prompts.task_B.copy(), prompts.history_BH.copy()
    place_N = np.flatnonzero(samples.synthetic_N)
    task_N[place_N] = rng.integers(len(neighbours), size=len(place_N))
    history_NH[place_N] = NOTHING
    for number, near in enumerate(neighbours):
        if near is None:
            raise ValueError(
                f"got synthetic_share without text neighbours for task {number}; expected some. Build the task with "
                "neighbours, or set synthetic_share to 0"
            )
        mine_N = place_N[task_N[place_N] == number]
        longest = min(LONGEST_SYNTHETIC, history_NH.shape[1])
        for place, drawn in zip(mine_N, draw_synthetic(near, len(mine_N), rng, longest=longest), strict=True):
            segments = parts.first_item_K[number] + np.array(drawn)
            target_N[place] = segments[-1]
            history_NH[place, : len(drawn) - 1] = segments[-2::-1]  # newest first
    num_templates = len(parts.before_PL) // len(parts.first_item_K)
    template_N = np.where(samples.synthetic_N, task_N * num_templates, prompts.template_B)
    return Samples(Prompts(task_N, template_N, history_NH), target_N, samples.synthetic_N)


def with_targets(samples: Samples) -> Prompts:
    """Prompts that end with their target."""
    prompts = samples.prompts
    return prompts._replace(history_BH=np.concatenate([samples.target_N[:, None], prompts.history_BH], 1))


def num_given(
    parts: PromptParts, segment_BW: np.ndarray, target_B: np.ndarray, synthetic_B: np.ndarray, task_B: np.ndarray
) -> np.ndarray:
    """(B,) tokens of a row before its first target: the words before the history and the first item; of a synthetic
    history, whose order means nothing, all but the last item."""
    length_G, words = parts.segments.length_G, parts.before_PL.shape[1]
    history_BW = segment_BW[:, words:]
    first_B = history_BW[np.arange(len(history_BW)), (history_BW != NOTHING).argmax(1)]
    end_B = length_G[parts.end_K[task_B]]
    first_end_B = length_G[segment_BW[:, :words]].sum(1) + length_G[first_B] + end_B
    return np.where(synthetic_B, length_G[segment_BW].sum(1) - length_G[target_B] - end_B, first_end_B)


def row_labels(batch: TokenBatch, given_B: np.ndarray) -> Tensor:
    """(B, S): the row's own tokens behind the given ones, -100 before them and at padding."""
    behind_BS = torch.arange(batch["input_ids"].shape[1]) >= torch.from_numpy(given_B)[:, None]
    return batch["input_ids"].masked_fill(~(behind_BS & (batch["attention_mask"] != 0)), IGNORED_LABEL)


class BasketLabels(NamedTuple):
    """What the places of N rows are asked for, where the items of a basket come in no order."""

    label_NW: np.ndarray
    """Segments that stand for the row's own as labels; where IDs have several tokens, the same ones."""
    counts_NW: np.ndarray
    """Bool: segments that are labels."""


def basket_labels(
    parts: PromptParts,
    events: EventTable,
    draw: Draw,
    segment_NW: np.ndarray,
    synthetic_N: np.ndarray,
    rng: np.random.Generator,
) -> BasketLabels:
    """Every place is asked for a random item of the basket behind the one that its item is in.

    Where IDs have several tokens, which are read as they are written, the places before a basket begins are asked for
    its first item alone: it is a random one too. Synthetic histories are asked for what they end with.
    """
    assert events.basket_first_E is not None
    event_NH = np.concatenate([draw.target_N[:, None], draw.history_NH], 1)[:, ::-1]  # oldest first
    before_NH = np.concatenate([np.full((len(event_NH), 1), -1), event_NH[:, :-1]], 1)
    is_pair_NH = (event_NH >= 0) & (before_NH >= 0)
    length_E = parts.segments.length_G[item_segments(parts, events, np.arange(len(events.item_E)))]
    if length_E.max() + parts.segments.length_G[parts.end_K].max() == 1:
        label_NH = next_basket(events, before_NH, rng)
    else:
        is_new_NH = events.basket_first_E[event_NH] != events.basket_first_E[before_NH]
        label_NH = np.where(is_new_NH, event_NH, -1)
    counts_NH = is_pair_NH & (label_NH >= 0)
    item_NH = parts.first_item_K[events.task_E[label_NH]] + events.item_E[label_NH]
    words = parts.before_PL.shape[1]
    items = slice(words, words + 2 * event_NH.shape[1] - 1, 2)
    label_NW, counts_NW = segment_NW.copy(), np.ones(segment_NW.shape, bool)
    is_own_NH = synthetic_N[:, None] | ~counts_NH | (segment_NW[:, items] == NOTHING)
    label_NW[:, items] = np.where(is_own_NH, segment_NW[:, items], item_NH)
    counts_NW[:, items] = synthetic_N[:, None] | counts_NH
    counts_NW[:, items.start + 1 : items.stop : 2] = counts_NW[:, items][:, :-1]  # what closes an ID goes with it
    counts_NW[:, items.stop :] = counts_NW[:, [items.stop - 1]]
    return BasketLabels(label_NW, counts_NW)


def of_baskets(
    parts: PromptParts, own_BS: Tensor, segment_NW: np.ndarray, labels: BasketLabels, rows: np.ndarray
) -> Tensor:
    """`row_labels` of the rows, ``own_BS``, with those of baskets in their place."""
    length_BW = parts.segments.length_G[segment_NW[rows]]
    token_BS, _ = join(parts.segments, labels.label_NW[rows], IGNORED_LABEL)
    counts_BS = np.zeros(token_BS.shape, bool)
    counts_BS[np.arange(token_BS.shape[1]) < length_BW.sum(1)[:, None]] = np.repeat(
        labels.counts_NW[rows].ravel(), length_BW.ravel()
    )
    return torch.from_numpy(token_BS).masked_fill(
        (own_BS == IGNORED_LABEL) | ~torch.from_numpy(counts_BS), IGNORED_LABEL
    )


BATCHES_AT_A_TIME = 64
"""Samples are drawn for so many batches at once, then sorted by length into batches with little padding."""


def num_samples(tasks: Task | Sequence[Task]) -> int:
    """Training samples of one epoch: every position of the training parts but the first of each user, or every window
    where all its positions are targets; and the synthetic histories."""
    tasks = _as_list(tasks)
    return sum(map(len, _epoch(tasks, *merge_tasks(tasks)))) if tasks else 0


def num_batches(tasks: Task | Sequence[Task], batch_size: int) -> int:
    """Batches of one epoch; the last one may be smaller."""
    return -(-num_samples(tasks) // batch_size)


def train_batches(tasks: Task | Sequence[Task], batch_size: int, generator: torch.Generator) -> Iterator[TokenBatch]:
    """One epoch of training batches: ``input_ids`` (B, S), ``attention_mask``, ``labels`` (B, T) with -100 as padding;
    of rows, ``row_labels`` (B, S) in their place (`idgen.backbones.family.TokenBatch`).

    The samples of several tasks are mixed. Positions are shuffled, templates and augmentations drawn anew for every
    sample; samples of similar length share a batch. All randomness comes from ``generator``: the same state gives
    the same batches. ``labels`` are the target's item ID and the end token, if any; nothing is truncated there.
    """
    if batch_size < 1:
        raise ValueError(f"got batch_size {batch_size}, expected at least 1")
    tasks = _as_list(tasks)
    parts, events = merge_tasks(tasks)
    rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
    config = tasks[0].config
    events = shuffled(events, rng)
    order = np.concatenate(_epoch(tasks, parts, events))
    if len(events.item_E) == 0:  # synthetic histories alone: they stand in the place of an event, whatever it is
        events = event_table([[0]], False)
    if len(order) == 0:
        raise ValueError(
            f"no training samples in {[task.name for task in tasks]}; expected users with two training events. "
            "Prepare the data with a larger min_length"
        )
    rng.shuffle(order)
    num_templates, nodes = len(load_templates(config.templates)), parents_of(tasks)
    for start in range(0, len(order), batch_size * BATCHES_AT_A_TIME):
        target_N = order[start : start + batch_size * BATCHES_AT_A_TIME]
        synthetic_N = target_N == SYNTHETIC
        draw = draw_samples(events, np.where(synthetic_N, 0, target_N), num_templates, config, rng)
        samples = Samples(prompts_of(parts, events, draw), item_segments(parts, events, draw.target_N), synthetic_N)
        if synthetic_N.any():
            samples = with_synthetic(samples, [task.neighbours for task in tasks], parts, rng)
        prompts = with_targets(samples) if config.is_row else samples.prompts
        segment_NW = lay_out(parts, prompts)
        labels = None
        if config.is_row and events.basket_first_E is not None:
            labels = basket_labels(parts, events, draw, segment_NW, synthetic_N, rng)
        length_N = num_tokens(parts.segments, segment_NW)
        by_length = np.lexsort((rng.random(len(length_N)), length_N))
        batches = [by_length[at : at + batch_size] for at in range(0, len(by_length), batch_size)]
        for number in rng.permutation(len(batches)):
            rows = batches[number]
            batch = sample_batch(parts, config, segment_NW, samples, prompts.task_B, rows)
            if labels is not None:
                batch["row_labels"] = of_baskets(parts, batch["row_labels"], segment_NW, labels, rows)
            yield (
                batch
                if nodes is None
                else batch | nodes.batch(labels_of(batch), torch.from_numpy(prompts.task_B[rows]))
            )


def eval_batches(
    task: Task, split: Split, batch_size: int, users: Tensor | Sequence[int] | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(user number (B,), input_ids (B, S), attention_mask (B, S), target item (B,)), one prompt per user.

    Template 0; the history is everything before the target ("valid": last but one event, "test": last event). Of
    baskets the targets are all items of it, as `fedecider.evaluation.protocols.held_out` has them.
    ``users``: a selection of users, default all. Users of similar prompt length share a batch, so that users do NOT
    come in order: use the user numbers. Errors: ``ValueError`` for a task without held-out events.
    """
    check_split(split)
    if not task.hold_out:
        raise ValueError(f"task {task.name!r} was built without held-out events; build it with hold_out=True")
    events = task.train
    rows_U = SequenceArray.of(task.sequences)
    target_U, first_U = held_out(rows_U, split), rows_U.start_U[:-1] + known_events(rows_U, split).length_U
    chosen = np.arange(len(first_U)) if users is None else np.asarray(users, dtype=np.int64)
    target_N = first_U[chosen]
    history_NH = histories(events, target_N, task.config.shown_history)
    draw = Draw(target_N, history_NH, np.zeros(len(target_N), np.int64))
    segment_NW = lay_out(task.parts, prompts_of(task.parts, events, draw))
    order = np.argsort(num_tokens(task.parts.segments, segment_NW), kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = _prompt_batch(task.parts, segment_NW[rows])
        user_B = torch.from_numpy(chosen[rows])
        yield user_B, batch["input_ids"], batch["attention_mask"], target_U[user_B]


def encode_histories(task: Task, histories: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Prompts (template 0) for any histories, item numbers oldest first: (input_ids, attention_mask).

    Errors: ``ValueError`` for an empty history or an item outside the catalogue.
    """
    history_BH = np.zeros((len(histories), task.config.shown_history), np.int64)
    for row, history in enumerate(histories):
        newest = list(history)[::-1][: task.config.shown_history]
        if not newest or min(newest) < 0 or max(newest) >= len(task.trie):
            raise ValueError(f"got history {list(history)}; expected item numbers from 0 to {len(task.trie) - 1}")
        history_BH[row, : len(newest)] = task.parts.first_item_K[0] + np.asarray(newest)
    zero_B = np.zeros(len(histories), np.int64)
    prompts = Prompts(zero_B, zero_B, history_BH)
    token_BS, length_B = join(task.parts.segments, lay_out(task.parts, prompts), task.parts.padding)
    return torch.from_numpy(token_BS), _mask(length_B, token_BS.shape[1])


def empty_prompt(task: Task) -> tuple[Tensor, Tensor]:
    """The prompt of somebody without a history: (input_ids (1, S), attention_mask (1, S)).

    Errors: ``ValueError`` when the templates have no words but the history.
    """
    zero_1 = np.zeros(1, np.int64)
    segment_1W = lay_out(task.parts, Prompts(zero_1, zero_1, np.zeros((1, 1), np.int64)))
    if task.config.is_row:  # nothing closes but what closes the words
        segment_1W[:, -1] = NOTHING
    token_1S, length_1 = join(task.parts.segments, segment_1W, task.parts.padding)
    if not length_1[0]:
        raise ValueError(
            f"got templates {task.config.templates}, which are empty without a history, expected some with words"
        )
    return torch.from_numpy(token_1S), _mask(length_1, token_1S.shape[1])


def prompts_of(parts: PromptParts, events: EventTable, draw: Draw) -> Prompts:
    """The segments that drawn samples are made of."""
    task_N = events.task_E[draw.target_N]
    item_NH = events.item_E[draw.history_NH] + parts.first_item_K[task_N][:, None]
    num_templates = len(parts.before_PL) // len(parts.first_item_K)
    return Prompts(
        task_B=task_N,
        template_B=task_N * num_templates + draw.template_N,
        history_BH=np.where(draw.history_NH >= 0, item_NH, NOTHING),
    )


def target_labels(parts: PromptParts, events: EventTable, target_B: np.ndarray) -> np.ndarray:
    """(B, T) tokens of the targets' item IDs and the end token, if any, -100 as padding."""
    return _labels(parts, item_segments(parts, events, target_B), events.task_E[target_B])


def _epoch(tasks: Sequence[Task], parts: PromptParts, events: EventTable) -> tuple[np.ndarray, np.ndarray]:
    """As `sampled_events`; of public pools without a single user, one synthetic history for each of their items."""
    config = tasks[0].config
    if len(events.item_E) or config.synthetic_share == 0.0 or any(task.hold_out for task in tasks):
        return sampled_events(parts, events, config)
    return np.zeros(0, np.int64), np.full(sum(len(task.trie) for task in tasks), SYNTHETIC)


def sampled_events(parts: PromptParts, events: EventTable, config: SampleConfig) -> tuple[np.ndarray, np.ndarray]:
    """Target events of one epoch, and a place of `SYNTHETIC` for every synthetic history."""
    if config.is_row:
        length_G = parts.segments.length_G
        cost_E = length_G[item_segments(parts, events, np.arange(len(events.item_E)))] + length_G[parts.end_K].max()
        room = config.max_source_tokens - int(length_G[parts.before_PL].sum(1).max())
        target_N = window_ends(events, config.max_history, cost_E, room)
    else:
        target_N = np.flatnonzero(is_target(events))
    return target_N, np.full(round(len(target_N) * config.synthetic_share / (1.0 - config.synthetic_share)), SYNTHETIC)


def item_segments(parts: PromptParts, events: EventTable, target_N: np.ndarray) -> np.ndarray:
    return parts.first_item_K[events.task_E[target_N]] + events.item_E[target_N]


def _labels(parts: PromptParts, target_B: np.ndarray, task_B: np.ndarray) -> np.ndarray:
    return join(parts.segments, np.stack([target_B, parts.end_K[task_B]], 1), IGNORED_LABEL)[0]


def _prompt_batch(parts: PromptParts, segment_BW: np.ndarray) -> TokenBatch:
    token_BS, length_B = join(parts.segments, segment_BW, parts.padding)
    return {"input_ids": torch.from_numpy(token_BS), "attention_mask": _mask(length_B, token_BS.shape[1])}


def sample_batch(
    parts: PromptParts,
    config: SampleConfig,
    segment_NW: np.ndarray,
    samples: Samples,
    task_N: np.ndarray,
    rows: np.ndarray,
) -> TokenBatch:
    """The samples ``rows`` of those that were drawn."""
    segment_BW, target_B = segment_NW[rows], samples.target_N[rows]
    batch = _prompt_batch(parts, segment_BW)
    if not config.is_row:
        batch["labels"] = torch.from_numpy(_labels(parts, target_B, task_N[rows]))
        return batch
    given_B = num_given(parts, segment_BW, target_B, samples.synthetic_N[rows], task_N[rows])
    batch["row_labels"] = row_labels(batch, given_B)
    return batch


def _mask(length_B: np.ndarray, width: int) -> Tensor:
    return torch.from_numpy((np.arange(width) < length_B[:, None]).astype(np.int64))
