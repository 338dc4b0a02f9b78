"""FLoRA: every round merges the exact mean of the clients' products, whatever form it travels in."""

import copy

import pytest
import torch
from toy_recommender import SILOS, catalogue_recommender, on, run, toy_recommender

from fedecider.federation.method import Download
from fedecider.federation.wire import received, take_row
from fedecider.methods import METHODS
from fedecider.methods.config import WeightingConfig
from fedecider.methods.flora import client_model, flora, is_dense
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import AdapterShape, module_names, without_prefix
from fedecider.models.fused_linear import fused_layers

pytestmark = pytest.mark.whole

SIZES = (7.0, 5.0, 9.0)


def products(factors):
    return {name: factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"] for name in module_names(factors)}


def updates_of(recommender, state, variant, client, method=None):
    """Name -> (O, I) that the client's model adds."""
    method = method or flora(recommender, WeightingConfig())
    download = method.broadcast(state.round + 1, state.server, torch.tensor([client]))
    row = take_row(state.local, client)
    found = client_model(recommender, WeightingConfig(), variant, received(download, 0), row, client)
    return products(found.adapters.factors())


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("rank", [1, 2])  # stacks and sums of means travel
def test_three_rounds_are_dense_means_of_products_added_to_the_base(rank, weighting):
    recommender = toy_recommender(rank=rank)
    state, _ = run(flora(recommender, WeightingConfig(weighting)), 3, 3)
    weight_K = torch.tensor(SIZES if weighting == "examples" else (1.0, 1.0, 1.0))
    weight_K = weight_K / weight_K.sum()
    other = toy_recommender(rank=rank)
    other = on(other, model=copy.deepcopy(other.base.model))
    shapes = other.shapes
    assert any(is_dense(name, shape, 3) for name, shape in shapes.items()) == (rank == 2)
    total = {name: torch.zeros(shape.out_features, shape.in_features) for name, shape in shapes.items()}
    for round in (1, 2, 3):
        mean = {name: torch.zeros_like(one) for name, one in total.items()}
        for client in range(3):
            trained = products(train_locally(other, client, round, other.start).pair)
            for name, one in trained.items():
                mean[name] += weight_K[client] * one
        for name, layer in fused_layers(other.base.model).items():
            layer.get_base_layer().weight.data += mean[name]  # merged, as in the paper
            total[name] += mean[name]
    for name, one in total.items():
        assert one.abs().max() > 5e-3
        torch.testing.assert_close(state.server[f"{name}.update"], one, rtol=1e-3, atol=1e-4)
        for client in range(3):
            found = updates_of(recommender, state, "global", client)[name]
            torch.testing.assert_close(found, one, rtol=1e-3, atol=1e-4)


def test_the_model_before_the_upload_is_what_was_merged_and_the_new_pair():
    recommender = toy_recommender()
    before, _ = run(flora(recommender, WeightingConfig()), 3, 1)
    state, _ = run(flora(recommender, WeightingConfig()), 3, 2)
    for client in range(3):
        own = products(take_row(without_prefix(state.local, "own"), client))
        for name, update in updates_of(recommender, state, "local", client).items():
            torch.testing.assert_close(update, before.server[f"{name}.update"] + own[name], rtol=1e-4, atol=1e-6)


def test_rows_of_a_table_are_means_over_the_companies_that_have_them():
    recommender = catalogue_recommender()
    method = METHODS["flora"].build(recommender, WeightingConfig())
    state, _ = run(method, 4, 1)
    own_KV = recommender.rows.own["lm_head.lora_b"]
    product_K = [products(take_row(without_prefix(state.local, "own"), client))["lm_head"] for client in range(4)]
    for client in range(4):
        expected = torch.zeros_like(product_K[0])
        for row in own_KV[client].nonzero()[:, 0].tolist():
            having = [one for one in range(4) if own_KV[one, row]]
            assert len(having) == (4 if row in (0, 2) else 2)
            expected[row] = sum(product_K[one][row] for one in having) / len(having)
        found = updates_of(recommender, state, "global", client, method)["lm_head"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert len(SILOS) == 4


@pytest.mark.parametrize("rank", [1, 2])
def test_who_was_away_is_sent_the_whole_and_has_the_same_model(rank):
    recommender = toy_recommender(rank=rank)
    method = flora(recommender, WeightingConfig())
    state, records = run(method, 3, 5, participation=0.4)
    came = {log["client"] for log in records[-1]["clients"]}
    assert 0 < len(came) < 3
    models = [updates_of(recommender, state, "global", client) for client in range(3)]
    for client in range(3):
        download = method.broadcast(6, state.server, torch.tensor([client]))
        assert any("lora" in key for key in download.shared) == (client in came and rank == 1)
        for name, update in models[client].items():
            torch.testing.assert_close(update, state.server[f"{name}.update"], rtol=1e-4, atol=1e-6)


def test_what_travels_is_the_smaller_form():
    assert is_dense("q", AdapterShape(8, 64, 64), 4)  # 4,096 numbers against 4 * 8 * 128
    assert not is_dense("q", AdapterShape(8, 64, 64), 3)
    assert is_dense("lm_head", AdapterShape(64, 64, 9, True), 1)  # whole rows: no more than FedAvg's B
    assert not is_dense("lm_head", AdapterShape(8, 64, 26_000, True), 7)
    shapes = {"q": AdapterShape(8, 64, 64), "lm_head": AdapterShape(64, 64, 500, True)}
    assert METHODS["flora"].scalars(shapes, [shapes] * 3, 2)[0] == 3 * 8 * 128 + 500 * 64
    assert METHODS["flora"].scalars(shapes, [shapes] * 4, 2)[0] == 64 * 64 + 500 * 64


def test_a_round_that_nobody_finishes_changes_nothing():
    method = flora(toy_recommender(), WeightingConfig())
    state, _ = run(method, 3, 1)
    assert method.server_aggregate(2, state.server, iter([])) is state.server
    download = method.broadcast(3, state.server, torch.tensor([0]))
    assert all(key.endswith(".update") for key in download.shared)
    assert isinstance(download, Download)
