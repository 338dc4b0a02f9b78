"""Export of a client's personalised model as a standard PEFT LoRA folder, with a reload check.

The folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` (PEFT's format), ``item_ids.json`` (item key
to title, ID text and token IDs: all that is needed to rebuild the trie) and ``README.md`` (model card).

Shape legend: K domains, R rank, I in features, O out features.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig, PeftModel, TaskType
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from fedecider.federation.method import Tree
from fedecider.lora.adapters import module_names
from fedecider.lora.fusion import fused_factors

ITEM_FILE = "item_ids.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class ItemTable(NamedTuple):
    """The items that a client's model can recommend, in item-number order."""

    keys: Sequence[str]
    titles: Sequence[str]
    id_texts: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    """Without the end token; the trie is built from these."""


class Card(NamedTuple):
    """What the model card says."""

    method: str
    domain: str
    alpha: Mapping[str, float]
    """Fusion weight of this client for every domain; empty for methods without."""
    metrics: Mapping[str, float]
    protocol: str
    """How the metrics were measured, in a sentence or a stamp."""
    license: str = "apache-2.0"
    details: Mapping[str, Any] = {}
    """More rows for the table of settings."""


def export_adapter(
    model: PeftModel,
    folder: Path,
    *,
    base_folder: Path,
    base_name: str,
    items: ItemTable,
    card: Card,
    prompts: Mapping[str, Tensor],
    tolerance: float = 1e-5,
    factors: Tree | None = None,
) -> float:
    """Write what ``model`` has loaded as a PEFT folder and return the largest logit difference after a reload.

    Fused directions become one adapter of rank K*r, ``A = [A_1; ...; A_K]``, ``B = [alpha_1 B_1, ..., alpha_K B_K]``
    with ``lora_alpha = K*r``, which is the same update exactly. ``base_folder`` is where the base model is saved now,
    ``base_name`` what the adapter's config records. ``prompts`` are real ``input_ids``, ``attention_mask`` and
    ``labels``. ``factors`` are written instead when given (one pair per layer, any common rank): the update that
    ``model`` has loaded, in another form; the reload check compares the two. The folder is written beside its place
    and renamed only after the check, so a wrong export never appears under its name.

    Raises:
        ValueError: the reloaded model's logits differ by more than ``tolerance`` times ``max(1, largest logit)``.
    """
    _check_items(items)
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        save_peft_folder(fused_factors(model) if factors is None else factors, scratch, base_name)
        _write_items(scratch, items, model)
        (scratch / "README.md").write_text(model_card(card, base_name), encoding="utf-8")
        difference = reload_difference(model, scratch, base_folder, prompts)
        if not difference <= tolerance:
            raise ValueError(
                f"got logits that differ by {difference:.2e} after reloading the adapter of {card.domain} onto "
                f"{base_folder}, expected at most {tolerance:.0e}; pass the backbone that the adapters were trained on"
            )
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return difference


def save_peft_folder(factors: Tree, folder: Path, base_name: str) -> None:
    """Write one LoRA pair per layer (any common rank, scaling 1) in PEFT's own file format."""
    names = module_names(factors)
    rank = factors[f"{names[0]}.lora_a"].shape[0]
    state = {}
    for name in names:
        state[f"base_model.model.{name}.lora_A.weight"] = factors[f"{name}.lora_a"].float().contiguous()
        state[f"base_model.model.{name}.lora_B.weight"] = factors[f"{name}.lora_b"].float().contiguous()
    save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted({name.rsplit(".", 1)[-1] for name in names}),
        task_type=TaskType.SEQ_2_SEQ_LM,
        base_model_name_or_path=base_name,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))


@torch.no_grad()
def reload_difference(model: PeftModel, folder: Path, base_folder: Path, prompts: Mapping[str, Tensor]) -> float:
    """Largest absolute logit difference between ``model`` and what plain transformers + peft load, in fp32.

    Divided by the largest logit where that exceeds 1. Infinite when either side is not finite.
    """
    device = next(model.parameters()).device
    inputs = {key: prompts[key].to(device) for key in ("input_ids", "attention_mask", "labels")}
    modes = {module: module.training for module in model.modules()}
    expected = model.eval()(**inputs).logits.float()
    for module, training in modes.items():
        module.training = training
    base = AutoModelForSeq2SeqLM.from_pretrained(str(base_folder))
    dtype = next(model.parameters()).dtype
    reloaded = PeftModel.from_pretrained(base.to(device=device, dtype=dtype), str(folder)).eval()
    actual = reloaded(**inputs).logits.float()
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all() and torch.isfinite(expected).all()):
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def read_item_ids(folder: Path) -> ItemTable:
    """The item table of an adapter folder.

    Raises:
        ValueError: the file is damaged, or it was written for other adapter weights.
    """
    path = folder / ITEM_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries, recorded = content["items"], content["adapter_sha256"]
        table = ItemTable(
            keys=list(entries),
            titles=[entry["title"] for entry in entries.values()],
            id_texts=[entry["id"] for entry in entries.values()],
            token_ids=[entry["tokens"] for entry in entries.values()],
        )
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"got a damaged {path} ({error}), expected the file that the export wrote; export again"
        ) from error
    actual = _digest(folder / WEIGHTS_FILE)
    if actual != recorded:
        raise ValueError(
            f"got adapter weights {actual[:12]} beside an item table for {recorded[:12]} in {folder}, expected the "
            "pair of one export; item IDs of another run would recommend other items"
        )
    return table


def model_card(card: Card, base_name: str) -> str:
    """Markdown with the front matter that model hubs read."""
    total = sum(abs(weight) for weight in card.alpha.values()) or 1.0
    lines = [
        "---",
        "library_name: peft",
        f"base_model: {json.dumps(base_name)}",
        f"license: {card.license}",
        "tags: [recommendation, federated-learning, lora]",
        "---",
        "",
        f"# {card.domain}: personalised recommender ({card.method})",
        "",
        f"LoRA adapter of the client `{card.domain}`, trained by `{card.method}`. It needs the backbone `{base_name}`",
        f"and its tokenizer. `{ITEM_FILE}` maps item keys to titles, item ID texts and token IDs; decoding is",
        "constrained to the prefix tree of those token IDs, each followed by the end token.",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForSeq2SeqLM",
        f'model = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained("<backbone>"), "{card.domain}")',
        "```",
    ]
    if card.alpha:
        lines += ["", "## Fusion weights", "", "| domain | alpha | share of absolute values |", "|---|---|---|"]
        lines += [f"| {name} | {value:.4f} | {abs(value) / total:.1%} |" for name, value in card.alpha.items()]
    lines += ["", "## Evaluation", "", card.protocol]
    if card.metrics:
        lines += ["", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4f} |" for name, value in card.metrics.items()]
    if card.details:
        lines += ["", "## Settings", "", "| setting | value |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in card.details.items()]
    return "\n".join(lines) + "\n"


def _write_items(folder: Path, items: ItemTable, model: PeftModel) -> None:
    config = cast(Any, model.get_base_model()).config
    entries = {
        key: {"title": title, "id": id_text, "tokens": list(tokens)}
        for key, title, id_text, tokens in zip(*items, strict=True)
    }
    content = {
        "adapter_sha256": _digest(folder / WEIGHTS_FILE),
        "eos_token_id": config.eos_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
        "items": entries,
    }
    (folder / ITEM_FILE).write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def _check_items(items: ItemTable) -> None:
    sizes = {name: len(getattr(items, name)) for name in ItemTable._fields}
    if len(set(sizes.values())) != 1 or not items.keys:
        raise ValueError(f"got item columns of sizes {sizes}, expected equal ones of at least 1; rebuild the item IDs")
    if len(set(items.keys)) != len(items.keys):
        raise ValueError("got duplicate item keys, expected each once; prepare the domain again")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
