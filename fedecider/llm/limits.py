"""Settings that would fill the machine, told before a run of the LLM track writes anything."""

from __future__ import annotations

from collections.abc import Mapping

from fedecider.data.domain import Domain
from fedecider.llm.setup import Settings, calibration
from idgen.backbone import known_width


def check_limits(settings: Settings, domains: Mapping[str, Domain]) -> None:
    """``ValueError`` for more beams than items, adapters of a larger rank than the layers they adapt, and clients
    with nobody to fit the weights of a memory on."""
    most = max(len(domain.item_keys) for domain in domains.values())
    if settings.ranking.num_beams > most:
        raise ValueError(
            f"got num_beams {settings.ranking.num_beams}, expected at most {most}, the items of the largest catalogue"
        )
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
