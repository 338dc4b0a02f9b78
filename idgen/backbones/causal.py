"""Decoder-only backbones (Llama, Qwen, SmolLM, ...): everything goes through the model's own ``forward``.

So every architecture whose cache and 4-dimensional attention masks are those of transformers works without a line of
its own.

Shape legend: B users or samples, S prompt tokens, K beams, N beam tokens read so far, D width, T target tokens, W
tokens of a row, C targets tried for one user.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import LlamaMLP

from idgen.backbones.family import Family, Predictions, TokenBatch
from idgen.trie import IGNORED_LABEL


class CausalState(NamedTuple):
    """What decoding keeps: the prompt once per user, and every token any beam has read."""

    cache: DynamicCache
    """Keys and values of S prompt tokens and N beam tokens."""
    prompt_BS: Tensor
    """Bool: no padding."""
    visible_BKN: Tensor
    """Bool: which of the beam tokens are ancestors of each beam of the step before."""
    first_BD: Tensor
    """Hidden state of the last prompt token: it predicts the first token of an ID."""


class Causal(Family):
    """Models of transformers that are ``<Name>ForCausalLM`` with ``model.layers`` and ``lm_head``, as Llama's is."""

    name = "causal"
    task_type = "CAUSAL_LM"
    model_classes = {"": AutoModelForCausalLM}  # noqa: RUF012
    auto_class = "AutoModelForCausalLM"
    continues_prompt = True
    stacks = {"decoder": "model.layers"}  # noqa: RUF012
    kept_whole = "\0"  # nothing

    def fits(self, model: Any) -> bool:
        return hasattr(model, "lm_head") and hasattr(getattr(model, "model", None), "layers")

    def predictions(self, model: Any, batch: TokenBatch) -> Predictions:
        row = rows(batch)
        hidden_BWD = model.model(**self.plain_inputs(batch), use_cache=False).last_hidden_state
        counts_BW = row["labels"] != IGNORED_LABEL
        return Predictions(hidden_BWD[:, :-1][counts_BW[:, 1:]], row["labels"][counts_BW])

    def counting(self, batch: TokenBatch) -> dict[str, Tensor]:
        return {"decoder": rows(batch)["attention_mask"] != 0}

    def plain_inputs(self, batch: TokenBatch) -> TokenBatch:
        row = rows(batch)
        return {name: row[name] for name in ("input_ids", "attention_mask")}

    def start(self, model: Any, input_ids_BS: Tensor, attention_mask_BS: Tensor) -> CausalState:
        """What all prompts of the batch begin with, such as a heading, is read for one of them."""
        # Without the config every layer keeps all keys, also those behind a sliding window, which no prompt exceeds.
        cache, head = DynamicCache(), _common_head(input_ids_BS, attention_mask_BS)
        if head:
            model.model(input_ids=input_ids_BS[:1, :head], past_key_values=cache, use_cache=True)
            cache.batch_repeat_interleave(len(input_ids_BS))
        prompt_BS = attention_mask_BS != 0
        last_B = prompt_BS.sum(1) - 1
        user_B = torch.arange(len(last_B), device=last_B.device)
        with _ends_alone(model, last_B - head):
            hidden_BSD = model.model(
                input_ids=input_ids_BS[:, head:],
                attention_mask=attention_mask_BS,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        nothing_BKN = torch.zeros(len(last_B), 1, 0, dtype=torch.bool, device=last_B.device)
        return CausalState(cache, prompt_BS, nothing_BKN, hidden_BSD[user_B, last_B - head])

    def step(
        self, model: Any, state: CausalState, token_BK: Tensor, parent_BK: Tensor, number: int
    ) -> tuple[Tensor, CausalState]:
        """Step 0 reads nothing: the end of the prompt has been read.

        The K beams stand side by side as K more tokens of one sequence; a mask lets each see the prompt, its own
        ancestors and itself. Nothing is copied or reordered.
        """
        if number == 0:
            return state.first_BD[:, None].expand(-1, token_BK.shape[1], -1), state
        num_users, num_beams = token_BK.shape
        num_read = state.visible_BKN.shape[2]
        visible_BKN = state.visible_BKN.gather(1, parent_BK[..., None].expand(-1, -1, num_read))
        itself_BKK = torch.eye(num_beams, dtype=torch.bool, device=token_BK.device).expand(num_users, -1, -1)
        visible_BKN = torch.cat([visible_BKN, itself_BKK], 2)
        seen_BKW = torch.cat([state.prompt_BS[:, None].expand(-1, num_beams, -1), visible_BKN], 2)
        dtype = model.get_input_embeddings().weight.dtype
        mask_B1KW = torch.zeros(seen_BKW.shape, dtype=dtype, device=token_BK.device)
        mask_B1KW = mask_B1KW.masked_fill(~seen_BKW, torch.finfo(dtype).min)[:, None]
        place_BK = (state.prompt_BS.sum(1, keepdim=True) + number - 1).expand(-1, num_beams)
        hidden_BKD = model.model(
            input_ids=token_BK,
            attention_mask=mask_B1KW,
            position_ids=place_BK,
            past_key_values=state.cache,
            use_cache=True,
        ).last_hidden_state
        return hidden_BKD, state._replace(visible_BKN=visible_BKN)

    def start_token(self, model: Any) -> int:
        return 0  # step 0 reads none

    def token_logits(
        self, model: Any, hidden_RD: Tensor, token_C: Tensor | None = None, rows_CD: Tensor | None = None
    ) -> Tensor:
        return self.read_out(model.lm_head, hidden_RD, token_C, rows_CD)

    def depths(self, config: Any) -> dict[str, int]:
        return {"decoder": config.num_hidden_layers}

    def with_layers(self, config: Any, layers: dict[str, list[int]]) -> Any:
        changed = copy.deepcopy(config)
        changed.num_hidden_layers = len(layers["decoder"])
        if getattr(changed, "layer_types", None) is not None:  # of attention, for instance with a sliding window
            changed.layer_types = [config.layer_types[number] for number in layers["decoder"]]
        return changed

    def dropout(self, config: Any) -> float:
        return getattr(config, "attention_dropout", 0.0)

    def width(self, config: Any) -> int:
        return config.hidden_size


@contextmanager
def _ends_alone(model: Any, last_B: Tensor) -> Iterator[None]:
    """Inside, the feed-forward part of the last layer is worked out at the places ``last_B`` alone.

    Nothing reads its other outputs: keys and values come from before it. It is most of the cost of a short model.
    """
    layer = model.model.layers[-1].mlp
    if type(layer) is not LlamaMLP:  # of others it is not known that places do not meet there
        yield
        return
    plain = layer.forward

    def at_ends(hidden_BSD: Tensor) -> Tensor:
        user_B = torch.arange(len(last_B), device=last_B.device)
        found_BD = plain(hidden_BSD[user_B, last_B])
        return torch.zeros_like(hidden_BSD, dtype=found_BD.dtype).index_put((user_B, last_B), found_BD)

    layer.forward = at_ends  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward


def _common_head(input_ids_BS: Tensor, attention_mask_BS: Tensor) -> int:
    """Tokens with which every prompt begins, but for the last of the shortest one, which predicts what follows it."""
    if len(input_ids_BS) == 1:
        return 0
    same_S = (input_ids_BS == input_ids_BS[:1]).all(0) & (attention_mask_BS != 0).all(0)
    return min(int(same_S.cumprod(0).sum()), int(attention_mask_BS.sum(1).min()) - 1)


def rows(batch: TokenBatch) -> TokenBatch:
    """``input_ids``, ``attention_mask``, ``labels`` (B, W) in Hugging Face's order: prompts joined with their targets.

    The label of a position is its own token, -100 where it is no target, and is predicted by the position before.
    Rows are padded on the right.
    """
    if "row_labels" in batch:
        return {**{name: batch[name] for name in batch if name != "row_labels"}, "labels": batch["row_labels"]}
    prompt_BS, target_BT = batch["input_ids"], batch["labels"]
    is_target_BT = target_BT != IGNORED_LABEL
    given_BW = torch.cat([prompt_BS, target_BT.clamp(min=0)], 1)
    kept_BW = torch.cat([batch["attention_mask"] != 0, is_target_BT], 1)
    label_BW = torch.cat([torch.full_like(prompt_BS, IGNORED_LABEL), target_BT], 1)
    order_BW = torch.sort((~kept_BW).long(), dim=1, stable=True).indices[:, : int(kept_BW.sum(1).max())]
    kept_BW = kept_BW.gather(1, order_BW)
    return {
        "input_ids": given_BW.gather(1, order_BW).masked_fill(~kept_BW, 0),
        "attention_mask": kept_BW.long(),
        "labels": label_BW.gather(1, order_BW).masked_fill(~kept_BW, IGNORED_LABEL),
    }
