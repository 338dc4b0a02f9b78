"""Sharpness-aware gradients: a wrapper that any method can use."""

import math

import pytest
import torch

from embedding_fr.examples import ExampleBatch
from embedding_fr.local_training import Objective, dot_logits, plain_gradients
from embedding_fr.methods.fedncf import ncf_logits
from embedding_fr.sharpness import client_norms, sharpness_aware

OBJECTIVE = Objective(dot_logits)


def sigmoid(value):
    return 1.0 / (1.0 + math.exp(-value))


def one_positive():
    """One client with p = (0.6, 0.8), one item q = (1, -1) that it likes: z = -0.2, dL/dp = r q, dL/dq = r p."""
    params = {"user": torch.tensor([[0.6, 0.8]]), "item_table": torch.tensor([[[1.0, -1.0]]])}
    batch = ExampleBatch(1, torch.tensor([[0]]), torch.ones(1, 1), torch.ones(1, 1))
    return params, batch


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_one_step_by_hand(float64):
    params, batch = one_positive()
    # r = sigmoid(-0.2) - 1 < 0, so the worst p is p - 0.1 q / |q|, and the worst q is q - 0.5 p / |p|
    gradients = sharpness_aware({("user",): 0.1, ("item_table",): 0.5})
    sharp, logit = gradients(OBJECTIVE, params, ("user", "item_table"), batch)
    z_user = -0.2 - 0.1 * math.sqrt(2.0)
    z_item = -0.2 - 0.5 * 1.0
    assert sharp["user"][0].tolist() == pytest.approx([sigmoid(z_user) - 1.0, 1.0 - sigmoid(z_user)])
    assert sharp["item_table"][0, 0].tolist() == pytest.approx(
        [0.6 * (sigmoid(z_item) - 1), 0.8 * (sigmoid(z_item) - 1)]
    )
    assert logit.item() == pytest.approx(-0.2)
    assert params["user"].tolist() == [[0.6, 0.8]]


def test_one_group_moves_together(float64):
    params, batch = one_positive()
    sharp, _ = sharpness_aware({("user", "item_table"): 0.3})(OBJECTIVE, params, ("user", "item_table"), batch)
    norm = math.sqrt(3.0)  # |q|^2 + |p|^2
    p = [0.6 - 0.3 / norm, 0.8 + 0.3 / norm]
    q = [1.0 - 0.3 * 0.6 / norm, -1.0 - 0.3 * 0.8 / norm]
    residual = sigmoid(p[0] * q[0] + p[1] * q[1]) - 1.0
    assert sharp["user"][0].tolist() == pytest.approx([residual * q[0], residual * q[1]])
    assert sharp["item_table"][0, 0].tolist() == pytest.approx([residual * p[0], residual * p[1]])


def block(num_clients=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    params = {
        "user": draw(num_clients, 4),
        "item_table": draw(num_clients, 6, 4),
        "scorer.0.weight": draw(num_clients, 8, 3),
        "scorer.0.bias": draw(num_clients, 3),
        "scorer.1.weight": draw(num_clients, 3, 1),
        "scorer.1.bias": draw(num_clients, 1),
    }
    item = torch.randint(6, (2, 5), generator=generator)
    return params, ExampleBatch(2, item, torch.tensor([[1.0, 0, 1, 0, 0], [0, 1, 0, 0, 1]]), torch.full((2, 5), 0.2))


def test_radius_zero_is_the_plain_gradient_bit_for_bit():
    params, batch = block()
    shared = tuple(name for name in params if name != "user")
    objective = Objective(ncf_logits)
    plain, logit = plain_gradients(objective, params, tuple(params), batch)
    for radius in ({}, {("user",): 0.0, shared: 0.0}, {("user",): 0.0, shared: 0.1}):
        sharp, seen = sharpness_aware(radius)(objective, params, tuple(params), batch)
        assert torch.equal(logit, seen)
        assert torch.equal(sharp["user"], plain["user"])
        for name in shared:
            assert torch.equal(sharp[name], plain[name]) == (radius.get(shared, 0.0) == 0.0), name


def test_the_norm_is_that_of_the_group_and_of_one_client():
    tensors = [torch.tensor([[3.0, 0.0], [1.0, 2.0]]), torch.tensor([[[4.0], [0.0]], [[2.0], [4.0]]])]
    assert client_norms(tensors).tolist() == [5.0, 5.0]
    params, batch = block()
    alone = {name: tensor[1:2] for name, tensor in params.items()}
    alone_batch = ExampleBatch(1, batch.item_AB[1:], batch.label_AB[1:], batch.weight_AB[1:])
    gradients = sharpness_aware({("user",): 0.4, tuple(name for name in params if name != "user"): 0.7})
    together, _ = gradients(Objective(ncf_logits), params, tuple(params), batch)
    single, _ = gradients(Objective(ncf_logits), alone, tuple(params), alone_batch)
    for name in params:
        assert together[name].shape[0] == 2
        assert torch.allclose(together[name][1:], single[name], atol=1e-6), name
