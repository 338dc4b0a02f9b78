"""The loss around a trained model."""

import math

import pytest
import torch
from landscape_losses import gradient_direction, loss_grid, mean_losses, random_direction, training_loss
from toy_federation import run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.blocks import make_block
from embedding_fr.methods.fedmf import mf_model
from embedding_fr.methods.fedncf import ncf_model


def bowl(tree):
    """2 x^2 + y^2 around (3, -1)."""
    return float(2.0 * (tree["x"] - 3.0) ** 2 + (tree["y"] + 1.0) ** 2)


POINT = {"x": torch.tensor(3.0), "y": torch.tensor(-1.0)}
AXES = (
    {"x": torch.tensor(1.0), "y": torch.tensor(0.0)},
    {"x": torch.tensor(0.0), "y": torch.tensor(1.0)},
)


def test_the_grid_of_a_bowl_by_hand():
    grid = loss_grid(bowl, POINT, AXES, 2.0, num_steps=3)
    assert grid.tolist() == [[12.0, 8.0, 12.0], [4.0, 0.0, 4.0], [12.0, 8.0, 12.0]]  # a moves x: rows
    means = mean_losses(bowl, POINT, AXES, (2.0, 1.0), num_steps=3)
    assert means == {2.0: pytest.approx(72.0 / 9.0), 1.0: pytest.approx(18.0 / 9.0)}


def test_steps_and_magnitudes_that_make_no_grid_are_refused():
    with pytest.raises(ValueError, match="2 or more"):
        loss_grid(bowl, POINT, AXES, 1.0, num_steps=1)
    with pytest.raises(ValueError, match="positive"):
        loss_grid(bowl, POINT, AXES, 0.0)


def test_directions_have_length_one_and_differ():
    like = {"a": torch.zeros(50, 3), "b": torch.zeros(7)}
    first, second = random_direction(like, 0, "first"), random_direction(like, 0, "second")
    for tree in (first, second):
        assert sum(float(tensor.square().sum()) for tensor in tree.values()) == pytest.approx(1.0, abs=1e-6)
    product = sum(float((first[name] * second[name]).sum()) for name in like)
    assert abs(product) < 0.4
    assert all(torch.equal(tensor, random_direction(like, 0, "first")[name]) for name, tensor in first.items())


def blocks_of(population):
    return [make_block(population, [6, 2, 0]), make_block(population, [5, 4, 3, 1])]


def test_the_loss_is_the_mean_over_all_examples_of_all_clients():
    federation, training, population = toy_federation(), toy_training("fedmf"), toy_population()
    model = mf_model(federation, training)
    zero = {"item_table": torch.zeros_like(model.shared["item_table"])}
    loss = training_loss(model, model.private, blocks_of(population), federation, training)
    assert loss(zero) == pytest.approx(math.log(2.0))
    one_block = training_loss(
        model, model.private, [make_block(population, [6, 2, 0, 5, 4, 3, 1])], federation, training
    )
    assert loss(model.shared) == pytest.approx(one_block(model.shared), rel=1e-6)
    # a table that says yes to everything: each positive costs softplus(-z), each of its two negatives softplus(z)
    yes = {"item_table": torch.ones_like(model.shared["item_table"])}
    users = {"user": torch.full_like(model.private["user"], 0.5)}
    expected = (math.log1p(math.exp(-2.0)) + 2.0 * math.log1p(math.exp(2.0))) / 3.0
    assert training_loss(model, users, blocks_of(population), federation, training)(yes) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["fedmf", "fedncf"])
def test_the_gradient_direction_is_that_of_the_loss(name):
    torch.set_default_dtype(torch.float64)
    try:
        federation, training, population = toy_federation(), toy_training(name), toy_population()
        model = mf_model(federation, training) if name == "fedmf" else ncf_model(federation, training, "5")
        local, blocks = model.private, blocks_of(population)
        loss = training_loss(model, local, blocks, federation, training)
        uphill = gradient_direction(model, model.shared, local, blocks, federation, training)

        def slope(direction):
            moved = [{key: model.shared[key] + e * direction[key] for key in model.shared} for e in (1e-5, -1e-5)]
            return (loss(moved[0]) - loss(moved[1])) / 2e-5

        other = random_direction(model.shared, 0, "first")
        cosine = sum(float((uphill[key] * other[key]).sum()) for key in uphill)
        assert slope(uphill) > 0.0
        assert slope(other) == pytest.approx(cosine * slope(uphill), rel=1e-4)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_trained_model_lies_lower_than_its_surroundings():
    federation, training, population = toy_federation(), toy_training("fedmf"), toy_population()
    state, _ = run(toy_method("fedmf", federation, training), population, 30)
    model = mf_model(federation, training)
    loss = training_loss(model, state.local, blocks_of(population), federation, training, round=31)
    directions = (random_direction(state.server, 0, "first"), random_direction(state.server, 0, "second"))
    means = mean_losses(loss, state.server, directions)
    assert means[1e-4] == pytest.approx(loss(state.server), abs=1e-4)
    assert means[10.0] > means[1.0] > means[1e-1] - 1e-3
