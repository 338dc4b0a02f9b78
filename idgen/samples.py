"""Synthetic histories: histories and targets drawn from published item texts alone, without a single interaction.

Shapes: N samples drawn at a time, B samples of a batch, S input tokens, W segments a row has at most, K tasks.

Shapes: B samples of a batch, N samples drawn at a time, E events of all users, H history length, S input tokens,
T target tokens.

Shapes: N samples drawn at a time, W segments a sample has at most.

Shape legend: I items, K neighbours, N walks, H items of a history, D dimensions, R items of a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedTokenizerBase

from fedecider.data.domain import Domain, Events
from fedecider.evaluation.protocols import NUM_AFTER, check_split
from fedecider.evaluation.sequences import SequenceArray
from idgen.backbones.family import TokenBatch, labels_of
from idgen.item_ids import ItemIds
from idgen.prompts import (
    Draw,
    EventTable,
    SampleConfig,
    draw_samples,
    event_table,
    histories,
    is_target,
    load_templates,
    merge_events,
    window_ends,
    without_last_targets,
    without_targets,
)
from idgen.segments import NOTHING, PromptParts, Prompts, join, lay_out, make_parts, merge_parts, num_tokens
from idgen.tokenizer import encode
from idgen.trie import IGNORED_LABEL, Parents, Trie


class Neighbours(NamedTuple):
    """The items whose texts stand nearest to each item's, itself not among them."""

    item_IK: np.ndarray
    share_IK: np.ndarray
    """Running sums of the probabilities, 1 in the last column."""


MAX_COSINES = 2**26
"""Cosines of items that exist at a time: 256 MiB."""


def nearest_items(vector_ID: Tensor, count: int = 20, temperature: float = 0.1) -> Neighbours:
    """The ``count`` nearest items by cosine with probabilities softmax(cos / temperature); fewer in a small catalogue.

    Raises:
        ValueError: a catalogue of one item has no neighbours.
    """
    if len(vector_ID) < 2:
        raise ValueError(f"got a catalogue of {len(vector_ID)} item, expected two or more: there is nothing to walk to")
    unit_ID, nearest = normalize(vector_ID.float(), dim=1), []
    for number_B in torch.arange(len(unit_ID)).split(max(1, MAX_COSINES // len(unit_ID))):
        cosine_BI = (unit_ID[number_B] @ unit_ID.T).scatter_(1, number_B[:, None], -torch.inf)
        nearest.append(cosine_BI.topk(min(count, len(vector_ID) - 1), dim=1))
    cosine_IK, item_IK = (torch.cat(parts) for parts in zip(*nearest, strict=True))
    share_IK = torch.softmax(cosine_IK.double() / temperature, 1).cumsum(1)
    share_IK[:, -1] = 1.0
    return Neighbours(item_IK.numpy(), share_IK.numpy())


def draw_walks(
    neighbours: Neighbours, num: int, rng: np.random.Generator, *, longest: int = 5, random_share: float = 0.25
) -> list[list[int]]:
    """``num`` sequences of items, the target last: a uniform target behind 1 to ``longest`` of its neighbours.

    Each item of the history is with probability ``random_share`` any item of the catalogue instead: a model that trusts
    every item of a history would not survive real ones. All items are targets equally often, so that no item of the
    catalogue is unknown to a model that has seen few users.
    """
    num_items = len(neighbours.item_IK)
    target_N = rng.integers(num_items, size=num)
    length_N = rng.integers(1, longest + 1, size=num)
    place_NH = (rng.random((num, longest, 1)) >= neighbours.share_IK[target_N][:, None]).sum(2)
    near_NH = np.take_along_axis(neighbours.item_IK[target_N], place_NH, 1)
    any_NH = rng.integers(num_items, size=(num, longest))
    history_NH = np.where(rng.random((num, longest)) < random_share, any_NH, near_NH)
    return [
        [*history[:length], target]
        for history, length, target in zip(history_NH.tolist(), length_N.tolist(), target_N.tolist(), strict=True)
    ]


# Samples for decoder-only models: rows of item IDs of which many positions are targets, and synthetic histories in
# them.

A_WALK = -1
"""Stands for a synthetic history among the events that are targets."""
LONGEST_WALK = 5


class Samples(NamedTuple):
    """N samples drawn for training."""

    prompts: Prompts
    target_N: np.ndarray
    """Segment of the target's item ID."""
    walk_N: np.ndarray
    """Bool: synthetic histories, waiting to be drawn or there."""


def with_walks(
    samples: Samples, neighbours: Sequence[Neighbours | None], parts: PromptParts, rng: np.random.Generator
) -> Samples:
    """Put synthetic histories into the places that wait for them, each from a task drawn uniformly from the K tasks.

    A walk has template 0. Raises ``ValueError`` where a task has no neighbours.
    """
    prompts, target_N = samples.prompts, samples.target_N.copy()
    task_N, history_NH = prompts.task_B.copy(), prompts.history_BH.copy()
    place_N = np.flatnonzero(samples.walk_N)
    task_N[place_N] = rng.integers(len(neighbours), size=len(place_N))
    history_NH[place_N] = NOTHING
    for number, near in enumerate(neighbours):
        if near is None:
            raise ValueError(
                f"got walk_share without text neighbours for task {number}; expected some. Build the task with "
                "neighbours, or set walk_share to 0"
            )
        mine_N = place_N[task_N[place_N] == number]
        longest = min(LONGEST_WALK, history_NH.shape[1])
        for place, walk in zip(mine_N, draw_walks(near, len(mine_N), rng, longest=longest), strict=True):
            segments = parts.first_item_K[number] + np.array(walk)
            target_N[place] = segments[-1]
            history_NH[place, : len(walk) - 1] = segments[-2::-1]  # newest first
    num_templates = len(parts.before_PL) // len(parts.first_item_K)
    template_N = np.where(samples.walk_N, task_N * num_templates, prompts.template_B)
    return Samples(Prompts(task_N, template_N, history_NH), target_N, samples.walk_N)


def with_targets(samples: Samples) -> Prompts:
    """Prompts that end with their target."""
    prompts = samples.prompts
    return prompts._replace(history_BH=np.concatenate([samples.target_N[:, None], prompts.history_BH], 1))


def num_given(
    parts: PromptParts, segment_BW: np.ndarray, target_B: np.ndarray, walk_B: np.ndarray, task_B: np.ndarray
) -> np.ndarray:
    """(B,) tokens of a row before its first target: the words before the history and the first item; of a walk, whose
    order means nothing, all but the last item."""
    length_G, words = parts.segments.length_G, parts.before_PL.shape[1]
    history_BW = segment_BW[:, words:]
    first_B = history_BW[np.arange(len(history_BW)), (history_BW != NOTHING).argmax(1)]
    end_B = length_G[parts.end_K[task_B]]
    first_end_B = length_G[segment_BW[:, :words]].sum(1) + length_G[first_B] + end_B
    return np.where(walk_B, length_G[segment_BW].sum(1) - length_G[target_B] - end_B, first_end_B)


def row_labels(batch: TokenBatch, given_B: np.ndarray) -> Tensor:
    """(B, S): the row's own tokens behind the given ones, -100 before them and at padding."""
    behind_BS = torch.arange(batch["input_ids"].shape[1]) >= torch.from_numpy(given_B)[:, None]
    return batch["input_ids"].masked_fill(~(behind_BS & (batch["attention_mask"] != 0)), IGNORED_LABEL)


# Training and evaluation samples of the recommender: sliding windows over users' histories, put into prompts.

Split = Literal["valid", "test"]

__all__ = [
    "SampleConfig",
    "Split",
    "Task",
    "TokenBatch",
    "build_task",
    "catalogue_task",
    "empty_prompt",
    "encode_histories",
    "eval_batches",
    "merge_tasks",
    "num_batches",
    "num_samples",
    "prompts_of",
    "target_labels",
    "train_batches",
]

BATCHES_AT_A_TIME = 64
"""Samples are drawn for so many batches at once, then sorted by length into batches with little padding."""


class Task(NamedTuple):
    """All that a recommender needs to train and be evaluated on one domain."""

    name: str
    """The domain's; of a public pool, the catalogue's."""
    item_ids: ItemIds
    trie: Trie
    train: EventTable
    sequences: Sequence[list[int]]
    parts: PromptParts
    config: SampleConfig
    hold_out: bool
    neighbours: Neighbours | None = None
    """Items with near texts, for synthetic histories; None where there are none."""

    def without_users(self, users: Collection[int]) -> Task:
        """The same task with ``users`` (row numbers) left out of training; they are ranked as before."""
        return self._replace(train=without_targets(self.train, users))

    def without_last(self, users: Collection[int]) -> Task:
        """The same task with the last training event of ``users`` (row numbers) left out of training."""
        return self._replace(train=without_last_targets(self.train, users))

    @property
    def training_sequences(self) -> Sequence[list[int]]:
        """The training part of each user."""
        events = self.train
        inside_E = np.arange(len(events.item_E)) < events.train_end_E
        length_U = np.bincount(events.user_E[inside_E], minlength=len(self.sequences))
        return SequenceArray.of_lengths(length_U, events.item_E[inside_E])

    def one_token_catalogue(self) -> Tensor:
        """(I,) the tokens of all items, rising, where every ID is one token that nothing closes."""
        assert self.trie.max_length == 1, self.name
        return torch.tensor(sorted(tokens[0] for tokens in self.item_ids.token_ids))

    def template_tokens(self) -> Tensor:
        """The tokens of all templates and separators, and of padding, rising: what prompts may hold beside items."""
        segments, first_item = self.parts.segments, int(self.parts.first_item_K[0])
        fixed = segments.token_F[: segments.start_G[first_item]]
        return torch.tensor(sorted({self.parts.padding, *fixed.tolist()}))


def build_task(
    domain: Domain,
    events: Events,
    item_ids: ItemIds,
    tokenizer: PreTrainedTokenizerBase,
    config: SampleConfig,
    hold_out: bool,
    neighbours: Neighbours | None = None,
) -> Task:
    """Tokenise what prompts are made of, once, and lay out the events of the users.

    ``hold_out``: True keeps the last two events of each user for validation and test (clients); False trains on all
    of them (the public pool). ``neighbours``: needed for ``walk_share``.
    Errors: ``ValueError`` when IDs and catalogue do not belong together, or the shortest prompt is too long.
    """
    if len(item_ids.token_ids) != len(domain.item_keys):
        raise ValueError(
            f"got {len(item_ids.token_ids)} item IDs for the {len(domain.item_keys)} items of domain {domain.name!r}; "
            "expected one for each. The ID map belongs to other data: assign the item IDs again"
        )
    end_token = _end_token(item_ids, tokenizer, config)
    parts = make_parts(
        domain.catalogue.name,
        item_ids.token_ids,
        tokenizer,
        templates=config.templates,
        max_source_tokens=config.max_source_tokens,
        end_token=end_token,
        prompt_end=end_token if config.is_row else int(tokenizer.eos_token_id),  # type: ignore[arg-type]
    )
    return Task(
        name=domain.name if hold_out else domain.catalogue.name,
        item_ids=item_ids,
        trie=Trie.build(item_ids.token_ids, end_token),
        train=event_table(events.sequences, hold_out),
        sequences=SequenceArray.of(events.sequences),
        parts=parts,
        config=config,
        hold_out=hold_out,
        neighbours=neighbours,
    )


def catalogue_task(name: str, item_ids: ItemIds, tokenizer: PreTrainedTokenizerBase, config: SampleConfig) -> Task:
    """A task with a catalogue and no users: enough for `encode_histories` and constrained decoding."""
    end_token = _end_token(item_ids, tokenizer, config)
    parts = make_parts(
        name,
        item_ids.token_ids,
        tokenizer,
        templates=config.templates,
        max_source_tokens=config.max_source_tokens,
        end_token=end_token,
        prompt_end=end_token if config.is_row else int(tokenizer.eos_token_id),  # type: ignore[arg-type]
    )
    trie = Trie.build(item_ids.token_ids, end_token)
    return Task(name, item_ids, trie, event_table([], True), [], parts, config, hold_out=True)


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
    order = np.concatenate(_epoch(tasks, parts, events))
    if len(events.item_E) == 0:  # walks alone: they stand in the place of an event, whatever it is
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
        walk_N = target_N == A_WALK
        draw = draw_samples(events, np.where(walk_N, 0, target_N), num_templates, config, rng)
        samples = Samples(prompts_of(parts, events, draw), item_segments(parts, events, draw.target_N), walk_N)
        if walk_N.any():
            samples = with_walks(samples, [task.neighbours for task in tasks], parts, rng)
        prompts = with_targets(samples) if config.is_row else samples.prompts
        segment_NW = lay_out(parts, prompts)
        length_N = num_tokens(parts.segments, segment_NW)
        by_length = np.lexsort((rng.random(len(length_N)), length_N))
        batches = [by_length[at : at + batch_size] for at in range(0, len(by_length), batch_size)]
        for number in rng.permutation(len(batches)):
            rows = batches[number]
            batch = sample_batch(parts, config, segment_NW, samples, prompts.task_B, rows)
            yield (
                batch
                if nodes is None
                else batch | nodes.batch(labels_of(batch), torch.from_numpy(prompts.task_B[rows]))
            )


def eval_batches(
    task: Task, split: Split, batch_size: int, users: Tensor | Sequence[int] | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(user number (B,), input_ids (B, S), attention_mask (B, S), target item (B,)), one prompt per user.

    Template 0; the history is everything before the target ("valid": last but one event, "test": last event).
    ``users``: a selection of users, default all. Users of similar prompt length share a batch, so that users do NOT
    come in order: use the user numbers. Errors: ``ValueError`` for a task without held-out events.
    """
    check_split(split)
    if not task.hold_out:
        raise ValueError(f"task {task.name!r} was built without held-out events; build it with hold_out=True")
    events = task.train
    last_U = SequenceArray.of(task.sequences).start_U[1:] - 1
    chosen = np.arange(len(last_U)) if users is None else np.asarray(users, dtype=np.int64)
    target_N = last_U[chosen] - NUM_AFTER[split]
    history_NH = histories(events, target_N, task.config.shown_history)
    draw = Draw(target_N, history_NH, np.zeros(len(target_N), np.int64))
    segment_NW = lay_out(task.parts, prompts_of(task.parts, events, draw))
    order = np.argsort(num_tokens(task.parts.segments, segment_NW), kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = _prompt_batch(task.parts, segment_NW[rows])
        user_B, target_B = (
            torch.from_numpy(chosen[rows]),
            torch.from_numpy(events.item_E[target_N[rows]].astype(np.int64)),
        )
        yield user_B, batch["input_ids"], batch["attention_mask"], target_B


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


def _as_list(tasks: Task | Sequence[Task]) -> list[Task]:
    # A Task is a NamedTuple, hence a sequence too.
    return [tasks] if isinstance(tasks, Task) else list(tasks)


def merge_tasks(tasks: Sequence[Task]) -> tuple[PromptParts, EventTable]:
    """Prompt parts and events of several tasks as one. Errors: ``ValueError`` when their settings differ."""
    if len({task.config for task in tasks}) != 1:
        raise ValueError(
            f"got {len(tasks)} tasks with {len({task.config for task in tasks})} different sample settings; "
            "expected one setting. Build all tasks with the same SampleConfig"
        )
    return merge_parts([task.parts for task in tasks]), merge_events([task.train for task in tasks])


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
    """As `sampled_events`; of public pools without a single user, one walk for each item of their catalogues."""
    config = tasks[0].config
    if len(events.item_E) or config.walk_share == 0.0 or any(task.hold_out for task in tasks):
        return sampled_events(parts, events, config)
    return np.zeros(0, np.int64), np.full(sum(len(task.trie) for task in tasks), A_WALK)


def sampled_events(parts: PromptParts, events: EventTable, config: SampleConfig) -> tuple[np.ndarray, np.ndarray]:
    """Target events of one epoch, and a place of `A_WALK` for every synthetic history."""
    if config.is_row:
        length_G = parts.segments.length_G
        cost_E = length_G[item_segments(parts, events, np.arange(len(events.item_E)))] + length_G[parts.end_K].max()
        room = config.max_source_tokens - int(length_G[parts.before_PL].sum(1).max())
        target_N = window_ends(events, config.max_history, cost_E, room)
    else:
        target_N = np.flatnonzero(is_target(events))
    return target_N, np.full(round(len(target_N) * config.walk_share / (1.0 - config.walk_share)), A_WALK)


def item_segments(parts: PromptParts, events: EventTable, target_N: np.ndarray) -> np.ndarray:
    return parts.first_item_K[events.task_E[target_N]] + events.item_E[target_N]


def parents_of(tasks: Sequence[Task]) -> Parents | None:
    """Where labels stand in the tries; None for rows of IDs of one token each, whose loss needs no trie."""
    if all(task.config.is_row and task.trie.max_length == 1 for task in tasks):
        return None
    return Parents.of([task.trie for task in tasks])


def _end_token(item_ids: ItemIds, tokenizer: PreTrainedTokenizerBase, config: SampleConfig) -> int | None:
    """What closes an item ID; None where each is one token, which no other ID goes on from."""
    if all(len(tokens) == 1 for tokens in item_ids.token_ids):
        return None
    # A pretrained decoder expects a newline between the entries of a list.
    newline = encode(tokenizer, ["\n"])[0] if config.templates == "list" else []
    is_token = len(newline) == 1 and newline[0] != tokenizer.unk_token_id
    return newline[0] if is_token else cast(int, tokenizer.eos_token_id)


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
    given_B = num_given(parts, segment_BW, target_B, samples.walk_N[rows], task_N[rows])
    batch["row_labels"] = row_labels(batch, given_B)
    return batch


def _mask(length_B: np.ndarray, width: int) -> Tensor:
    return torch.from_numpy((np.arange(width) < length_B[:, None]).astype(np.int64))


# Large catalogues: a target is compared with a sample of the items.

SAMPLED_ABOVE = 15_000
"""Tokens to compare a target with above which a sample of them stands for all. A step is shorter from 3,000 on, by 3.6
times at 12,000 and 25 times at 96,000, and ndcg@10 is no lower (``benchmarks/speed.py``); below, the whole softmax is
affordable and without a draw."""
NUM_UNIFORM = 512
"""Tokens that are drawn uniformly for a batch, beside the targets that are in it; 1,024 were no better."""


class Candidates(NamedTuple):
    """What targets are compared with, where that is too much for every step."""

    token_I: Tensor
    """All of it, rising."""
    share_V: Tensor
    """By token, the share of an epoch's targets."""
    num_uniform: int


def candidates_of(tasks: Task | Sequence[Task], token_I: Tensor) -> Candidates | None:
    """Of the training samples of ``tasks`` against ``token_I``; None where these are no more than `SAMPLED_ABOVE`, or
    where IDs are not rows of one token each."""
    tasks = _as_list(tasks)
    if len(token_I) <= SAMPLED_ABOVE or any(task.trie.max_length != 1 or not task.config.is_row for task in tasks):
        return None
    parts, events = merge_tasks(tasks)
    _, walk_N = _epoch(tasks, parts, events)
    target_N = np.flatnonzero(is_target(events))
    start_N = parts.segments.start_G[item_segments(parts, events, target_N)]
    num_V = np.bincount(parts.segments.token_F[start_N], minlength=int(token_I[-1]) + 1).astype(float)
    for task in tasks:
        num_V[task.one_token_catalogue()] += len(walk_N) / len(tasks) / len(task.trie)
    return Candidates(token_I, torch.from_numpy(num_V / max(1.0, num_V.sum())).float(), NUM_UNIFORM)


def with_candidates(batch: TokenBatch, candidates: Candidates, generator: torch.Generator) -> TokenBatch:
    """``batch`` with ``catalogue`` (C,), its targets and tokens drawn uniformly, and what stands for all others.

    ``log_weights`` (B, C) are added to the logits of row b but for that of the target itself: ``-log pi_c``, ``pi_c``
    the probability with which the draw or another row brings c, so that ``e^{s_y} + sum_{c != y} e^{s_c} / pi_c`` has
    the sum over the whole catalogue as its mean (Horvitz and Thompson); ``-inf`` where nothing but row b itself brought
    c, since what its user buys next is no random draw. Without replacement, so that all tokens drawn are the full
    softmax. ``pi_c = 1 - (1 - m / I) (1 - p_c)^n``, m of I tokens drawn, p_c its share of all targets, n the targets of
    the other rows.

    Sampled softmax with a correction by log q: Bengio and Senecal 2008; uniform and in-batch negatives together: Yang
    et al. 2020, after Yi et al., RecSys 2019. Differs from them: the target is there for certain and is not corrected,
    q is a probability of being there and no expected number, and what the row alone brings is no negative of it.
    """
    label_BS = batch["row_labels"]
    counts_BS = label_BS != IGNORED_LABEL
    num_rows, num_all = len(label_BS), len(candidates.token_I)
    rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
    num_drawn = min(candidates.num_uniform, num_all)
    drawn_N = candidates.token_I[torch.from_numpy(rng.choice(num_all, num_drawn, replace=False, shuffle=False))]
    token_C = torch.cat([drawn_N, label_BS[counts_BS]]).unique()
    held_BC = torch.zeros(num_rows, len(token_C), dtype=torch.bool)
    held_BC[counts_BS.nonzero()[:, 0], torch.searchsorted(token_C, label_BS[counts_BS])] = True
    brought_C = held_BC.sum(0)
    brought_C[torch.searchsorted(token_C, drawn_N)] += 1
    num_others_B1 = counts_BS.sum() - counts_BS.sum(1, keepdim=True)
    absent_BC = (num_others_B1 * torch.log1p(-candidates.share_V[token_C])).exp_().mul_(1.0 - num_drawn / num_all)
    weight_BC = absent_BC.neg_().log1p_().neg_().masked_fill_(held_BC & (brought_C == 1), -torch.inf)
    return {**batch, "catalogue": token_C, "log_weights": weight_BC}


# Training samples user by user, for training that hides each single user.


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
