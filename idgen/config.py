"""Settings of prompts, backbone and training. They import no model, so that a command line costs nothing."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fedecider import bounds

Quantize = Literal["none", "nf4", "int8"]


class Words(NamedTuple):
    """How an item's words become its ID text."""

    least: int
    """Of the first ID that is tried; more are added until unique."""
    most: int
    as_written: bool
    """The title's first words as they stand, until no other title starts with them: what a pretrained model knows. Else
    the most telling words, in the order of the text."""


TITLE_WORDS = Words(2, 6, False)
"""For models from scratch. Words by their rarity were measured, and are level; a leading series word does not help."""

TITLES_AS_WRITTEN = Words(5, 12, True)

TemplateSet = Literal["natural", "compact", "history", "list"]

ROW_SETS = ("history", "list")
"""Prompts that a decoder-only model goes on writing: every item is closed, and the next one follows."""


@bounds.dataclass(frozen=True)
class SampleConfig:
    """How users' histories become prompts and targets. The defaults follow IDGenRec (SIGIR 2024).

    Args:
        templates: The texts of prompts: "natural" (ten sentences), "compact" (one prompt of a few words, fast
            on CPUs), or what a decoder-only model goes on writing: "history" (the item IDs and nothing
            else) or "list" (the same below a heading that names the domain). Under the latter two every item of a
            history but the first one is a target, each from those before it, in one pass.
        max_history: The largest number of items of a history; the newest ones are taken.
        max_source_tokens: The largest number of input tokens; the oldest items are left out first.
        pairs: If true, a quarter of the training samples are item pairs, a history of a single item near the target in
            the same training part; other training histories are cut at random, and outside training the
            newest item alone is shown. For small T5 models.
        item_dropout: The probability that an item of a training history is left out (one always stays).
        synthetic_share: The share of all training samples that are synthetic histories, on top of the others. Such a
            one has items whose texts stand near the target's, drawn from the published catalogue alone. Where nobody is
            public, an epoch is one of them for each item, whatever the share.
        dense_head: If true, every item ID ends with a token of its own item: the model writes the words before it, and
            ranks all items at once by these tokens.
    """

    templates: TemplateSet = "natural"
    max_history: bounds.OneOrMore = 20
    max_source_tokens: bounds.OneOrMore = 512
    pairs: bool = False
    item_dropout: bounds.ShareBelow1 = 0.0
    synthetic_share: bounds.ShareBelow1 = 0.0
    dense_head: bool = False

    def __post_init__(self) -> None:
        if self.is_row and self.pairs:
            raise ValueError(
                f"got templates {self.templates} with pairs, expected false: the items come as they came, and every "
                "one of them is a target"
            )

    @property
    def is_row(self) -> bool:
        """Whether prompt and target are one row of closed IDs, of which every item but the first is a target."""
        return self.templates in ROW_SETS

    @property
    def shown_history(self) -> int:
        """Items of a history outside training, at most."""
        return 1 if self.pairs else self.max_history


@bounds.dataclass(frozen=True)
class BackboneConfig:
    """Backbone: which model to start from.

    Args:
        name_or_path: The folder written by `save_pretrained`, or hub name such as google-t5/t5-small or
            HuggingFaceTB/SmolLM2-135M; unset builds a model from scratch, of the kind and sizes below.
        kind: The model from scratch: "t5", or "decoder", a decoder-only Llama that starts as a text-neighbour rule
            (embedding_init text).
        d_model: The width of the hidden states.
        num_layers: The number of layers; of a T5, of the encoder and of the decoder, each.
        embedding_init: The token embeddings that a model from scratch starts with: "random", or "text": vectors of
            the item texts, from a text encoder.
    """

    name_or_path: str | None = None
    kind: Literal["t5", "decoder"] = "t5"
    d_model: bounds.Width = 128
    num_layers: bounds.Depth = 4
    embedding_init: Literal["random", "text"] = "random"

    def __post_init__(self) -> None:
        if self.starts_from_texts and self.embedding_init != "text":
            raise ValueError(
                f"got a decoder from scratch with embedding_init {self.embedding_init}, expected text: it starts as a "
                "text-neighbour rule. Set embedding_init to text, or name_or_path to a pretrained decoder"
            )

    @property
    def starts_from_texts(self) -> bool:
        """Whether it is a decoder from scratch, whose table starts as nothing but vectors of item texts."""
        return self.kind == "decoder" and self.name_or_path is None


@bounds.dataclass(frozen=True)
class TrainConfig:
    """What stage 1, distillation and local training have in common; all of them optimise by AdamW.

    Args:
        learning_rate: The largest learning rate.
        batch_size: The number of samples of one step.
        precision: The number format: fp32, bf16 for bfloat16 autocast with fp32 weights, or auto, what is faster on the
            machine.
    """

    learning_rate: bounds.Positive = 1e-3
    batch_size: bounds.OneOrMore = 64
    precision: bounds.Precision = "fp32"


@bounds.dataclass(frozen=True)
class BackboneTraining(TrainConfig):
    """Stage 1: optimisation of the backbone.

    Args:
        epochs: The number of passes over the data.
        max_steps: The number of optimiser steps; 0 takes as many as epochs says.
        table_lr_multiplier: The factor on the learning rate of the token embeddings. A table of item tokens has to move
            much further than layers that start well. 0 never trains it, the layers alone are: item vectors stay those
            of the texts, and the vector of an item that comes later stands among them as any other.
    """

    epochs: bounds.ZeroOrMore = 1
    max_steps: bounds.ZeroOrMore = 0
    table_lr_multiplier: bounds.NotNegative = 1.0
