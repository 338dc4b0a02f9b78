"""Slow, plain per-user loops, one file per method: read them beside the paper, and hold the batched runtime to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embedding_fr.blocks import Federation
from embedding_fr.config import TrainingConfig
from embedding_fr.reference import fedmf, fedncf, gpfedrec, pfedclr, pfedrec
from embedding_fr.reference.loop import Reference

REFERENCES: dict[str, Callable[[Federation, TrainingConfig, Any], Reference]] = {
    "fedmf": fedmf.fedmf,
    "pfedclr": pfedclr.pfedclr,
    "fedncf": fedncf.fedncf,
    "pfedrec": pfedrec.pfedrec,
    "gpfedrec": gpfedrec.gpfedrec,
}
