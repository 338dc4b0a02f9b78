"""FFA-LoRA: A is everybody's and nobody's, and the mean of B is the mean of the updates."""

import pytest
import torch
from toy_recommender import run, toy_recommender

from fedecider.federation.wire import take_row
from fedecider.methods.ffa_lora import WeightingConfig, client_model, ffa_lora
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import module_names, without_prefix


def test_a_is_bit_equal_over_rounds_and_clients_and_never_leaves():
    recommender, config = toy_recommender(), WeightingConfig()
    method, start = ffa_lora(recommender, config), recommender.start
    for num_rounds in (1, 3):
        state, records = run(method, 3, num_rounds)
        names = {*state.server, *state.local, *records[-1]["traffic"][0]["down"], *records[-1]["traffic"][0]["up"]}
        assert all(name.endswith(".lora_b") for name in names)
        for client in range(3):
            for variant in method.variants:
                download = method.broadcast(num_rounds + 1, state.server, torch.tensor([client]))
                own = take_row(state.local, client)
                pair = client_model(recommender, config, variant, download, own, client).adapters.pair
                for name in module_names(start):
                    assert torch.equal(pair[f"{name}.lora_a"], start[f"{name}.lora_a"])
                    assert pair[f"{name}.lora_b"].abs().max() > 0.0


@pytest.mark.parametrize(("weighting", "shares"), [("uniform", (1, 1, 1)), ("examples", (7, 5, 9))])
def test_the_mean_of_the_products_is_the_product_of_the_means(weighting, shares):
    recommender = toy_recommender()
    state, _ = run(ffa_lora(recommender, WeightingConfig(weighting=weighting)), 3, 2)
    share_C = torch.tensor(shares).double() / sum(shares)
    own, start = without_prefix(state.local, "own"), recommender.start
    for name in module_names(start):
        factor_a = start[f"{name}.lora_a"].double()
        update_COI = own[f"{name}.lora_b"].double() @ factor_a
        mean_OI = torch.tensordot(share_C, update_COI, 1)
        torch.testing.assert_close(state.server[f"{name}.lora_b"].double() @ factor_a, mean_OI, rtol=0.0, atol=1e-9)
        assert (update_COI[0] - mean_OI).abs().max() > 1e-4  # the clients did not all learn the same


def test_one_client_is_training_of_b_alone():
    state, _ = run(ffa_lora(toy_recommender(["comics"]), WeightingConfig()), 1, 2)
    recommender = toy_recommender(["comics"])
    pair = recommender.start
    for round in (1, 2):
        pair = train_locally(recommender, 0, round, pair, factors=("lora_b",)).pair
    for key, tensor in state.server.items():
        assert torch.equal(tensor, pair[key])


def test_a_comes_from_the_seed_of_the_run():
    names = list(toy_recommender().start)
    assert not torch.equal(toy_recommender().start[names[0]], toy_recommender(seed=4).start[names[0]])
    first, _ = run(ffa_lora(toy_recommender(), WeightingConfig()), 3, 1)
    other, _ = run(ffa_lora(toy_recommender(seed=4), WeightingConfig()), 3, 1)
    assert any(not torch.equal(first.server[key], other.server[key]) for key in first.server)
