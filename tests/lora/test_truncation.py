"""Fused adapters at the least rank that holds them, as plain peft loads them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_toys import adapted, random_stack

from fedecider.models.adapters import fusion, put
from fedecider.models.directions import compact
from fedecider.models.item_table import ItemTable

ALPHA = torch.tensor([1.5, -0.5, 2.0])
ITEMS = ItemTable(["b7", "a2"], ["Émile's trial", "The heir"], ["trial emile", "heir"], [[5, 9, 4], [7]])


def pair(seed, rank=6, in_features=9, out_features=7):
    generator = torch.Generator().manual_seed(seed)
    return {
        "m.lora_a": torch.randn(rank, in_features, generator=generator),
        "m.lora_b": torch.randn(out_features, rank, generator=generator),
    }


def product(tree, name="m"):
    return tree[f"{name}.lora_b"].double() @ tree[f"{name}.lora_a"].double()


def fused(num_clients=3):
    model = adapted()
    put(model, fusion(random_stack(model, num_clients), 1, ALPHA[:num_clients]))
    return model


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_the_least_rank_that_a_layer_can_have_loses_nothing(seed, rank, in_features, out_features, other):
    tree = pair(seed, rank, in_features, out_features)
    tree |= {key.replace("m.", "n."): tensor for key, tensor in pair(seed + 1, rank, other, other).items()}
    small = compact(tree)
    assert len(small["m.lora_a"]) == min(rank, max(min(in_features, out_features), other))
    for name in ("m", "n"):
        assert small[f"{name}.lora_a"].shape[0] == small[f"{name}.lora_b"].shape[1] == len(small["m.lora_a"])
        torch.testing.assert_close(product(small, name), product(tree, name), rtol=0, atol=1e-5)
    wider = compact(tree, len(small["m.lora_a"]) + 2)
    assert len(wider["m.lora_a"]) == wider["n.lora_b"].shape[1] == len(small["m.lora_a"]) + 2
    for name in ("m", "n"):
        torch.testing.assert_close(product(wider, name), product(tree, name), rtol=0, atol=1e-5)
