"""Named random streams: every draw says what it is for, so no generator state is ever saved."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *labels: str | int) -> int:
    """A 63-bit seed that depends on ``seed`` and every label, and on nothing else (not on call order)."""
    text = "\x1f".join([str(seed), *(f"{type(label).__name__}:{label}" for label in labels)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stream(seed: int, *labels: str | int) -> torch.Generator:
    """A fresh CPU generator for one named purpose, e.g. ``stream(seed, "negatives", round, client)``.

    Results therefore do not depend on block size, process count, client order or resume point.
    """
    return torch.Generator().manual_seed(derive_seed(seed, *labels))
