"""Export of a client's personalised model as a standard PEFT LoRA folder, with a reload check.

The folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` (PEFT's format), ``item_ids.json`` (item key
to title, ID text and token IDs: all that is needed to rebuild the trie) and ``README.md`` (`fedecider.lora.card`).

Shape legend: K domains, R rank, I in features, O out features.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedecider.federation.method import Tree
from fedecider.lora.adapters import FACTORS, module_names
from fedecider.lora.card import Card, model_card
from fedecider.lora.fusion import fused_factors
from fedecider.lora.tied_table import HEAD, adapted_embeddings
from idgen.backbones.families import family_of, unwrap
from idgen.quantized import keep_trainable, loading_options, quantize_of

CONFIG_FILE = "adapter_config.json"
ITEM_FILE = "item_ids.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class ItemTable(NamedTuple):
    """The items that a client's model can recommend, in item-number order."""

    keys: Sequence[str]
    titles: Sequence[str]
    id_texts: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    """Without the end token; the trie is built from these."""
    catalogue: str = ""
    """What prompts call it where that is not the domain's name, as for silos."""

    def columns(self) -> dict[str, Sequence[Any]]:
        """What every item has."""
        return {name: value for name, value in self._asdict().items() if name != "catalogue"}


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
    ``base_name`` what the adapter's config and card record: a hub name, or a path relative to ``folder``. ``prompts``
    is a real training batch. ``factors`` are written instead when given (one pair per layer, any common rank): the
    update that ``model`` has loaded, in another form; the reload check compares the two. The folder is written beside
    its place and renamed only after the check, so a wrong export never appears under its name.

    Raises:
        ValueError: the reloaded model's logits differ by more than ``tolerance`` times ``max(1, largest logit)``.
    """
    _check_items(items)
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        written, tables = (
            fused_factors(model) if factors is None else factors,
            adapted_embeddings(model.get_base_model()),
        )
        save_peft_folder(written, scratch, base_name, family_of(model).task_type, tables)
        _write_items(scratch, items, card.prompt.end_token)
        text = model_card(card, base_name, tuple(items.titles[:2]))
        (scratch / "README.md").write_text(text, encoding="utf-8")
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


def save_peft_folder(factors: Tree, folder: Path, base_name: str, task_type: str, tables: Sequence[str] = ()) -> None:
    """Write one LoRA pair per layer (any common rank, scaling 1) in PEFT's own file format; ``task_type`` is PEFT's.

    ``tables``: embeddings that get the pair of the output as well, in PEFT's form of it: ``dE = (B_e A_e)^T`` with
    ``A_e = B^T`` (R, V) and ``B_e = A^T`` (D, R).
    """
    names = module_names(factors)
    rank = factors[f"{names[0]}.lora_a"].shape[0]
    check_pairs(factors, rank)
    state = {}
    for name in names:
        state[f"base_model.model.{name}.lora_A.weight"] = factors[f"{name}.lora_a"].float().contiguous()
        state[f"base_model.model.{name}.lora_B.weight"] = factors[f"{name}.lora_b"].float().contiguous()
    for table in tables:
        state[f"base_model.model.{table}.lora_embedding_A"] = factors[f"{HEAD}.lora_b"].float().t().contiguous()
        state[f"base_model.model.{table}.lora_embedding_B"] = factors[f"{HEAD}.lora_a"].float().t().contiguous()
    save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted({name.rsplit(".", 1)[-1] for name in (*names, *tables)}),
        task_type=TaskType(task_type),
        base_model_name_or_path=base_name,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))


def check_pairs(factors: Tree, rank: int) -> None:
    """``ValueError`` for factors that are no pair of matrices of ``rank``, such as the empty ones of ZeRO-3."""
    for name in module_names(factors):
        shape_a, shape_b = (tuple(factors[f"{name}.{factor}"].shape) for factor in FACTORS)
        sound = len(shape_a) == len(shape_b) == 2 and shape_a[0] == shape_b[1] == rank and 0 not in (*shape_a, *shape_b)
        if not sound:
            raise ValueError(
                f"got adapters of shapes {shape_a} and {shape_b} for {name}, expected ({rank}, inputs) and (outputs, "
                f"{rank}); gather partitioned parameters before they are read"
            )


@torch.no_grad()
def reload_difference(model: PeftModel, folder: Path, base_folder: Path, prompts: Mapping[str, Tensor]) -> float:
    """Largest absolute logit difference between ``model`` and what plain transformers + peft load, in fp32.

    Divided by the largest logit where that exceeds 1. Infinite when either side is not finite.
    """
    device = next(model.parameters()).device
    family = family_of(model)
    inputs = {key: tensor.to(device) for key, tensor in family.plain_inputs(dict(prompts)).items()}
    modes = {module: module.training for module in model.modules()}
    expected = model.eval()(**inputs).logits.float()
    for module, training in modes.items():
        module.training = training
    dtype, quantized = next(model.parameters()).dtype, loading_options(quantize_of(model), device)
    auto_class = getattr(transformers, family.auto_class)
    own: dict[str, Any] = {"trust_remote_code": False, "dtype": dtype, **quantized}
    base = auto_class.from_pretrained(str(base_folder), use_safetensors=True, **own)
    keep_trainable(base)
    reloaded = load_adapter(base.to(device), folder).to(device).eval()
    actual = reloaded(**inputs).logits.float()
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all() and torch.isfinite(expected).all()):
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def load_adapter(base: Any, folder: Path) -> PeftModel:
    """``base`` with the adapter of a folder, as plain peft loads it, but never from a pickle or from the hub.

    Raises:
        ValueError: a file of the adapter is missing or damaged, or it does not fit ``base``.
    """
    config, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    advice = "expected the adapter and the backbone of one run. Copy both together, or export again"
    for path in (config, weights):
        if not path.is_file():  # else peft looks for a pickle, and then on the hub
            raise ValueError(f"no {path}, {advice}")
    try:
        with safe_open(weights, "pt") as file:
            wanted = set(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"got a damaged {weights} ({error}), {advice}") from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # between two libraries
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # told below
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # see attach_lora
            warnings.filterwarnings("error", message="Unexpected keyword arguments")  # peft would drop them
            model = PeftModel.from_pretrained(base, str(folder))
        found = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError, UserWarning, re.error) as error:
        reason = str(error).strip().splitlines()[-1].strip() if str(error).strip() else type(error).__name__
        raise ValueError(f"the adapter of {config} does not fit the backbone ({reason}), {advice}") from error
    if found != wanted:
        raise ValueError(f"{config} names other layers than {weights.name} holds ({min(found ^ wanted)}), {advice}")
    return model


def without_adapters(model: Any) -> Any:
    """The backbone of ``model``, in place, with its own layers where those of peft's adapters stood."""
    base = unwrap(model)
    for path, layer in list(base.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            parent, _, name = path.rpartition(".")
            setattr(base.get_submodule(parent), name, layer.get_base_layer())
    if hasattr(base, "peft_config"):
        del base.peft_config
    return base


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
            catalogue=content.get("catalogue", ""),
        )
        _check_items(table)
        _check_entries(table)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"got a damaged {path} ({error}), expected the file that the export wrote; export again"
        ) from error
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"no {folder / WEIGHTS_FILE} beside its item table, expected both; export again")
    actual = _digest(folder / WEIGHTS_FILE)
    if actual != recorded:
        raise ValueError(
            f"got adapter weights {actual[:12]} beside an item table for {recorded[:12]} in {folder}, expected the "
            "pair of one export; item IDs of another run would recommend other items"
        )
    return table


def _write_items(folder: Path, items: ItemTable, end_token: int | None) -> None:
    entries = {
        key: {"title": title, "id": id_text, "tokens": list(tokens)}
        for key, title, id_text, tokens in zip(*items.columns().values(), strict=True)
    }
    content = {
        **({"catalogue": items.catalogue} if items.catalogue else {}),
        "adapter_sha256": _digest(folder / WEIGHTS_FILE),
        "eos_token_id": end_token,
        "items": entries,
    }
    (folder / ITEM_FILE).write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def _check_items(items: ItemTable) -> None:
    sizes = {name: len(column) for name, column in items.columns().items()}
    if len(set(sizes.values())) != 1 or not items.keys:
        raise ValueError(f"got item columns of sizes {sizes}, expected equal ones of at least 1; rebuild the item IDs")
    if len(set(items.keys)) != len(items.keys):
        raise ValueError("got duplicate item keys, expected each once; prepare the domain again")


def _check_entries(items: ItemTable) -> None:
    if not isinstance(items.catalogue, str):
        raise ValueError("the name of the catalogue is no text")
    for key, title, id_text, tokens in zip(*items.columns().values(), strict=True):
        if not isinstance(title, str) or not isinstance(id_text, str):
            raise ValueError(f"title or ID of {key!r} is no text")
        if not tokens or not all(type(token) is int and token >= 0 for token in tokens):
            raise ValueError(f"tokens of {key!r} are no list of numbers from 0 on")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
