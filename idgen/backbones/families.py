"""All families of backbones, and which one a model belongs to.

Everything here raises ``ValueError`` with what was got, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedTokenizerBase

from fedecider.bounds import is_out_of_memory
from idgen.backbones.causal import Causal
from idgen.backbones.family import Family
from idgen.backbones.t5 import T5

# All families of backbones, and which one a model belongs to.

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


# What can be told of a pretrained model before its weights are read: from its files, their headers and its
# config.

CHANGES_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""What some decoder-only models (Gemma 2, Granite, Cohere) do to logits behind the output layer."""
TABLES = ("shared.weight", "embed_tokens.weight")
"""How the names of token embeddings end in the files of T5 and of decoder-only models."""


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Whatever a missing or damaged model folder leads to, as a ``ValueError`` that names it."""
    try:
        yield
    except Exception as error:  # transformers lets errors of json, its configs, torch and safetensors through
        if is_out_of_memory(error):  # the folder is not to blame
            raise
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"cannot load a backbone from {name!r} ({first_line}); expected a folder with config.json and "
            "model.safetensors, or a hub name that can be reached. Leave name_or_path unset to train from scratch"
        ) from error


def known_config(name: str) -> Any:
    """The configuration of a model with plain weights, of a family that we know; nothing else of it is read."""
    _refuse_gguf(Path(name))
    with loading(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    try:
        family_of_config(config)
    except ValueError as error:
        raise ValueError(f"cannot use {name!r} as a backbone: {error}") from error
    _refuse_packed(name, config)
    return config


def empty_model(config: Any) -> Any:
    """A model of one layer a stack and without weights, to see what its parts are called."""
    family = family_of_config(config)
    single = family.with_layers(config, {stack: [0] for stack in family.stacks})
    classes = family.model_classes
    with torch.device("meta"):
        return classes[single.model_type](single) if single.model_type in classes else classes[""].from_config(single)


def check_parts(name: str, config: Any) -> None:
    """Refuse a decoder-only model whose layers and output are not where those of Llama are."""
    with loading(name):
        model = empty_model(config)
    if not family_of_config(config).fits(model):
        raise ValueError(
            f"cannot use {name!r} as a backbone: got a {type(model).__name__}, expected layers in model.layers and the "
            "output in lm_head, as those of Llama, Qwen, Mistral and SmolLM are. Choose such a model"
        )
    changed = [field for field in CHANGES_LOGITS if getattr(config, field, None) not in (None, 0, 1)]
    if changed:
        raise ValueError(
            f"cannot use {name!r} as a backbone: got {changed[0]} {getattr(config, changed[0])} in config.json, "
            "expected a model whose logits are what lm_head returns, as those of Llama, Qwen, Mistral and SmolLM. "
            "Choose such a model"
        )


def check_weights(folder: Path) -> None:
    """Refuse a model folder without safetensors files, or with one that is cut off; the message names the file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no model.safetensors in {folder}; expected a folder that save_pretrained wrote")
    for path in files:
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}); copy it again") from error


def check_table(folder: Path, config: Any) -> None:
    """Refuse a vocab_size in config.json that is not the number of token embeddings in the files of the weights."""
    rows = _table_rows(folder)
    if rows is not None and rows != config.vocab_size:
        raise ValueError(
            f"got vocab_size {config.vocab_size} in {folder / 'config.json'}, but the weights beside it have {rows} "
            f"token embeddings: the vocabulary was resized. Set vocab_size to {rows}, or save model and config together"
        )


def check_tokenizer(name: str, config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with more tokens than embeddings, or with so few that it belongs to another model.

    Models have some more embeddings than tokens, up to a multiple of 128; those are cut off when they are loaded.
    """
    rows = config.vocab_size
    if not rows <= 2 * len(tokenizer) <= 2 * rows:
        raise ValueError(
            f"the backbone {name!r} has {rows} token embeddings but the tokenizer {len(tokenizer)} tokens; expected a "
            "tokenizer that belongs to the backbone. Load the tokenizer from the same place"
        )


def check_context(name: str, config: Any, source_tokens: int, id_tokens: int = 1) -> None:
    """Refuse prompts of ``source_tokens`` that leave no room for the longest item ID in a decoder-only model's context.

    The last token of an ID is written and never read. A sliding window of some layers counts as the context. A T5 has
    relative positions, hence no such limit.
    """
    fields = ["max_position_embeddings"]
    if "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"]):
        fields.append("sliding_window")
    limits = {field: int(getattr(config, field)) for field in fields if getattr(config, field, None)}
    if not family_of_config(config).continues_prompt or not limits:
        return
    field, context = min(limits.items(), key=itemgetter(1))
    room = context - id_tokens + 1
    if source_tokens > room:
        raise ValueError(
            f"got max_source_tokens {source_tokens}, expected at most {max(room, 1)}: prompt and item ID are one row, "
            f"the longest ID takes at least {id_tokens}, and the backbone {name!r} reads {context} tokens "
            f"({field}). Lower pretrain.samples.max_source_tokens"
        )


def _refuse_gguf(path: Path) -> None:
    """transformers reads a .gguf only when it is asked to, and else says that there is no config.json."""
    single = path.suffix == ".gguf" and path.is_file()
    files = [path] if single else sorted(path.glob("*.gguf"))
    if files and (single or not list(path.glob("*.safetensors"))):
        source = f"from_pretrained({str(files[0].parent)!r}, gguf_file={files[0].name!r}"
        raise ValueError(
            f"got the packed weights {files[0]}, expected a folder with config.json and model.safetensors. Convert it "
            f"once with transformers and gguf: AutoModelForCausalLM.{source}, quantization_config="
            f"GgufConfig(dequantize=True)).save_pretrained('plain'), AutoTokenizer.{source}).save_pretrained('plain')"
        )


def _refuse_packed(name: str, config: Any) -> None:
    packed = getattr(config, "quantization_config", None)
    if packed is not None:
        raise ValueError(
            f"got quantization_config ({packed.get('quant_method')}) in config.json of the backbone {name!r}, expected "
            "none: its weights would be packed while they are loaded, and could not be trained or saved. Remove "
            "quantization_config where the weights beside it are plain (converted from a .gguf), else take the model "
            "from which they were packed"
        )


def _table_rows(folder: Path) -> int | None:
    """Rows of the token embeddings by the headers of the files; None where they have another name."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dictionary)
                if name.endswith(TABLES):
                    return int(file.get_slice(name).get_shape()[0])
    return None
