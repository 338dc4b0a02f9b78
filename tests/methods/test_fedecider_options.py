"""FeDecider beyond the paper: weights per layer, norms in the log."""

import pytest
import torch
from slow import slow
from toy_recommender import run, toy_data, toy_recommender

from fedecider.federation.wire import take_row
from fedecider.methods.fedecider import FedeciderConfig, fedecider
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import (
    fusion,
    module_names,
    put,
    stack_trees,
    without_prefix,
)
from fedecider.models.directions import normalise, update_norms
from fedecider.testing.faults import Fault, faulty_channel

pytestmark = pytest.mark.whole

RATE = {"alpha_learning_rate": 0.02}


@pytest.fixture
def frozen(monkeypatch):
    """Fusion weights that do not learn, as those of wo_per."""
    monkeypatch.setattr(FedeciderConfig, "learns_alpha", False)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def build(**settings):
    return fedecider(toy_recommender(), FedeciderConfig(**{"alpha_init": 2.0, **settings}))


def test_round_two_with_weights_per_module_by_hand():
    first, _ = run(build(alpha_per="module", **RATE), 3, 1)
    second, records = run(build(alpha_per="module", **RATE), 3, 2)
    other = toy_recommender()
    num_modules = len(module_names(first.server))
    assert first.local["alpha"].tolist() == torch.full((3, num_modules, 3), 2.0).tolist()
    for client in (0, 2):
        start = fusion(first.server, client, torch.full((num_modules, 3), 2.0))
        trained = train_locally(other, client, 2, start, alpha_learning_rate=0.02)
        assert same(trained.pair, take_row(without_prefix(second.local, "own"), client))
        assert torch.equal(second.local["alpha"][client], trained.adapters.peers.alpha)
        assert same(take_row(normalise(stack_trees([trained.pair])).tree, 0), take_row(second.server, client))
    alpha_KMK = second.local["alpha"]
    assert (alpha_KMK.amax(1) - alpha_KMK.amin(1)).min() > 1e-2  # layers differ
    for client, log in enumerate(records[1]["clients"]):
        assert log["alpha_modules"] == alpha_KMK[client].tolist()
        assert log["alpha"] == pytest.approx([float(alpha_KMK[client, :, peer].mean()) for peer in range(3)])
    assert not [key for group in records[1]["traffic"] for key in group["up"] if "alpha" in key]


def test_gradients_of_the_layers_add_up_to_that_of_one_weight():
    first, _ = run(build(), 3, 1)
    recommender, gradients = toy_recommender(), []
    for alpha_K in (torch.full((3,), 2.0), torch.full((len(module_names(first.server)), 3), 2.0)):
        alpha = put(recommender.base.model, fusion(first.server, 1, alpha_K))
        recommender.base.model(**toy_data("comics")).loss.backward()
        gradients.append(alpha.grad)
    torch.testing.assert_close(gradients[1].sum(0), gradients[0], rtol=1e-4, atol=1e-6)
    assert gradients[1][:, 1].max() * gradients[1][:, 1].min() < 0  # layers disagree about a peer


def test_frozen_weights_are_the_same_per_client_and_per_module(frozen):
    client, _ = run(build(), 3, 2)
    module, _ = run(build(alpha_per="module"), 3, 2)
    assert same(client.server, module.server)
    assert torch.equal(module.local["alpha"][:, 0], client.local["alpha"])


OPTIONS = [
    {"alpha_per": "module"},
    slow({"alpha_per": "module", "ablation": "wo_sep"}),
]


@pytest.mark.parametrize(("ablation", "capped"), [("none", []), ("wo_per", []), ("wo_decomp", [1]), ("wo_sep", [1])])
def test_raw_pairs_are_bounded_by_their_peers_and_directions_need_it_not(ablation, capped):
    plan = faulty_channel([Fault(1, "scale", factor=1e4)])
    state, records = run(build(ablation=ablation), 3, 1, channel=plan)
    assert [one["client"] for one in records[0]["capped_uploads"]] == capped
    size_K = update_norms(state.server).norm(dim=1)
    assert size_K[1] < 10 * size_K[0]
