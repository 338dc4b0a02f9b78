"""FedAvg on adapters: means, weights, identical clients."""

import torch
from toy_recommender import run, toy_data, toy_recommender

from fedecider.federation.wire import take_row
from fedecider.methods.fedavg import WeightingConfig, fedavg
from fedecider.methods.local import LocalConfig, local
from fedecider.models.adapters import without_prefix


def close(left, right):
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        torch.testing.assert_close(tensor, right[key], rtol=1e-6, atol=1e-7)


def test_the_global_adapter_is_the_mean_of_what_clients_trained():
    uniform, _ = run(fedavg(toy_recommender(), WeightingConfig()), 3, 1)
    own = without_prefix(uniform.local, "own")
    close(uniform.server, {key: tensor.double().mean(0).float() for key, tensor in own.items()})
    weighted, _ = run(fedavg(toy_recommender(), WeightingConfig(weighting="examples")), 3, 1)
    share_C = torch.tensor([7.0, 5.0, 9.0]) / 21.0
    close(weighted.server, {key: torch.tensordot(share_C, tensor, 1) for key, tensor in own.items()})


def test_identical_clients_are_local_training():
    data = [toy_data("crime")] * 2
    state, _ = run(fedavg(toy_recommender(["crime", "crime"], data=data), WeightingConfig()), 2, 3)
    alone, _ = run(local(toy_recommender(["crime"], data=data), LocalConfig()), 1, 3)
    close(state.server, take_row(without_prefix(alone.local, "local.now"), 0))


def test_one_client_is_local_training():
    state, _ = run(fedavg(toy_recommender(["comics"]), WeightingConfig()), 1, 2)
    alone, _ = run(local(toy_recommender(["comics"]), LocalConfig()), 1, 2)
    close(state.server, take_row(without_prefix(alone.local, "local.now"), 0))


def test_the_two_views_differ():
    method = fedavg(toy_recommender(), WeightingConfig())
    _, records = run(method, 3, 2)
    assert records[1]["valid"]["global"] != records[1]["valid"]["local"]
