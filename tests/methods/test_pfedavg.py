"""PFedAvg: FedAvg's global model, fine-tuned by every client."""

import pytest
import torch
from test_fedavg import close
from toy_recommender import run, toy_recommender

from fedecider.federation.method import Download
from fedecider.federation.wire import take_row
from fedecider.methods.fedavg import WeightingConfig, fedavg
from fedecider.methods.local_training import train_locally
from fedecider.methods.pfedavg import client_model, pfedavg
from fedecider.models.adapters import without_prefix

pytestmark = pytest.mark.whole


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_the_fine_tuned_model_is_the_last_global_one_after_local_training():
    recommender = toy_recommender(local_epochs=2, dropout=0.1)
    method = pfedavg(recommender, WeightingConfig())
    before, _ = run(method, 3, 2)
    after, _ = run(method, 3, 3)
    for client in range(3):
        expected = train_locally(recommender, client, 3, before.server).pair
        asked = (Download(after.server), take_row(after.local, client), client)
        fine_tuned, shared = (
            client_model(recommender, WeightingConfig(), variant, *asked).adapters.pair
            for variant in ("fine_tuned", "global")
        )
        assert same(fine_tuned, expected)
        assert same(shared, after.server)


def test_the_global_model_is_that_of_fedavg_but_another_one_is_reported():
    method = pfedavg(toy_recommender(), WeightingConfig())
    state, records = run(method, 3, 3)
    plain, plain_records = run(fedavg(toy_recommender(), WeightingConfig()), 3, 3)
    assert same(state.server, plain.server)
    assert method.variants[0] == "fine_tuned"
    assert records[2]["valid"]["fine_tuned"] == plain_records[2]["valid"]["local"]
    assert records[2]["score"] != plain_records[2]["score"]


def test_weights_by_examples():
    state, _ = run(pfedavg(toy_recommender(), WeightingConfig(weighting="examples")), 3, 1)
    share_C = torch.tensor([7.0, 5.0, 9.0]) / 21.0
    own = without_prefix(state.local, "own")
    close(state.server, {key: torch.tensordot(share_C, tensor, 1) for key, tensor in own.items()})
