"""bf16 autocast: where a forward pass runs in it, and whether this machine is faster with it.

Differs from the paper: the output layer and T5's ``wo`` stay in full precision, as transformers leaves them, and
optimiser states are not paged.
"""

from __future__ import annotations

import functools
import logging
import time
from importlib.util import find_spec
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedecider.bounds import Precision
from idgen.config import Quantize

# bf16 autocast: where a forward pass runs in it, and whether this machine is faster with it.

# Of the kernels for attention in half precision, cuDNN's comes first on Hopper GPUs. It builds a plan for every new
# shape, and every batch has its own; since PyTorch 2.11 its gradients can be NaN beside a mask (pytorch#196678).
torch.backends.cuda.enable_cudnn_sdp(False)

PAYS = 1.25
"""How many times as fast products have to be in bf16 for its rounding to be worth it."""
_SIZES = {"cpu": 512, "cuda": 4096}
"""Rows and columns: a wide layer; what fills a GPU."""
_FORMATS = (torch.float32, torch.bfloat16)
_TIMES = 5


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The context of a forward pass: bf16 over fp32 weights, or fp32; ``auto`` is what `fastest` says."""
    found = fastest(device.type) if precision == "auto" else precision
    return torch.autocast(device.type, torch.bfloat16, enabled=found == "bf16")


def fastest(device_type: str) -> Precision:
    """bf16 where its products are at least `PAYS` times as fast as those of fp32, else fp32."""
    return "bf16" if bf16_speedup(device_type) >= PAYS else "fp32"


@functools.cache
def bf16_speedup(device_type: str) -> float:
    """How many times as fast a linear layer is in bf16 as in fp32, measured once a process: the best of five products.

    Below 1 on processors without instructions for bf16, by far.
    """
    size = _SIZES[device_type]
    fp32, bf16 = (_product_s(torch.ones(size, size, device=device_type, dtype=dtype)) for dtype in _FORMATS)
    return fp32 / bf16


def in_words(speedup: float) -> str:
    """Of `bf16_speedup`: 2.0 times faster, or 50.0 times slower."""
    return f"{speedup:.1f} times faster" if speedup >= 1 else f"{1 / speedup:.1f} times slower"


def _product_s(square_NN: Tensor) -> float:
    """Seconds of the fastest product; the first one is not counted."""
    found = []
    for _ in range(_TIMES + 1):
        started = time.perf_counter()
        product_NN = F.linear(square_NN, square_NN)
        if product_NN.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[1:])


# Frozen backbones in 4 or 8 bits for adapters to be trained on (QLoRA, Dettmers et al., 2023), through
# bitsandbytes.

OPTIONS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


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
