"""Rows of items that came after the training, where items have tokens of their own: beside the adapter of the company
that has them, since the backbone is everybody's.

Shape legend: N later items, the last ones of the item table, whose tokens follow those of the backbone; D width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedecider.federation.method import Tree
from fedecider.models.item_table import ItemTable
from fedecider.models.source import LATER_ROWS as FILE
from fedecider.models.tied_table import HEAD
from fedecider.running.damage import check_tensors, damage_names
from idgen.new_items import append_rows
from idgen.tokenizer import with_phrases


def read_rows(adapter: Path) -> Tensor | None:
    """(N, D); None where there are none. ``ValueError`` when the file is damaged."""
    path = adapter / FILE
    if not path.is_file():
        return None
    check_tensors(path)
    with damage_names(path):
        return load_file(path)["row"]


def add_rows(adapter: Path, row_ND: Tensor) -> None:
    """Put rows behind those that are there."""
    before = read_rows(adapter)
    save_file({"row": row_ND if before is None else torch.cat([before, row_ND])}, adapter / FILE)


def with_rows(
    model: Any, tokenizer: PreTrainedTokenizerBase, adapter: Path, items: ItemTable
) -> PreTrainedTokenizerBase:
    """``model`` with the rows, in place, where it is one; the tokenizer with their tokens."""
    row_ND = read_rows(adapter)
    if row_ND is None:
        return tokenizer
    with damage_names(adapter / FILE):
        later = zip(items.id_texts[-len(row_ND) :], items.token_ids[-len(row_ND) :], strict=True)
        own = [text if len(tokens) == 1 else text.split()[-1] for text, tokens in later]
        longer = with_phrases(tokenizer, own)
    if model is not None:
        append_rows(model, row_ND)
    return longer


def with_zeros(pair: Tree, adapter: Path) -> Tree:
    """The factors of an adapter for a model of `with_rows`: what it adds to later rows is nothing yet."""
    row_ND, name = read_rows(adapter), f"{HEAD}.lora_b"
    if row_ND is None or name not in pair:
        return pair
    return {**pair, name: torch.cat([pair[name], pair[name].new_zeros(len(row_ND), pair[name].shape[1])])}


def folded(pair: Tree, adapter: Path, to: Path, is_tied: bool) -> Tree:
    """The trained factors for the backbone as it is; what they add to later rows is in these, written into ``to``.

    ``is_tied``: whether the adapter of the output is that of the embeddings too; else it learns nothing of them.
    """
    row_ND, name = read_rows(adapter), f"{HEAD}.lora_b"
    if row_ND is None:
        return pair
    if name in pair:
        own_VR, num = pair[name].cpu(), len(row_ND)
        if is_tied:
            row_ND = row_ND + own_VR[-num:] @ pair[f"{HEAD}.lora_a"].cpu()
        pair = {**pair, name: own_VR[:-num]}
    add_rows(to, row_ND)
    return pair
