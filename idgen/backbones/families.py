"""All families of backbones, and which one a model belongs to."""

from __future__ import annotations

from typing import Any

from idgen.backbones.causal import Causal
from idgen.backbones.family import Family
from idgen.backbones.t5 import T5

FAMILIES: tuple[Family, ...] = (T5(), Causal())


def unwrap(model: Any) -> Any:
    """The model inside a PEFT wrapper; adapters stay active because they sit in its modules."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def family_of(model: Any) -> Family:
    """The family of a model, plain or wrapped by PEFT. ``ValueError`` for any other model."""
    base = unwrap(model)
    for family in FAMILIES:
        if family.fits(base):
            return family
    raise ValueError(
        f"got a {type(base).__name__}; expected a T5ForConditionalGeneration or a decoder-only model such as "
        "LlamaForCausalLM, plain or wrapped by PEFT. Load the backbone with idgen.backbone.load_backbone"
    )


def family_of_config(config: Any) -> Family:
    """The family that the configuration of a saved model belongs to.

    Raises:
        ValueError: it is of none, for instance an encoder without a decoder.
    """
    for family in FAMILIES:
        if config.model_type in family.model_classes:
            return family
    names = config.architectures or []
    if not config.is_encoder_decoder and any(name.endswith("ForCausalLM") for name in names):
        return FAMILIES[-1]
    known = sorted(name for family in FAMILIES for name in family.model_classes if name)
    raise ValueError(
        f"it is a model of type {config.model_type!r} ({', '.join(names) or 'no architecture named'}); expected one of "
        f"{known}, for instance google-t5/t5-small, or a decoder-only language model (...ForCausalLM), for instance "
        "HuggingFaceTB/SmolLM2-135M"
    )
