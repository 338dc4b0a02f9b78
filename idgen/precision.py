"""bf16 autocast: where a forward pass runs in it, and whether this machine is faster with it."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedecider.bounds import Precision

# Of the kernels for attention in half precision, cuDNN's comes first on Hopper GPUs. It builds a plan for every new
# shape, and every batch has its own; since PyTorch 2.11 its gradients can be NaN beside a mask (pytorch#196678).
torch.backends.cuda.enable_cudnn_sdp(False)
PAYS = 1.25
"""How many times as fast products have to be in bf16 for its rounding to be worth it."""
_SIZES = {"cpu": 512, "cuda": 4096}
"""Rows and columns: a wide layer; what fills a GPU."""
_FORMATS = (torch.float32, torch.bfloat16)
_TIMES, _ENOUGH_S = 20, 1.0
"""Products of each format in turn, so that a moment in which the machine is busy slows both; fewer where they are
slow."""


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The context of a forward pass: bf16 over fp32 weights, or fp32; ``auto`` is what `fastest` says."""
    found = fastest(device.type) if precision == "auto" else precision
    return torch.autocast(device.type, torch.bfloat16, enabled=found == "bf16")


def fastest(device_type: str) -> Precision:
    """bf16 where its products are at least `PAYS` times as fast as those of fp32, else fp32."""
    return "bf16" if bf16_speedup(device_type) >= PAYS else "fp32"


@functools.cache
def bf16_speedup(device_type: str) -> float:
    """How many times as fast a linear layer is in bf16 as in fp32, measured once a process: the best product of each.

    Below 1 on processors without instructions for bf16, by far.
    """
    size = _SIZES[device_type]
    squares = [torch.ones(size, size, device=device_type, dtype=dtype) for dtype in _FORMATS]
    timed: list[list[float]] = []
    while len(timed) < 2 or (len(timed) <= _TIMES and sum(map(sum, timed)) < _ENOUGH_S):
        timed.append([_product_s(square_NN) for square_NN in squares])
    fp32, bf16 = map(min, zip(*timed[1:], strict=True))  # the first ones are not counted
    return fp32 / bf16


def in_words(speedup: float) -> str:
    """Of `bf16_speedup`: 2.0 times faster, or 50.0 times slower."""
    return f"{speedup:.1f} times faster" if speedup >= 1 else f"{1 / speedup:.1f} times slower"


def _product_s(square_NN: Tensor) -> float:
    started = time.perf_counter()
    product_NN = F.linear(square_NN, square_NN)
    if product_NN.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


OPTIONS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
