"""``merge``: what a round brought stays in the model, and every local training starts from a new pair."""

import functools

import pytest
import torch
from toy_recommender import blocks, catalogue_recommender, run, toy_recommender

from fedecider.federation.method import Download
from fedecider.federation.wire import take_row
from fedecider.methods import BUILT_IN as METHODS
from fedecider.methods.fedecider import FUSION_WEIGHTS, NORMS, FedeciderConfig, fedecider, load_variant
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import (
    client_order,
    fused_factors,
    fused_layers,
    load_fusion,
    module_names,
    without_prefix,
)
from fedecider.models.directions import compact, normalise, projection_weights, update_norms
from fedecider.testing.llm_contract import LLM_CONTRACT, LlmBench

pytestmark = pytest.mark.whole

MERGE = {"alpha_init": "auto", "self_term": "raw", "alpha_per": "module", "alpha_peers": 1.0, "merge": True}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def build(recommender=None, **settings):
    return fedecider(recommender or toy_recommender(), FedeciderConfig(alpha_learning_rate=0.02, **MERGE, **settings))


def pairs(server):
    return {key: tensor for key, tensor in server.items() if key != NORMS}


def products(factors):
    return {name: factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"] for name in module_names(factors)}


def loaded(recommender, state, variant, client, **settings):
    config = FedeciderConfig(**MERGE, **settings)
    load_variant(recommender, config, variant, Download(state.server), take_row(state.local, client), client)
    return products(fused_factors(recommender.model))


def test_rounds_two_and_three_by_hand():
    states = [run(build(), 3, rounds)[0] for rounds in (1, 2, 3)]
    start = take_row(without_prefix(build().init()[1], "own"), 0)
    other = toy_recommender()
    for client in (0, 2):
        own = [take_row(without_prefix(state.local, "own"), client) for state in states]
        below = own[0]
        for round in (2, 3):
            before, after = states[round - 2], states[round - 1]
            alpha_MK = update_norms(without_prefix(before.local, "own")).float().T.contiguous()
            alpha_MK[:, client] = 1.0
            alpha = load_fusion(other.model, pairs(before.server), client, alpha_MK, own_pair=start, merged=below)
            trained = train_locally(other, client, round, alpha=alpha, alpha_learning_rate=0.02)
            learned_MK = client_order(alpha.detach(), client)
            torch.testing.assert_close(after.local["alpha"][client], learned_MK, rtol=1e-3, atol=1e-5)
            for module, (name, update) in enumerate(products(trained.adapters).items()):
                own_update = products(own[round - 1])[name]
                torch.testing.assert_close(update * learned_MK[module, client], own_update, rtol=1e-3, atol=1e-5)
            found = products(take_row(without_prefix(after.local, "merged"), client))
            directions = {
                name: before.server[f"{name}.lora_b"] @ before.server[f"{name}.lora_a"] for name in module_names(below)
            }
            for module, (name, update) in enumerate(products(below).items()):
                peers = [peer for peer in range(3) if peer != client]
                taken = sum(learned_MK[module, peer] * directions[name][peer] for peer in peers)
                torch.testing.assert_close(found[name], update + taken, rtol=1e-3, atol=1e-5)
            merged = take_row(without_prefix(after.local, "merged"), client)
            below = {
                key: torch.cat([merged[key], own[round - 1][key]], 0 if key.endswith("lora_a") else 1) for key in merged
            }
    assert same(normalise(without_prefix(states[2].local, "own")).tree, pairs(states[2].server))


def test_the_model_before_the_upload_is_what_lies_below_and_the_new_pair():
    recommender = toy_recommender()
    state, _ = run(build(recommender), 3, 3)
    for client in range(3):
        row = take_row(state.local, client)
        below, own = products(without_prefix(row, "merged")), products(without_prefix(row, "own"))
        for name, update in loaded(recommender, state, "pre_upload", client).items():
            torch.testing.assert_close(update, below[name] + own[name], rtol=1e-4, atol=1e-6)
            assert below[name].abs().max() > 1e-3 < own[name].abs().max()


def test_who_does_not_take_part_is_not_merged_twice():
    state, records = run(build(), 3, 6, participation=0.4)
    came = {log["client"] for log in records[-1]["clients"]}
    norm_KM = update_norms(pairs(state.server))
    for client in range(3):
        assert bool(norm_KM[client].any()) == (client in came)
    before = {log["client"] for log in records[-2]["clients"]}
    for client in came:
        weight_MK = state.local["alpha"][client]
        for peer in {0, 1, 2} - {client}:
            assert bool(weight_MK[:, peer].any()) == (peer in before)  # in the round that the weights are of
    kept, _ = run(fedecider(toy_recommender(), FedeciderConfig(**{**MERGE, "merge": False})), 3, 6, participation=0.4)
    assert update_norms(kept.server).all()  # without merge the last direction stays


def test_a_refused_update_changes_nothing():
    before, _ = run(build(), 3, 2)
    method = build(toy_recommender(learning_rate=1e38))
    download = method.broadcast(3, before.server, torch.tensor([1]))
    own = {key: tensor[1:2] for key, tensor in before.local.items()}
    upload, new_own, logs = method.client_update(3, download, own, blocks(3)[1])
    assert logs[0]["finite"] is False
    assert same(new_own, own)
    assert not update_norms(pairs(method.server_aggregate(3, before.server, iter([upload])))).any()


@pytest.mark.parametrize("alpha_per", ["module", "client"])
def test_projected_is_as_large_as_the_own_update_along_every_direction(alpha_per):
    recommender = toy_recommender()
    settings = {**MERGE, "merge": False, "alpha_per": alpha_per, "initial_fusion": "projected"}
    state, _ = run(fedecider(recommender, FedeciderConfig(**settings)), 3, 1)
    layer_MK = projection_weights(state.server)
    share_MK = layer_MK if alpha_per == "module" else layer_MK.mean(0, keepdim=True).repeat(len(layer_MK), 1)
    names = module_names(without_prefix(state.local, "own"))
    norm_KM = update_norms(without_prefix(state.local, "own"))
    for client in range(3):
        load_variant(
            recommender,
            FedeciderConfig(**settings),
            "post_broadcast",
            Download(state.server),
            take_row(state.local, client),
            client,
        )
        found = products(fused_factors(recommender.model))
        for module, name in enumerate(names):
            directions = (state.server[f"{name}.lora_b"] @ state.server[f"{name}.lora_a"]).double()
            norm_K = norm_KM[client, module].expand(3).clone()
            if alpha_per == "client":  # peers come at the geometric mean of the own norms
                norm_K[:] = norm_KM[client].log().mean().exp()
                norm_K[client] = norm_KM[client, module]
            share_K = share_MK[module].clone()
            share_K[client] = layer_MK[module, client]  # of the own pair B is cut down, layer by layer
            expected = ((share_K * norm_K)[:, None, None] * directions).sum(0)
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-3, atol=1e-5)
            if alpha_per == "module" and (share_MK[module] > 0).all():
                along_K = (found[name].double() * directions).flatten(1).sum(1)
                torch.testing.assert_close(along_K, norm_K, rtol=0.03, atol=0.0)


@pytest.mark.parametrize("alpha_per", ["module", "client"])
def test_with_norms_a_mean_of_directions_is_that_of_the_updates(alpha_per):
    recommender = toy_recommender()
    settings = {**MERGE, "alpha_per": alpha_per, "initial_fusion": "1"}
    config = FedeciderConfig(**settings)
    state, _ = run(fedecider(recommender, config), 3, 2)
    own = without_prefix(state.local, "own")
    norm_KM = update_norms(own)
    torch.testing.assert_close(state.server[NORMS], norm_KM.float())
    if alpha_per == "client":
        norm_KM = norm_KM.log().mean(1, keepdim=True).exp().expand_as(norm_KM)
    for client in range(3):
        row = take_row(state.local, client)
        load_variant(recommender, config, "post_broadcast", Download(state.server), row, client)
        found = products(fused_factors(recommender.model))
        below = products(without_prefix(row, "merged"))
        for module, name in enumerate(module_names(own)):
            update_K = own[f"{name}.lora_b"] @ own[f"{name}.lora_a"]
            direction_K = state.server[f"{name}.lora_b"] @ state.server[f"{name}.lora_a"]
            part_K = norm_KM[:, module, None, None].float() * direction_K
            part_K[client] = update_K[client]
            torch.testing.assert_close(found[name], below[name] + part_K.mean(0), rtol=1e-3, atol=1e-5)
            assert norm_KM[:, module].max() > 1.001 * norm_KM[:, module].min()  # clients are unequal


def test_the_weights_that_are_told_are_those_of_the_loaded_model():
    recommender = toy_recommender()
    state, _ = run(build(recommender), 3, 1)
    row, config = take_row(state.local, 1), FedeciderConfig(**MERGE)
    told = FUSION_WEIGHTS.read(load_variant(recommender, config, "post_broadcast", Download(state.server), row, 1))
    used = next(iter(fused_layers(recommender.model).values())).bank.alpha.detach()
    torch.testing.assert_close(told, client_order(used, 1))
    assert not torch.equal(told, row["alpha"])


def test_every_broadcast_is_chosen_anew_and_seen_by_the_variant():
    """With a taste for the mean first and for nobody else later, the choice follows, and the variant shows it."""
    liked = {"weight": 0.0}

    def positions(client: int, split: str) -> torch.Tensor:
        bank = next(iter(fused_layers(recommender.model).values())).bank
        likes = bank is not None and bool(bank.alpha[..., 1:].any()) == (liked["weight"] > 0)
        return torch.full((10,), 0 if likes else 50) + torch.arange(10) % 2

    recommender = toy_recommender()
    recommender = recommender._replace(positions=positions)
    settings = {"initial_fusion": "1,0"}
    first, _ = run(build(recommender, **settings), 3, 1)
    alone = loaded(recommender, first, "post_broadcast", 1, **settings)
    own = products(take_row(without_prefix(first.local, "own"), 1))
    for name, update in alone.items():
        torch.testing.assert_close(update, own[name], rtol=1e-4, atol=1e-6)
    second, _ = run(build(recommender, **settings), 3, 2)
    assert second.local["fitted"].tolist() == [1, 1, 1]
    liked["weight"] = 1.0
    third, _ = run(build(recommender, **settings), 3, 2)
    assert third.local["fitted"].tolist() == [0, 0, 0]
    mean = loaded(recommender, first, "post_broadcast", 1, **settings)
    assert any((mean[name] - alone[name]).abs().max() > 1e-3 for name in mean)


def test_what_is_kept_has_one_shape_in_every_round():
    start, after = build().init()[1], run(build(), 3, 3)[0].local
    assert {key: tensor.shape for key, tensor in start.items()} == {key: tensor.shape for key, tensor in after.items()}
    merged = take_row(without_prefix(after, "merged"), 0)
    assert compact(merged).keys() == merged.keys()


@functools.cache
def bench():
    settings = FedeciderConfig(alpha_learning_rate=0.02, **MERGE, initial_fusion="projected,1")
    return LlmBench(METHODS["fedecider"], settings, toy_recommender, catalogue_recommender)


# A server that nobody sent a round's update to holds the last ones, but not with merge: see the tests above. The
# formula of the scalars leaves the norms out.
LEFT_OUT = ("diverged_training", "scalars", "scalars_of_silos")
PARTS = [part for part in LLM_CONTRACT if part.__name__ not in LEFT_OUT]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_contract(part):
    part(bench())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"alpha_init": 2.0, "alpha_peers": 0.0}, "got merge with alpha_init 2.0"),
        ({"self_term": "absorb"}, "got merge with alpha_init auto and self_term absorb"),
        ({"initial_fusion": "projected,1,projected"}, "got initial_fusion 'projected,1,projected'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        FedeciderConfig(**{**MERGE, **settings})
