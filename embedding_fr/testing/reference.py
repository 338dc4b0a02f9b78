"""Slow, plain per-user loops, one file per method: read them beside the paper, and hold the batched runtime to them.

FedEASE and FedNear do not train: their tests compare them with the centralised solution in the place of a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.testing import (
    cofedrec,
    colr,
    elastic,
    fedcia,
    fedem,
    fedfast,
    fedmf,
    fedncf,
    fedrap,
    fedrecgel,
    gpfedrec,
    perfedrec,
    pfedclr,
    pfedgraph,
    pfedrec,
)
from embedding_fr.testing.loop import Reference

REFERENCES: dict[str, Callable[[Federation, EmbeddingTraining, Any], Reference]] = {
    "colr": colr.colr,
    "fedcia": fedcia.fedcia,
    "fedcia_fitted": fedcia.fedcia_fitted,
    "fedmf": fedmf.fedmf,
    "pfedclr": pfedclr.pfedclr,
    "fedncf": fedncf.fedncf,
    "fedrap": fedrap.fedrap,
    "pfedrec": pfedrec.pfedrec,
    "gpfedrec": gpfedrec.gpfedrec,
    "fedem": fedem.fedem,
    "pfedgraph": pfedgraph.pfedgraph,
    "fedrecgel": fedrecgel.fedrecgel,
    "fedfast": fedfast.fedfast,
    "cofedrec": cofedrec.cofedrec,
    "perfedrec": perfedrec.perfedrec,
    "fedmf_em": elastic.fedmf_em,
    "fedncf_em": elastic.fedncf_em,
    "pfedrec_em": elastic.pfedrec_em,
    "gpfedrec_em": elastic.gpfedrec_em,
    "fedrap_em": elastic.fedrap_em,
}
