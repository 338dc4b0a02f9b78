"""The adapter of a tied table: one pair of factors for both places where the table of the tokens is read.

What clients learn sits in the vectors of their items. Where the output is tied to the embeddings, an adapter of the
output alone changes when an item is recommended, but not what it says about a user who had it. So the embeddings get
the rows of the same update.

Shape legend: K clients, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedecider.models.fused_linear import FusedLinear

HEAD = "lm_head"


class ReadsTable:
    """A forward hook of embeddings: ``e(x) + dW[x]`` with ``dW = sum_j alpha_j B_j A_j`` (V, D) of the output layer.

    An object and no closure, so that a deep copy of the model reads the copy's adapter.
    """

    def __init__(self, head: FusedLinear) -> None:
        self.head = head

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if self.head.disable_adapters or self.head.merged:  # a merged table already stands in the tied weights
            return None
        return output + self.head.update_rows(inputs[0]).to(output.dtype)


def tie_adapter(base: Any) -> None:
    """Let the adapter of ``base.lm_head`` change the embeddings that share its weights.

    Raises:
        ValueError: no embeddings do.
    """
    for table in tied_embeddings(base).values():
        table.register_forward_hook(ReadsTable(base.lm_head))
    base.lm_head.by_rows = True


def adapted_embeddings(base: Any) -> list[str]:
    """Paths of the embeddings that the adapter of the output changes too."""
    return [
        name
        for name, module in base.named_modules()
        if any(isinstance(hook, ReadsTable) for hook in module._forward_hooks.values())
    ]


def tied_embeddings(base: Any) -> dict[str, nn.Embedding]:
    """The embeddings that read the weights of ``base.lm_head``, by path.

    Raises:
        ValueError: there are none.
    """
    weight = base.lm_head.base_layer.weight if isinstance(base.lm_head, FusedLinear) else base.lm_head.weight
    found = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, nn.Embedding) and module.weight is weight and name != "shared"  # T5 never calls it
    }
    if not found:
        raise ValueError(
            f"got lora_targets table for a {type(base).__name__} whose output is not tied to its embeddings, expected "
            "tie_word_embeddings. Take the target output instead"
        )
    return found
