"""FedCA: directions and angles by hand, its weights against a solver, its settings at their ends."""

import math

import pytest
import torch
from toy_federation import run, toy_federation, toy_method, toy_training

from embedding_fr.local_only import local_only
from embedding_fr.methods.fedca import TABLE, closeness, principal_directions
from fedecider.federation.wire import dense

pytestmark = pytest.mark.usefixtures("double")


def test_directions_are_those_along_which_the_rows_vary_most():
    """(3, 4) and its opposite, twice; a smaller spread across; the last row is padding and counts nothing."""
    rows = torch.tensor([[[3.0, 4.0], [-3.0, -4.0], [0.4, -0.3], [-0.4, 0.3], [99.0, 99.0]]]) + 7.0
    count = torch.tensor([[2.0, 2.0, 1.0, 1.0, 0.0]])
    found = principal_directions(rows, count, 2)
    assert torch.allclose(found, torch.tensor([[[0.6, 0.8], [0.8, -0.6]]]))
    swapped = principal_directions(rows, torch.tensor([[1.0, 1.0, 400.0, 400.0, 0.0]]), 2)
    assert torch.allclose(swapped, found.flip(1))


def test_where_rows_vary_along_fewer_directions_the_others_are_zero():
    rows = torch.tensor([[[1.0, 2.0, 2.0], [2.0, 4.0, 4.0]], [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]])
    found = principal_directions(rows, torch.ones(2, 2), 2)
    assert torch.allclose(found[0], torch.tensor([[1 / 3, 2 / 3, 2 / 3], [0.0, 0.0, 0.0]]))
    assert torch.equal(found[1], torch.zeros(2, 3))


def test_closeness_is_the_cosine_of_the_mean_angle():
    """Planes that share one axis and are at right angles in the other: (0 + 90) / 2; turned by 60 degrees: 30."""
    one = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    right = torch.tensor([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]])
    turned = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, math.sqrt(0.75)]])
    found = closeness(torch.stack([one, right, turned]))
    assert found[0].tolist() == pytest.approx([1.0, math.cos(math.pi / 4), math.cos(math.pi / 6)], abs=1e-7)
    assert torch.allclose(found, found.T)


def test_a_table_of_one_s_own_is_training_alone():
    training = toy_training("fedca")
    alone, _ = run(local_only(toy_method("fedmf", training=training), toy_federation()))
    state, _ = run(toy_method("fedca", training=training, own_share=1.0))
    assert torch.allclose(state.local["last_table"], alone.local["kept.item_table"], atol=1e-9)
    assert torch.allclose(state.local["user"], alone.local["user"], atol=1e-9)


def test_sizes_alone_and_nothing_kept_is_fedmf():
    plain = {"own_share": 0.0, "mixed_share": 1.0, "similarity_weight": 0.0, "complement_weight": 0.0}
    training = toy_training("fedca")
    mean, _ = run(toy_method("fedmf", training=training))
    state, _ = run(toy_method("fedca", training=training, **plain))
    assert torch.allclose(state.server[TABLE], mean.server[TABLE].expand_as(state.server[TABLE]), atol=1e-9)
    assert torch.allclose(state.local["user"], mean.local["user"], atol=1e-9)


@pytest.mark.parametrize("weight", ["similarity_weight", "complement_weight"])
def test_a_weight_draws_a_mix_to_who_is_near(weight):
    """From the plain mean a client's own table, to which it is nearest, gains weight."""

    def distance(value):
        other = {"similarity_weight": 0.0, "complement_weight": 0.0, weight: value}
        method, sent = toy_method("fedca", mixed_share=1.0, num_components=2, **other), {}

        def keep(round, download, own, block):
            upload, *rest = method.client_update(round, download, own, block)
            sent.update(zip(upload.clients.tolist(), dense(upload, download).tensors[TABLE], strict=True))
            return upload, *rest

        state, _ = run(method._replace(client_update=keep), rounds=1)
        return sum(float((state.server[TABLE][client] - table).norm()) for client, table in sent.items())

    plain, near = distance(0.0), distance(2.0)
    assert near < 0.9 * plain
