"""Settings that would fill the machine, told before a run of the LLM track writes anything."""

from __future__ import annotations

from collections.abc import Mapping

from fedecider.data.domain import Domain
from fedecider.evaluation.split import train_part
from fedecider.llm.setup import Settings
from idgen.backbone import known_width


def check_limits(settings: Settings, domains: Mapping[str, Domain]) -> None:
    """``ValueError`` for more beams than items, adapters of a larger rank than the layers they adapt, and clients
    without an event that the weights of a memory could be fitted on."""
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
            if not any(len(set(train_part(sequence))) > 1 for sequence in domain.clients.sequences):
                raise ValueError(
                    f"got no user of {name} with two different train events, expected some for memory.kind "
                    f"{settings.run.memory.kind}: prepare the data with a larger min_length, or set it to none"
                )
