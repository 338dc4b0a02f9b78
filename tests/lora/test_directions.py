"""Directions: norms without the product, normalisation and its invariances, degenerate updates."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedecider.models.directions import (
    cosine_matrix,
    normalise,
    update_norms,
)


def pair(seed, clients=2, rank=3, in_features=7, out_features=5, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "m.lora_a": scale * torch.randn(clients, rank, in_features, generator=generator),
        "m.lora_b": torch.randn(clients, out_features, rank, generator=generator),
    }


def product(tree, name="m"):
    return tree[f"{name}.lora_b"].double() @ tree[f"{name}.lora_a"].double()


def split(tree, balanced):
    """`normalise`, or as it does where its scale would be too large: by balanced factors."""
    with pytest.MonkeyPatch.context() as patch:
        if balanced:
            patch.setattr("fedecider.models.directions.MAX_SCALE", 0.0)
        return normalise(tree)


def one(a, b):
    return {"m.lora_a": torch.tensor([a]), "m.lora_b": torch.tensor([b])}


def test_hand_numbers():
    # B A = [3; -4] [0 2] has the norm 5 * 2 = 10
    tree = one([[0.0, 2.0]], [[3.0], [-4.0]])
    assert update_norms(tree).tolist() == [[pytest.approx(10.0, rel=1e-15)]]
    found = normalise(tree)
    scale = 10.0**-0.5
    torch.testing.assert_close(found.tree["m.lora_a"], torch.tensor([[[0.0, 2.0 * scale]]]))
    torch.testing.assert_close(found.tree["m.lora_b"], torch.tensor([[[3.0 * scale], [-4.0 * scale]]]))
    torch.testing.assert_close(product(found.tree)[0], torch.tensor([[0.0, 0.6], [0.0, -0.8]]).double())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_norms_are_the_dense_ones_and_directions_have_norm_one(seed, rank, in_features, out_features, balanced):
    tree = pair(seed, 3, rank, in_features, out_features, scale=0.01)
    dense = torch.linalg.matrix_norm(product(tree))
    factors = tree["m.lora_a"].double().flatten(1).norm(dim=1) * tree["m.lora_b"].double().flatten(1).norm(dim=1)
    assume(bool((dense > 0.2 * factors).all()))  # cancelling columns have their own test
    torch.testing.assert_close(update_norms(tree)[:, 0], dense, rtol=1e-6, atol=1e-12)
    found = split(tree, balanced)
    torch.testing.assert_close(torch.linalg.matrix_norm(product(found.tree)), torch.ones(3).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(product(found.tree), product(tree) / dense[:, None, None], rtol=0, atol=2e-6)
    again = split(found.tree, balanced)
    for key, tensor in found.tree.items():
        torch.testing.assert_close(again.tree[key], tensor, rtol=2e-6, atol=2e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 50.0))
def test_scale_invariance(seed, factor):
    tree = pair(seed)
    base = normalise(tree).tree
    both = normalise({key: factor * tensor for key, tensor in tree.items()}).tree
    for key, tensor in base.items():
        torch.testing.assert_close(both[key], tensor, rtol=1e-5, atol=1e-6)
    left = normalise({"m.lora_a": tree["m.lora_a"], "m.lora_b": factor * tree["m.lora_b"]}).tree
    torch.testing.assert_close(left["m.lora_a"], base["m.lora_a"] / math.sqrt(factor), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(left["m.lora_b"], base["m.lora_b"] * math.sqrt(factor), rtol=1e-5, atol=1e-6)
    flipped = normalise({"m.lora_a": tree["m.lora_a"], "m.lora_b": -factor * tree["m.lora_b"]}).tree
    torch.testing.assert_close(product(flipped), -product(base), rtol=0, atol=1e-6)


def in_float64(tree):
    return {key: tensor.double() for key, tensor in tree.items()}


def scaled(tree, factor_a, factor_b):
    return {"m.lora_a": factor_a * tree["m.lora_a"], "m.lora_b": factor_b * tree["m.lora_b"]}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.02, 50.0), st.booleans())
def test_scales_and_signs_to_the_last_digits(seed, factor, balanced):
    """In float64, so that only rounding is tolerated: the same broadcast, and a negative factor flips the product."""
    tree = in_float64(pair(seed))
    base = split(tree, balanced).tree
    tight = {"rtol": 1e-9, "atol": 1e-11}
    both = split(scaled(tree, factor, factor), balanced).tree
    for key, tensor in base.items():
        torch.testing.assert_close(both[key], tensor, **tight)
    left = split(scaled(tree, 1.0, factor), balanced).tree
    torch.testing.assert_close(product(left), product(base), **tight)
    root = 1.0 if balanced else math.sqrt(factor)
    torch.testing.assert_close(left["m.lora_a"], base["m.lora_a"] / root, **tight)
    torch.testing.assert_close(left["m.lora_b"], base["m.lora_b"] * root, **tight)
    for factor_a, factor_b in ((1.0, -factor), (-factor, 1.0)):
        flipped = split(scaled(tree, factor_a, factor_b), balanced).tree
        torch.testing.assert_close(product(flipped), -product(base), **tight)
    assert product(base).abs().max() > 0.05
    twice = split(scaled(tree, -factor, -factor), balanced).tree  # c^2 > 0: the same product
    torch.testing.assert_close(product(twice), product(base), **tight)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_rank_gauge_leaves_the_product_and_balanced_factors(seed):
    tree = in_float64(pair(seed))
    gauge = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed + 1)).double()
    assume(float(torch.linalg.cond(gauge)) < 30.0)
    moved = {"m.lora_a": torch.linalg.inv(gauge) @ tree["m.lora_a"], "m.lora_b": tree["m.lora_b"] @ gauge}
    plain, other = normalise(tree), normalise(moved)
    torch.testing.assert_close(product(other.tree), product(plain.tree), rtol=0, atol=1e-11)
    assert (other.tree["m.lora_b"] - plain.tree["m.lora_b"]).abs().max() > 1e-2  # other factors, the same product
    base, turned = split(tree, True).tree, split(moved, True).tree
    for key, tensor in base.items():
        torch.testing.assert_close(turned[key], tensor, rtol=1e-7, atol=1e-8)


def test_balanced_factors_depend_on_the_product_only_and_are_balanced():
    tree = pair(11)
    moved = {"m.lora_a": tree["m.lora_a"] / 7.0, "m.lora_b": 7.0 * tree["m.lora_b"]}
    turned = {"m.lora_a": -tree["m.lora_a"][:, [2, 0, 1]], "m.lora_b": -tree["m.lora_b"][:, :, [2, 0, 1]]}
    base = split(tree, True).tree
    for other in (moved, turned):
        for key, tensor in split(other, True).tree.items():
            torch.testing.assert_close(tensor, base[key], rtol=1e-4, atol=1e-5)
    squares = [base[key].double().square().sum((1, 2)) for key in ("m.lora_a", "m.lora_b")]
    torch.testing.assert_close(squares[0], squares[1])
    assert (squares[0] <= math.sqrt(3.0)).all()
    assert (squares[0] > 1.0).all()  # the nuclear norm is at least the Frobenius norm
    peak = base["m.lora_b"].gather(1, base["m.lora_b"].abs().argmax(1, keepdim=True))
    assert (peak > 0).all()


@pytest.mark.parametrize("balanced", [False, True])
def test_an_untrained_module_has_the_zero_direction(balanced):
    tree = pair(4)
    tree["m.lora_b"][1] = 0.0
    found = split(tree, balanced)
    assert found.zero_CM.tolist() == [[False], [True]]
    assert not product(found.tree)[1].any()
    assert torch.equal(found.tree["m.lora_a"][1], tree["m.lora_a"][1])  # can still learn
    assert torch.isfinite(found.tree["m.lora_b"]).all()
    torch.testing.assert_close(torch.linalg.matrix_norm(product(found.tree)[0]), torch.ones(()).double())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", ["m.lora_a", "m.lora_b"])
def test_non_finite_adapters_are_refused(bad, key):
    tree = pair(4)
    tree[key][1, 0, 0] = bad
    with pytest.raises(ValueError, match=r"non-finite adapters from clients \[1\]"):
        normalise(tree)


def test_nearly_cancelling_columns_need_float64():
    # B A = b (a - (a - tiny)) = b * tiny: float32 Gram matrices lose it
    direction = torch.linspace(-1.0, 1.0, 64) * 30.0
    tiny = torch.zeros(64)
    tiny[5] = 0.015625
    tree = {
        "m.lora_a": torch.stack([direction, direction - tiny])[None],
        "m.lora_b": torch.tensor([[[2.0, -2.0], [1.0, -1.0]]]),
    }
    dense = torch.linalg.matrix_norm(product(tree))[0]
    a, b = tree["m.lora_a"][0], tree["m.lora_b"][0]
    single = float(((a @ a.T) * (b.T @ b)).sum().clamp(min=0).sqrt())
    assert abs(single / float(dense) - 1.0) > 0.1, "the case no longer shows what it is for"
    assert float(update_norms(tree)[0, 0]) == pytest.approx(float(dense), rel=1e-3)


@pytest.mark.parametrize("balanced", [False, True])
def test_a_client_gets_the_same_bits_alone_and_among_others(balanced):
    tree = pair(9, clients=5, rank=4, in_features=33, out_features=17)
    together = split(tree, balanced).tree
    for client in range(5):
        alone = split({key: tensor[client : client + 1] for key, tensor in tree.items()}, balanced).tree
        for key, tensor in alone.items():
            assert torch.equal(tensor[0], together[key][client])


def test_cosines_are_those_of_dense_updates_and_modules_count_alike():
    tree = pair(21, clients=3)
    for name, scale, seed in (("n", 40.0, 22), ("k", 0.01, 23)):
        for key, tensor in pair(seed, clients=3, in_features=4, scale=scale).items():
            tree[key.replace("m.", f"{name}.")] = tensor
    dense = torch.stack([torch.nn.functional.normalize(product(tree, name).flatten(1), dim=1) for name in "kn"])
    third = torch.nn.functional.normalize(product(tree, "m").flatten(1), dim=1)
    expected = (sum(d @ d.T for d in dense) + third @ third.T) / 3.0
    torch.testing.assert_close(cosine_matrix(tree), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(cosine_matrix(tree).diagonal(), torch.ones(3).double(), rtol=0, atol=1e-6)
    opposite = {key: -tensor if key.endswith("_b") else tensor for key, tensor in tree.items()}
    torch.testing.assert_close(cosine_matrix(tree, opposite), -expected, rtol=0, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_cosines_of_low_and_of_full_rank_are_those_of_dense_updates(seed, clients, peers, rank, width):
    """Ranks below the width go over the factors, others over the products."""
    sizes = {"in_features": width, "out_features": 10, "rank": rank}
    tree, others = pair(seed, clients, **sizes), pair(seed + 1, peers, **sizes)
    others["m.lora_b"][0] = 0.0
    first, second = product(tree).double().flatten(1), product(others).double().flatten(1)
    expected = torch.nn.functional.normalize(first, dim=1) @ torch.nn.functional.normalize(second, dim=1).T
    torch.testing.assert_close(cosine_matrix(tree, others), expected, rtol=0, atol=1e-5)
