"""Centralised reference lines: what the same data give when they lie in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from embedding_fr.central import ease, item_knn, mf
from fedecider.evaluation.protocols import ScoreUsers


class Central(NamedTuple):
    """How a centralised line is configured, fitted and tuned."""

    config: type
    fit: Callable[..., ScoreUsers]
    grid: tuple[dict[str, Any], ...]


CENTRAL: dict[str, Central] = {
    "item_knn": Central(item_knn.ItemKnnConfig, item_knn.fit, item_knn.GRID),
    "ease": Central(ease.EaseConfig, ease.fit, ease.GRID),
    "mf": Central(mf.MfConfig, mf.fit, mf.GRID),
}
