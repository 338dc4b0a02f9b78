"""Frozen backbones in 4 or 8 bits, which adapters are trained on (QLoRA, Dettmers et al., 2023), by bitsandbytes.

Differs from the paper: the output layer and T5's ``wo`` stay in full precision, as transformers leaves them, and
optimiser states are not paged.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any, get_args

import torch
from torch import nn

from idgen.config import Quantize
from idgen.precision import OPTIONS


def check_quantize(quantize: Quantize) -> None:
    """``ValueError`` for another format, or when bitsandbytes is needed and not installed."""
    if quantize not in get_args(Quantize):
        raise ValueError(f"got quantize {quantize!r}, expected one of {', '.join(get_args(Quantize))}")
    if quantize != "none" and find_spec("bitsandbytes") is None:
        raise ValueError(
            f"got quantize {quantize}, but bitsandbytes is not installed, expected it to be there. Run: pip install "
            "'.[gpu]', or set quantize to none"
        )


def loading_options(quantize: Quantize, device: torch.device | str) -> dict[str, Any]:
    """What ``from_pretrained`` takes to quantise all linear layers but the output, on the device where they stay.

    Raises as `check_quantize`.
    """
    check_quantize(quantize)
    if quantize == "none":
        return {}
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # it tells every int8 product
    config = BitsAndBytesConfig(llm_int8_skip_modules=["lm_head"], **OPTIONS[quantize])
    return {"quantization_config": config, "device_map": {"": str(device)}}


def keep_trainable(model: nn.Module) -> None:
    """Let 4-bit layers pass gradients after an evaluation, too.

    On CPUs with AVX512-BF16, bitsandbytes packs their weights in the first evaluation, and packed weights pass none,
    with no more than a warning.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def check_trainable(model: nn.Module) -> None:
    """``ValueError`` when a 4-bit layer has been packed: layers below it would train on what the others let through."""
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError(
                f"got {name} with 4-bit weights that were packed in an evaluation and pass no gradients, expected "
                "weights as they were loaded. Load the backbone with idgen.backbone.load_backbone"
            )


def quantize_of(model: Any) -> Quantize:
    """How the base of a loaded model, plain or wrapped by PEFT, is quantised."""
    if getattr(model, "is_loaded_in_4bit", False):
        return "nf4"
    return "int8" if getattr(model, "is_loaded_in_8bit", False) else "none"
