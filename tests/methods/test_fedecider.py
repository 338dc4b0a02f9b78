"""FeDecider: the algorithm step by step, its degenerate cases and its ablations."""

import pytest
import torch
from toy_recommender import blocks, positions_of, run, toy_data, toy_recommender

from fedecider.federation.method import Download
from fedecider.federation.wire import take_row
from fedecider.methods.fedecider import FedeciderConfig, client_model, fedecider
from fedecider.methods.local import LocalConfig, local
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import (
    client_order,
    fusion,
    module_names,
    num_scalars,
    put,
    stack_trees,
    without_prefix,
)
from fedecider.models.directions import normalise, update_norms
from fedecider.models.fused_linear import fused_layers


@pytest.fixture
def frozen(monkeypatch):
    """Fusion weights that do not learn, as those of wo_per."""
    monkeypatch.setattr(FedeciderConfig, "learns_alpha", False)


def paper(**settings):
    return FedeciderConfig(**{"alpha_init": 2.0, **settings})


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def close(left, right, **tolerance):
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        torch.testing.assert_close(tensor, right[key], **tolerance)


def dense_updates(factors):
    return {name: factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"] for name in module_names(factors)}


def held_updates(recommender):
    """What the model adds to its base after the last training, dense."""
    return {name: layer.get_delta_weight("default") for name, layer in fused_layers(recommender.base.model).items()}


def test_round_one_is_local_training_and_its_broadcast_has_unit_norms():
    state, records = run(fedecider(toy_recommender(), paper()), 3, 1)
    alone, _ = run(local(toy_recommender(), LocalConfig()), 3, 1)
    assert same(without_prefix(state.local, "own"), without_prefix(alone.local, "local.now"))
    norms = update_norms(state.server)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-6)
    raw = update_norms(without_prefix(state.local, "own"))
    for client, log in enumerate(records[0]["clients"]):
        assert log["norm_min"] == pytest.approx(float(raw[client].min()))
        assert log["norm_max"] > log["norm_median"] > log["norm_min"] > 0.0
        assert log["num_untrained"] == 0
        assert log["cosine"] is None
    assert state.local["alpha"].tolist() == [[2.0] * 3] * 3


def test_round_two_by_hand():
    recommender = toy_recommender()
    method = fedecider(recommender, paper(alpha_learning_rate=0.03))
    first, _ = run(method, 3, 1)
    second, records = run(method, 3, 2)
    other = toy_recommender()
    for client in (0, 2):
        start = fusion(first.server, client, torch.full((3,), 2.0))
        trained = train_locally(other, client, 2, start, alpha_learning_rate=0.03)
        assert same(trained.pair, take_row(without_prefix(second.local, "own"), client))
        assert torch.equal(second.local["alpha"][client], trained.adapters.peers.alpha)
        expected = take_row(normalise(stack_trees([trained.pair])).tree, 0)
        assert same(expected, take_row(second.server, client))
    assert (second.local["alpha"] - 2.0).abs().min() > 1e-3
    for client, log in enumerate(records[1]["clients"]):
        assert log["alpha"] == pytest.approx(second.local["alpha"][client].tolist())
        assert len(log["cosine"]) == 3
        assert log["cosine"][client] > max(log["cosine"][:client] + log["cosine"][client + 1 :])


def test_downloads_are_one_pair_then_all_directions():
    recommender = toy_recommender()
    method = fedecider(recommender, paper())
    _, records = run(method, 3, 2)
    scalars = num_scalars(recommender.start)
    for record, factor in zip(records, (1, 3), strict=True):
        assert [sum(group["down"].values()) for group in record["traffic"]] == [4 * factor * scalars]
        assert [sum(group["up"].values()) for group in record["traffic"]] == [4 * scalars]


def test_permuting_clients_permutes_alpha_and_nothing_else():
    names = ["crime", "comics", "children"]
    order = [2, 0, 1]
    config = paper(alpha_learning_rate=0.02)
    first, _ = run(fedecider(toy_recommender(names), config), 3, 2)
    moved, _ = run(fedecider(toy_recommender([names[client] for client in order]), config), 3, 2)
    torch.testing.assert_close(moved.local["alpha"], first.local["alpha"][order][:, order], rtol=1e-4, atol=1e-5)
    close(moved.server, {key: tensor[order] for key, tensor in first.server.items()}, rtol=1e-2, atol=1e-3)
    assert (first.local["alpha"] - first.local["alpha"].T).abs().max() > 1e-3  # not symmetric by chance


def test_identical_clients_stay_bit_equal():
    # same data and same random streams: both bear the name "crime"
    data = [toy_data("crime"), toy_data("crime"), toy_data("children")]
    recommender = toy_recommender(["crime", "crime", "children"], data=data)
    method = fedecider(recommender, paper(alpha_learning_rate=0.02))
    state, _ = run(method, 3, 3)
    assert same(take_row(state.server, 0), take_row(state.server, 1))
    alpha_KK = state.local["alpha"]
    assert torch.equal(alpha_KK[0, [0, 1, 2]], alpha_KK[1, [1, 0, 2]])
    alpha = put(recommender.base.model, fusion(state.server, 2, torch.full((3,), 2.0)))
    recommender.base.model(**toy_data("children")).loss.backward()
    gradient = client_order(alpha.grad, 2)
    assert float(gradient[0]) == pytest.approx(float(gradient[1]), rel=1e-5)
    assert float(gradient[0]) != pytest.approx(float(gradient[2]), rel=1e-2)


def test_one_client_is_local_training_restarted_from_its_direction():
    recommender, other = toy_recommender(["crime"]), toy_recommender(["crime"])
    state, _ = run(fedecider(recommender, paper(alpha_learning_rate=0.02)), 1, 3)
    pair, alpha_K = train_locally(other, 0, 1, other.start).pair, torch.tensor([2.0])
    for round in (2, 3):
        unit = fusion(normalise(stack_trees([pair])).tree, 0, alpha_K)
        (pair, peers), _ = train_locally(other, 0, round, unit, alpha_learning_rate=0.02)
        alpha_K = peers.alpha
    assert torch.equal(state.local["alpha"][0], alpha_K)
    assert same(take_row(state.server, 0), take_row(normalise(stack_trees([pair])).tree, 0))


def test_local_is_the_model_that_was_trained():
    recommender = toy_recommender()
    method = fedecider(recommender, paper())
    first, _ = run(method, 3, 1)
    own = {key: tensor[1:2] for key, tensor in first.local.items()}
    download = method.broadcast(2, first.server, torch.tensor([1]))
    method.client_update(2, download, own, blocks(3)[1])
    trained = held_updates(recommender)
    second, _ = run(method, 3, 2)
    later = method.broadcast(3, second.server, torch.tensor([1]))
    asked = (later, take_row(second.local, 1), 1)
    before, after = (
        dense_updates(client_model(recommender, paper(), variant, *asked).adapters.factors())
        for variant in ("local", "fused")
    )
    close(before, trained, rtol=0, atol=1e-6)
    assert not any(torch.allclose(after[name], update, atol=1e-3) for name, update in trained.items())


def test_what_was_trained_is_held_at_the_width_of_the_layers():
    """Twelve updates of rank 2 make rank 24, attention layers of 10 x 12 features hold rank 10."""
    names = [f"{name}.{copy}" for copy in range(4) for name in ("crime", "comics", "children")]
    recommender = toy_recommender(names, data=[toy_data(name.partition(".")[0]) for name in names])
    method = fedecider(recommender, paper())
    state, _ = run(method, 12, 2)
    assert {tensor.shape[1] for key, tensor in state.local.items() if key.endswith("lora_a")} == {2, 10}
    before, _ = run(method, 12, 1)
    own = {key: tensor[5:6] for key, tensor in before.local.items()}
    method.client_update(2, method.broadcast(2, before.server, torch.tensor([5])), own, blocks(12)[5])
    trained = held_updates(recommender)
    found = client_model(recommender, paper(), "local", Download(state.server), take_row(state.local, 5), 5)
    close(dense_updates(found.adapters.factors()), trained, rtol=0, atol=1e-5)
    assert min(float(update.norm()) for update in trained.values()) > 0.1


def test_local_after_round_one_is_the_plain_adapter():
    recommender = toy_recommender()
    method = fedecider(recommender, paper())
    state, _ = run(method, 3, 1)
    found = positions_of(method, state, "local", 3)
    alone = local(toy_recommender(), LocalConfig())
    alone_state, _ = run(alone, 3, 1)
    for mine, other in zip(found, positions_of(alone, alone_state, "local", 3), strict=True):
        assert torch.equal(mine, other)


def test_without_personalisation_is_alpha_frozen_at_one_over_k(frozen):
    without, _ = run(fedecider(toy_recommender(), paper(ablation="wo_per")), 3, 2)
    frozen, _ = run(fedecider(toy_recommender(), FedeciderConfig(alpha_init=1.0 / 3.0)), 3, 2)
    assert same(without.server, frozen.server)
    assert same(without.local, frozen.local)
    assert without.local["alpha"].tolist() == torch.full((3, 3), 1.0 / 3.0).tolist()


def test_without_decomposition_is_normalisation_replaced_by_the_identity(monkeypatch):
    without, _ = run(fedecider(toy_recommender(), paper(ablation="wo_decomp")), 3, 2)

    class Untouched:
        def __init__(self, tree):
            self.tree = tree

    monkeypatch.setattr("fedecider.methods.fedecider.normalise", lambda tree, **_: Untouched(tree))
    main, _ = run(fedecider(toy_recommender(), paper()), 3, 2)
    assert same(without.server, main.server)
    assert same(without.local, main.local)
    assert same(without.server, without_prefix(without.local, "own"))


def test_without_separation_uses_raw_factors_and_the_product_of_sums():
    recommender = toy_recommender()
    config = paper(ablation="wo_sep")
    state, _ = run(fedecider(recommender, config), 3, 2)
    assert same(state.server, without_prefix(state.local, "own"))
    asked = (Download(state.server), take_row(state.local, 1), 1)
    found = client_model(recommender, config, "fused", *asked)
    alpha_K = state.local["alpha"][1]
    for key, tensor in found.adapters.factors().items():
        torch.testing.assert_close(tensor, torch.tensordot(alpha_K, state.server[key], 1), rtol=1e-4, atol=1e-6)


def test_one_client_without_separation_and_weight_one_is_local_training(frozen):
    config = FedeciderConfig(ablation="wo_sep", alpha_init=1.0)
    state, _ = run(fedecider(toy_recommender(["crime"]), config), 1, 3)
    alone, _ = run(local(toy_recommender(["crime"]), LocalConfig()), 1, 3)
    assert same(without_prefix(state.local, "own"), without_prefix(alone.local, "local.now"))


def test_a_client_that_first_comes_later_still_learns():
    # one client a round: in round 2 or 3 somebody starts from the common start, with an exactly zero direction
    recommender = toy_recommender()
    method = fedecider(recommender, paper())
    server, local_tree = method.init()
    own = {key: tensor[2:3] for key, tensor in local_tree.items()}
    upload, new_own, logs = method.client_update(2, method.broadcast(2, server, torch.tensor([2])), own, blocks(3)[2])
    assert logs[0]["finite"]
    assert logs[0]["norm_min"] > 0.0
    after = method.server_aggregate(2, server, iter([upload]))
    norms = update_norms(after)
    assert not norms[:2].any()
    torch.testing.assert_close(norms[2], torch.ones_like(norms[2]), rtol=0, atol=1e-6)
    assert torch.equal(new_own["alpha"][0, :2], torch.tensor([2.0, 2.0]))  # untrained peers give no gradient
