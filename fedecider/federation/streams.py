"""Named random streams: every draw says what it is for, so no generator state is ever saved."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derive_seed(seed: int, *labels: str | int) -> int:
    """A 63-bit seed that depends on ``seed`` and every label, and on nothing else (not on call order)."""
    text = "\x1f".join([str(seed), *(f"{type(label).__name__}:{label}" for label in labels)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stream(seed: int, *labels: str | int) -> torch.Generator:
    """A fresh CPU generator for one named purpose, e.g. ``stream(seed, "negatives", round, client)``.

    Results therefore do not depend on block size, process count, client order or resume point.
    """
    return torch.Generator().manual_seed(derive_seed(seed, *labels))


_STEP, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # the constants of splitmix64


def client_keys(clients_C: Tensor, seed: int, *labels: str | int) -> Tensor:
    """(C,) int64 keys of one named stream per client, for :func:`counter_draws`."""
    return mix(clients_C * _STEP + derive_seed(seed, *labels))


def counter_draws(key_C: Tensor, count: int, start: int = 0) -> Tensor:
    """(C, count) int64 random numbers of 63 bits: numbers ``start`` and following of each client's stream.

    Counter based (splitmix64: Steele, Lea, Flood 2014), so a block of clients draws in one go, on any device, what each
    of them draws alone: :func:`stream` would need one generator per client and round.
    """
    counter = torch.arange(start + 1, start + count + 1, device=key_C.device) * _STEP
    return mix(key_C[:, None] + counter) & 0x7FFFFFFFFFFFFFFF


def below(draw: Tensor, limit: Tensor | int) -> Tensor:
    """Whole numbers in ``0 .. limit - 1`` from 63-bit draws, uniform up to limit / 2^32; ``limit`` below 2^31."""
    return ((draw >> 31) * limit) >> 32


def mix(value: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 (arithmetic wraps; shifts are logical)."""
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)
