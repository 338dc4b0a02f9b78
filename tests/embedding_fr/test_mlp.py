"""Stacked networks: numbers by hand, and torch.nn as the judge."""

import pytest
import torch
from toy_federation import toy_federation

from embedding_fr.mlp import mlp, mlp_gradients, mlp_layers, mlp_of_catalogue, row_gradients, start_mlp


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


@pytest.mark.parametrize("sizes", [(5, 1), (5, 4, 1), (5, 6, 3, 2)])
def test_a_shared_network_on_shared_rows_equals_the_stacked_one_and_each_client_alone(sizes):
    params = start_mlp(toy_federation(), "f", sizes)
    row_IF, client_CK = torch.randn(9, 3), torch.randn(4, 2)
    stacked = {name: tensor.expand(4, *tensor.shape) for name, tensor in params.items()}
    found = mlp_of_catalogue(params, "f", row_IF, client_CK)
    assert torch.allclose(found, mlp(stacked, "f", row_IF.expand(4, 9, 3), client_CK).mT, atol=1e-6)
    assert torch.allclose(found[2:3], mlp_of_catalogue(params, "f", row_IF, client_CK[2:3]), atol=1e-6)


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
