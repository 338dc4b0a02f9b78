"""Stacked networks: numbers by hand, and torch.nn as the judge."""

import pytest
import torch
from toy_federation import toy_federation

from embedding_fr.mlp import layer_sizes, mlp, mlp_gradients, mlp_layers, mlp_of_catalogue, row_gradients, start_mlp


def test_forward_by_hand():
    """Two clients with networks 2 -> 2 -> 1; every hidden unit is cut off by ReLU for one of the rows."""
    params = {
        "f.0.weight": torch.tensor([[[1.0, -1.0], [2.0, 0.5]], [[0.0, 1.0], [1.0, 0.0]]]),
        "f.0.bias": torch.tensor([[0.5, 0.0], [-1.0, 0.0]]),
        "f.1.weight": torch.tensor([[[1.0], [10.0]], [[2.0], [-3.0]]]),
        "f.1.bias": torch.tensor([[-0.25], [1.0]]),
    }
    row_CBF = torch.tensor([[[1.0, 1.0], [-3.0, 1.0]], [[2.0, 4.0], [-1.0, 0.5]]])
    # client 0: (1 + 2 + .5, -1 + .5) -> (3.5, 0) -> 3.25; (-3 + 2 + .5, 3 + .5) -> (0, 3.5) -> 34.75
    # client 1: (4 - 1, 2) -> (3, 2) -> 6 - 6 + 1; (.5 - 1, -1) -> (0, 0) -> 1
    expected = torch.tensor([[[3.25], [34.75]], [[1.0], [1.0]]])
    assert torch.allclose(mlp(params, "f", row_CBF), expected)


def test_features_of_a_client_stand_before_those_of_its_rows():
    params = start_mlp(toy_federation(), "f", (5, 4, 3), num_clients=2)
    row_CBF, client_CK = torch.randn(2, 6, 3), torch.randn(2, 2)
    joined = torch.cat([client_CK[:, None].expand(-1, 6, -1), row_CBF], 2)
    assert torch.allclose(mlp(params, "f", row_CBF, client_CK), mlp(params, "f", joined), atol=1e-6)


@pytest.mark.parametrize("sizes", [(5, 1), (5, 4, 1), (5, 6, 3, 2)])
def test_a_shared_network_on_shared_rows_equals_the_stacked_one_and_each_client_alone(sizes):
    params = start_mlp(toy_federation(), "f", sizes)
    row_IF, client_CK = torch.randn(9, 3), torch.randn(4, 2)
    stacked = {name: tensor.expand(4, *tensor.shape) for name, tensor in params.items()}
    found = mlp_of_catalogue(params, "f", row_IF, client_CK)
    assert torch.allclose(found, mlp(stacked, "f", row_IF.expand(4, 9, 3), client_CK).mT, atol=1e-6)
    assert torch.allclose(found[2:3], mlp_of_catalogue(params, "f", row_IF, client_CK[2:3]), atol=1e-6)


def test_equals_linear_layers_and_their_gradients():
    params = start_mlp(toy_federation(), "f", (3, 4, 4, 2), num_clients=3)
    params |= start_mlp(toy_federation(), "g", (7, 1), num_clients=3)  # another network in the same tree
    leaves = {key: tensor.requires_grad_() for key, tensor in params.items() if key.startswith("f.")}
    row_CBF = torch.randn(3, 5, 3)
    mlp(params, "f", row_CBF).square().sum().backward()
    for client in range(3):
        layers = [torch.nn.Linear(size_in, size_out) for size_in, size_out in ((3, 4), (4, 4), (4, 2))]
        for number, layer in enumerate(layers):
            layer.weight.data = leaves[f"f.{number}.weight"][client].detach().T.clone()
            layer.bias.data = leaves[f"f.{number}.bias"][client].detach().clone()
        one = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        one(row_CBF[client]).square().sum().backward()
        for number, layer in enumerate(layers):
            assert torch.allclose(leaves[f"f.{number}.weight"].grad[client], layer.weight.grad.T, atol=1e-5)
            assert torch.allclose(leaves[f"f.{number}.bias"].grad[client], layer.bias.grad, atol=1e-5)


@pytest.mark.parametrize("sizes", [(5, 1), (5, 4, 3, 2), (5, 6, 1)])
@pytest.mark.parametrize("num_common", [0, 2])
def test_closed_form_equals_autograd(sizes, num_common):
    leaves = {key: one.requires_grad_() for key, one in start_mlp(toy_federation(), "f", sizes, num_clients=3).items()}
    row_CBF = torch.randn(3, 7, 5 - num_common, requires_grad=True)
    client_CK = torch.randn(3, num_common, requires_grad=True) if num_common else None
    weight_CBO = torch.randn(3, 7, sizes[-1])
    (mlp(leaves, "f", row_CBF, client_CK) * weight_CBO).sum().backward()
    with torch.no_grad():
        hidden = mlp_layers(leaves, "f", row_CBF, client_CK)[:-1]
        found = mlp_gradients(leaves, "f", hidden, weight_CBO.mT, client_CK)
    assert set(found.layers) == set(leaves)
    for key, leaf in leaves.items():
        assert torch.allclose(found.layers[key], leaf.grad, atol=1e-5), key
    assert torch.allclose(row_gradients(leaves, "f", found), row_CBF.grad, atol=1e-5)
    assert (found.client_CK is None) == (client_CK is None)
    assert client_CK is None or torch.allclose(found.client_CK, client_CK.grad, atol=1e-5)


def test_start_values_are_within_their_bound_and_named():
    shared = start_mlp(toy_federation(), "f", (16, 8, 1))
    assert {key: tuple(tensor.shape) for key, tensor in shared.items()} == {
        "f.0.weight": (16, 8),
        "f.0.bias": (8,),
        "f.1.weight": (8, 1),
        "f.1.bias": (1,),
    }
    assert 0.23 < float(shared["f.0.weight"].abs().max()) <= 0.25 < float(shared["f.1.weight"].abs().max()) <= 8**-0.5
    assert abs(float(shared["f.0.weight"].mean())) < 0.04
    own = start_mlp(toy_federation(), "f", (16, 8, 1), num_clients=7)
    assert own["f.0.weight"].shape == (7, 16, 8)
    assert not torch.equal(own["f.0.weight"][0], own["f.0.weight"][1])
    other_seed = start_mlp(toy_federation(seed=1), "f", (16, 8, 1))
    assert not torch.equal(shared["f.0.weight"], other_seed["f.0.weight"])


def test_layer_sizes():
    assert layer_sizes("32,16,8") == (32, 16, 8)
    assert layer_sizes("4") == (4,)
    assert layer_sizes("") == ()
    for wrong in ("32,0", "a,b", "8,-1", "3.5"):
        with pytest.raises(ValueError, match="expected positive whole numbers"):
            layer_sizes(wrong)
