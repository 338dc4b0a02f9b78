"""LoRA adapters as trees of tensors: the fusion layer, tied item tables, what is exchanged.

``FusedLinear`` is PEFT's own ``lora.Linear`` with another ``forward``, put in place through PEFT's hook for custom
modules. So the model stays an ordinary ``PeftModel``: merge, disable and save work. And the fusion happens under every
generation loop, which a hook of ``PeftModel.forward`` would miss. A model without a bank of peers is plain LoRA.

What clients learn sits in the vectors of their items. Where the output is tied to the embeddings, an adapter of the
output alone changes when an item is recommended, but not what it says about a user who had it. So the embeddings get
the rows of the same update.

Keys are ``<module path in the base model>.lora_a`` (R, I) and ``.lora_b`` (O, R); stacked trees lead with K clients.

Shape legend: N tokens of a batch, I in features, O out features, R own rank, P peers with a direction that is not 0, S
= P + 1 slots, K clients, D width, V vocabulary. Slot 0 is the client's own; peers follow by client number, so that two
clients that hold the same numbers do the same arithmetic.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from fedecider.federation.method import Tree
from fedecider.federation.streams import stream
from fedecider.federation.wire import rows_with_anything
from fedecider.models.config import ROLES, LoraSettings
from idgen.backbones.families import family_of, unwrap

# The fusion forward: own LoRA pair, frozen peer directions and their weights as one stacked low-rank product.

ADAPTER = "default"
"""Name of the one PEFT adapter that holds the trainable pair."""


class Bank(NamedTuple):
    """What a layer adds to its own pair. Held outside of ``nn.Module`` bookkeeping: neither trained nor saved by it."""

    peer_a: Tensor
    """(P * R, I) frozen."""
    peer_bt: Tensor
    """(P * R, O) frozen, transposed factors."""
    alpha: nn.Parameter
    """(K,) shared by all layers, or (M, K) with one row per layer; fp32; slot order."""
    row: int
    """Row of this layer in an (M, S) alpha."""
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
        weights = self.alpha if self.alpha.dim() == 1 else self.alpha[self.row]
        return weights if self.weighed is None else weights[self.weighed]

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
            return _LowRank.apply(base, x, own_a, own_b, None, None, None)
        if torch.is_grad_enabled():
            self.bank.whole.clear()  # a fused optimiser changes values without a new version
        elif self.by_rows:
            return base + F.linear(x, self.dense_update().to(x.dtype)).to(base.dtype)
        if self.bank.separate:
            return _LowRank.apply(base, x, own_a, own_b, self.bank.peer_a, self.bank.peer_bt, self.bank.weight_S())
        return _LowRank.apply(base, x, *self._mixed_factors(), None, None, None)

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
        """``sum_j alpha_j A_j`` (R, I) and ``sum_j alpha_j B_j`` (O, R), differentiable in the own pair and alpha."""
        assert self.bank is not None
        own_a, own_b = self.own_pair()
        weight_S = self.bank.weight_S()
        peer_a = self.bank.peer_a.view(-1, *own_a.shape)
        peer_bt = self.bank.peer_bt.view(-1, *own_b.t().shape)
        mixed_a = weight_S[0] * own_a + torch.tensordot(weight_S[1:], peer_a, 1)
        mixed_b = weight_S[0] * own_b + torch.tensordot(weight_S[1:], peer_bt, 1).t()
        return mixed_a, mixed_b

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
        return weight_S[0] * own_rows + torch.tensordot(weight_S[1:], self.bank.peer_rows(token_ids, len(own_a)), 1)

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
        own_a, own_b = self.own_pair()
        if self.bank is None:
            return own_a.detach().clone(), own_b.detach().clone()
        if not self.bank.separate:
            return self._mixed_factors()
        weight = self.bank.weight_S().repeat_interleave(own_a.shape[0])
        return torch.cat([own_a, self.bank.peer_a]), torch.cat([own_b, self.bank.peer_bt.t()], 1) * weight

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
        peer_a: Tensor | None,
        peer_bt: Tensor | None,
        weight_S: Tensor | None,
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x_NI = x.reshape(-1, x.shape[-1]).to(base.dtype)
            if peer_a is None or peer_bt is None:
                cat_a, cat_bt = own_a.to(base.dtype), own_b.t().to(base.dtype)
            else:
                cat_a, cat_bt = (
                    torch.cat([own_a, peer_a]).to(base.dtype),
                    torch.cat([own_b.t(), peer_bt]).to(base.dtype),
                )
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
            if ctx.needs_input_grad[6]:
                grad_weight = (grad_scaled.to(ctx.dtype) * hidden.to(ctx.dtype)).sum(0).view(-1, rank).sum(1)
        return grad, grad_x, grad_a, grad_b, None, None, grad_weight


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


def load_fusion(
    model: nn.Module,
    directions: Tree,
    own: int,
    alpha_K: Tensor,
    *,
    train_alpha: bool = True,
    separate: bool = True,
) -> nn.Parameter:
    """Put client ``own``'s fusion into ``model`` and return the shared fusion weights, in slot order.

    ``directions`` holds K rows; row ``own`` becomes the trainable pair, the others the frozen bank. ``alpha_K`` is
    (K,), or (M, K) for one row per layer in sorted order. Weights and bank live on the device of the layers; hand the
    returned parameter to the optimiser beside the LoRA parameters.
    """
    layers = fused_layers(model)
    num_clients = alpha_K.shape[-1]
    device = next(iter(layers.values())).own_pair()[0].device
    alpha = nn.Parameter(slot_order(alpha_K, own).to(device, torch.float32).clone(), requires_grad=train_alpha)
    peers = [client for client in range(num_clients) if client != own]
    for row, (name, layer) in enumerate(layers.items()):
        stacked_a, stacked_b = directions[f"{name}.lora_a"], directions[f"{name}.lora_b"]
        if stacked_a.shape[0] != num_clients:
            raise ValueError(
                f"got {stacked_a.shape[0]} directions for {name} and {num_clients} fusion weights, expected one weight "
                "per direction; rebuild alpha for the clients of this run"
            )
        _write_pair(layer, stacked_a[own], stacked_b[own])
        kept = _nonzero(stacked_b, peers) if separate else peers
        peer_a, peer_b = stacked_a[kept], stacked_b[kept]
        weighed = None if kept == peers else torch.tensor([0, *(1 + peers.index(peer) for peer in kept)], device=device)
        layer.bank = Bank(
            peer_a=peer_a.flatten(0, 1).to(device, torch.float32),
            peer_bt=_peer_outputs(peer_b.to(device, torch.float32), layer.by_rows),
            alpha=alpha,
            row=row,
            separate=separate,
            kept=[],
            whole={},
            weighed=weighed,
        )
    return alpha


def _nonzero(stacked_b: Tensor, peers: list[int]) -> list[int]:
    """Of ``peers`` those whose direction is not 0: of a table, whose rows are not all of other catalogues."""
    trained = rows_with_anything(stacked_b).tolist()
    return [peer for peer in peers if trained[peer]]


def slots_of_rank(rank: int, factor_a: Tensor, factor_b: Tensor) -> tuple[Tensor, Tensor]:
    """A pair of any rank T, (T, I) and (O, T), as S = ceil(T / R) slots of rank R with zeros: (S, R, I), (S, O, R)."""
    missing = -len(factor_a) % rank
    padded_a, padded_bt = (F.pad(factor, (0, 0, 0, missing)) for factor in (factor_a, factor_b.t()))
    return padded_a.unflatten(0, (-1, rank)), padded_bt.unflatten(0, (-1, rank)).transpose(1, 2)


def _peer_outputs(peer_b: Tensor, by_rows: bool) -> Tensor:
    """(P, O, R) -> (P * R, O), with the numbers of an output beside each other where they are read by rows."""
    if by_rows:
        return peer_b.transpose(0, 1).flatten(1).t()
    return peer_b.transpose(1, 2).flatten(0, 1).contiguous()


def load_plain(model: nn.Module, adapters: Tree) -> None:
    """Put one LoRA pair per layer into ``model`` and remove any bank: ``dW = B A``."""
    for name, layer in fused_layers(model).items():
        _write_pair(layer, adapters[f"{name}.lora_a"], adapters[f"{name}.lora_b"])
        layer.bank = None


@torch.no_grad()
def scale_update(model: nn.Module, share: float) -> None:
    """Take the loaded update, peers included, times ``share``: 0 is the frozen base, 1 leaves every bit as it is.

    Weights between a base and what it was fine-tuned to: WiSE-FT (Wortsman et al., 2022), on the factors.
    """
    if share == 1.0:
        return
    alphas: dict[int, tuple[nn.Parameter, float]] = {}
    for layer in fused_layers(model).values():
        if layer.bank is None:
            layer.own_pair()[1].mul_(share)
        else:  # a product of sums has every weight twice
            alphas[id(layer.bank.alpha)] = (layer.bank.alpha, share if layer.bank.separate else share**0.5)
    for alpha, factor in alphas.values():
        alpha.mul_(factor)


@torch.no_grad()
def slot_norms(model: nn.Module, own: int, num_clients: int) -> Tensor:
    """(K,) float64 Frobenius norm, over all layers, of what each client's direction adds to the model as it is loaded
    for client ``own``: its weight times its size, and 0 for a direction of zeros, whatever weight it has."""
    square_S = torch.zeros(num_clients, dtype=torch.float64)
    for layer in fused_layers(model).values():
        factor_a, factor_b = layer.own_pair()
        if layer.bank is None:
            square_S[0] += (factor_b.double().T @ factor_b.double() * (factor_a.double() @ factor_a.double().T)).sum()
            continue
        rank, weight_S = len(factor_a), layer.bank.weight_S().double()
        slot_a = torch.cat([factor_a, layer.bank.peer_a]).double().unflatten(0, (-1, rank))
        slot_b = torch.cat([factor_b.T, layer.bank.peer_bt]).double().unflatten(0, (-1, rank))
        gram_S = (slot_b @ slot_b.mT * (slot_a @ slot_a.mT)).sum((1, 2)).clamp(min=0.0)
        places = torch.arange(num_clients) if layer.bank.weighed is None else layer.bank.weighed.cpu()
        square_S[places] += (weight_S.square() * gram_S).cpu()
    return client_order(square_S, own).sqrt()


def fused_factors(model: nn.Module) -> Tree:
    """What the loaded model adds to its base, as one LoRA pair per layer on CPU, the weights folded into B.

    Its rank is S*r of the layer with most slots.
    """
    pairs = {name: layer.factors() for name, layer in fused_layers(model).items()}
    rank = max(len(factor_a) for factor_a, _ in pairs.values())
    tree: Tree = {}
    for name, (factor_a, factor_b) in pairs.items():
        missing = rank - len(factor_a)
        tree[f"{name}.lora_a"] = F.pad(factor_a.cpu(), (0, 0, 0, missing)).contiguous()
        tree[f"{name}.lora_b"] = F.pad(factor_b.cpu(), (0, missing)).contiguous()
    return tree


def slot_order(alpha_K: Tensor, own: int) -> Tensor:
    """Client order -> slot order (own first) along the last axis."""
    return torch.cat([alpha_K[..., own : own + 1], alpha_K[..., :own], alpha_K[..., own + 1 :]], -1)


def client_order(alpha_S: Tensor, own: int) -> Tensor:
    """Slot order -> client order: the inverse of ``slot_order``."""
    return torch.cat([alpha_S[..., 1 : own + 1], alpha_S[..., :1], alpha_S[..., own + 1 :]], -1)


@torch.no_grad()
def _write_pair(layer: FusedLinear, source_a: Tensor, source_b: Tensor) -> None:
    for parameter, source in zip(layer.own_pair(), (source_a, source_b), strict=True):
        if parameter.shape != source.shape:
            raise ValueError(
                f"got an adapter of shape {tuple(source.shape)}, expected {tuple(parameter.shape)}; "
                "it belongs to another backbone or lora_rank"
            )
        parameter.copy_(source)


# The adapter of a tied table: one pair of factors for both places where the table of the tokens is read.

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


# LoRA adapters as Trees: attach to a backbone, read, write, stack over clients, common initialisation.

FACTORS = ("lora_a", "lora_b")
"""Names of the two factors of a pair."""


class AdapterShape(NamedTuple):
    """Sizes of one adapted layer."""

    rank: int
    in_features: int
    out_features: int
    is_table: bool = False
    """Whether it is the target table, whose inputs are the coordinates of the tokens' vectors."""


Shapes = Mapping[str, AdapterShape]
"""The adapted layers of a client by path."""


def attach_lora(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """Freeze ``model`` and attach LoRA through PEFT: scaling 1, no dropout, no bias, ``FusedLinear`` layers.

    ``lora_alpha`` equals the rank, so that ``dW = B A`` (Hu et al., 2022, with alpha / r = 1). The values are PEFT's
    until ``load_plain`` or ``load_fusion`` writes others.

    Raises:
        ValueError: a target that the model does not have, or the target table where nothing is tied to the output.
    """
    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=layer_names(settings, names),
        task_type=TaskType(family_of(model).task_type),
    )
    config._register_custom_module({nn.Linear: FusedLinear})
    with warnings.catch_warnings():
        # An adapter of a tied output changes how the table is read at the end alone, but for the role table.
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        peft_model = cast(PeftModel, get_peft_model(model, config))
    if "table" in settings.targets:
        tie_adapter(peft_model.get_base_model())
    return peft_model


def layer_names(settings: LoraSettings, names: Collection[str]) -> list[str]:
    """The targets as names of linear layers of a model that has those called ``names``: roles stand for several.

    Raises:
        ValueError: a target is no such layer, or a role that no layer of the model has.
    """
    wanted = [(target, ROLES.get(target, (target,))) for target in settings.targets]
    missing = sorted(target for target, layers in wanted if not set(layers) & set(names))
    if missing:
        raise ValueError(
            f"got LoRA targets {missing}, expected some of the roles {sorted(ROLES)} or of the linear layers "
            f"{sorted(names)}; change lora_targets"
        )
    return sorted({layer for _, layers in wanted for layer in layers if layer in names})


def adapter_shapes(model: nn.Module) -> dict[str, AdapterShape]:
    """Sizes of every adapted layer by path, sorted by path."""
    shapes, has_table = {}, bool(adapted_embeddings(unwrap(model)))
    for name, layer in fused_layers(model).items():
        own_a, own_b = layer.own_pair()
        shapes[name] = AdapterShape(own_a.shape[0], own_a.shape[1], own_b.shape[0], has_table and name == HEAD)
    return shapes


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The factors of the own pairs, A then B, layers sorted by path."""
    return [parameter for layer in fused_layers(model).values() for parameter in layer.own_pair()]


def named_factors(model: nn.Module, factors: Collection[str] = FACTORS) -> dict[str, nn.Parameter]:
    """The factors of all layers under the names they have in a Tree; those not in ``factors`` are frozen and left out.

    A before B, layers sorted by path.
    """
    named = {}
    for path, layer in fused_layers(model).items():
        for factor, parameter in zip(FACTORS, layer.own_pair(), strict=True):
            parameter.requires_grad_(factor in factors)
            if factor in factors:
                named[f"{path}.{factor}"] = parameter
    return named


def initial_adapters(shapes: dict[str, AdapterShape], seed: int) -> Tree:
    """The common start of all clients: A Kaiming-uniform as in PEFT, ``U(-1/sqrt(I), 1/sqrt(I))``, and B = 0.

    Every layer draws from its own stream, so a layer's start does not depend on which other layers are adapted. The A
    of a table holds the first R unit vectors instead: a row of B is then what is added to the first R coordinates of
    a token, the leading principal components where tokens start from texts, and at R = I any table can be reached.
    Random rows in their place mix coordinates, which an optimiser with a rate for every number does not see through.
    """
    tree: Tree = {}
    for name, shape in shapes.items():
        if shape.is_table:
            tree[f"{name}.lora_a"] = torch.eye(shape.rank, shape.in_features)
        else:
            uniform = torch.rand(shape.rank, shape.in_features, generator=stream(seed, "lora_a", name))
            tree[f"{name}.lora_a"] = (2.0 * uniform - 1.0) / math.sqrt(shape.in_features)
        tree[f"{name}.lora_b"] = torch.zeros(shape.out_features, shape.rank)
    return tree


def read_adapters(model: nn.Module) -> Tree:
    """The own pairs of ``model`` as fp32 CPU copies."""
    tree: Tree = {}
    for name, layer in fused_layers(model).items():
        own_a, own_b = layer.own_pair()
        tree[f"{name}.lora_a"] = own_a.detach().float().cpu().clone()
        tree[f"{name}.lora_b"] = own_b.detach().float().cpu().clone()
    return tree


def check_adapters(tree: Tree, shapes: dict[str, AdapterShape], num_clients: int | None = None) -> None:
    """Raise ``ValueError`` unless ``tree`` holds exactly the adapters of ``shapes`` (stacked when a count is given)."""
    lead = () if num_clients is None else (num_clients,)
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        expected[f"{name}.lora_a"] = (*lead, shape.rank, shape.in_features)
        expected[f"{name}.lora_b"] = (*lead, shape.out_features, shape.rank)
    odd = sorted(set(expected) ^ set(tree))
    if odd:
        raise ValueError(
            f"got adapters for other layers than the backbone has (first difference {odd[0]}, {len(odd)} in all), "
            f"expected {len(shapes)} layers; use the backbone that the adapters were trained on"
        )
    for key, sizes in expected.items():
        if tuple(tree[key].shape) != sizes:
            raise ValueError(
                f"got {key} of shape {tuple(tree[key].shape)}, expected {sizes}; the adapters belong to another "
                "backbone, lora_rank or number of clients"
            )


def module_names(tree: Tree) -> list[str]:
    """Paths of the adapted layers in ``tree``, sorted: the order of every sum over layers."""
    return sorted(key[: -len(".lora_a")] for key in tree if key.endswith(".lora_a"))


def factor_scalars(shapes: Shapes) -> dict[str, int]:
    """Scalars of all A and of all B of one client; their sum is P."""
    return {
        "lora_a": sum(shape.rank * shape.in_features for shape in shapes.values()),
        "lora_b": sum(shape.rank * shape.out_features for shape in shapes.values()),
    }


def num_scalars(tree: Tree) -> int:
    """P, the number of scalars of one client's adapters (unstacked)."""
    return sum(tensor.numel() for tensor in tree.values())


def stack_trees(trees: Sequence[Tree]) -> Tree:
    """One tree per client -> one tree whose tensors lead with K."""
    return {key: torch.stack([tree[key] for tree in trees]) for key in trees[0]}


def with_prefix(tree: Tree, prefix: str) -> Tree:
    """Every key gets ``prefix.`` in front."""
    return {f"{prefix}.{key}": tensor for key, tensor in tree.items()}


def without_prefix(tree: Tree, prefix: str) -> Tree:
    """The entries under ``prefix.``, without it."""
    return {key[len(prefix) + 1 :]: tensor for key, tensor in tree.items() if key.startswith(f"{prefix}.")}


def base_hash(model: nn.Module) -> str:
    """SHA-256 over names and values of everything frozen: equal before and after, or training touched the base."""
    digest = hashlib.sha256()
    own = {id(parameter) for parameter in adapter_parameters(model)}
    for name, parameter in sorted(model.named_parameters()):
        if id(parameter) not in own:
            digest.update(name.encode())
            digest.update(_bytes(parameter))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
