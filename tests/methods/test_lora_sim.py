"""LoRA-Sim: cosines per module, weights by hand, identical clients, and the parts shared with FellRec."""

import math

import torch
from toy_recommender import run, toy_data, toy_recommender

from fedecider.methods.local import LocalConfig, local
from fedecider.methods.lora_sim import LoraSimConfig, lora_sim, mixing_weights
from fedecider.methods.personal_average import cosines, exact_sum, mixed_row, module_products
from fedecider.models.adapters import without_prefix

# Module x flat: (3, 4), (4, 3), (-3, 4); module y flat: (1, 0, 0), (0, 2, 0), (0, -5, 0).
TINY = {
    "x.lora_a": torch.tensor([[[3.0]], [[4.0]], [[-3.0]]]),
    "x.lora_b": torch.tensor([[[4.0]], [[3.0]], [[4.0]]]),
    "y.lora_a": torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]], [[0.0, -5.0]]]),
    "y.lora_b": torch.zeros(3, 1, 1),
}
COSINE = torch.tensor([[1.0, 0.48, 0.14], [0.48, 1.0, -0.5], [0.14, -0.5, 1.0]], dtype=torch.float64)


def mean_cosine(adapters):
    cosine_MKK = cosines(module_products(adapters))
    return cosine_MKK.mean(0)


def test_cosines_of_modules_by_hand():
    found = cosines(module_products(TINY))
    expected = torch.tensor(
        [[[1.0, 0.96, 0.28], [0.96, 1.0, 0.0], [0.28, 0.0, 1.0]], [[1.0, 0.0, 0.0], [0.0, 1.0, -1.0], [0.0, -1.0, 1.0]]]
    )
    torch.testing.assert_close(found, expected.double())
    torch.testing.assert_close(mean_cosine(TINY), COSINE)
    torch.testing.assert_close(
        cosines(module_products({**TINY, "x.lora_a": torch.zeros(3, 1, 1)}))[1], expected[1].double()
    )


def test_a_zero_module_is_like_nothing():
    zero = {key: tensor.clone() for key, tensor in TINY.items()}
    for key in ("x.lora_a", "x.lora_b"):
        zero[key][1] = 0.0
    assert cosines(module_products(zero))[0, 1].tolist() == [0.0, 0.0, 0.0]


def test_weights_by_hand():
    shifted = torch.tensor(
        [
            [1 / 2.31, 0.74 / 2.31, 0.57 / 2.31],
            [0.74 / 1.99, 1 / 1.99, 0.25 / 1.99],
            [0.57 / 1.82, 0.25 / 1.82, 1 / 1.82],
        ]
    )
    torch.testing.assert_close(mixing_weights(COSINE, LoraSimConfig()), shifted.double())
    softmax = mixing_weights(COSINE, LoraSimConfig(similarity="softmax", temperature=0.5))
    terms = [math.exp(2.0 * value) for value in (0.48, 1.0, -0.5)]
    torch.testing.assert_close(softmax[1], torch.tensor(terms).double() / sum(terms), rtol=1e-6, atol=1e-7)
    near_own = mixing_weights(COSINE, LoraSimConfig(similarity="softmax", temperature=1e-4))
    torch.testing.assert_close(near_own, torch.eye(3, dtype=torch.float64))


def test_mixed_factors_by_hand():
    mixed = mixed_row(TINY, torch.tensor([0.5, 0.25, -1.0]), 1, {})
    assert mixed["x.lora_a"].tolist() == [[5.5]]  # 1.5 + 1 + 3
    assert mixed["y.lora_a"].tolist() == [[0.5, 5.5]]
    assert mixed["x.lora_a"].dtype == torch.float32
    assert exact_sum(torch.tensor([[1e16, 1.0, -1e16], [1.0, 1e16, -1e16]], dtype=torch.float64)).tolist() == [1.0, 1.0]


def test_identical_clients_are_local_training():
    data = [toy_data("crime")] * 3
    for config in (LoraSimConfig(), LoraSimConfig(similarity="softmax", temperature=0.05)):
        state, _ = run(lora_sim(toy_recommender(["crime"] * 3, data=data), config), 3, 3)
        alone, _ = run(local(toy_recommender(["crime"], data=data), LocalConfig()), 1, 3)
        for key, tensor in state.local.items():
            for client in range(3):
                torch.testing.assert_close(tensor[client], alone.local[f"local.now.{key[4:]}"][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state.server["weights"], torch.full((3, 3), 1 / 3, dtype=torch.float64))


def test_a_run_mixes_what_was_uploaded():
    method = lora_sim(toy_recommender(), LoraSimConfig(similarity="softmax", temperature=0.01))
    state, records = run(method, 3, 2)
    own = without_prefix(state.local, "own")
    weight_KK = mixing_weights(mean_cosine(own), LoraSimConfig(similarity="softmax", temperature=0.01))
    torch.testing.assert_close(state.server["weights"], weight_KK)
    assert (weight_KK - weight_KK.T).abs().max() > 1e-4
    download = method.broadcast(3, state.server, torch.tensor([2, 0]))
    assert not download.shared
    for key, tensor in own.items():
        mixed = torch.tensordot(weight_KK, tensor.double(), 1)[[2, 0]].float()
        torch.testing.assert_close(download.per_client[key], mixed, rtol=1e-6, atol=1e-7)
    assert records[1]["valid"]["aggregated"] != records[1]["valid"]["local"]


def test_absent_clients_stand_in_with_their_last_upload_and_newcomers_are_left_out():
    method = lora_sim(toy_recommender(), LoraSimConfig())
    state, _ = run(method, 3, 1, participation=0.6)
    away = [client for client in range(3) if not state.server["uploaded"][client]]
    assert len(away) == 1
    start = method.init()[0]
    weight_KK = state.server["weights"]
    assert weight_KK[away[0]].tolist() == [float(client == away[0]) for client in range(3)]
    assert weight_KK[:, away[0]].sum() == 1.0
    download = method.broadcast(2, state.server, torch.tensor(away))
    assert all(torch.equal(tensor[0], start[key][0]) for key, tensor in download.per_client.items())
    later, _ = run(method, 3, 5, participation=0.3)
    known_K = later.server["uploaded"]
    assert known_K.tolist() == [True, True, False]
    assert torch.equal(later.server["weights"] > 0.0, (known_K[:, None] & known_K) | torch.eye(3, dtype=torch.bool))
    for key, tensor in without_prefix(later.local, "own").items():
        assert torch.equal(tensor, later.server[key])  # one row per client, as it was uploaded last
