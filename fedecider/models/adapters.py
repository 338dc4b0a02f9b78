"""Adapters of a client as values: trees of LoRA factors, fusions with others' directions, and how a model holds them.

Keys of a tree are ``<module path in the base model>.lora_a`` (R, I) and ``.lora_b`` (O, R); stacked trees lead with K
clients.

Shape legend: I in features, O out features, R own rank, P peers whose direction is not 0, S = P + 1 slots, K clients,
M adapted layers (sorted by path), T any rank.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from fedecider.federation.method import Tree
from fedecider.federation.streams import stream
from fedecider.federation.wire import rows_with_anything
from fedecider.models.config import ROLES, LoraSettings
from fedecider.models.fused_linear import Bank, FusedLinear, fused_layers, fused_pair
from fedecider.models.tied_table import HEAD, adapted_embeddings, tie_adapter
from idgen.backbones.families import family_of, unwrap

FACTORS = ("lora_a", "lora_b")
"""Names of the two factors of a pair."""


class Peers(NamedTuple):
    """Frozen directions beside a client's own pair, and the fusion weights of all."""

    directions: Tree
    """K rows; the own pair stands in the place of row ``own``."""
    own: int
    alpha: Tensor
    """(K,) in client order."""
    learns: bool = True
    """Whether the weights are trained beside the pair."""
    separate: bool = True
    """True: sum of products (the method). False: product of sums (the ablation w/o Sep)."""

    @property
    def others(self) -> list[int]:
        """The clients of the directions, in slot order."""
        return [client for client in range(len(self.alpha)) if client != self.own]

    def used(self, name: str) -> list[int]:
        """Those that have a slot in a layer: not where a direction is 0, as of a table whose rows are all of other
        catalogues."""
        if not self.separate:
            return self.others
        trained = rows_with_anything(self.directions[f"{name}.lora_b"]).tolist()
        return [client for client in self.others if trained[client]]


class Adapters(NamedTuple):
    """What a client's model adds to the frozen base: ``dW = B A``, or ``sum_j alpha_j B_j A_j`` with peers."""

    pair: Tree
    """The own, trainable pair of every layer."""
    peers: Peers | None = None

    def scaled(self, scale: float) -> Adapters:
        """The update times ``scale``: 0 is the frozen base, 1 leaves every bit as it is.

        Weights between a base and what it was fine-tuned to: WiSE-FT (Wortsman et al., 2022), on the factors.
        """
        if scale == 1.0:
            return self
        if self.peers is None:
            scaled = {key: tensor * scale if key.endswith(FACTORS[1]) else tensor for key, tensor in self.pair.items()}
            return Adapters(scaled)
        factor = scale if self.peers.separate else scale**0.5  # a product of sums has every weight twice
        return self._replace(peers=self.peers._replace(alpha=self.peers.alpha.float() * factor))

    @torch.no_grad()
    def factors(self) -> Tree:
        """The same as one pair per layer, the weights folded into B. Its rank is S*R of the layer with most slots."""
        if self.peers is None:
            return {key: tensor.float().clone() for key, tensor in self.pair.items()}
        weight_S, pairs = slot_order(self.peers.alpha, self.peers.own).float(), {}
        for name in module_names(self.pair):
            key_a, key_b = f"{name}.lora_a", f"{name}.lora_b"
            used = self.peers.used(name)
            slots = torch.tensor([0, *(1 + self.peers.others.index(client) for client in used)])
            bank_a = self.peers.directions[key_a][used].flatten(0, 1)
            bank_bt = self.peers.directions[key_b][used].transpose(1, 2).flatten(0, 1)
            pairs[name] = fused_pair(
                (self.pair[key_a], self.pair[key_b]), (bank_a, bank_bt), weight_S[slots], self.peers.separate
            )
        rank = max(len(factor_a) for factor_a, _ in pairs.values())
        tree: Tree = {}
        for name, (factor_a, factor_b) in pairs.items():
            missing = rank - len(factor_a)
            tree[f"{name}.lora_a"] = F.pad(factor_a, (0, 0, 0, missing)).contiguous()
            tree[f"{name}.lora_b"] = F.pad(factor_b, (0, missing)).contiguous()
        return tree

    def slot_norms(self) -> Tensor:
        """(K,) float64 Frobenius norm, over all layers, of what each client's direction adds: its weight times its
        size, and 0 for a direction of zeros, whatever weight it has."""
        assert self.peers is not None, "adapters with peers"
        square_K = torch.zeros(len(self.peers.alpha), dtype=torch.float64)
        for name in module_names(self.pair):
            stack_a, stack_b = (self.peers.directions[f"{name}.{factor}"].double().clone() for factor in FACTORS)
            stack_a[self.peers.own], stack_b[self.peers.own] = (self.pair[f"{name}.{factor}"] for factor in FACTORS)
            gram_K = (stack_b.mT @ stack_b * (stack_a @ stack_a.mT)).sum((1, 2)).clamp(min=0.0)
            square_K += self.peers.alpha.double().square() * gram_K
        return square_K.sqrt()


def fusion(directions: Tree, own: int, alpha: Tensor, *, learns: bool = True, separate: bool = True) -> Adapters:
    """Client ``own``'s fusion of K directions, its own of which is trainable. ``alpha`` as in `Peers`.

    Raises:
        ValueError: not as many directions as weights.
    """
    for name in module_names(directions):
        num_directions, num_weights = len(directions[f"{name}.lora_a"]), len(alpha)
        if num_directions != num_weights:
            raise ValueError(
                f"got {num_directions} directions for {name} and {num_weights} fusion weights, expected one weight "
                "per direction; rebuild alpha for the clients of this run"
            )
    pair = {key: tensor[own] for key, tensor in directions.items()}
    return Adapters(pair, Peers(directions, own, alpha, learns, separate))


def put(model: nn.Module, adapters: Adapters) -> nn.Parameter | None:
    """Write ``adapters`` into the layers of ``model``; returns the fusion weights in slot order, where there are some.

    Weights and bank live on the device of the layers. `fedecider.models.client_model.Base.holding` calls it for every
    use of a model: what a model held before must not matter to anybody.
    """
    layers, peers, alpha = fused_layers(model), adapters.peers, None
    device = next(iter(layers.values())).own_pair()[0].device
    if peers is not None:
        weight_S = slot_order(peers.alpha, peers.own).to(device, torch.float32).clone()
        alpha = nn.Parameter(weight_S, requires_grad=peers.learns)
    for name, layer in layers.items():
        _write_pair(layer, adapters.pair[f"{name}.lora_a"], adapters.pair[f"{name}.lora_b"])
        layer.bank = None
        if peers is not None and alpha is not None:
            used = peers.used(name)
            places = [0, *(1 + peers.others.index(client) for client in used)]
            layer.bank = Bank(
                peer_a=peers.directions[f"{name}.lora_a"][used].flatten(0, 1).to(device, torch.float32),
                peer_bt=_peer_outputs(
                    peers.directions[f"{name}.lora_b"][used].to(device, torch.float32), layer.by_rows
                ),
                alpha=alpha,
                separate=peers.separate,
                kept=[],
                whole={},
                weighed=None if used == peers.others else torch.tensor(places, device=device),
            )
    return alpha


def _peer_outputs(peer_b: Tensor, by_rows: bool) -> Tensor:
    """(P, O, R) -> (P * R, O), with the numbers of an output beside each other where they are read by rows."""
    if by_rows:
        return peer_b.transpose(0, 1).flatten(1).t()
    return peer_b.transpose(1, 2).flatten(0, 1).contiguous()


@torch.no_grad()
def _write_pair(layer: FusedLinear, source_a: Tensor, source_b: Tensor) -> None:
    for parameter, source in zip(layer.own_pair(), (source_a, source_b), strict=True):
        if parameter.shape != source.shape:
            raise ValueError(
                f"got an adapter of shape {tuple(source.shape)}, expected {tuple(parameter.shape)}; "
                "it belongs to another backbone or lora_rank"
            )
        parameter.copy_(source)


def slot_order(alpha_K: Tensor, own: int) -> Tensor:
    """Client order -> slot order (own first)."""
    return torch.cat([alpha_K[own : own + 1], alpha_K[:own], alpha_K[own + 1 :]])


def client_order(alpha_S: Tensor, own: int) -> Tensor:
    """Slot order -> client order: the inverse of ``slot_order``."""
    return torch.cat([alpha_S[1 : own + 1], alpha_S[:1], alpha_S[own + 1 :]])


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
    until `put` writes others.

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


def initial_adapters(shapes: Shapes, seed: int) -> Tree:
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


def read_pair(model: nn.Module) -> Tree:
    """The own pairs of ``model`` as fp32 CPU copies."""
    tree: Tree = {}
    for name, layer in fused_layers(model).items():
        own_a, own_b = layer.own_pair()
        tree[f"{name}.lora_a"] = own_a.detach().float().cpu().clone()
        tree[f"{name}.lora_b"] = own_b.detach().float().cpu().clone()
    return tree


def check_adapters(tree: Tree, shapes: Shapes, num_clients: int | None = None) -> None:
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


def only(tree: Tree, factor: str) -> Tree:
    """The entries of one factor."""
    return {key: tensor for key, tensor in tree.items() if key.endswith(f".{factor}")}


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
