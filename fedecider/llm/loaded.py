"""One domain's model with its adapter on a backbone, its items and its memory: all that ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from peft import PeftModel

from fedecider.llm.model_scores import model_scores
from fedecider.llm.pretrained_folder import Place, Source, file_hashes
from fedecider.llm.titles import Items
from fedecider.lora.export import load_adapter
from fedecider.lora.item_table import ITEM_FILE, ItemTable
from fedecider.memory.memory import Memory, ModelScores
from fedecider.memory.store import load_memory
from fedecider.running.damage import damage_names
from idgen.candidates import with_prior
from idgen.item_ids import ItemIds
from idgen.samples import Task, catalogue_task


class Loaded(NamedTuple):
    """One domain's model, ready to rank."""

    source: Source
    place: Place
    model: PeftModel
    tokenizer: Any
    table: ItemTable
    items: Items
    task: Task
    memory: Memory | None
    """None where there is none, or it is not wanted."""
    scores: ModelScores
    """What the memory asks of the model."""
    num_added: int
    """Items that came after the training."""


def adapted(
    base: Any,
    tokenizer: Any,
    source: Source,
    place: Place,
    table: ItemTable,
    device: torch.device,
    wants_memory: bool,
) -> Loaded:
    """``base`` with the adapter of ``place``, ready to rank."""
    memory = load_memory(place.memory, table.keys) if wants_memory and place.memory is not None else None
    model = load_adapter(base, place.adapter).to(device).eval()
    return ready_to_rank(source, place, model, tokenizer, table, memory, device)


def ready_to_rank(
    source: Source,
    place: Place,
    model: PeftModel,
    tokenizer: Any,
    table: ItemTable,
    memory: Memory | None,
    device: torch.device,
) -> Loaded:
    """``model`` with the trie of its items and what the memory asks of it."""
    ranking = place.recipe.ranking
    with damage_names(place.adapter / ITEM_FILE):
        catalogue, item_ids = table.catalogue or place.domain, _checked_ids(table, len(tokenizer))
        task = catalogue_task(catalogue, item_ids, tokenizer, place.recipe.samples)
    with model.disable_adapter():  # the student, whose prior counts for every client
        task = with_prior(task, model, ranking.prior_weight, device)
    scores = model_scores(model, task, ranking, "fp32", device)
    items = Items(table.keys, table.titles)
    return Loaded(source, place, model, tokenizer, table, items, task, memory, scores, 0)


def _checked_ids(table: ItemTable, num_tokens: int) -> ItemIds:
    """The item IDs of a hand-over. ``ValueError`` when one of them has a token that the tokenizer does not have."""
    largest = max(token for tokens in table.token_ids for token in tokens)
    if largest >= num_tokens:
        raise ValueError(f"token {largest} of a tokenizer with {num_tokens} tokens")
    return ItemIds(list(table.id_texts), [list(tokens) for tokens in table.token_ids], {})


def check_same_base(now: Place, wanted: Place) -> None:
    """``ValueError`` where an adapter was trained on another backbone than the one that is loaded."""
    same_place = wanted.backbone.resolve() == now.backbone.resolve()
    same_format = wanted.recipe.quantize == now.recipe.quantize
    if not same_format or not (same_place or file_hashes(wanted.backbone) == file_hashes(now.backbone)):
        raise ValueError(
            f"got the adapter in {wanted.adapter}, which needs another backbone than the one in {now.backbone}, "
            "expected one that was trained on it. Load it with from_pretrained"
        )
