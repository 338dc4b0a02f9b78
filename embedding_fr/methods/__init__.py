"""Federated methods of the embedding track; one file and one line here for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from embedding_fr.blocks import Federation
from embedding_fr.config import TrainingConfig
from embedding_fr.merging import Merging
from embedding_fr.methods import (
    fedease,
    fedem,
    fedmf,
    fedncf,
    fednear,
    fedrap,
    fedrecgel,
    gpfedrec,
    pfedclr,
    pfedrec,
    plug_ins,
)
from fedecider.federation.method import FederatedMethod


class Method(NamedTuple):
    """How a method is configured, built and tuned."""

    config: type
    """Frozen dataclass of the method's own settings."""
    build: Callable[[Federation, TrainingConfig, Any], FederatedMethod]
    defaults: Mapping[str, Any]
    """What the paper sets among the common settings (TrainingConfig, participation)."""
    grid: tuple[dict[str, Any], ...]
    """Settings to try on validation, most sensible first; an empty dict is the paper's."""
    whole_tables: int = 0
    """Item tables that each client holds in full while it trains; 0: only the rows that it touches."""
    passing_tables: int = 0
    """Further ones that it goes over once or twice a round: they take memory, but no part of a CPU's caches."""
    client_bytes: Callable[[int, Any], int] | None = None
    """num_items, config -> working set of a client in bytes, for methods without local steps."""
    budget: Callable[[Any], str] | None = None
    """What the method guarantees by itself; its config then holds clip and noise, and the common ones do not apply."""
    uses_order: bool = False
    """Whether the order of a client's train items enters what is trained."""
    code: Mapping[str, Any] | None = None
    """Settings that make the method do what its authors' public code does, where that differs from the paper."""


METHODS: dict[str, Method] = {
    "fedease": Method(
        fedease.FedeaseConfig,
        fedease.fedease,
        fedease.DEFAULTS,
        fedease.GRID,
        client_bytes=fedease.client_bytes,
        budget=fedease.budget,
    ),
    "fednear": Method(
        fednear.FednearConfig,
        fednear.fednear,
        fednear.DEFAULTS,
        fednear.GRID,
        client_bytes=fednear.client_bytes,
        budget=fednear.budget,
        uses_order=True,
    ),
    "fedmf": Method(fedmf.FedmfConfig, fedmf.fedmf, fedmf.DEFAULTS, fedmf.GRID),
    "pfedclr": Method(pfedclr.PfedclrConfig, pfedclr.pfedclr, pfedclr.DEFAULTS, pfedclr.GRID, passing_tables=2),
    "fedrap": Method(
        fedrap.FedrapConfig, fedrap.fedrap, fedrap.DEFAULTS, fedrap.GRID, whole_tables=2, code=fedrap.CODE
    ),
    "fedncf": Method(fedncf.FedncfConfig, fedncf.fedncf, fedncf.DEFAULTS, fedncf.GRID),
    "pfedrec": Method(
        pfedrec.PfedrecConfig, pfedrec.pfedrec, pfedrec.DEFAULTS, pfedrec.GRID, passing_tables=1, code=pfedrec.CODE
    ),
    "gpfedrec": Method(
        gpfedrec.GpfedrecConfig,
        gpfedrec.gpfedrec,
        gpfedrec.DEFAULTS,
        gpfedrec.GRID,
        passing_tables=4,
        code=gpfedrec.CODE,
    ),
    "fedem": Method(fedem.FedemConfig, fedem.fedem, fedem.DEFAULTS, fedem.GRID, passing_tables=3, code=fedem.CODE),
    "fedrecgel": Method(
        fedrecgel.FedrecgelConfig, fedrecgel.fedrecgel, fedrecgel.DEFAULTS, fedrecgel.GRID, code=fedrecgel.CODE
    ),
    "fedmf_em": Method(Merging, plug_ins.fedmf_em, fedmf.DEFAULTS, plug_ins.GRID, passing_tables=3),
    "fedncf_em": Method(Merging, plug_ins.fedncf_em, fedncf.DEFAULTS, plug_ins.GRID, passing_tables=3),
    "pfedrec_em": Method(Merging, plug_ins.pfedrec_em, pfedrec.DEFAULTS, plug_ins.GRID, passing_tables=4),
    "gpfedrec_em": Method(Merging, plug_ins.gpfedrec_em, gpfedrec.DEFAULTS, plug_ins.GRID, passing_tables=7),
    "fedrap_em": Method(Merging, plug_ins.fedrap_em, fedrap.DEFAULTS, plug_ins.GRID, whole_tables=2, passing_tables=3),
}
