"""Settings that would fill the machine, told before a run of the LLM track writes anything."""

from __future__ import annotations

from collections.abc import Mapping

from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import CUTOFFS
from fedecider.llm.setup import Settings, calibration
from idgen.backbone import known_width


def check_limits(settings: Settings, domains: Mapping[str, Domain]) -> None:
    """``ValueError`` for more beams than items or too few for the metrics, adapters of a larger rank than the layers
    they adapt, and clients with nobody to fit the weights of a memory on."""
    if not settings.run.pretrain.has_one_token_ids:
        _check_beams(settings.ranking.num_beams, max(len(domain.item_keys) for domain in domains.values()))
    width = known_width(settings.run.pretrain.backbone)
    if width is not None and settings.run.lora_rank > width:
        raise ValueError(
            f"got lora_rank {settings.run.lora_rank}, expected at most {width}, the width of the backbone: a layer has "
            "no larger rank"
        )
    if settings.run.memory.kind != "none":
        for name, domain in domains.items():
            try:
                calibration(domain, settings.run.memory, settings.run.seed)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def _check_beams(num_beams: int, num_items: int) -> None:
    """``num_items``: of the largest catalogue."""
    if num_beams > num_items:
        raise ValueError(f"got num_beams {num_beams}, expected at most {num_items}, the items of the largest catalogue")
    least = min(max(CUTOFFS), num_items)
    if num_beams < least:
        raise ValueError(f"got num_beams {num_beams}, expected at least {least}: hit@{max(CUTOFFS)} is reported")
