"""The T5 family: encoder and decoder with a relative position bias in the first layer of each stack.

The decoder runs here step by step on the model's own sub-modules (so adapters injected into them take part), with
the beams of a user laid along the query axis: keys and values of the encoder output exist once per user and serve
all of the user's beams, and the self-attention cache is a list of tokens of which every beam sees its ancestors only:
nothing is copied for beams that are reordered, and tokens that no beam sees any more are dropped.

Shape legend: B users or samples, S input tokens, K beams, D width, H heads, V vocabulary, T target tokens, C targets
tried for one user, R rows, N decoder tokens kept for a user.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import MT5ForConditionalGeneration, T5ForConditionalGeneration

from idgen.backbones.family import Family, Predictions, TokenBatch
from idgen.trie import IGNORED_LABEL


class DecoderState(NamedTuple):
    """What decoding remembers between two steps."""

    cross_keys: list[tuple[Tensor, Tensor]]  # per layer: keys and values of the encoder output, (B, H, S, D / H)
    cross_bias_B11S: Tensor  # 0 on input tokens, the lowest number on padding
    self_keys: list[tuple[Tensor, Tensor]]  # per layer: keys and values of the decoder tokens, (B, H, N, D / H)
    visible_BKN: Tensor  # bool: decoder token n is an ancestor of beam k
    depth_BN: Tensor  # the step in which token n was read


class T5(Family):
    """T5 and mT5, plain or gated."""

    name = "t5"
    task_type = "SEQ_2_SEQ_LM"
    model_classes = {"t5": T5ForConditionalGeneration, "mt5": MT5ForConditionalGeneration}  # noqa: RUF012
    auto_class = "AutoModelForSeq2SeqLM"
    continues_prompt = False
    stacks = {"encoder": "encoder.block", "decoder": "decoder.block"}  # noqa: RUF012
    kept_whole = "relative_attention_bias"

    def fits(self, model: Any) -> bool:
        return hasattr(model, "lm_head") and hasattr(getattr(model, "decoder", None), "block")

    def predictions(self, model: Any, batch: TokenBatch) -> Predictions:
        """``batch`` may hold ``inputs_embeds`` (B, S, D) in the place of ``input_ids``."""
        label_BT = _labels(batch)
        counts_BT = label_BT != IGNORED_LABEL
        source = {name: batch[name] for name in ("input_ids", "inputs_embeds") if name in batch}
        hidden_BSD = model.encoder(attention_mask=batch["attention_mask"], **source).last_hidden_state
        hidden_BTD = model.decoder(
            input_ids=model._shift_right(label_BT),
            encoder_hidden_states=hidden_BSD,
            encoder_attention_mask=batch["attention_mask"],
            use_cache=False,
        ).last_hidden_state
        return Predictions(hidden_BTD[counts_BT], label_BT[counts_BT])

    def counting(self, batch: TokenBatch) -> dict[str, Tensor]:
        return {"encoder": batch["attention_mask"] != 0, "decoder": _labels(batch) != IGNORED_LABEL}

    def plain_inputs(self, batch: TokenBatch) -> TokenBatch:
        return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}

    def start(self, model: Any, input_ids_BS: Tensor, attention_mask_BS: Tensor) -> DecoderState:
        """Run the encoder once and prepare decoding."""
        hidden_BSD = model.encoder(input_ids=input_ids_BS, attention_mask=attention_mask_BS).last_hidden_state
        cross_keys = []
        for block in model.decoder.block:
            attention = block.layer[1].EncDecAttention
            cross_keys.append((_heads(attention, attention.k(hidden_BSD)), _heads(attention, attention.v(hidden_BSD))))
        lowest = torch.finfo(torch.float32).min
        bias_B11S = torch.zeros(attention_mask_BS.shape, device=hidden_BSD.device)
        bias_B11S = bias_B11S.masked_fill(attention_mask_BS == 0, lowest)[:, None, None, :]
        num_users = len(input_ids_BS)
        return DecoderState(
            cross_keys=cross_keys,
            cross_bias_B11S=bias_B11S,
            self_keys=[],
            visible_BKN=torch.zeros(num_users, 1, 0, dtype=torch.bool, device=hidden_BSD.device),
            depth_BN=torch.zeros(num_users, 0, dtype=torch.long, device=hidden_BSD.device),
        )

    def step(
        self, model: Any, state: DecoderState, token_BK: Tensor, parent_BK: Tensor, number: int
    ) -> tuple[Tensor, DecoderState]:
        num_users, num_beams = token_BK.shape
        state = _of_beams(state, parent_BK)
        itself_BKK = torch.eye(num_beams, dtype=torch.bool, device=token_BK.device).expand(num_users, -1, -1)
        visible_BKN = torch.cat([state.visible_BKN, itself_BKK], 2)
        depth_BN = torch.cat([state.depth_BN, torch.full_like(token_BK, number)], 1)

        blocks = model.decoder.block
        # One relative position bias, held by the first layer; the row of the newest query, by the depth of the key.
        bias_HT = blocks[0].layer[0].SelfAttention.compute_bias(number + 1, number + 1)[0, :, -1, :]
        lowest = torch.finfo(torch.float32).min
        self_bias = bias_HT[:, depth_BN].float().transpose(0, 1)[:, :, None].masked_fill(~visible_BKN[:, None], lowest)

        hidden_BKD = model.decoder.embed_tokens(token_BK)
        self_keys = []
        for layer, block in enumerate(blocks):
            attention, normed = block.layer[0].SelfAttention, block.layer[0].layer_norm(hidden_BKD)
            keys, values = _heads(attention, attention.k(normed)), _heads(attention, attention.v(normed))
            if state.self_keys:
                old_keys, old_values = state.self_keys[layer]
                keys, values = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
            self_keys.append((keys, values))
            hidden_BKD = hidden_BKD + _attend(attention, normed, keys, values, self_bias)
            attention, normed = block.layer[1].EncDecAttention, block.layer[1].layer_norm(hidden_BKD)
            hidden_BKD = hidden_BKD + _attend(attention, normed, *state.cross_keys[layer], state.cross_bias_B11S)
            hidden_BKD = block.layer[2](hidden_BKD)
        hidden_BKD = model.decoder.final_layer_norm(hidden_BKD)
        return hidden_BKD, state._replace(self_keys=self_keys, visible_BKN=visible_BKN, depth_BN=depth_BN)

    def start_token(self, model: Any) -> int:
        return model.config.decoder_start_token_id

    def token_logits(
        self, model: Any, hidden_RD: Tensor, token_C: Tensor | None = None, rows_CD: Tensor | None = None
    ) -> Tensor:
        """Logits in fp32; T5 with tied embeddings divides the decoder output by sqrt(D) first."""
        hidden_RD = hidden_RD * self.output_scale(model)
        return self.read_out(model.lm_head, hidden_RD, token_C, rows_CD)

    def output_scale(self, model: Any) -> float:
        scaled = getattr(model.config, "scale_decoder_outputs", model.config.tie_word_embeddings)
        return model.config.d_model**-0.5 if scaled else 1.0

    def depths(self, config: Any) -> dict[str, int]:
        return {"encoder": config.num_layers, "decoder": config.num_decoder_layers or config.num_layers}

    def with_layers(self, config: Any, layers: dict[str, list[int]]) -> Any:
        changed = copy.deepcopy(config)
        changed.num_layers, changed.num_decoder_layers = len(layers["encoder"]), len(layers["decoder"])
        return changed

    def dropout(self, config: Any) -> float:
        return config.dropout_rate

    def width(self, config: Any) -> int:
        return config.d_model


def _labels(batch: TokenBatch) -> Tensor:
    if "labels" not in batch:
        raise ValueError(
            "got rows of which every position is a target, expected prompts with one target each: a T5 reads the "
            "prompt in its encoder. Set pretrain.samples.templates to natural or compact, or take a decoder-only model"
        )
    return batch["labels"]


def _of_beams(state: DecoderState, parent_BK: Tensor) -> DecoderState:
    """The state whose beams are the children of ``parent_BK``, without tokens that are an ancestor of none of them."""
    num_kept = state.depth_BN.shape[1]
    visible_BKN = state.visible_BKN.gather(1, parent_BK[..., None].expand(-1, -1, num_kept))
    seen_BN = visible_BKN.any(1)
    num_seen = int(seen_BN.sum(1).max()) if num_kept else 0
    if num_seen == num_kept:
        return state._replace(visible_BKN=visible_BKN)
    # What another user sees more of stays as padding, which no beam sees.
    kept_BN = torch.sort(seen_BN, dim=1, descending=True, stable=True).indices[:, :num_seen]
    num_users, num_heads = state.self_keys[0][0].shape[:2]
    first_BH = num_kept * torch.arange(num_users * num_heads, device=kept_BN.device).view(num_users, num_heads)
    place_R = (first_BH[..., None] + kept_BN[:, None]).flatten()

    def kept(keys: Tensor) -> Tensor:
        return keys.flatten(0, 2)[place_R].view(num_users, num_heads, num_seen, -1)

    return state._replace(
        self_keys=[(kept(keys), kept(values)) for keys, values in state.self_keys],
        visible_BKN=visible_BKN.gather(2, kept_BN[:, None].expand(-1, parent_BK.shape[1], -1)),
        depth_BN=state.depth_BN.gather(1, kept_BN),
    )


def _heads(attention: Any, projected_BTD: Tensor) -> Tensor:
    """(B, T, heads * width) -> (B, heads, T, width)."""
    return projected_BTD.unflatten(2, (-1, attention.key_value_proj_dim)).transpose(1, 2)


def _attend(attention: Any, normed_BKD: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """T5 attention (no 1 / sqrt(width)) of the beams over keys; softmax in fp32."""
    weight = (_heads(attention, attention.q(normed_BKD)) @ keys.transpose(2, 3)).float() + bias
    context = torch.softmax(weight, -1).to(values.dtype) @ values
    return attention.o(context.transpose(1, 2).flatten(2))
