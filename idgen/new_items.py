"""Items that come after the training: a token and a row of the table for each, and nothing else is changed.

Shape legend: N new tokens, D width, V tokens, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from idgen.backbones.families import unwrap


@torch.no_grad()
def append_rows(model: Any, row_ND: Tensor) -> None:
    """Give a model with a tied table N more tokens, in place; ``row_ND`` are their rows.

    ``model``: plain, or with an adapter as PEFT loads it. An adapter of the output or of the embeddings gets rows of
    zeros for them: W' = [W; rows], B' = [B; 0], so that every other logit stays what it was.

    Raises:
        ValueError: the output has a table of its own, or the rows have another width.
    """
    adapted = model.get_input_embeddings(), model.get_output_embeddings()
    plain: list[Any] = [layer.get_base_layer() if isinstance(layer, LoraLayer) else layer for layer in adapted]
    table, output = plain
    if output.weight is not table.weight or row_ND.shape[1] != table.weight.shape[1]:
        raise ValueError(
            f"got rows of width {row_ND.shape[1]} for a {type(unwrap(model)).__name__} with a table of width "
            f"{table.weight.shape[1]}, expected the same width and an output that is tied to the table. Take a model "
            "from scratch"
        )
    before_VD = table.weight
    weight_VD = nn.Parameter(torch.cat([before_VD, row_ND.to(before_VD)]), before_VD.requires_grad)
    for module in unwrap(model).modules():  # a T5 reads its table in the encoder and in the decoder
        if isinstance(module, nn.Embedding) and module.weight is before_VD:
            module.weight, module.num_embeddings = weight_VD, len(weight_VD)
    output.weight, output.out_features = weight_VD, len(weight_VD)
    unwrap(model).config.vocab_size = len(weight_VD)
    for layer in adapted:
        if isinstance(layer, LoraLayer):
            for name, factor_RV in layer.lora_embedding_A.items():
                layer.lora_embedding_A[name] = _longer(factor_RV, len(row_ND), 1)
            pairs: dict[str, Any] = dict(layer.lora_B.items())
            for pair in pairs.values():
                pair.weight, pair.out_features = _longer(pair.weight, len(row_ND), 0), len(weight_VD)


def _longer(factor: Any, num: int, dim: int) -> nn.Parameter:
    shape = list(factor.shape)
    shape[dim] = num
    return nn.Parameter(torch.cat([factor, factor.new_zeros(shape)], dim), factor.requires_grad)
