"""Loops compiled for the CPU by Numba: draws, counts, and local training under inner products, one client at a time.

The stacked PyTorch code says the same thing for a block of clients on any device; a CPU is spared its memory traffic
and its thousands of small calls. Draws are the same numbers, local training the same up to rounding. Numba takes half a
second to import, so whoever calls these functions imports their file where they are called.
"""

import torch
from torch import Tensor


def takes(tensor: Tensor) -> bool:
    """Whether compiled functions take it: on the CPU, in one of the types they are compiled for."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64, torch.int64)
