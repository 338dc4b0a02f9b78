"""Rows that are not federated: what the same data give when one party holds all of them. Nothing here is private."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fedecider.baselines import als, centrap, ease, fitted_counts, item_knn, lightgcn, mf, ncf, sasrec
from fedecider.evaluation.protocols import ScoreUsers
from fedecider.search_space import Space


class Baseline(NamedTuple):
    """How a baseline is configured, fitted and tuned."""

    config: type
    """Frozen dataclass of its settings; its defaults suit ML-100K."""
    fit: Callable[..., ScoreUsers]
    """(`fedecider.baselines.fitting.Pooled`, config) -> scores of the catalogue.

    Only train parts shape the scores, with two exceptions that are spelled out: ``valid`` chooses the epoch by the
    validation items, and a leaking protocol keeps held-out items out of the training negatives.
    """
    grid: tuple[dict[str, Any], ...] = ({},)
    """Settings to try on validation, the most sensible first: a search of N trials takes the first N."""
    space: Space = {}  # noqa: RUF012 (never written to)
    """What a search draws from when it has tried the grid."""


BASELINES = {
    "popularity": Baseline(fitted_counts.NoConfig, fitted_counts.fit_popularity),
    "memoriser": Baseline(fitted_counts.MemoriserConfig, fitted_counts.fit_memoriser),
    "last_item_cooccurrence": Baseline(fitted_counts.NoConfig, fitted_counts.fit_last_item_cooccurrence),
    "decayed_cooccurrence": Baseline(
        fitted_counts.DecayedConfig,
        fitted_counts.fit_decayed_cooccurrence,
        fitted_counts.DECAYED_GRID,
        fitted_counts.DECAYED_SPACE,
    ),
    "item_knn": Baseline(item_knn.ItemKnnConfig, item_knn.fit, item_knn.GRID, item_knn.SPACE),
    "ease": Baseline(ease.EaseConfig, ease.fit, ease.GRID, ease.SPACE),
    "centrap": Baseline(centrap.CentrapConfig, centrap.fit, centrap.GRID, centrap.SPACE),
    "mf": Baseline(mf.MfConfig, mf.fit, mf.GRID, mf.SPACE),
    "als": Baseline(als.AlsConfig, als.fit, als.GRID, als.SPACE),
    "bpr": Baseline(mf.BprConfig, mf.fit_bpr, mf.BPR_GRID, mf.SPACE),
    "ncf": Baseline(ncf.NcfConfig, ncf.fit, ncf.GRID, ncf.SPACE),
    "lightgcn": Baseline(lightgcn.LightgcnConfig, lightgcn.fit, lightgcn.GRID, lightgcn.SPACE),
    "sasrec": Baseline(sasrec.SasrecConfig, sasrec.fit, sasrec.GRID, sasrec.SPACE),
}
