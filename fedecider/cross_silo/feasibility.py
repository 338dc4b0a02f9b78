"""Settings that would fill the machine or cannot be run, refused before a cross-silo run writes anything."""

from __future__ import annotations

from collections.abc import Mapping

from fedecider.cross_silo.settings import Settings
from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import CUTOFFS
from fedecider.evaluation.protocols import train_parts
from fedecider.federation.cohort import cohort_size
from fedecider.methods import METHODS
from idgen.backbone import known_width


def check_limits(settings: Settings, domains: Mapping[str, Domain]) -> None:
    """``ValueError`` as `check_sizes`, and for clients with nothing to train on."""
    check_sizes(settings, domains)
    for name, domain in domains.items():
        if train_parts(domain.clients.sequences).length_U.max(initial=0) < 2:
            raise ValueError(
                f"got no user of {name} with two training events, expected one at least: there is nothing to train on. "
                "Prepare the data with a larger min_length"
            )


def check_sizes(settings: Settings, domains: Mapping[str, Domain]) -> None:
    """``ValueError`` for more beams than items or too few for the metrics, and adapters of a larger rank than the
    layers they adapt. No user is looked at."""
    if not settings.run.pretrain.has_own_tokens:
        _check_beams(settings.ranking.num_beams, max(len(domain.item_keys) for domain in domains.values()))
    width = known_width(settings.run.pretrain.backbone)
    if width is not None and settings.run.lora_rank > width:
        raise ValueError(
            f"got lora_rank {settings.run.lora_rank}, expected at most {width}, the width of the backbone: a layer has "
            "no larger rank"
        )


def check_uploads(settings: Settings, num_clients: int) -> None:
    """``ValueError`` for settings that the method's server, or a cohort of this size, cannot do."""
    run, method = settings.run, METHODS[settings.run.method]
    mean = "secure_sum" if run.secure_sum else f"robust_mean {run.robust_mean}" if run.robust_mean != "mean" else ""
    if mean and not method.takes_mean:
        raise ValueError(
            f"got {mean} with {run.method}, whose server takes no mean over clients, expected a method that averages, "
            "or secure_sum false and robust_mean mean"
        )
    size = cohort_size(num_clients, run.participation)
    if run.secure_sum and size < 2:
        raise ValueError(
            f"got secure_sum with a cohort of {size} of {num_clients} clients, expected two or more: a sum of one "
            "hides nothing. Raise participation, or set secure_sum false"
        )
    if method.pooled and run.participation < 1.0:
        raise ValueError(
            f"got participation {run.participation} with {run.method}, expected 1: it trains on everybody's data in "
            "every round"
        )


def _check_beams(num_beams: int, num_items: int) -> None:
    """``num_items``: of the largest catalogue."""
    if num_beams > num_items:
        raise ValueError(f"got num_beams {num_beams}, expected at most {num_items}, the items of the largest catalogue")
    least = min(max(CUTOFFS), num_items)
    if num_beams < least:
        raise ValueError(f"got num_beams {num_beams}, expected at least {least}: hit@{max(CUTOFFS)} is reported")
