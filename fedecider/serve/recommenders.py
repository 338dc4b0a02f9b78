"""The recommenders of a run, with one backbone in memory."""

from __future__ import annotations

from typing import Any

import torch

from fedecider.models.recommender import Recommender
from fedecider.models.source import find_source
from fedecider.serve.config import ServeConfig


def load_recommenders(config: ServeConfig) -> dict[str, Recommender]:
    """Domain -> its recommender, for all domains of the run.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: it is one of the cross-device track, a file is damaged or was changed, or there is no such device.
    """
    source = find_source(config.run)
    found: dict[str, Recommender] = {}
    for domain in source.domains:
        found[domain] = Recommender.from_pretrained(config.run, domain, device=config.device, ensemble=config.ensemble)
        share_tensors(found[source.domains[0]].model, found[domain].model)
    return found


def share_tensors(model: Any, other: Any) -> None:
    """Let the parameters of ``other`` that are those of ``model`` lie in the same memory: the frozen backbone.

    Adapters differ, and stay where they are. The values of both stay as they are.
    """
    kept = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        own = kept.get(name)
        if own is not None and own.is_floating_point() and _alike(own, parameter):
            parameter.data = own.data


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
