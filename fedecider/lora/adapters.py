"""LoRA adapters as Trees: attach to a backbone, read, write, stack over clients, common initialisation.

Keys are ``<module path in the base model>.lora_a`` (R, I) and ``.lora_b`` (O, R); stacked trees lead with K clients.

Shape legend: R rank, I in features, O out features, K clients.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from fedecider.bounds import LoraRank, check
from fedecider.federation.method import Tree
from fedecider.federation.streams import stream
from fedecider.lora.fusion import FusedLinear, fused_layers
from fedecider.lora.tied_table import HEAD, adapted_embeddings, tie_adapter
from idgen.backbones.families import family_of, unwrap

FACTORS = ("lora_a", "lora_b")
"""Names of the two factors of a pair."""
ROLES = {
    "attention": ("q", "k", "v", "o", "q_proj", "k_proj", "v_proj", "o_proj"),
    "feed_forward": ("wi", "wi_0", "wi_1", "wo", "gate_proj", "up_proj", "down_proj"),
    "output": ("lm_head",),
    "table": ("lm_head",),
}
"""What linear layers are for -> their names in the backbones that we know; table is the output and, by the same pair of
factors, the embeddings that are tied to it."""


@dataclass(frozen=True)
class LoraSettings:
    """Where and how large the adapters are.

    Args:
        rank: Rank r of every adapter.
        targets: The linear layers that get one: roles of `ROLES`, or the ends of layers' names.
    """

    rank: LoraRank = 8
    targets: tuple[str, ...] = ("attention",)

    def __post_init__(self) -> None:
        check(self)
        if not self.targets:
            raise ValueError("got no LoRA targets, expected at least one, for instance attention")
        outputs = [target for target in self.targets if ROLES.get(target, (target,)) == ROLES["output"]]
        if len(outputs) > 1:
            raise ValueError(f"got LoRA targets {outputs}, expected one of them: they stand for the same layer")


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
