"""The fusion forward against dense weights, stock PEFT and finite differences."""

import copy

import pytest
import torch
from lora_toys import (
    RANK,
    adapted,
    batch,
    dense_updates,
    held_factors,
    random_adapters,
    random_stack,
    tiny_t5,
    with_dense,
)
from peft import LoraConfig, get_peft_model

from fedecider.federation.wire import take_row
from fedecider.models.adapters import (
    Adapters,
    adapter_parameters,
    adapter_shapes,
    base_hash,
    client_order,
    fusion,
    put,
    read_pair,
)
from fedecider.models.directions import above
from fedecider.models.fused_linear import _LowRank, fused_layers

ALPHA = torch.tensor([0.7, -1.3, 2.0])
OWN = 1


def stock_peft(adapters):
    """The same adapters in PEFT's own layers."""
    rank = next(iter(adapters.values())).shape[0]
    model = get_peft_model(
        tiny_t5(), LoraConfig(r=rank, lora_alpha=rank, target_modules=["q", "k", "v", "o"], task_type="SEQ_2_SEQ_LM")
    )
    base = model.get_base_model()
    with torch.no_grad():
        for key, tensor in adapters.items():
            name, factor = key.rsplit(".", 1)
            layer = base.get_submodule(name)
            {"lora_a": layer.lora_A, "lora_b": layer.lora_B}[factor]["default"].weight.copy_(tensor)
    return model.eval()


def gradients(model, **inputs):
    model.zero_grad()
    output = model(**batch(), **inputs)
    output.loss.backward()
    return output


def test_plain_lora_has_the_outputs_and_gradients_of_stock_peft():
    model = adapted()
    tree = random_adapters(model, 1)
    put(model, Adapters(tree))
    stock = stock_peft(tree)
    torch.testing.assert_close(gradients(model).logits, gradients(stock).logits, rtol=1e-5, atol=1e-6)
    wanted = {name: parameter.grad for name, parameter in stock.named_parameters() if parameter.requires_grad}
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert wanted.keys() == found.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-7)


def test_stacked_forward_is_the_dense_sum_the_concatenated_adapter_and_the_merged_weights():
    model = adapted()
    stack = random_stack(model, 3)
    put(model, fusion(stack, OWN, ALPHA))
    logits = model(**batch()).logits
    dense = with_dense(model, dense_updates(stack, ALPHA))
    torch.testing.assert_close(logits, dense(**batch()).logits, rtol=0, atol=1e-5)
    factors = held_factors(model)
    assert {tensor.shape[0] for key, tensor in factors.items() if key.endswith("_a")} == {3 * RANK}
    torch.testing.assert_close(logits, stock_peft(factors)(**batch()).logits, rtol=0, atol=1e-5)
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(logits, merged(**batch()).logits, rtol=0, atol=1e-5)
    with model.disable_adapter():
        plain = model(**batch()).logits
    torch.testing.assert_close(plain, tiny_t5()(**batch()).logits, rtol=0, atol=1e-6)
    assert (plain - logits).abs().max() > 0.1  # the updates matter


def test_gradients_are_the_inner_products_with_the_dense_gradient():
    # dF/dalpha_j = sum_m <G_m, D_jm>, dF/dB = alpha_i G A^T, dF/dA = alpha_i B^T G
    model = adapted()
    stack = random_stack(model, 3)
    alpha = put(model, fusion(stack, OWN, ALPHA))
    gradients(model.double())
    stack = {key: tensor.double() for key, tensor in stack.items()}
    dense = with_dense(model, dense_updates(stack, ALPHA.double())).double()
    gradients(dense)
    wanted = torch.zeros(3).double()
    for name, layer in fused_layers(model).items():
        grad = dense.get_submodule(name).weight.grad
        a, b = stack[f"{name}.lora_a"], stack[f"{name}.lora_b"]
        wanted += torch.stack([(grad * (b[j] @ a[j])).sum() for j in range(3)])
        own_a, own_b = layer.own_pair()
        torch.testing.assert_close(own_b.grad, ALPHA[OWN] * grad @ a[OWN].T, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(own_a.grad, ALPHA[OWN] * b[OWN].T @ grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(client_order(alpha.grad, OWN), wanted.float(), rtol=1e-5, atol=1e-7)
    assert wanted.abs().min() > 1e-3


@pytest.mark.parametrize("separate", [True, False])
def test_alpha_gradient_agrees_with_finite_differences(separate):
    model = adapted()
    stack = random_stack(model, 3)
    alpha = put(model, fusion(stack, OWN, ALPHA, separate=separate))
    gradients(model.double())
    step = 2.0**-11
    for slot in range(3):
        losses = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                alpha[slot] += sign * step
                losses.append(float(model(**batch()).loss))
                alpha[slot] -= sign * step
        assert float(alpha.grad[slot]) == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=3e-3, abs=3e-4)


@pytest.mark.parametrize("x_needs_grad", [True, False])
def test_the_hand_written_backward_passes_gradcheck(x_needs_grad):
    generator = torch.Generator().manual_seed(2)

    def tensor(*shape, grad=True):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(grad)

    base, x = tensor(2, 3, 5), tensor(2, 3, 4, grad=x_needs_grad)
    own_a, own_b, weight = tensor(2, 4), tensor(5, 2), tensor(3)
    peer_a, peer_bt = tensor(4, 4, grad=False), tensor(4, 5, grad=False)

    def fused(base, x, own_a, own_b, weight):
        return _LowRank.apply(base.clone(), x, own_a, own_b, weight, (peer_a, peer_bt))

    def plain(base, x, own_a, own_b):
        return _LowRank.apply(base.clone(), x, own_a, own_b, None, None)

    assert torch.autograd.gradcheck(fused, (base, x, own_a, own_b, weight))
    assert torch.autograd.gradcheck(plain, (base, x, own_a, own_b))


def test_a_step_changes_own_pair_and_alpha_and_nothing_else():
    model = adapted()
    stack = random_stack(model, 3)
    alpha = put(model, fusion(stack, OWN, ALPHA))
    frozen, own, banks = (
        base_hash(model),
        read_pair(model),
        [(layer.bank.peer_a.clone(), layer.bank.peer_bt.clone()) for layer in fused_layers(model).values()],
    )
    optimizer = torch.optim.AdamW([*adapter_parameters(model), alpha], lr=1e-2, weight_decay=0.0)
    gradients(model)
    optimizer.step()
    assert base_hash(model) == frozen
    for layer, (peer_a, peer_bt) in zip(fused_layers(model).values(), banks, strict=True):
        assert torch.equal(layer.bank.peer_a, peer_a)
        assert torch.equal(layer.bank.peer_bt, peer_bt)
        assert layer.bank.peer_a.grad is None
        assert not layer.bank.peer_a.requires_grad
    for key, tensor in read_pair(model).items():
        assert not torch.equal(tensor, own[key])
    assert (client_order(alpha.detach(), OWN) - ALPHA).abs().min() > 1e-3


def test_one_step_lowers_alpha_iff_the_inner_product_is_positive_and_opposites_mirror():
    model = adapted()
    stack = random_stack(model, 2)
    opposite = {
        key: torch.cat([tensor, -tensor[1:] if key.endswith("_b") else tensor[1:]]) for key, tensor in stack.items()
    }
    alpha = put(model, fusion(opposite, 0, torch.tensor([1.0, 0.4, 0.4])))
    gradients(model)
    assert float(alpha.grad[1]) == pytest.approx(-float(alpha.grad[2]), rel=1e-4)
    before = alpha.detach().clone()
    torch.optim.SGD([alpha], lr=0.1).step()
    assert torch.equal((alpha.detach() < before), (alpha.grad > 0))
    assert not torch.equal(alpha.detach()[1:] < before[1:], torch.tensor([True, True]))


def test_a_zero_direction_gives_alpha_no_gradient_there():
    model = adapted()
    stack = random_stack(model, 2)
    for key, tensor in stack.items():
        if key.endswith("_b"):
            tensor[1] = 0.0
    alpha = put(model, fusion(stack, 0, torch.tensor([1.0, 2.0])))
    gradients(model)
    assert float(alpha.grad[1]) == 0.0
    assert float(alpha.grad[0]) != 0.0


def test_a_direction_that_is_zero_in_some_layers_has_no_slot_there():
    """Outputs and gradients are those of a direction of tiny size; what is read out has one rank for all layers."""
    model = adapted()
    stack = random_stack(model, 3)
    names = list(fused_layers(model))
    zero, tiny = ({key: tensor.clone() for key, tensor in stack.items()} for _ in range(2))
    for place, name in enumerate(names):
        for peer in [(0,), (2,), (0, 2), ()][place % 4]:
            zero[f"{name}.lora_b"][peer] = 0.0
            tiny[f"{name}.lora_b"][peer] *= 1e-12
    found = []
    for directions in (zero, tiny):
        weights = put(model, fusion(directions, OWN, ALPHA))
        slots = [len(layer.bank.peer_a) // RANK for layer in fused_layers(model).values()]
        output = gradients(model)
        own = [parameter.grad.clone() for parameter in adapter_parameters(model)]
        factors = fusion(directions, OWN, ALPHA).factors()
        found.append((slots, output.logits.detach(), weights.grad, own, factors))
    assert found[0][0] == [[1, 1, 0, 2][place % 4] for place in range(len(names))]
    assert set(found[1][0]) == {2}
    torch.testing.assert_close(found[0][1:4], found[1][1:4], rtol=1e-4, atol=1e-5)
    for name in names:
        dense = [one[4][f"{name}.lora_b"] @ one[4][f"{name}.lora_a"] for one in found]
        torch.testing.assert_close(*dense, rtol=1e-4, atol=1e-5)


def test_weights_zero_but_own_one_is_plain_lora():
    model, plain = adapted(), adapted()
    stack = random_stack(model, 3)
    put(model, fusion(stack, OWN, torch.tensor([0.0, 1.0, 0.0]), learns=False))
    put(plain, Adapters(take_row(stack, OWN)))
    steps = [torch.optim.AdamW(adapter_parameters(one), lr=1e-2) for one in (model, plain)]
    for _ in range(3):
        for one, optimizer in zip((model, plain), steps, strict=True):
            gradients(one)
            optimizer.step()
    for key, tensor in read_pair(plain).items():
        torch.testing.assert_close(read_pair(model)[key], tensor, rtol=1e-4, atol=1e-5)


def test_product_of_sums_is_the_formula_with_its_cross_terms():
    model = adapted()
    stack = random_stack(model, 3)
    put(model, fusion(stack, OWN, ALPHA, separate=False))
    updates = {
        name: torch.tensordot(ALPHA, stack[f"{name}.lora_b"], 1) @ torch.tensordot(ALPHA, stack[f"{name}.lora_a"], 1)
        for name in fused_layers(model)
    }
    logits = model(**batch()).logits
    torch.testing.assert_close(logits, with_dense(model, updates)(**batch()).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, stock_peft(held_factors(model))(**batch()).logits, rtol=0, atol=1e-5)
    put(model, fusion(stack, OWN, ALPHA))
    assert (model(**batch()).logits - logits).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["plain", "separate", "product of sums", "above"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_the_update_is_that_share_of_every_layer(kind, share):
    model = adapted()
    if kind == "plain":
        adapters = Adapters(random_adapters(model, 1))
    elif kind == "above":
        adapters = above(random_adapters(model, 1), random_updates(model))
    else:
        adapters = fusion(random_stack(model, 3), OWN, ALPHA, separate=kind != "product of sums")
    put(model, adapters)
    whole = {name: layer.get_delta_weight("default") for name, layer in fused_layers(model).items()}
    logits = model(**batch()).logits
    put(model, adapters.scaled(share))
    for name, layer in fused_layers(model).items():
        update = layer.get_delta_weight("default")
        torch.testing.assert_close(update, share * whole[name], rtol=1e-5, atol=1e-6)
        factors = adapters.scaled(share).factors()  # the value says what the layers add
        torch.testing.assert_close(factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"], update, rtol=1e-5, atol=1e-6)
    if share == 1.0:
        assert torch.equal(model(**batch()).logits, logits)
    if share == 0.0:
        with model.disable_adapter():
            torch.testing.assert_close(model(**batch()).logits, adapted()(**batch()).logits, rtol=0, atol=1e-6)


def random_updates(model):
    generator = torch.Generator().manual_seed(5)
    return {
        f"{name}.update": torch.randn(shape.out_features, shape.in_features, generator=generator)
        for name, shape in adapter_shapes(model).items()
    }


@pytest.mark.parametrize("rank", [RANK, RANK + 2, 1])
def test_a_dense_update_below_a_pair_is_added_as_it_is_and_does_not_learn(rank):
    model = adapted(rank=rank)
    pair, below = random_adapters(model, 1), random_updates(model)
    sides = {tuple(one.shape) for one in below.values()}
    assert {out > into for out, into in sides} == {True, False}
    put(model, above(pair, below))
    updates = {
        name: below[f"{name}.update"] + pair[f"{name}.lora_b"] @ pair[f"{name}.lora_a"] for name in fused_layers(model)
    }
    logits = gradients(model).logits
    torch.testing.assert_close(logits, with_dense(model, updates)(**batch()).logits, rtol=0, atol=1e-4)
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    assert len(trained) == 2 * len(updates)
    put(model, above(pair, {key: torch.zeros_like(one) for key, one in below.items()}))
    alone = model(**batch()).logits
    put(model, Adapters(pair))
    torch.testing.assert_close(model(**batch()).logits, alone)


def test_product_of_sums_with_one_client_and_weight_one_is_plain_lora():
    model, plain = adapted(), adapted()
    stack = random_stack(model, 1)
    put(model, fusion(stack, 0, torch.ones(1), separate=False))
    put(plain, Adapters(take_row(stack, 0)))
    torch.testing.assert_close(gradients(model).logits, gradients(plain).logits, rtol=0, atol=0)
    for mine, other in zip(adapter_parameters(model), adapter_parameters(plain), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)


def test_bf16_autocast_keeps_fp32_parameters_and_gradients():
    model = adapted()
    stack = random_stack(model, 3)
    alpha = put(model, fusion(stack, OWN, ALPHA))
    gradients(model)
    exact = alpha.grad.clone()
    alpha.grad = None
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch())
    assert output.logits.dtype == torch.bfloat16
    output.loss.float().backward()
    for parameter in [alpha, *adapter_parameters(model)]:
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all()
    torch.testing.assert_close(alpha.grad, exact, rtol=0.1, atol=0.02)
    before = alpha.detach().clone()
    torch.optim.AdamW([alpha], lr=1e-3, weight_decay=0.0).step()
    torch.testing.assert_close((alpha.detach() - before).abs(), torch.full((3,), 1e-3), rtol=1e-2, atol=0)


def test_rows_of_a_fused_update_under_bf16():
    model = adapted()
    put(model, fusion(random_stack(model, 3), OWN, ALPHA))
    layer = next(iter(fused_layers(model).values()))
    token_ids = torch.tensor([2, 0])
    exact = layer.update_rows(token_ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.update_rows(token_ids)
    torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_gives_the_cpu_results(precision):
    results = []
    for device in ("cpu", "cuda"):
        model = adapted().to(device)
        alpha = put(model, fusion(random_stack(model, 3), OWN, ALPHA))
        inputs = {key: tensor.to(device) for key, tensor in batch().items()}
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            output = model(**inputs)
        output.loss.float().backward()
        grads = [alpha.grad, *(parameter.grad for parameter in adapter_parameters(model))]
        results.append([output.logits.detach().float().cpu(), *(grad.cpu() for grad in grads)])
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if precision == "fp32" else {"rtol": 0.2, "atol": 0.05}
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, **tolerance)
