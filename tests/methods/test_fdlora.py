"""FDLoRA: outer step, synchronisation of the personal adapters, search of the fusion weights."""

import pytest
import torch
from test_fedavg import close
from toy_recommender import blocks, run, toy_data, toy_recommender

from fedecider.federation.wire import take_row
from fedecider.methods.fdlora import (
    FdloraConfig,
    fdlora,
    fuse,
    fusion_weights,
    outer_step,
)
from fedecider.methods.fedavg import WeightingConfig, fedavg
from fedecider.methods.local import LocalConfig, local
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import Adapters, with_prefix, without_prefix

pytestmark = pytest.mark.whole

FAST = {"num_evaluations": 3}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def theta_s(state):
    return {key: tensor for key, tensor in state.server.items() if not key.startswith("momentum.")}


def theta_p(state, client):
    return take_row(without_prefix(state.local, "own"), client)


def test_the_outer_step_by_hand():
    """g = 1 - 2 = -1, m = -1, theta = 1 + 0.7 * 1.9; then g = 2.33 - 2.5, m = -0.9 - 0.17, and so on."""
    theta, momentum = {"a": torch.tensor([1.0])}, {"a": torch.tensor([0.0])}
    theta, momentum = outer_step(FdloraConfig(), theta, {"a": torch.tensor([2.0])}, momentum)
    assert float(theta["a"]) == pytest.approx(2.33)
    assert float(momentum["a"]) == pytest.approx(-1.0)
    theta, momentum = outer_step(FdloraConfig(), theta, {"a": torch.tensor([2.5])}, momentum)
    assert float(momentum["a"]) == pytest.approx(-1.07)
    assert float(theta["a"]) == pytest.approx(2.33 + 0.7 * (0.17 + 0.9 * 1.07))


def test_the_outer_step_is_nesterov_sgd():
    generator = torch.Generator().manual_seed(1)
    means = [torch.randn(3, 2, generator=generator) for _ in range(4)]
    theta, momentum = {"a": torch.ones(3, 2)}, {"a": torch.zeros(3, 2)}
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.8, nesterov=True)
    for mean in means:
        theta, momentum = outer_step(
            FdloraConfig(outer_learning_rate=0.5, outer_momentum=0.8), theta, {"a": mean}, momentum
        )
        parameter.grad = parameter.detach() - mean
        optimizer.step()
    torch.testing.assert_close(theta["a"], parameter.detach())


def test_the_outer_step_leaves_rows_alone_that_nobody_sent():
    """Row 0 as above; row 1 would move by 0.7 * 0.9 * 0.9 * 4 though its mean is what it was."""
    theta, mean = ({"t": torch.tensor([[one], [5.0]])} for one in (1.0, 2.0))
    momentum = {"t": torch.tensor([[0.0], [4.0]])}
    theta, momentum = outer_step(FdloraConfig(), theta, mean, momentum, {"t": torch.tensor([True, False])})
    assert theta["t"].flatten().tolist() == pytest.approx([2.33, 5.0])
    assert momentum["t"].flatten().tolist() == pytest.approx([-1.0, 4.0])


def test_the_server_starts_at_the_mean_of_the_personal_adapters_then_steps_beyond_the_mean():
    first, _ = run(fdlora(toy_recommender(), FdloraConfig(**FAST)), 3, 1)
    personal = without_prefix(first.local, "own")
    close(theta_s(first), {key: tensor.double().mean(0).float() for key, tensor in personal.items()})
    alone, _ = run(local(toy_recommender(), LocalConfig()), 3, 1)
    assert all(torch.equal(tensor, alone.local[f"local.now.{key[4:]}"]) for key, tensor in first.local.items())
    assert not any(bool(tensor.any()) for tensor in without_prefix(first.server, "momentum").values())
    second, _ = run(fdlora(toy_recommender(), FdloraConfig(**FAST)), 3, 2)
    mean, _ = run(fedavg(toy_recommender(), WeightingConfig()), 3, 2)
    for key, tensor in theta_s(second).items():  # 0.7 * 1.9 of the mean change
        change = mean.server[key] - theta_s(first)[key]
        torch.testing.assert_close(tensor - theta_s(first)[key], 1.33 * change, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(second.server[f"momentum.{key}"], -change)


@pytest.mark.slow
def test_personal_adapters_follow_every_h_rounds():
    recommender = toy_recommender()
    config = FdloraConfig(sync_every=2, **FAST)
    states = [run(fdlora(recommender, config), 3, rounds) for rounds in (1, 2, 3)]
    assert [[log["synced"] for log in records[-1]["clients"]] for _, records in states] == [
        [True] * 3,
        [True] * 3,
        [False] * 3,
    ]
    (first, _), (second, _), (third, _) = states
    copy = train_locally(recommender, 1, 2, theta_s(first)).pair
    assert same(theta_p(second, 1), copy)
    assert not same(copy, theta_s(second))  # what the last round leaves to fuse are two models
    assert same(third.local, second.local)


def test_who_missed_round_one_starts_with_a_copy():
    method = fdlora(toy_recommender(), FdloraConfig(sync_every=9, **FAST))
    server, own = method.init()
    own = {key: tensor[1:2] for key, tensor in own.items()}
    upload, own, logs = method.client_update(3, method.broadcast(3, server, torch.tensor([1])), own, blocks(3)[1])
    assert logs[0]["synced"] is True
    assert same(without_prefix(own, "own"), upload.tensors)
    _, again, logs = method.client_update(4, method.broadcast(4, server, torch.tensor([1])), own, blocks(3)[1])
    assert logs[0]["synced"] is False
    assert same(again, own)


def test_momentum_stays_at_the_server_and_rests_when_nobody_answers():
    method = fdlora(toy_recommender(), FdloraConfig(**FAST))
    state, _ = run(method, 3, 2)
    download = method.broadcast(3, state.server, torch.tensor([0]))
    assert download.shared.keys() == theta_s(state).keys()
    assert not download.per_client
    assert any(bool(tensor.any()) for tensor in without_prefix(state.server, "momentum").values())
    assert same(method.server_aggregate(3, state.server, iter([])), state.server)


def test_fusing_sums_factors():
    personal = {"q.lora_a": torch.tensor([[1.0, -2.0]]), "q.lora_b": torch.tensor([[3.0], [0.5]])}
    shared = {"q.lora_a": torch.tensor([[4.0, 1.0]]), "q.lora_b": torch.tensor([[-1.0], [2.0]])}
    fused = fuse(personal, shared, (0.5, -2.0))
    assert fused["q.lora_a"].tolist() == [[-7.5, -3.0]]
    assert fused["q.lora_b"].tolist() == [[3.5], [-3.75]]
    assert same(fuse(personal, shared, (1.0, 0.0)), personal)
    assert same(fuse(personal, shared, (0.0, 1.0)), shared)


@pytest.fixture(scope="module")
def pair_of_models():
    """A client's adapters, trained for long, and global ones that do the opposite."""
    recommender = toy_recommender(["crime"], local_epochs=25, learning_rate=3e-2)
    state, _ = run(local(recommender, LocalConfig()), 1, 1)
    personal = theta_p(state, 0)
    opposite = {key: -tensor if key.endswith(".lora_b") else tensor for key, tensor in personal.items()}
    return recommender, personal, opposite


def loss_of(recommender, adapters):
    with torch.no_grad():
        return float(recommender.base.holding(Adapters(adapters))(**toy_data(recommender.names[0])).loss)


@pytest.mark.slow
def test_the_search_finds_the_better_part(pair_of_models):
    recommender, good, bad = pair_of_models
    config = FdloraConfig()
    first, second = fusion_weights(recommender, config, with_prefix(good, "own"), bad, 0)
    assert first > 0.8
    assert second < 0.4
    fused = fuse(good, bad, (first, second))
    assert loss_of(recommender, fused) < loss_of(recommender, fuse(good, bad, (0.5, 0.5))) - 0.3
    swapped = fusion_weights(recommender, config, with_prefix(bad, "own"), good, 0)
    assert swapped[0] < 0.4
    assert swapped[1] > 0.8
    assert fusion_weights(recommender, config, with_prefix(good, "own"), bad, 0) == (first, second)
    dear = fusion_weights(recommender, FdloraConfig(l1_weight=1e3), with_prefix(good, "own"), bad, 0)
    assert sum(map(abs, dear)) < 0.1
