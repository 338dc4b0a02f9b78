"""PEFT's LoRA layer with a bank of frozen peers: own pair, others' directions and weights as one low-rank product.

``FusedLinear`` is PEFT's own ``lora.Linear`` with another ``forward``, put in place through PEFT's hook for custom
modules. So the model stays an ordinary ``PeftModel``: merge, disable and save work. And the fusion happens under every
generation loop, which a hook of ``PeftModel.forward`` would miss. A layer without a bank is plain LoRA.

Shape legend: N tokens of a batch, I in features, O out features, R own rank, P peers with a direction that is not 0, S
= P + 1 slots, K clients, C outputs that are read. Slot 0 is the client's own; peers follow by client number, so that
two clients that hold the same numbers do the same arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ADAPTER = "default"
"""Name of the one PEFT adapter that holds the trainable pair."""


class Bank(NamedTuple):
    """What a layer adds to its own pair. Held outside of ``nn.Module`` bookkeeping: neither trained nor saved by it."""

    peer_a: Tensor
    """(P * R, I) frozen."""
    peer_bt: Tensor
    """(P * R, O) frozen, transposed factors."""
    alpha: nn.Parameter
    """(K,) shared by all layers; fp32; slot order."""
    separate: bool
    """True: sum of products (the method). False: product of sums (the ablation w/o Sep)."""
    kept: list[tuple[Tensor, Tensor, Tensor]]
    """At most one: outputs that are asked for again and again (C,), the peers' rows there (P, C, I), and the place of
    each output among them (O,), -1 for none (`peer_rows`)."""
    whole: dict[tuple[int, ...], Tensor]
    """At most one: the dense update, by versions of what it was made of (`FusedLinear.dense_update`)."""
    weighed: Tensor | None = None
    """Which of the weights belong to the slots, where not all do: directions that are 0 in this layer have none."""

    def weight_S(self) -> Tensor:
        return self.alpha if self.weighed is None else self.alpha[self.weighed]

    @torch.no_grad()
    def peer_rows(self, token_ids: Tensor, rank: int) -> Tensor:
        """(P, *, I) rows ``B_j[token_ids] A_j`` of every peer's direction."""
        if not self.kept:
            return self._products(token_ids, rank)
        kept_C, row_PCI, place_O = self.kept[0]
        if kept_C is token_ids:
            return row_PCI
        place = place_O[token_ids]
        rows, missing = row_PCI[:, place.clamp(min=0)], place < 0
        if bool(missing.any()):
            rows[:, missing] = self._products(token_ids[missing], rank).to(rows.dtype)
        return rows

    def _products(self, token_ids: Tensor, rank: int) -> Tensor:
        row_b = F.embedding(token_ids, self.peer_bt.t()).unflatten(-1, (-1, rank))
        return torch.einsum("...pr,pri->p...i", row_b, self.peer_a.unflatten(0, (-1, rank)))

    def keep(self, token_ids: Tensor, rank: int) -> None:
        """Have :meth:`peer_rows` of exactly this tensor at hand: a catalogue is the same in every step, and most items
        of histories are in it. For one dimension of distinct outputs."""
        if not (self.kept and self.kept[0][0] is token_ids):
            place_O = torch.full((self.peer_bt.shape[1],), -1, device=token_ids.device)
            place_O[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
            self.kept[:] = [(token_ids, self.peer_rows(token_ids, rank), place_O)]


Pair = tuple[Tensor, Tensor]
"""A and B of a layer; of a bank A (P * R, I) and B transposed (P * R, O)."""


def mixed_pair(own: Pair, bank: Pair, weight_S: Tensor) -> Pair:
    """``sum_j alpha_j A_j`` (R, I) and ``sum_j alpha_j B_j`` (O, R): the product of sums."""
    peer_a, peer_bt = bank[0].view(-1, *own[0].shape), bank[1].view(-1, *own[1].t().shape)
    mixed_a = weight_S[0] * own[0] + torch.tensordot(weight_S[1:], peer_a, 1)
    mixed_b = weight_S[0] * own[1] + torch.tensordot(weight_S[1:], peer_bt, 1).t()
    return mixed_a, mixed_b


def fused_pair(own: Pair, bank: Pair, weight_S: Tensor, separate: bool) -> Pair:
    """All slots as one LoRA pair with the weights folded into B: (S*R, I) and (O, S*R), or (R, I) and (O, R)."""
    if not separate:
        return mixed_pair(own, bank, weight_S)
    weight = weight_S.repeat_interleave(len(own[0]))
    return torch.cat([own[0], bank[0]]), torch.cat([own[1], bank[1].t()], 1) * weight


class FusedLinear(LoraLinear):
    """``y = W0 x + B_cat (a * (A_cat x))``: PEFT's LoRA layer with an optional bank of frozen peers.

    ``a`` repeats each fusion weight R times. Only the own pair and the weights get gradients; peers cost two wider
    matrix products and no gradient of their own. Equation: FeDecider, section 3.1, with
    ``dW_i = sum_j alpha_ij B_j A_j``. Differs from the paper: nothing.
    """

    bank: Bank | None = None
    by_rows = False
    """Whether rows of the update are asked for (`update_rows`), as by embeddings that are tied to it."""
    sparse = False
    """Whether the gradient of B is that of the rows that were asked for alone, as of ``nn.Embedding``."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., I) -> (..., O); the frozen layer alone where adapters are switched off."""
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        base = self.base_layer(x, *args, **kwargs)
        if self.quantized:
            base = base.clone()  # it may be a view made inside bitsandbytes, which nobody may write to
        own_a, own_b = self.own_pair()
        if self.bank is None:
            return _LowRank.apply(base, x, own_a, own_b, None, None)
        if torch.is_grad_enabled():
            self.bank.whole.clear()  # a fused optimiser changes values without a new version
        elif self.by_rows:
            return base + F.linear(x, self.dense_update().to(x.dtype)).to(base.dtype)
        if self.bank.separate:
            bank = (self.bank.peer_a, self.bank.peer_bt)
            return _LowRank.apply(base, x, own_a, own_b, self.bank.weight_S(), bank)
        return _LowRank.apply(base, x, *self._mixed_factors(), None, None)

    @property
    def quantized(self) -> bool:
        """Whether the frozen weights are codes of 4 or 8 bits (`idgen.precision`)."""
        return not cast(Tensor, self.get_base_layer().weight).is_floating_point()

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """PEFT's merge; not into quantised weights, which would round the update away."""
        if self.quantized:
            raise ValueError(
                "got quantised weights to merge an adapter into, expected full precision: merge the exported adapter "
                "into the unquantised backbone"
            )
        super().merge(*args, **kwargs)

    def own_pair(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The trainable (R, I) and (O, R) factors."""
        return cast(nn.Parameter, self.lora_A[ADAPTER].weight), cast(nn.Parameter, self.lora_B[ADAPTER].weight)

    def _mixed_factors(self) -> tuple[Tensor, Tensor]:
        """`mixed_pair` of what is held, differentiable in the own pair and alpha."""
        assert self.bank is not None
        return mixed_pair(self.own_pair(), (self.bank.peer_a, self.bank.peer_bt), self.bank.weight_S())

    @torch.no_grad()
    def dense_update(self) -> Tensor:
        """(O, I) of all slots, made once for what is loaded: ranking asks a large table for it in every step."""
        assert self.bank is not None
        versions = tuple(tensor._version for tensor in (*self.own_pair(), self.bank.alpha))
        if versions not in self.bank.whole:
            self.bank.whole.clear()
            with torch.autocast(self.bank.alpha.device.type, enabled=False):  # kept whatever asks for it next
                self.bank.whole[versions] = self.get_delta_weight(ADAPTER)
        return self.bank.whole[versions]

    def update_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the update at some outputs, ``dW[token_ids]`` (*, I), differentiable in the own pair and alpha."""
        own_a, own_b = self.own_pair()
        if self.bank is None:
            return F.embedding(token_ids, own_b, sparse=self.sparse) @ own_a
        if not self.bank.separate:
            mixed_a, mixed_b = self._mixed_factors()
            return F.embedding(token_ids, mixed_b) @ mixed_a
        weight_S = self.bank.weight_S()
        own_rows = F.embedding(token_ids, own_b, sparse=self.sparse) @ own_a
        peer_rows = self.bank.peer_rows(token_ids, len(own_a)).to(weight_S.dtype)  # under autocast they may be bf16
        return weight_S[0] * own_rows + torch.tensordot(weight_S[1:], peer_rows, 1)

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Rows ``W0[token_ids] + dW[token_ids]`` (C, I) of the layer: what some outputs are the products with."""
        rows = F.embedding(token_ids, cast(Tensor, self.get_base_layer().weight))
        if self.disable_adapters or self.merged:
            return rows
        if self.bank is not None and self.bank.separate:
            self.bank.keep(token_ids, len(self.own_pair()[0]))
        return rows + self.update_rows(token_ids).to(rows.dtype)

    @torch.no_grad()
    def factors(self) -> tuple[Tensor, Tensor]:
        """Everything the layer adds, as one LoRA pair with the weights folded into B: (S*R, I) and (O, S*R)."""
        if self.bank is None:
            own_a, own_b = self.own_pair()
            return own_a.detach().clone(), own_b.detach().clone()
        bank = self.bank
        return fused_pair(self.own_pair(), (bank.peer_a, bank.peer_bt), bank.weight_S(), bank.separate)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """(O, I) dense update, peers included; PEFT's merge uses it."""
        factor_a, factor_b = self.factors()
        return factor_b @ factor_a


class _LowRank(torch.autograd.Function):
    """``base + B_cat (a * (A_cat x))`` with gradients for base, x, the own pair and the weights only.

    Written by hand for three savings over a graph of small operations: the result is accumulated into ``base``
    in place, what is kept for the backward pass is (N, S*R) and not (N, O), and peers get no weight gradients.
    Products run in the dtype of ``base`` (bf16 under autocast); parameters, weights and their gradients stay fp32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        base: Tensor,
        x: Tensor,
        own_a: Tensor,
        own_b: Tensor,
        weight_S: Tensor | None,
        bank: Pair | None,
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x_NI = x.reshape(-1, x.shape[-1]).to(base.dtype)
            cat_a, cat_bt = own_a, own_b.t()
            if bank is not None:
                cat_a, cat_bt = torch.cat([cat_a, bank[0]]), torch.cat([cat_bt, bank[1]])
            cat_a, cat_bt = cat_a.to(base.dtype), cat_bt.to(base.dtype)
            hidden = x_NI @ cat_a.t()
            scale = None if weight_S is None else weight_S.repeat_interleave(own_a.shape[0])
            scaled = hidden if scale is None else (hidden * scale).to(base.dtype)
            base.view(-1, base.shape[-1]).addmm_(scaled, cat_bt)
        ctx.save_for_backward(x_NI, hidden, cat_a, cat_bt, scale)
        ctx.x_shape, ctx.x_dtype, ctx.dtype, ctx.rank = x.shape, x.dtype, own_a.dtype, own_a.shape[0]
        ctx.mark_dirty(base)
        return base

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_NI, hidden, cat_a, cat_bt, scale = ctx.saved_tensors
        rank = ctx.rank
        with torch.autocast(grad.device.type, enabled=False):
            grad_NO = grad.reshape(-1, grad.shape[-1])
            grad_scaled = grad_NO @ cat_bt.t()
            grad_hidden = grad_scaled if scale is None else (grad_scaled * scale).to(cat_a.dtype)
            grad_x = grad_a = grad_b = grad_weight = None
            if ctx.needs_input_grad[1]:
                grad_x = (grad_hidden @ cat_a).to(ctx.x_dtype).view(ctx.x_shape)
            if ctx.needs_input_grad[2]:
                grad_a = (grad_hidden[:, :rank].t() @ x_NI).to(ctx.dtype)
            if ctx.needs_input_grad[3]:
                grad_b = (grad_NO.t() @ hidden[:, :rank]).to(ctx.dtype)
                grad_b = grad_b if scale is None else grad_b * scale[0]
            if ctx.needs_input_grad[4]:
                grad_weight = (grad_scaled.to(ctx.dtype) * hidden.to(ctx.dtype)).sum(0).view(-1, rank).sum(1)
        return grad, grad_x, grad_a, grad_b, grad_weight, None


def fused_layers(model: nn.Module) -> dict[str, FusedLinear]:
    """The adapted layers of ``model`` by their path in the base model, sorted by path.

    Raises:
        ValueError: the model has none.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    layers = {name: module for name, module in base.named_modules() if isinstance(module, FusedLinear)}
    if not layers:
        raise ValueError(
            f"got a {type(model).__name__} without adapters, expected one from attach_lora; call that first"
        )
    return dict(sorted(layers.items()))
