"""FedProx: from FedAvg (mu 0) to a model that does not move (mu large)."""

import pytest
import torch
from test_fedavg import close
from toy_recommender import blocks, run, toy_recommender

from fedecider.federation.method import Download
from fedecider.federation.wire import take_row
from fedecider.methods.fedavg import WeightingConfig, fedavg
from fedecider.methods.fedprox import FedproxConfig, fedprox
from fedecider.models.adapters import without_prefix

LEARNING_RATE = 1e-2


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def received(recommender, seed=5):
    """Global adapters far away from where all clients started."""
    start, _ = fedavg(recommender, WeightingConfig()).init()
    generator = torch.Generator().manual_seed(seed)
    return {key: 0.3 * torch.randn(tensor.shape, generator=generator) for key, tensor in start.items()}


def farthest(mu):
    """Largest change of any number in 20 epochs from ``received``."""
    recommender = toy_recommender(local_epochs=20, learning_rate=LEARNING_RATE)
    method = fedprox(recommender, FedproxConfig(mu=mu))
    _, local = method.init()
    shared = received(recommender)
    upload, _, _ = method.client_update(4, Download(shared), take_rows(local, 2), blocks(3)[2])
    sent = take_row(upload.tensors, 0)
    return max(float((sent[key] - shared[key]).abs().max()) for key in shared)


def take_rows(local, client):
    return {key: tensor[client : client + 1] for key, tensor in local.items()}


def test_mu_zero_is_fedavg_bit_for_bit():
    prox, records = run(fedprox(toy_recommender(dropout=0.1), FedproxConfig(mu=0.0)), 3, 3)
    plain, plain_records = run(fedavg(toy_recommender(dropout=0.1), WeightingConfig()), 3, 3)
    assert same(prox.server, plain.server)
    assert same(prox.local, plain.local)
    assert records[2]["valid"]["local"] == plain_records[2]["valid"]["local"]
    other, _ = run(fedprox(toy_recommender(dropout=0.1), FedproxConfig()), 3, 3)
    assert not same(other.server, plain.server)  # the default is not FedAvg


@pytest.mark.slow
def test_large_mu_stays_at_what_was_received():
    """Every number has a pull of its own, so AdamW oscillates within a few steps of the anchor."""
    free, held = farthest(0.0), farthest(1e4)
    assert free > 10 * LEARNING_RATE
    assert held < 3 * LEARNING_RATE
    assert held < farthest(1.0) < free


def test_local_is_reported_and_weights_may_be_examples():
    method = fedprox(toy_recommender(), FedproxConfig(weighting="examples"))
    state, records = run(method, 3, 2)
    assert method.variants == ("local", "global")
    assert records[1]["valid"]["local"] != records[1]["valid"]["global"]
    share_C = torch.tensor([7.0, 5.0, 9.0]) / 21.0
    own = without_prefix(state.local, "own")
    close(state.server, {key: torch.tensordot(share_C, tensor, 1) for key, tensor in own.items()})
