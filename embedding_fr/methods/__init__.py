"""Federated methods of the cross-device track; one file and one line here for each, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.gram import SMALLER_SERVER
from embedding_fr.merging import Merging
from embedding_fr.methods import (
    cofedrec,
    colr,
    fedca,
    fedcia,
    fedcia_fitted,
    feddae,
    fedease,
    fedem,
    fedfast,
    fedmf,
    fedncf,
    fednear,
    fedrap,
    fedrecgel,
    gpfedrec,
    ifedrec,
    perfedrec,
    pfedclr,
    pfedgraph,
    pfedrec,
    plug_ins,
)
from fedecider.bounds import Space
from fedecider.federation.method import FederatedMethod
from fedecider.federation.registry import EMBEDDING_METHODS, Registry


def never(config: Any) -> bool:
    return False


def always(config: Any) -> bool:
    return True


def none(config: Any) -> int:
    return 0


class Method(NamedTuple):
    """How a method is configured, built and tuned, and what the rest of the track must know of it."""

    config: type
    """Frozen dataclass of the method's own settings."""
    build: Callable[[Federation, EmbeddingTraining, Any], FederatedMethod]
    defaults: Mapping[str, Any]
    """What the paper sets among the common settings (EmbeddingTraining, participation)."""
    grid: tuple[dict[str, Any], ...]
    """Settings to try on validation, most sensible first; an empty dict is the paper's."""
    space: Space = {}  # noqa: RUF012 (never written to)
    """What a search draws from when it has tried the grid."""
    whole_tables: int = 0
    """Tables of one row per item that a client holds in full and goes over in every local step (FedRAP: its personal
    table and a whole copy of the common one). 0: its steps touch the rows of its own examples only, and no more are
    held. Blocks are sized by it, so it decides speed and memory, never a result."""
    further_tables: Callable[[Any], int] = none
    """config -> whole tables besides those, where a setting makes a client go over them in every local step (pFedGraph:
    its table and the direction, under ``likeness_weight``)."""
    passing_tables: int = 0
    """Further whole tables that a client goes over once or twice a round, not in every step (PFedRec: its own last
    table, which is kept): they take memory, but no room in a CPU's caches, so only a GPU's blocks are sized by them."""
    client_bytes: Callable[[int, int, EmbeddingTraining, Any], int] | None = None
    """num_items, num_rows, training, config -> working set of a client in bytes, where that is not tables and examples;
    num_rows: of a table in its upload, its train items, or all items where uploads are made whole."""
    server_bytes: Callable[[int, Any], int] | None = None
    """num_items, config -> peak memory of the server's step on a CPU, checked before the first round."""
    server_tables: Callable[[Any], int] = none
    """config -> tables of one row per item that the server holds for each client at its peak (GPFedRec: the uploads, in
    whose place it makes the next ones, and those of absent clients)."""
    smaller_server: tuple[dict[str, Any], ...] = ()
    """Settings with which that step takes less, the smallest change first; what a run that does not fit is told."""
    negatives: bool = True
    """Whether clients train on ``num_negatives`` drawn items beside each of their own."""
    guarantee: Callable[[Any], str] | None = None
    """config -> what the bound and the noise in the method's own config guarantee, in one line; the common privacy
    settings are then not offered. None: the common ones hold."""
    upload_rounds: int | None = None
    """Rounds, from the first one on, in which clients upload anything, of which an epsilon is the sum; None: all."""
    needs_server: Callable[[Any], bool] = never
    """config -> whether uploads are sums or gradients, of which only a server makes the next model: with federation
    off nothing would be left of the method."""
    needs_everyone: Callable[[Any], bool] = never
    """config -> whether every client must take part in every round, since all of them exchange keys."""
    equal_weights: Callable[[Any], bool] = never
    """config -> whether all clients weigh alike in the server's mean: only then do their shares of noise add up."""
    chooses_cohort: Callable[[Any], bool] = never
    """config -> whether the server chooses a cohort by what it knows of clients: then a small share hides nobody."""
    published: bool = True
    """Whether a paper sets the defaults; the methods of this project have none."""
    plug_in: bool = False
    """Whether it is another method with a part put in, and so no row of its own among ``all``."""
    attributes: bool = False
    """Whether its server holds attributes of the items (:mod:`embedding_fr.attributes`); its settings then have
    ``attributes`` and ``text_encoder``."""
    uses_order: bool = False
    """Whether the order of a client's train items enters what is trained."""
    item_tables: tuple[str, ...] = ("item_table",)
    """Tensors of an upload and of the server with a row for each item, by whose moves an audit tells train items."""
    code: Mapping[str, Any] | None = None
    """Settings that make the method do what its authors' public code does, where that differs from the paper."""
    code_space: Space = {}  # noqa: RUF012 (never written to)
    """What a search around these draws from, where ranges of the paper's variant do not suit."""


def two(config: Any) -> int:
    return 2


def space_of(entry: Method, code: bool) -> Space:
    """What a search draws from around the settings of the paper, or of the public code."""
    return entry.code_space or entry.space if code else entry.space


BUILT_IN: dict[str, Method] = {
    "fedease": Method(
        fedease.FedeaseConfig,
        fedease.fedease,
        fedease.DEFAULTS,
        fedease.GRID,
        fedease.SPACE,
        item_tables=(),
        client_bytes=fedease.client_bytes,
        server_bytes=fedease.server_bytes,
        smaller_server=SMALLER_SERVER,
        negatives=False,
        guarantee=fedease.guarantee,
        upload_rounds=1,
        needs_server=fedease.needs_server,
        needs_everyone=fedease.needs_everyone,
        published=False,
    ),
    "fednear": Method(
        fednear.FednearConfig,
        fednear.fednear,
        fednear.DEFAULTS,
        fednear.GRID,
        fednear.SPACE,
        item_tables=(),
        client_bytes=fednear.client_bytes,
        server_bytes=fednear.server_bytes,
        smaller_server=SMALLER_SERVER,
        negatives=False,
        guarantee=fednear.guarantee,
        upload_rounds=1,
        needs_server=fednear.needs_server,
        needs_everyone=fednear.needs_everyone,
        published=False,
        uses_order=True,
    ),
    "colr": Method(
        colr.ColrConfig,
        colr.colr,
        colr.DEFAULTS,
        colr.GRID,
        colr.SPACE,
        equal_weights=always,
        item_tables=("item_table", "factor"),
    ),
    "fedcia": Method(
        fedcia.FedciaConfig,
        fedcia.fedcia,
        fedcia.DEFAULTS,
        fedcia.GRID,
        fedcia.SPACE,
        item_tables=("similarity",),
        client_bytes=fedcia.client_bytes,
        negatives=False,
        upload_rounds=1,
        needs_server=fedcia.needs_server,
        equal_weights=always,
    ),
    "fedcia_fitted": Method(
        fedcia_fitted.FedciaFittedConfig,
        fedcia_fitted.fedcia_fitted,
        fedcia_fitted.DEFAULTS,
        fedcia_fitted.GRID,
        fedcia_fitted.SPACE,
        item_tables=("similarity", "factor"),
        client_bytes=fedcia_fitted.client_bytes,
        equal_weights=always,
        code=fedcia_fitted.CODE,
    ),
    "fedmf": Method(
        fedmf.FedmfConfig,
        fedmf.fedmf,
        fedmf.DEFAULTS,
        fedmf.GRID,
        fedmf.SPACE,
        equal_weights=lambda config: config.weighting == "uniform",
    ),
    "pfedclr": Method(
        pfedclr.PfedclrConfig, pfedclr.pfedclr, pfedclr.DEFAULTS, pfedclr.GRID, pfedclr.SPACE, passing_tables=2
    ),
    "fedrap": Method(
        fedrap.FedrapConfig,
        fedrap.fedrap,
        fedrap.DEFAULTS,
        fedrap.GRID,
        fedrap.SPACE,
        whole_tables=2,
        equal_weights=always,
        item_tables=(fedrap.COMMON,),
        code=fedrap.CODE,
        code_space=fedrap.CODE_SPACE,
    ),
    "fedncf": Method(fedncf.FedncfConfig, fedncf.fedncf, fedncf.DEFAULTS, fedncf.GRID, fedncf.SPACE),
    "pfedrec": Method(
        pfedrec.PfedrecConfig,
        pfedrec.pfedrec,
        pfedrec.DEFAULTS,
        pfedrec.GRID,
        pfedrec.SPACE,
        passing_tables=1,
        equal_weights=always,
        code=pfedrec.CODE,
    ),
    "gpfedrec": Method(
        gpfedrec.GpfedrecConfig,
        gpfedrec.gpfedrec,
        gpfedrec.DEFAULTS,
        gpfedrec.GRID,
        gpfedrec.SPACE,
        passing_tables=4,
        server_tables=two,
        code=gpfedrec.CODE,
    ),
    "fedem": Method(
        fedem.FedemConfig,
        fedem.fedem,
        fedem.DEFAULTS,
        fedem.GRID,
        fedem.SPACE,
        passing_tables=3,
        server_tables=lambda config: 2 if config.aggregation == "similarity" else 0,
        code=fedem.CODE,
    ),
    "fedca": Method(
        fedca.FedcaConfig, fedca.fedca, fedca.DEFAULTS, fedca.GRID, fedca.SPACE, passing_tables=4, server_tables=two
    ),
    "pfedgraph": Method(
        pfedgraph.PfedgraphConfig,
        pfedgraph.pfedgraph,
        pfedgraph.DEFAULTS,
        pfedgraph.GRID,
        pfedgraph.SPACE,
        further_tables=pfedgraph.whole_tables,
        passing_tables=6,
        server_tables=two,
        code=pfedgraph.CODE,
    ),
    "fedrecgel": Method(
        fedrecgel.FedrecgelConfig,
        fedrecgel.fedrecgel,
        fedrecgel.DEFAULTS,
        fedrecgel.GRID,
        fedrecgel.SPACE,
        needs_server=fedrecgel.needs_server,
        equal_weights=lambda config: config.variant == "code",
        code=fedrecgel.CODE,
        code_space=fedrecgel.CODE_SPACE,
        item_tables=fedrecgel.ITEM_TABLES,
    ),
    "fedfast": Method(
        fedfast.FedfastConfig,
        fedfast.fedfast,
        fedfast.DEFAULTS,
        fedfast.GRID,
        fedfast.SPACE,
        chooses_cohort=fedfast.chooses_cohort,
    ),
    "cofedrec": Method(
        cofedrec.CofedrecConfig,
        cofedrec.cofedrec,
        cofedrec.DEFAULTS,
        cofedrec.GRID,
        cofedrec.SPACE,
        whole_tables=1,
        passing_tables=2,
    ),
    "perfedrec": Method(
        perfedrec.PerfedrecConfig,
        perfedrec.perfedrec,
        perfedrec.DEFAULTS,
        perfedrec.GRID,
        perfedrec.SPACE,
        passing_tables=4,
        chooses_cohort=perfedrec.chooses_cohort,
        item_tables=("item_table", "global_table"),
        code=perfedrec.CODE,
    ),
    "feddae": Method(
        feddae.FeddaeConfig,
        feddae.feddae,
        feddae.DEFAULTS,
        feddae.GRID,
        feddae.SPACE,
        client_bytes=feddae.client_bytes,
        negatives=False,
        equal_weights=always,
        item_tables=(feddae.TABLE,),
    ),
    "ifedrec": Method(
        ifedrec.IfedrecConfig,
        ifedrec.ifedrec,
        ifedrec.DEFAULTS,
        ifedrec.GRID,
        ifedrec.SPACE,
        equal_weights=always,
        attributes=True,
    ),
    "fedmf_em": Method(
        Merging, plug_ins.fedmf_em, fedmf.DEFAULTS, plug_ins.GRID, plug_ins.SPACE, passing_tables=3, plug_in=True
    ),
    "fedncf_em": Method(
        Merging, plug_ins.fedncf_em, fedncf.DEFAULTS, plug_ins.GRID, plug_ins.SPACE, passing_tables=3, plug_in=True
    ),
    "pfedrec_em": Method(
        Merging, plug_ins.pfedrec_em, pfedrec.DEFAULTS, plug_ins.GRID, plug_ins.SPACE, passing_tables=3, plug_in=True
    ),
    "gpfedrec_em": Method(
        Merging, plug_ins.gpfedrec_em, gpfedrec.DEFAULTS, plug_ins.GRID, plug_ins.SPACE, passing_tables=6, plug_in=True
    ),
    "fedrap_em": Method(
        Merging,
        plug_ins.fedrap_em,
        fedrap.DEFAULTS,
        plug_ins.GRID,
        plug_ins.SPACE,
        whole_tables=2,
        passing_tables=3,
        item_tables=(fedrap.COMMON,),
        plug_in=True,
    ),
}
METHODS: Registry[Method] = Registry(EMBEDDING_METHODS, Method, BUILT_IN)
