"""Adapters as Trees: shapes, common start, refusal of what does not fit."""

import pytest
import torch
from lora_toys import RANK, adapted, random_adapters

from fedecider.federation.wire import take_row
from fedecider.models.adapters import (
    Adapters,
    adapter_shapes,
    base_hash,
    check_adapters,
    initial_adapters,
    module_names,
    num_scalars,
    put,
    read_pair,
    stack_trees,
    with_prefix,
    without_prefix,
)


def test_every_attention_projection_is_adapted_and_sizes_are_right():
    model = adapted()
    shapes = adapter_shapes(model)
    # encoder self, decoder self, decoder cross: three attentions of four projections
    assert len(shapes) == 12
    assert list(shapes) == sorted(shapes)
    assert shapes["encoder.block.0.layer.0.SelfAttention.q"] == (RANK, 12, 10, False)
    assert shapes["decoder.block.0.layer.1.EncDecAttention.o"] == (RANK, 10, 12, False)
    # every projection costs r * (12 + 10)
    assert num_scalars(read_pair(model)) == 12 * RANK * 22
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trainable == 12 * RANK * 22


def test_common_start_depends_on_the_seed_and_the_layer_only():
    shapes = adapter_shapes(adapted())
    start = initial_adapters(shapes, 7)
    subset = dict(list(shapes.items())[3:5])
    for key, tensor in initial_adapters(subset, 7).items():
        assert torch.equal(tensor, start[key])
    assert not torch.equal(initial_adapters(shapes, 8)[f"{next(iter(shapes))}.lora_a"], next(iter(start.values())))
    for name, shape in shapes.items():
        bound = shape.in_features**-0.5
        a = start[f"{name}.lora_a"]
        assert a.abs().max() <= bound
        assert a.std() > 0.4 * bound  # uniform: 0.577 of the bound
        assert not start[f"{name}.lora_b"].any()


def test_write_then_read_is_the_identity():
    model = adapted()
    tree = random_adapters(model, 3)
    put(model, Adapters(tree))
    back = read_pair(model)
    assert list(back) == [key for name in module_names(tree) for key in (f"{name}.lora_a", f"{name}.lora_b")]
    for key, tensor in tree.items():
        assert torch.equal(back[key], tensor)
    back[next(iter(back))].zero_()
    assert torch.equal(read_pair(model)[next(iter(back))], tree[next(iter(back))])  # a copy was read


def test_stack_and_prefix_round_trip():
    model = adapted()
    trees = [random_adapters(model, seed) for seed in (1, 2)]
    stacked = stack_trees(trees)
    key = next(iter(stacked))
    assert torch.equal(take_row(stacked, 1)[key], trees[1][key])
    mixed = {**with_prefix(stacked, "own"), "alpha": torch.zeros(2)}
    assert set(without_prefix(mixed, "own")) == set(stacked)


def test_adapters_of_another_backbone_or_rank_are_refused():
    model, shapes = adapted(), adapter_shapes(adapted())
    tree = random_adapters(model, 1)
    check_adapters(tree, shapes)
    check_adapters(stack_trees([tree, tree]), shapes, num_clients=2)
    with pytest.raises(ValueError, match="lora_rank or number of clients"):
        check_adapters(stack_trees([tree, tree]), shapes, num_clients=3)
    with pytest.raises(ValueError, match="other layers"):
        check_adapters({key: value for key, value in tree.items() if "decoder" not in key}, shapes)
    with pytest.raises(ValueError, match="another backbone or lora_rank"):
        put(adapted(rank=2), Adapters(tree))


def test_base_hash_ignores_adapters_and_sees_one_changed_weight():
    model = adapted()
    before = base_hash(model)
    put(model, Adapters(random_adapters(model, 1)))
    assert base_hash(model) == before
    with torch.no_grad():
        model.get_base_model().shared.weight[3, 2] += 1e-6
    assert base_hash(model) != before
