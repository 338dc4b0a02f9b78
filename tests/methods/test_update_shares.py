"""The share of its update that a client takes: the one its own validation items rank best."""

from types import SimpleNamespace

import pytest
import torch
from toy_recommender import run, toy_recommender, with_clients

from fedecider.cross_silo.reported import chosen_scale, reported_model
from fedecider.cross_silo.settings import RunConfig
from fedecider.methods import METHODS
from fedecider.models.fused_linear import fused_layers


def size_of(model):
    return sum(float(layer.get_delta_weight("default").norm()) for layer in fused_layers(model).values())


@pytest.fixture(scope="module", params=["fedecider", "fedavg"])
def finished(request):
    recommender = toy_recommender()
    method = METHODS[request.param].build(recommender, METHODS[request.param].config())
    state, _ = run(method, 3, 2)
    settings = SimpleNamespace(
        run=RunConfig(method=request.param, update_scales="0, 0.5,1,0.25"), method=METHODS[request.param].config()
    )
    return settings, method, recommender, state


def test_each_client_takes_what_its_validation_items_like_best(finished):
    settings, method, recommender, state = finished
    model = reported_model(settings, method, recommender, state, 0)
    whole = size_of(model.base.holding(model.adapters))
    asked = []

    def positions_of(client):
        """Best near a half for client 0; the same for all scales for client 1; client 2 is best off without."""

        def positions(held, split, share):
            asked.append((client, split))
            size = size_of(held)
            return torch.tensor([[round(9 * abs(size / whole - 0.5)), 3, 0 if size == 0.0 else 5][client]])

        return positions

    names = recommender.names
    models = with_clients(recommender, positions=positions_of)
    reported = [reported_model(settings, method, models, state, client) for client in range(len(names))]
    assert [chosen_scale(settings, model) for model in reported] == [0.5, 1.0, 0.0]
    assert {split for _, split in asked} == {"valid"}
    half, again = (reported_model(settings, method, recommender, state, 0).scaled(scale) for scale in (0.5, 1.0))
    assert size_of(half.base.holding(half.adapters)) == pytest.approx(0.5 * whole, rel=1e-5)
    assert size_of(again.base.holding(again.adapters)) == whole  # what was ranked before leaves no trace
