"""Centralised reference lines: what the same data give when one party holds all of them. Not federated, not private."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from embedding_fr.central import centrap, ease, item_knn, lightgcn, lines, mf, ncf, sasrec
from fedecider.evaluation.protocols import ScoreUsers


class Central(NamedTuple):
    """How a line is configured, fitted and tuned."""

    config: type
    """Frozen dataclass of the line's settings; its defaults suit ML-100K."""
    fit: Callable[..., ScoreUsers]
    """(sequences, num_items, protocol, config, *, seed, device="cpu", valid=None) -> scores of the catalogue.

    ``sequences`` are whole histories, the last two events held out. Only train parts shape the scores, with two
    exceptions that are spelled out: ``valid`` (see :func:`embedding_fr.central.fitting.validation_ndcg`) chooses the
    epoch by the validation items, and a leaking protocol keeps held-out items out of the training negatives.
    """
    grid: tuple[dict[str, Any], ...] = ({},)
    """Settings to tune over on validation, the most sensible first: an equal budget of N takes the first N."""


CENTRAL = {
    "popularity": Central(lines.NoConfig, lines.fit_popularity),
    "memoriser": Central(lines.MemoriserConfig, lines.fit_memoriser),
    "last_item_cooccurrence": Central(lines.NoConfig, lines.fit_last_item_cooccurrence),
    "decayed_cooccurrence": Central(lines.DecayedConfig, lines.fit_decayed_cooccurrence, lines.DECAYED_GRID),
    "item_knn": Central(item_knn.ItemKnnConfig, item_knn.fit, item_knn.GRID),
    "ease": Central(ease.EaseConfig, ease.fit, ease.GRID),
    "centrap": Central(centrap.CentrapConfig, centrap.fit, centrap.GRID),
    "mf": Central(mf.MfConfig, mf.fit, mf.GRID),
    "ncf": Central(ncf.NcfConfig, ncf.fit, ncf.GRID),
    "lightgcn": Central(lightgcn.LightgcnConfig, lightgcn.fit, lightgcn.GRID),
    "sasrec": Central(sasrec.SasrecConfig, sasrec.fit, sasrec.GRID),
}
