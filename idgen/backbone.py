"""The backbone: a T5 from a local folder, from the hub, or from scratch, and its training on public data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    MT5ForConditionalGeneration,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
)

from fedecider.bounds import Depth, ShareBelow1, Width, check
from idgen.samples import Task, num_batches, train_batches
from idgen.training import BackboneTraining, OnStep, epoch_generator, train_model
from idgen.word_vectors import WordVectorConfig, start_from_word_vectors, word_vectors

MODEL_CLASSES: dict[str, Any] = {"t5": T5ForConditionalGeneration, "mt5": MT5ForConditionalGeneration}
"""Families whose relative position bias sits in the first layer of each stack: decoding and halving rely on it."""


@dataclass(frozen=True)
class BackboneConfig:
    """Backbone: which T5 to start from.

    Args:
        name_or_path: The folder written by `save_pretrained`, or hub name such as google-t5/t5-small or
            google/flan-t5-small; unset builds a model from scratch with the sizes below.
        d_model: The width of the hidden states.
        num_layers: The number of layers of the encoder and of the decoder, each.
        num_heads: The number of attention heads.
        d_kv: The width of one head.
        d_ff: The width of the feed-forward layers.
        dropout: The dropout of a model from scratch.
        feed_forward: The activation of the feed-forward layers.
        embedding_init: The token embeddings that a model from scratch starts with: "random", or "cooccurrence": vectors
            from which tokens stand in item IDs that public users have near each other.
        word_vectors: The settings of "cooccurrence".
    """

    name_or_path: str | None = None
    d_model: Width = 128
    num_layers: Depth = 4
    num_heads: Depth = 4
    d_kv: Width = 32
    d_ff: Width = 512
    dropout: ShareBelow1 = 0.1
    feed_forward: Literal["relu", "gated-gelu"] = "relu"
    embedding_init: Literal["random", "cooccurrence"] = "random"
    word_vectors: WordVectorConfig = field(default_factory=WordVectorConfig)

    def __post_init__(self) -> None:
        check(self)


def known_width(config: BackboneConfig) -> int | None:
    """``d_model`` of the backbone, on one side of each of its layers; None where only loading it would tell."""
    if config.name_or_path is None:
        return config.d_model
    if not Path(config.name_or_path).is_dir():  # a name of the hub, which is not asked here
        return None
    try:
        return getattr(AutoConfig.from_pretrained(config.name_or_path), "d_model", None)
    except (OSError, ValueError):  # load_backbone says what is wrong
        return None


def build_backbone(
    config: BackboneConfig, tokenizer: PreTrainedTokenizerBase, seed: int = 0, tasks: Sequence[Task] = ()
) -> T5ForConditionalGeneration:
    """A T5 in fp32 whose vocabulary is that of ``tokenizer``; in evaluation mode.

    A pre-trained model with a longer embedding table (T5 pads it) is cut to the tokenizer's length. ``seed`` draws
    the weights of a model from scratch; the global random state is left as it was. ``tasks``: public training
    tasks, read when ``embedding_init`` is "cooccurrence".
    Errors: ``ValueError`` when the model cannot be loaded, is of another family, or does not fit the tokenizer.
    """
    if config.name_or_path is not None:
        return load_backbone(config.name_or_path, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(_scratch_config(config, tokenizer))
    if config.embedding_init == "cooccurrence":
        if not tasks:
            raise ValueError("embedding_init is 'cooccurrence' but there are no tasks; expected the public tasks")
        token_ids = [task.item_ids.token_ids for task in tasks]
        sequences = [task.training_sequences for task in tasks]
        vector_VD = word_vectors(sequences, token_ids, len(tokenizer), config.d_model, config.word_vectors, seed)
        start_from_word_vectors(model, vector_VD)
    return model.eval()


def load_backbone(name_or_path: str | Path, tokenizer: PreTrainedTokenizerBase) -> T5ForConditionalGeneration:
    """A pre-trained model of the T5 family; see `build_backbone`."""
    name = str(name_or_path)
    check_backbone(name)
    with _loading(name):
        model, info = MODEL_CLASSES[_known_config(name).model_type].from_pretrained(
            name, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        if info["missing_keys"]:  # they would be drawn at random
            raise ValueError(f"no weights for {min(info['missing_keys'])}")
    rows = model.get_input_embeddings().num_embeddings
    if rows < len(tokenizer):
        raise ValueError(
            f"the backbone {name!r} has {rows} token embeddings but the tokenizer {len(tokenizer)} tokens; expected a "
            "tokenizer that belongs to the backbone. Load the tokenizer from the same place"
        )
    if rows > len(tokenizer):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model.eval()


def check_backbone(name_or_path: str | Path) -> None:
    """See, without reading the weights, that a backbone can be loaded: its family, and that its files are whole.

    Errors: ``ValueError`` as `load_backbone`, for all that can be told before the model is there.
    """
    name = str(name_or_path)
    with _loading(name):
        _known_config(name)
        if Path(name).is_dir():
            check_weights(Path(name))


def check_weights(folder: Path) -> None:
    """Refuse a model folder without safetensors files, or with one that is cut off. ``ValueError`` names the file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no model.safetensors in {folder}; expected a folder that save_pretrained wrote")
    for path in files:
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}); copy it again") from error


def linear_layers(config: BackboneConfig) -> set[str]:
    """Names of the linear layers that a backbone will have, by their ends: what adapters can be attached to.

    For a name of the hub, which is not asked, those of every kind of T5.
    """
    kinds: list[str] = [config.feed_forward]
    if config.name_or_path is not None:
        kinds = ["relu", "gated-gelu"]
        if Path(config.name_or_path).is_dir():
            with _loading(config.name_or_path):
                kinds = [_known_config(config.name_or_path).feed_forward_proj]
    small: dict[str, Any] = {
        "d_model": 4,
        "d_kv": 2,
        "d_ff": 4,
        "num_heads": 2,
        "num_layers": 1,
        "num_decoder_layers": 1,
    }
    names: set[str] = set()
    for kind in kinds:
        with torch.device("meta"):
            model = T5ForConditionalGeneration(T5Config(vocab_size=4, feed_forward_proj=kind, **small))
        names |= {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return names


def _known_config(name: str) -> Any:
    found = AutoConfig.from_pretrained(name)
    if found.model_type not in MODEL_CLASSES:
        raise ValueError(
            f"it is a model of type {found.model_type!r}; expected one of {sorted(MODEL_CLASSES)}, "
            "for instance google-t5/t5-small"
        )
    return found


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Whatever a missing or damaged model folder leads to, as a ``ValueError`` that names it."""
    try:
        yield
    except Exception as error:  # transformers lets errors of json, its configs, torch and safetensors through
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"cannot load a backbone from {name!r} ({first_line}); expected a folder with config.json and "
            "model.safetensors, or a hub name that can be reached. Leave name_or_path unset to train from scratch"
        ) from error


def train_backbone(
    model: T5ForConditionalGeneration,
    tasks: Task | Sequence[Task],
    config: BackboneTraining,
    seed: int,
    device: torch.device | str = "cpu",
    on_step: OnStep | None = None,
    validate: Callable[[], float] | None = None,
) -> list[dict[str, Any]]:
    """Train all weights on the mixed training samples of ``tasks``, in place; logs as in `train_model`.

    FeDecider (WWW 2026), appendix B.2: the base model is fine-tuned on data of users outside all clients.
    """
    return train_model(
        model,
        lambda epoch: train_batches(tasks, config.batch_size, epoch_generator(seed, epoch)),
        num_batches(tasks, config.batch_size),
        config,
        device,
        seed=seed,
        on_step=on_step,
        validate=validate,
    )


def _scratch_config(config: BackboneConfig, tokenizer: PreTrainedTokenizerBase) -> T5Config:
    start: dict[str, Any] = {"decoder_start_token_id": tokenizer.pad_token_id}
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=config.d_model,
        d_kv=config.d_kv,
        d_ff=config.d_ff,
        num_layers=config.num_layers,
        num_decoder_layers=config.num_layers,
        num_heads=config.num_heads,
        dropout_rate=config.dropout,
        feed_forward_proj=config.feed_forward,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **start,
    )
