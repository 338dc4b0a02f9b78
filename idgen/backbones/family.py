"""What a family of backbones has to offer to everything above it; :mod:`idgen.backbones.families` knows all families.

Shape legend: B users or samples, S prompt tokens, K beams, D width, T target tokens, R target tokens that count, C
targets tried for one user, V vocabulary, W tokens of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from idgen.trie import IGNORED_LABEL

TokenBatch = dict[str, Tensor]
"""``input_ids`` and ``attention_mask`` (B, S) with ``labels`` (B, T): prompts and targets, each on its own; or, for
decoder-only models, with ``row_labels`` (B, S): rows of which many positions are targets, in Hugging Face's order.
With ``catalogue`` (C,), rising, the loss compares a target with these tokens alone; with ``log_weights`` (B, C) beside
it they are a sample of those that it is compared with (`idgen.candidates.with_candidates`). With ``node``, a node
for each label, it is compared with the tokens that may stand in its place in a trie (`idgen.trie.Parents`)."""

SHARED = ("catalogue", "first_child", "child_token")
"""What is one for all rows of a batch."""


def labels_of(batch: TokenBatch) -> Tensor:
    """The labels of a batch of either kind; -100 where there is no target."""
    return batch["row_labels"] if "row_labels" in batch else batch["labels"]


def num_targets(batch: TokenBatch) -> int:
    """What the loss of a batch is a mean of: its target items where labels have nodes, its target tokens else."""
    counts = labels_of(batch) != IGNORED_LABEL
    if "node" in batch:
        counts &= batch["node"] < batch["first_child"][1]
    return int(counts.sum())


def every_nth_row(batch: TokenBatch, first: int, step: int) -> TokenBatch:
    """A share of the rows of a batch; possibly none."""
    return {name: tensor if name in SHARED else tensor[first::step] for name, tensor in batch.items()}


def num_samples_of(batch: TokenBatch) -> int:
    """Samples of a batch."""
    return len(labels_of(batch))


class Predictions(NamedTuple):
    """The targets of a batch and the hidden states that predict them, ready for ``token_logits``."""

    hidden_RD: Tensor
    target_R: Tensor


class Family(ABC):
    """One kind of architecture. ``model`` is always unwrapped (`idgen.backbones.families.unwrap`)."""

    name: ClassVar[str]
    task_type: ClassVar[str]
    """PEFT's name of the task."""
    model_classes: ClassVar[dict[str, Any]]
    """Model type of transformers -> class to load it with; ``""`` stands for every other type that fits."""
    auto_class: ClassVar[str]
    """The class of transformers with which anyone loads an exported model."""
    continues_prompt: ClassVar[bool]
    """Whether ``generate`` returns the prompt with the ID behind it, else the ID behind one start token."""
    stacks: ClassVar[dict[str, str]]
    """Name -> path of each stack of layers in the model."""
    kept_whole: ClassVar[str]
    """Parameters with this in their name stand in the first layer for all: neither trained nor averaged in halving."""

    @abstractmethod
    def fits(self, model: Any) -> bool:
        """Whether this code knows the parts of ``model``."""

    @abstractmethod
    def predictions(self, model: Any, batch: TokenBatch) -> Predictions:
        """Run the model on a training batch; targets in the order of the batch's labels, row after row."""

    @abstractmethod
    def counting(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Stack -> bool: the positions of its layers' outputs that are no padding."""

    @abstractmethod
    def plain_inputs(self, batch: TokenBatch) -> TokenBatch:
        """What ``model(**inputs).logits`` takes so that its logits cover the targets of a batch."""

    @abstractmethod
    def start(self, model: Any, input_ids_BS: Tensor, attention_mask_BS: Tensor) -> Any:
        """Read the prompts, padded on the right, once; what it returns is handed to ``step``."""

    @abstractmethod
    def step(self, model: Any, state: Any, token_BK: Tensor, parent_BK: Tensor, number: int) -> tuple[Tensor, Any]:
        """Let every beam read one token: (hidden_BKD ready for ``token_logits``, the new state).

        ``parent_BK`` says which beam of the step before each beam continues. In step 0 the token is ``start_token``
        and the parents are zeros.
        """

    @abstractmethod
    def start_token(self, model: Any) -> int:
        """The token of step 0."""

    @abstractmethod
    def token_logits(
        self, model: Any, hidden_RD: Tensor, token_C: Tensor | None = None, rows_CD: Tensor | None = None
    ) -> Tensor:
        """Logits (R, V) in fp32; with ``token_C`` those of these tokens alone, (R, C).

        ``rows_CD``: `output_rows` of these tokens, where they are asked for often with the same weights.
        """

    @abstractmethod
    def depths(self, config: Any) -> dict[str, int]:
        """Layers of each stack."""

    @abstractmethod
    def with_layers(self, config: Any, layers: dict[str, list[int]]) -> Any:
        """A copy of ``config`` for a model whose layers are those of these numbers, stack by stack."""

    @abstractmethod
    def dropout(self, config: Any) -> float:
        """The dropout that the model trains with."""

    @abstractmethod
    def width(self, config: Any) -> int:
        """D."""

    def output_scale(self, model: Any) -> float:
        """What the output is multiplied with before the output layer reads it."""
        return 1.0

    @staticmethod
    def read_out(head: Any, hidden_RD: Tensor, token_C: Tensor | None, rows_CD: Tensor | None) -> Tensor:
        """What the output layer gives for all tokens or for some."""
        if token_C is None:
            return head(hidden_RD).float()
        return F.linear(hidden_RD, output_rows(head, token_C) if rows_CD is None else rows_CD).float()

    def layers(self, model: Any) -> dict[str, nn.ModuleList]:
        """Stack -> its layers."""
        return {name: model.get_submodule(path) for name, path in self.stacks.items()}


def output_rows(head: Any, token_C: Tensor) -> Tensor:
    """(C, D) rows of an output layer: one that trains has ``output_rows`` of its own, and those of one that peft has
    loaded are worked out here."""
    if hasattr(head, "output_rows"):
        return head.output_rows(token_C)
    if isinstance(head, LoraLayer):
        return _lora_rows(head, token_C)
    return F.embedding(token_C, head.weight, sparse=getattr(head, "sparse", False))


def _lora_rows(head: Any, token_C: Tensor) -> Tensor:
    """(C, D) rows ``W[token_C] + s B[token_C] A`` of a linear layer with adapters of peft; s is their scaling."""
    rows_CD = F.embedding(token_C, head.get_base_layer().weight)
    if head.disable_adapters or head.merged:
        return rows_CD
    for name in head.active_adapters:
        if name in head.lora_A:
            update_CD = F.embedding(token_C, head.lora_B[name].weight) @ head.lora_A[name].weight
            rows_CD = rows_CD + head.scaling[name] * update_CD.to(rows_CD.dtype)
    return rows_CD


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off and no gradients inside; each module's mode is as before afterwards."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
