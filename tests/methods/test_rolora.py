"""RoLoRA: which factor moves in which round, exact means, and clients that were away."""

import pytest
import torch
from toy_recommender import blocks, run, toy_recommender

from fedecider.federation.method import Download
from fedecider.federation.wire import take_row
from fedecider.methods.local_training import train_locally
from fedecider.methods.rolora import LAST_ROUND, WeightingConfig, client_model, frozen_factor, rolora, trained_factor
from fedecider.models.adapters import module_names, only, without_prefix

pytestmark = pytest.mark.whole

COHORTS = [(0, 1, 2), (0,), (1, 2), (0, 2), (0, 2), (1,)]


def play(method, cohorts):
    """Rounds with given cohorts -> (round, server, local, downloads by client) after each of them."""
    server, local = method.init()
    for round, cohort in enumerate(cohorts, 1):
        downloads, uploads = {}, []
        local = {key: tensor.clone() for key, tensor in local.items()}
        for client in cohort:
            block = blocks(3)[client]
            downloads[client] = method.broadcast(round, server, block.clients)
            own = {key: tensor[block.clients] for key, tensor in local.items()}
            upload, new_own, _ = method.client_update(round, downloads[client], own, block)
            uploads.append(upload)
            for key, tensor in new_own.items():
                local[key][client] = tensor[0]
        server = method.server_aggregate(round, server, iter(uploads))
        yield round, server, local, downloads


def factors(tree):
    return {**only(tree, "lora_a"), **only(tree, "lora_b")}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_the_frozen_factor_is_unchanged_in_its_round():
    assert [trained_factor(round) for round in (1, 2, 3)] == ["lora_b", "lora_a", "lora_b"]
    method = rolora(toy_recommender(), WeightingConfig())
    before = method.init()[0]
    for round, server, local, _ in play(method, [(0, 1, 2)] * 4):
        frozen, trained = only(server, frozen_factor(round)), only(server, trained_factor(round))
        assert equal(frozen, only(before, frozen_factor(round)))
        assert all(not torch.equal(tensor, before[key]) for key, tensor in trained.items())
        for client in range(3):
            assert equal(only(take_row(without_prefix(local, "own"), client), frozen_factor(round)), frozen)
        before = server


@pytest.mark.parametrize(("weighting", "shares"), [("uniform", (1, 1, 1)), ("examples", (7, 5, 9))])
def test_every_aggregation_is_exact(weighting, shares):
    share_C = torch.tensor(shares).double() / sum(shares)
    method = rolora(toy_recommender(), WeightingConfig(weighting=weighting))
    for _, server, local, _ in play(method, [(0, 1, 2)] * 3):
        own = without_prefix(local, "own")
        for name in module_names(server):
            update_COI = own[f"{name}.lora_b"].double() @ own[f"{name}.lora_a"].double()
            mean_OI = torch.tensordot(share_C, update_COI, 1)
            product_OI = server[f"{name}.lora_b"].double() @ server[f"{name}.lora_a"].double()
            torch.testing.assert_close(product_OI, mean_OI, rtol=0.0, atol=1e-8)
            assert (update_COI[1] - mean_OI).abs().max() > 1e-4


def test_one_client_is_alternating_training():
    state, _ = run(rolora(toy_recommender(["comics"]), WeightingConfig()), 1, 3)
    recommender = toy_recommender(["comics"])
    pair = recommender.start
    for round, factor in enumerate(("lora_b", "lora_a", "lora_b"), 1):
        pair = train_locally(recommender, 0, round, pair, factors=(factor,)).pair
    assert equal(factors(state.server), pair)


def test_absent_clients_catch_up():
    """Sending both factors always is the plain method; the cheap one has the same bits and sends half where it can."""
    cheap = rolora(toy_recommender(), WeightingConfig())
    plain = rolora(toy_recommender(), WeightingConfig())._replace(
        broadcast=lambda round, server, clients: Download(factors(server))
    )
    sent_both = []
    for one, other in zip(play(cheap, COHORTS), play(plain, COHORTS), strict=True):
        round, server, local, downloads = one
        assert equal(server, other[1])
        assert equal(local, other[2])
        sent_both.append([client for client, sent in downloads.items() if only(sent.shared, trained_factor(round))])
        for download in downloads.values():
            assert only(download.shared, frozen_factor(round))
    assert sent_both == [[], [], [1, 2], [0], [], [1]]
    assert server[LAST_ROUND].tolist() == [5, 6, 5]


def test_every_client_has_the_global_model_whenever_it_was_there_last():
    recommender, config = toy_recommender(), WeightingConfig()
    method = rolora(recommender, config)
    for round, server, local, _ in play(method, COHORTS):
        for client in range(3):
            download = method.broadcast(round + 1, server, torch.tensor([client]))
            assert LAST_ROUND not in download.shared
            asked = (download, take_row(local, client), client)
            shared, own = (
                client_model(recommender, config, variant, *asked).adapters.pair for variant in ("global", "local")
            )
            assert equal(shared, factors(server))
            assert equal(own, take_row(without_prefix(local, "own"), client))


def test_a_client_whose_update_was_not_finite_is_sent_both_factors():
    method, broken = (rolora(toy_recommender(learning_rate=rate), WeightingConfig()) for rate in (1e-2, 1e38))
    server, local = method.init()
    uploads = []
    for client, block in enumerate(blocks(3)):
        own = {key: tensor[block.clients] for key, tensor in local.items()}
        download = method.broadcast(1, server, block.clients)
        uploads.append((broken if client == 1 else method).client_update(1, download, own, block)[0])
    after = method.server_aggregate(1, server, iter(uploads))
    assert after[LAST_ROUND].tolist() == [1, 0, 1]
    sizes = [len(method.broadcast(2, after, torch.tensor([client])).shared) for client in range(3)]
    assert sizes == [len(only(server, "lora_b")), len(factors(server)), len(only(server, "lora_b"))]
    for key, tensor in only(after, "lora_b").items():
        kept = torch.stack([uploads[0].tensors[key][0], uploads[2].tensors[key][0]])
        torch.testing.assert_close(tensor, kept.double().mean(0).float(), rtol=1e-6, atol=1e-8)


def test_bounded_clients_are_always_sent_both_factors_and_learn_the_same():
    free = rolora(toy_recommender(), WeightingConfig())
    bounded = rolora(toy_recommender()._replace(protected=True), WeightingConfig())
    for one, other in zip(play(bounded, COHORTS), play(free, COHORTS), strict=True):
        assert equal(one[1], other[1])
        assert equal(one[2], other[2])
        assert all(only(sent.shared, trained_factor(one[0])) for sent in one[3].values())
