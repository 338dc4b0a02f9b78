"""Export of a client's personalised model as a standard PEFT LoRA folder, with a reload check.

The folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` (PEFT's format), ``item_ids.json`` (item key
to title, ID text and token IDs: all that is needed to rebuild the trie) and ``README.md`` (`fedecider.lora.card`).

Shape legend: K domains, R rank, I in features, O out features.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from fedecider.lora.item_table import CONFIG_FILE, WEIGHTS_FILE, ItemTable, check_items, write_items
from fedecider.lora.tied_table import HEAD, adapted_embeddings
from fedecider.lora.truncation import compact
from idgen.backbones.families import family_of, unwrap
from idgen.quantized import keep_trainable, loading_options, quantize_of


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
    with ``lora_alpha = K*r``, which is the same update exactly; where K*r is above the shorter side of every layer, in
    the smaller pairs of `fedecider.lora.truncation.compact`. ``base_folder`` is where the base model is saved now,
    ``base_name`` what the adapter's config and card record: a hub name, or a path relative to ``folder``. ``prompts``
    is a real training batch. ``factors`` are written instead when given (one pair per layer, any common rank): the
    update that ``model`` has loaded, in another form; the reload check compares the two. The folder is written beside
    its place and renamed only after the check, so a wrong export never appears under its name.

    Raises:
        ValueError: the reloaded model's logits differ by more than ``tolerance`` times ``max(1, largest logit)``.
    """
    check_items(items)
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        written, tables = (
            compact(fused_factors(model)) if factors is None else factors,
            adapted_embeddings(model.get_base_model()),
        )
        save_peft_folder(written, scratch, base_name, family_of(model).task_type, tables)
        write_items(scratch, items, card.prompt.end_token)
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
