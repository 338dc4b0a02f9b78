"""A task: all that a recommender needs to train and be evaluated on one domain, tokenised once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedecider.data.domain import Domain, Events
from fedecider.evaluation.sequences import SequenceArray
from idgen.config import SampleConfig
from idgen.events import (
    EventTable,
    event_table,
    merge_events,
    without_last_targets,
)
from idgen.item_ids import ItemIds
from idgen.segments import PromptParts, make_parts, merge_parts
from idgen.synthetic import Neighbours
from idgen.tokenizer import encode
from idgen.trie import Parents, Trie

Split = Literal["valid", "test"]


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

    def without_last(self, users: Collection[int]) -> Task:
        """The same task with the last training event of ``users`` (row numbers) left out of training."""
        return self._replace(train=without_last_targets(self.train, users))

    @property
    def training_sequences(self) -> Sequence[list[int]]:
        """The training part of each user."""
        events = self.train
        inside_E = np.arange(len(events.item_E)) < events.train_end_E
        length_U = np.bincount(events.user_E[inside_E], minlength=len(self.sequences))
        basket_E = None if events.basket_first_E is None else events.basket_first_E[inside_E]
        return SequenceArray.of_lengths(length_U, events.item_E[inside_E], basket_E)

    def item_tokens(self) -> Tensor:
        """(I,) the last tokens of all IDs, rising, where each is its item's own (`Trie.has_own_tokens`)."""
        assert self.trie.has_own_tokens, self.name
        return self.trie.last_token_I.sort().values

    def id_tokens(self) -> Tensor:
        """The tokens of all IDs, rising."""
        return torch.tensor(sorted({token for tokens in self.item_ids.token_ids for token in tokens}))

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

    ``hold_out``: True keeps the last two baskets (or events) of each user for validation and test (clients); False
    trains on all of them (the public pool). ``neighbours``: needed for ``synthetic_share``.
    Errors: ``ValueError`` when IDs and catalogue do not belong together, or the shortest prompt is too long.
    """
    if len(item_ids.token_ids) != len(domain.item_keys):
        raise ValueError(
            f"got {len(item_ids.token_ids)} item IDs for the {len(domain.item_keys)} items of domain {domain.name!r}; "
            "expected one for each. The ID map belongs to other data: assign the item IDs again"
        )
    nobody = catalogue_task(domain.catalogue.name, item_ids, tokenizer, config)
    return nobody._replace(
        name=domain.name if hold_out else domain.catalogue.name,
        train=event_table(events.sequences, hold_out),
        sequences=SequenceArray.of(events.sequences),
        hold_out=hold_out,
        neighbours=neighbours,
    )


def catalogue_task(name: str, item_ids: ItemIds, tokenizer: PreTrainedTokenizerBase, config: SampleConfig) -> Task:
    """A task with a catalogue and no users: enough for `encode_histories` and constrained decoding."""
    end_token = _end_token(item_ids, tokenizer, config)
    parts = make_parts(name, item_ids.token_ids, tokenizer, config, end_token)
    trie = Trie.build(item_ids.token_ids, end_token)
    return Task(name, item_ids, trie, event_table([], True), [], parts, config, hold_out=True)


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


def parents_of(tasks: Sequence[Task]) -> Parents | None:
    """Where labels stand in the tries; None for rows of IDs of one token each, whose loss needs no trie."""
    if all(task.config.is_row and task.trie.max_length == 1 for task in tasks):
        return None
    return Parents.of([task.trie for task in tasks])


def _end_token(item_ids: ItemIds, tokenizer: PreTrainedTokenizerBase, config: SampleConfig) -> int | None:
    """What closes an item ID; None where each ends with a token of its own, as those of one token do."""
    if config.dense_head or all(len(tokens) == 1 for tokens in item_ids.token_ids):
        return None
    # A pretrained decoder expects a newline between the entries of a list.
    newline = encode(tokenizer, ["\n"])[0] if config.templates == "list" else []
    is_token = len(newline) == 1 and newline[0] != tokenizer.unk_token_id
    return newline[0] if is_token else cast(int, tokenizer.eos_token_id)
