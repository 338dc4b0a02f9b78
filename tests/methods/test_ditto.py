"""Ditto: w is FedAvg's, v is drawn to the w that was received, and neither disturbs the other."""

import pytest
import torch
from test_fedavg import close
from toy_recommender import blocks, run, toy_recommender

from fedecider.federation.method import Download
from fedecider.federation.record import left_out
from fedecider.federation.wire import take_row
from fedecider.methods.ditto import GRID, DittoConfig, client_model, ditto
from fedecider.methods.fedavg import WeightingConfig, fedavg
from fedecider.methods.local import LocalConfig, local
from fedecider.methods.local_training import ProximalTerm, train_locally
from fedecider.models.adapters import without_prefix

pytestmark = pytest.mark.whole


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_without_a_proximal_term_v_is_local_training_bit_for_bit():
    personal, records = run(ditto(toy_recommender(dropout=0.1), DittoConfig(personal_pull=0.0)), 3, 3)
    alone, local_records = run(local(toy_recommender(dropout=0.1), LocalConfig()), 3, 3)
    assert all(torch.equal(tensor, alone.local[f"local.now.{key[4:]}"]) for key, tensor in personal.local.items())
    assert [log["loss"] for log in records[2]["clients"]] == [log["loss"] for log in local_records[2]["clients"]]


@pytest.mark.parametrize("personal_pull", [1.0, 30.0])
def test_w_is_that_of_fedavg_bit_for_bit(personal_pull):
    state, records = run(ditto(toy_recommender(dropout=0.1), DittoConfig(personal_pull=personal_pull)), 3, 3)
    plain, plain_records = run(fedavg(toy_recommender(dropout=0.1), WeightingConfig()), 3, 3)
    assert same(state.server, plain.server)
    assert records[2]["valid"]["global"] == plain_records[2]["valid"]["global"]
    for log, plain_log in zip(records[2]["clients"], plain_records[2]["clients"], strict=True):
        assert log["global_loss"] == plain_log["loss"] != log["loss"]


def test_v_goes_on_from_v_and_is_drawn_to_the_w_of_the_start_of_the_round():
    """The same three rounds written down as a loop over one client."""
    state, _ = run(ditto(toy_recommender(local_epochs=3), DittoConfig(personal_pull=2.0)), 3, 3)
    globals_ = [
        run(fedavg(toy_recommender(local_epochs=3), WeightingConfig()), 3, rounds)[0].server for rounds in (1, 2)
    ]
    recommender = toy_recommender(local_epochs=3)
    start, _ = fedavg(recommender, WeightingConfig()).init()
    expected = start
    for round, anchor in enumerate([start, *globals_], 1):
        expected = train_locally(recommender, 1, round, expected, proximal=ProximalTerm(anchor, 2.0)).pair
    assert same(take_row(without_prefix(state.local, "own"), 1), expected)


def test_a_strong_proximal_term_brings_v_to_w():
    recommender = toy_recommender(local_epochs=20)
    target = {key: tensor + 0.1 for key, tensor in initial(recommender).items()}
    distances = []
    for strength in (0.0, 1e4):
        method = ditto(recommender, DittoConfig(personal_pull=strength))
        own = {key: tensor[:1] for key, tensor in method.init()[1].items()}
        _, kept, _ = method.client_update(1, Download(target), own, blocks(3)[0])
        personal = take_row(without_prefix(kept, "own"), 0)
        distances.append(max(float((personal[key] - target[key]).abs().max()) for key in target))
    assert distances[1] < 0.05 < 0.1 < distances[0]


def initial(recommender):
    return fedavg(recommender, WeightingConfig()).init()[0]


def test_what_each_variant_is_and_a_broken_v_leaves_w_alone():
    recommender = toy_recommender()
    method = ditto(recommender, DittoConfig(weighting="examples"))
    state, records = run(method, 3, 2)
    assert method.variants == ("personal", "global")
    assert records[1]["valid"]["personal"] != records[1]["valid"]["global"]
    asked = (Download(state.server), take_row(state.local, 2), 2)
    personal = client_model(recommender, DittoConfig(), "personal", *asked).adapters.pair
    assert same(personal, take_row(without_prefix(state.local, "own"), 2))

    broken = {key: torch.full_like(tensor[2:3], float("nan")) for key, tensor in state.local.items()}
    upload, _, logs = method.client_update(3, Download(state.server), broken, blocks(3)[2])
    own = {key: tensor[2:3] for key, tensor in state.local.items()}
    untouched, _, _ = method.client_update(3, Download(state.server), own, blocks(3)[2])
    assert same(upload.tensors, untouched.tensors)
    assert (logs[0]["finite"], logs[0]["personal_finite"]) == (True, False)
    assert left_out([{"round": 3, "clients": [{"client": 2, **logs[0]}]}]) == []  # what was sent is fine
    assert "diverged" not in logs[0]

    bad = {key: torch.full_like(tensor, float("nan")) for key, tensor in state.server.items()}
    _, _, logs = method.client_update(3, Download(bad), own, blocks(3)[2])
    assert logs[0]["finite"] is False
    assert logs[0]["diverged"].startswith("diverged at step")


def test_weights_by_examples_and_settings():
    weighted, _ = run(ditto(toy_recommender(), DittoConfig(weighting="examples")), 3, 1)
    plain, _ = run(fedavg(toy_recommender(), WeightingConfig(weighting="examples")), 3, 1)
    uniform, _ = run(fedavg(toy_recommender(), WeightingConfig()), 3, 1)
    close(weighted.server, plain.server)
    assert not same(weighted.server, uniform.server)
    assert DittoConfig(**GRID[0]) == DittoConfig()
    assert sorted(DittoConfig(**setting).personal_pull for setting in GRID) == [0.1, 1.0, 2.0]
