"""The backbone: from a local folder, from the hub, or from scratch; what can be told of it before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
)

from idgen.backbones import families
from idgen.backbones.small_decoder import build_small_decoder
from idgen.backbones.small_t5 import build_small_t5
from idgen.config import BackboneConfig, Quantize
from idgen.quantize import keep_trainable, loading_options
from idgen.tasks import Task
from idgen.text_vectors import token_vectors

HEADS = {"t5": 4, "decoder": 2}
"""Attention heads of a model from scratch, which share its width."""
FEED_FORWARD = 4
"""Width of its feed-forward layers, in widths of the model."""
DROPOUT = 0.0
"""Of a T5 from scratch: 0.1 was measured, and hurts (a ranking of .128 instead of .176)."""
SMALL_T5: dict[str, Any] = {
    "d_model": 4,
    "d_kv": 2,
    "d_ff": 4,
    "num_heads": 2,
    "num_layers": 1,
    "num_decoder_layers": 1,
}


def known_width(config: BackboneConfig) -> int | None:
    """The width of the backbone, on one side of each of its layers; None where only loading it would tell."""
    if config.name_or_path is None:
        return config.d_model
    if not Path(config.name_or_path).is_dir():  # a name of the hub, which is not asked here
        return None
    try:
        found = families.known_config(config.name_or_path)
        return families.family_of_config(found).width(found)
    except ValueError:  # load_backbone says what is wrong
        return None


def build_backbone(
    config: BackboneConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    tasks: Sequence[Task] = (),
    item_vectors: Mapping[str, Tensor] | None = None,
    freeze_table: bool = False,
) -> Any:
    """A backbone in fp32 whose vocabulary is that of ``tokenizer``; in evaluation mode.

    A pre-trained model with a longer embedding table (T5 pads it) is cut to the tokenizer's length. ``seed`` draws
    the weights of a model from scratch; the global random state is left as it was. ``tasks``: public training
    tasks, read unless ``embedding_init`` is "random"; ``item_vectors``: task name -> (I, d_model) vectors of the item
    texts, for "text". ``freeze_table``: the table of a decoder from scratch is never trained.
    Errors: ``ValueError`` when the model cannot be loaded, is of another family, or does not fit the tokenizer.
    """
    source_tokens = max((task.config.max_source_tokens for task in tasks), default=1)
    id_tokens = max((task.trie.max_length for task in tasks), default=1)
    if config.name_or_path is not None:
        families.check_context(
            config.name_or_path, families.known_config(config.name_or_path), source_tokens, id_tokens
        )
        return load_backbone(config.name_or_path, tokenizer)
    vector_VD = _start_vectors(config, tokenizer, tasks, item_vectors)
    if config.kind == "decoder":
        assert vector_VD is not None  # checked by the settings
        decoder = build_small_decoder(
            vector_VD,
            num_layers=config.num_layers,
            num_heads=HEADS["decoder"],
            d_ff=FEED_FORWARD * config.d_model,
            max_tokens=source_tokens + id_tokens - 1,  # the last token of an ID is written and never read
            padding=int(tokenizer.pad_token_id),  # type: ignore[arg-type]
            seed=seed,
        )
        decoder.get_input_embeddings().requires_grad_(not freeze_table)
        return decoder
    sizes = _scratch_config(config, tokenizer)
    if vector_VD is not None:
        lengths = [len(tokens) for task in tasks for tokens in task.item_ids.token_ids]
        return build_small_t5(vector_VD, sizes, 1.0 + sum(lengths) / len(lengths), seed)  # a separator behind each ID
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(sizes)
    return model.eval()


def _start_vectors(
    config: BackboneConfig,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    item_vectors: Mapping[str, Tensor] | None,
) -> Tensor | None:
    """(V, d_model) rows of length 1, or 0 where a token keeps what it has; None for a random start."""
    if config.embedding_init == "random":
        return None
    if not tasks:
        raise ValueError(f"embedding_init is {config.embedding_init!r} without tasks; expected the public tasks")
    if not item_vectors:
        raise ValueError("embedding_init is 'text' but there are no item vectors; expected those of the item texts")
    return token_vectors(item_vectors, {task.name: task.item_ids.token_ids for task in tasks}, len(tokenizer))


def load_backbone(
    name_or_path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    quantize: Quantize = "none",
    device: torch.device | str = "cpu",
) -> Any:
    """A pre-trained model of a family that we know; see `build_backbone`.

    ``quantize``: the format of its linear layers but the output; a quantised model is frozen and stays on ``device``.
    """
    name, quantized = str(name_or_path), loading_options(quantize, device)
    config = check_backbone(name, tokenizer)
    with families.loading(name):
        classes = families.family_of_config(config).model_classes
        model_class = classes[config.model_type if config.model_type in classes else ""]
        model, info = model_class.from_pretrained(
            name,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
            **quantized,
        )
        if info["missing_keys"]:  # they would be drawn at random
            raise ValueError(f"no weights for {min(info['missing_keys'])}")
    cut_table(model, len(tokenizer))
    keep_trainable(model)
    return model.eval()


def cut_table(model: PreTrainedModel, num_tokens: int) -> None:
    """Keep the first ``num_tokens`` rows of the embeddings and of the output.

    A config may call weights tied that are not: that of every T5 1.1, flan-t5 and mT5 does. Then transformers keeps the
    two as they were saved, but resizing would put the embeddings into the place of the output.
    """
    if model.config.vocab_size == num_tokens:
        return
    head = model.get_output_embeddings()
    own_VD = None if head.weight is model.get_input_embeddings().weight else head.weight.detach()[:num_tokens].clone()
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    if own_VD is not None:
        model.get_output_embeddings().weight = nn.Parameter(own_VD)


def check_backbone(
    name_or_path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None, source_tokens: int = 1
) -> Any:
    """See, without reading the weights, that a backbone can be loaded and used; its configuration.

    Its family is known, its files are whole and belong to its config.json; with ``tokenizer``, that the two fit; with
    ``source_tokens``, the length of prompts, that it reads so much.
    Errors: ``ValueError`` as `load_backbone`, for all that can be told before the model is there.
    """
    name = str(name_or_path)
    config = families.known_config(name)
    families.check_parts(name, config)
    families.check_context(name, config, source_tokens)
    if Path(name).is_dir():
        families.check_weights(Path(name))
        families.check_table(Path(name), config)
    if tokenizer is not None:
        families.check_tokenizer(name, config, tokenizer)
    return config


def linear_layers(config: BackboneConfig) -> set[str]:
    """Names of the linear layers that a backbone will have, by their ends: what adapters can be attached to.

    For a name of the hub, which is not asked, those of every kind of model from scratch.
    """
    names: set[str] = set()
    for kind in _kinds(config):
        modules = families.empty_model(kind).named_modules()
        names |= {name.rsplit(".", 1)[-1] for name, module in modules if isinstance(module, nn.Linear)}
    return names


def has_tied_output(config: BackboneConfig) -> bool:
    """Whether a backbone's output reads the table of its embeddings, as far as its configuration tells."""
    return all(kind.tie_word_embeddings for kind in _kinds(config))


def _kinds(config: BackboneConfig) -> list[Any]:
    """Configurations that have the layers of the backbone; for a name of the hub, all that it may be."""
    t5 = [T5Config(vocab_size=4, feed_forward_proj=kind, **SMALL_T5) for kind in ("relu", "gated-gelu")]
    llama = LlamaConfig(vocab_size=4, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2)
    llama.tie_word_embeddings = True
    llama.architectures = ["LlamaForCausalLM"]
    if config.name_or_path is None:
        return [llama] if config.kind == "decoder" else t5[:1]
    if Path(config.name_or_path).is_dir():
        return [families.known_config(config.name_or_path)]
    return [*t5, llama]


def _scratch_config(config: BackboneConfig, tokenizer: PreTrainedTokenizerBase) -> T5Config:
    start: dict[str, Any] = {"decoder_start_token_id": tokenizer.pad_token_id}
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=config.d_model,
        d_kv=config.d_model // HEADS["t5"],
        d_ff=FEED_FORWARD * config.d_model,
        num_layers=config.num_layers,
        num_decoder_layers=config.num_layers,
        num_heads=HEADS["t5"],
        dropout_rate=DROPOUT,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **start,
    )
