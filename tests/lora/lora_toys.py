"""A T5 small enough to reason about: two heads of 5 on a width of 12, so that no two sizes agree by chance."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

from fedecider.models.adapters import LoraSettings, adapter_shapes, attach_lora, stack_trees
from fedecider.models.fused_linear import fused_layers

RANK = 3


def tiny_t5(seed: int = 0, layers: int = 1) -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=40,
        d_model=12,
        d_kv=5,
        d_ff=20,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(config).eval()


def adapted(seed: int = 0, rank: int = RANK):
    return attach_lora(tiny_t5(seed), LoraSettings(rank=rank))


def random_adapters(model, seed: int, scale: float = 0.3):
    generator = torch.Generator().manual_seed(seed)
    tree = {}
    for name, shape in adapter_shapes(model).items():
        tree[f"{name}.lora_a"] = scale * torch.randn(shape.rank, shape.in_features, generator=generator)
        tree[f"{name}.lora_b"] = scale * torch.randn(shape.out_features, shape.rank, generator=generator)
    return tree


def random_stack(model, num_clients: int, seed: int = 50, scale: float = 0.3):
    return stack_trees([random_adapters(model, seed + client, scale) for client in range(num_clients)])


def batch(seed: int = 5):
    generator = torch.Generator().manual_seed(seed)
    attention_mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 6 + [0]])
    labels = torch.randint(3, 40, (3, 4), generator=generator)
    labels[1, 3:] = -100
    return {
        "input_ids": torch.randint(3, 40, (3, 7), generator=generator) * attention_mask,
        "attention_mask": attention_mask,
        "labels": labels,
    }


def dense_updates(stack, alpha_K):
    """sum_j alpha_j B_j A_j per layer, the slow way."""
    names = [key[:-7] for key in stack if key.endswith(".lora_a")]
    return {
        name: sum(
            weight * b @ a
            for weight, a, b in zip(alpha_K, stack[f"{name}.lora_a"], stack[f"{name}.lora_b"], strict=True)
        )
        for name in names
    }


def with_dense(model, updates):
    """A plain T5 copy of ``model``'s base whose projections hold W0 + update as trainable leaves."""
    dense = tiny_t5()
    for name, update in updates.items():
        layer = dense.get_submodule(name)
        layer.weight = torch.nn.Parameter(layer.weight.detach() + update)
    return dense


def held_factors(model):
    """What a model's layers add, one pair a layer."""
    pairs = {name: layer.factors() for name, layer in fused_layers(model).items()}
    return {
        f"{name}.lora_{which}": factor for name, pair in pairs.items() for which, factor in zip("ab", pair, strict=True)
    }
