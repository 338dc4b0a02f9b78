"""Training that hides single users: hand-made gradients, what noise falls on, who is drawn, what is promised."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import toy_recommender as toys
from scipy import stats
from toy_recommender import catalogue_recommender, run, toy_recommender, with_clients

from fedecider.federation.channel import Channel
from fedecider.federation.config import PrivacyConfig
from fedecider.federation.privacy import protector
from fedecider.methods import METHODS
from fedecider.methods.config import UserPrivacy
from fedecider.methods.private_training import draw_users, private_steps, steps_per_epoch, user_epsilon, user_report
from fedecider.methods.rows import TABLE
from fedecider.models.adapters import Adapters, initial_adapters, named_factors
from fedecider.models.client_model import Users
from idgen.losses import sequence_loss

pytestmark = pytest.mark.whole


def by_users(recommender, data, config, **changes):
    """Training over users of two rows of a client's data each; the last one may have a single row."""

    def users_of(client):
        rows = {key: tensor.split(2) for key, tensor in data[client].items()}
        return lambda: Users(
            len(rows["labels"]),
            lambda numbers, generator: ({key: parts[one] for key, parts in rows.items()} for one in numbers),
        )

    training = replace(recommender.training, user_privacy=config, **changes)
    return with_clients(recommender, users=users_of)._replace(training=training)


NAMES = ("crime", "comics", "children")


def toy(config, family="llama", **changes):
    toys.BACKBONE, before = family, toys.BACKBONE
    try:
        found = toy_recommender(NAMES)
    finally:
        toys.BACKBONE = before
    return by_users(found, [toys.toy_data(name) for name in NAMES], config, **changes)


def start_of(recommender):
    return {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
        for number, (name, tensor) in enumerate(initial_adapters(recommender.shapes, 1).items())
    }


def started(recommender):
    return named_factors(recommender.base.holding(Adapters(start_of(recommender))))


def gradients_of(recommender, named, batches, noise_scale=0.0, clip=0.05, client=0):
    """What one step takes as its gradient, seen in the parameters: plain SGD would move by it, AdamW hides it."""
    seen = {}

    class Spy(torch.optim.AdamW):
        def step(self, closure=None):
            seen.update({name: parameter.grad.clone() for name, parameter in named.items()})

    original, torch.optim.AdamW = torch.optim.AdamW, Spy
    try:
        config = UserPrivacy(clip, noise_scale)
        recommender = recommender._replace(training=replace(recommender.training, user_privacy=config))
        groups = [{"params": list(named.values()), "lr": 1.0}]
        with private_steps(recommender, client, 1, groups, named) as step:
            loss = step(batches, 1.0)
    finally:
        torch.optim.AdamW = original
    return seen, loss


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_gradient_is_the_sum_of_bounded_gradients_of_users(family):
    recommender = toy(UserPrivacy(0.05), family)
    named = started(recommender)
    batches = list(recommender.clients[0].users().batches([0, 1, 3], torch.Generator()))
    assert [len(batch["labels"]) for batch in batches] == [2, 2, 1]
    expected = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    norms, losses = [], []
    for batch in batches:
        recommender.base.model.zero_grad()
        loss = sequence_loss(recommender.base.model, batch)
        loss.backward()
        norm = math.sqrt(sum(float(parameter.grad.double().square().sum()) for parameter in named.values()))
        for name, parameter in named.items():
            expected[name] += parameter.grad * min(1.0, 0.05 / norm) / 0.05
        norms.append(norm)
        losses.append(float(loss.detach()))
    recommender.base.model.zero_grad()
    assert min(norms) > 0.05  # the bound is reached
    seen, loss = gradients_of(recommender, named, batches)
    assert float(loss) == pytest.approx(sum(losses) / 3)
    for name in named:
        torch.testing.assert_close(seen[name], expected[name], rtol=1e-4, atol=1e-6)
    total = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in seen.values()))
    assert total <= 3.0 + 1e-5  # in units of the bound: one for each user
    alone, _ = gradients_of(recommender, named, batches[:2])
    difference = math.sqrt(sum(float((seen[name] - alone[name]).double().square().sum()) for name in named))
    assert difference == pytest.approx(1.0, abs=1e-4)  # what a user there or not changes
    unbounded, _ = gradients_of(recommender, named, batches, clip=math.inf)
    assert not torch.allclose(unbounded["lm_head.lora_b" if TABLE in named else next(iter(named))], torch.zeros(1))


def test_a_user_whose_gradient_is_not_finite_adds_nothing():
    recommender = toy(UserPrivacy(0.05))
    named = started(recommender)
    good, bad = recommender.clients[0].users().batches([0, 1], torch.Generator())
    expected, _ = gradients_of(recommender, named, [good])
    hook = recommender.base.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output * math.nan if torch.equal(inputs[0][:, :5], bad["input_ids"]) else None
    )
    seen, _ = gradients_of(recommender, named, [good, bad])
    hook.remove()
    assert all(torch.equal(seen[name], expected[name]) for name in named)


def test_noise_falls_on_both_factors_of_every_layer_and_on_no_row_of_others():
    recommender = catalogue_recommender()
    recommender = by_users(recommender, [{"labels": torch.zeros(0, 1)}] * 4, UserPrivacy(0.05, 3.0))
    named = started(recommender)
    seen, loss = gradients_of(recommender, named, [], noise_scale=3.0)  # nobody was drawn
    assert float(loss) == 0.0
    own_V = recommender.rows.own[TABLE][0]
    assert not seen[TABLE][~own_V].any()
    assert seen[TABLE][own_V].all()
    for name, tensor in seen.items():
        if name != TABLE:
            assert tensor.all()
    noise = torch.cat([tensor[own_V].flatten() if name == TABLE else tensor.flatten() for name, tensor in seen.items()])
    assert stats.kstest(noise.numpy(), stats.norm(0, 3.0).cdf).pvalue > 1e-3
    other, _ = gradients_of(recommender, named, [], noise_scale=3.0, client=2)  # of the same catalogue
    again, _ = gradients_of(recommender, named, [], noise_scale=3.0)
    assert all(torch.equal(again[name], seen[name]) for name in named)
    assert not any(torch.equal(other[name], seen[name]) for name in named)
    secret, _ = gradients_of(recommender._replace(secret=True), named, [], noise_scale=3.0)
    assert not any(torch.equal(secret[name], seen[name]) for name in named)


def test_noise_of_steps_rounds_and_factors_is_independent():
    recommender = toy(UserPrivacy(0.05, 1.0))
    named = started(recommender)
    wide = {f"w{number}": torch.nn.Parameter(torch.zeros(20_000)) for number in range(2)}
    draws = []
    for round in (1, 2):
        seen = []

        class Spy(torch.optim.AdamW):
            def step(self, closure=None, seen=seen):
                seen.extend(parameter.grad.clone() for parameter in wide.values())

        original, torch.optim.AdamW = torch.optim.AdamW, Spy
        try:
            with private_steps(recommender, 0, round, [{"params": list(wide.values()), "lr": 1.0}], wide) as step:
                step([], 1.0)
                step([], 1.0)
        finally:
            torch.optim.AdamW = original
        draws += seen
    assert len(draws) == 8
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(8)
    assert correlation.abs().max() < 5 / 20_000**0.5
    assert torch.stack(draws).std().item() == pytest.approx(1.0, rel=0.02)
    assert named  # the model is as it was


def test_users_are_drawn_independently_with_the_rate_that_is_counted(monkeypatch):
    monkeypatch.setattr("fedecider.methods.private_training.SAMPLE_RATE", 0.3)
    config = UserPrivacy(1.0, 1.0)
    users = Users(1000, lambda numbers, generator: iter([{"number": one} for one in numbers]))
    recommender = with_clients(toy(config), users=lambda client: lambda: users)
    drawn = [{batch["number"] for batch in step} for epoch in range(3) for step in draw_users(recommender, 0, 1, epoch)]
    assert len(drawn) == 3 * steps_per_epoch() == 12
    sizes = [len(step) for step in drawn]
    assert abs(sum(sizes) / 12 - 300) < 5 * math.sqrt(1000 * 0.3 * 0.7 / 12)
    assert len(set(sizes)) > 3  # not of one size, as the guarantee asks
    for first, second in pairwise(drawn):
        assert abs(len(first & second) - 90) < 5 * math.sqrt(1000 * 0.09 * 0.91)
    secret = [draw_users(recommender._replace(secret=True), 0, 1, 0) for _ in range(2)]
    assert secret[0] != secret[1]
    assert draw_users(recommender, 0, 1, 0) == draw_users(recommender, 0, 1, 0)
    monkeypatch.setattr("fedecider.methods.private_training.SAMPLE_RATE", 1.0)
    assert sum(map(len, draw_users(toy(config), 0, 1, 0))) == 4  # everybody


def test_fusion_weights_are_noised_with_the_factors(monkeypatch):
    """Of a client without users nothing but noise moves them."""
    monkeypatch.setattr("fedecider.methods.private_training.SAMPLE_RATE", 1.0)

    def nobody(client):
        return lambda: Users(0, lambda numbers, generator: iter(()))

    for noise_scale, moved in ((0.0, 0.0), (2.0, 0.1)):
        recommender = with_clients(toy(UserPrivacy(0.05, noise_scale)), users=nobody)
        method = METHODS["fedecider"].build(
            recommender, METHODS["fedecider"].config(alpha_init=2.0, alpha_learning_rate=0.1)
        )
        alpha_KK = run(method, 3, 2)[0].local["alpha"]
        torch.testing.assert_close((alpha_KK - 2.0).abs(), torch.full((3, 3), moved), atol=1e-4, rtol=0)


def test_what_is_promised_to_users(monkeypatch):
    rate, delta = "fedecider.methods.private_training.SAMPLE_RATE", 1e-5
    monkeypatch.setattr(rate, 1.0)
    # z = 1, everybody in every step, 1 epoch of 1 step: the Gaussian mechanism, as in tests/federation/test_privacy.py
    assert user_epsilon(UserPrivacy(1.0, 1.0), 1, delta) == pytest.approx(4.72851, abs=2e-3)
    assert user_epsilon(UserPrivacy(7.0, 2.0), 4, delta) == pytest.approx(user_epsilon(UserPrivacy(1.0, 1.0), 1, delta))
    monkeypatch.setattr(rate, 0.1)
    sampled = user_epsilon(UserPrivacy(1.0, 1.0), 10, delta)  # 100 steps
    assert 7.9039 <= sampled < 7.9039 * 1.01  # as dp-accounting 0.6 has it
    assert 9.4707 <= user_epsilon(UserPrivacy(1.0, 1.0), 10, delta, 1) < 9.4707 * 1.01  # and one step with everybody
    assert user_epsilon(UserPrivacy(1.0), 1, delta) == user_epsilon(UserPrivacy(math.inf), 1, delta) == math.inf
    text = user_report(UserPrivacy(1.0, 1.0), 10, delta)
    assert text.startswith("epsilon 7.97 at delta 1e-05: one user of one client there or not, over 100 steps")
    assert "not covered: the choice of the round and of update_scales on validation items" in text
    both = user_report(UserPrivacy(1.0, 1.0), 10, delta, 1)
    assert "over 100 steps" in both
    assert "and 1 sum(s) of events of items" in both
    assert user_report(UserPrivacy(1.0, 1.0), 0, delta, 1).startswith("epsilon 4.73 at delta 1e-05")
    assert user_report(UserPrivacy(1.0), 10, delta).startswith("no guarantee to users")
    with pytest.raises(ValueError, match=r"user_privacy.noise_scale 1.0 without a clip"):
        UserPrivacy(math.inf, 1.0)


def watched(protect, seen):
    """``protect``, which notes (round, upload as trained, upload as sent)."""

    def noted(upload, download, round, cohort_size):
        sent = protect(upload, download, round, cohort_size)
        seen.append((round, upload, sent))
        return sent

    return noted


def uploads_of(name, config, recommender, rounds=1):
    method, seen = METHODS[name].build(recommender, METHODS[name].config()), []
    run(method, recommender.num_clients, rounds, channel=Channel(watched(protector(method, config, 5), seen)))
    return seen


@pytest.mark.parametrize("name", ["fedavg", "fedecider", "lora_sim", "rolora", "ffa_lora", "ditto", "fellrec"])
def test_noise_on_real_uploads_is_normal_and_independent(name):
    config = PrivacyConfig(clip=0.5, noise_scale=2.0)
    quiet = uploads_of(name, PrivacyConfig(clip=0.5), toy_recommender()._replace(protected=True))
    loud = uploads_of(name, config, toy_recommender()._replace(protected=True))
    clean = {int(upload.clients[0]): sent.tensors for _, upload, sent in quiet}
    noises = {
        int(upload.clients[0]): {
            key: tensor[0] - clean[int(upload.clients[0])][key][0] for key, tensor in sent.tensors.items()
        }
        for _, upload, sent in loud
    }
    for noise in noises.values():
        assert all(bool(tensor.all()) for tensor in noise.values())  # every number of A and of B
    flat = torch.stack([torch.cat([tensor.flatten() for tensor in noise.values()]) for noise in noises.values()])
    assert stats.kstest(flat.flatten().numpy(), stats.norm(0, 1.0).cdf).pvalue > 1e-3
    assert (torch.corrcoef(flat) - torch.eye(3)).abs().max() < 5 / flat.shape[1] ** 0.5
    assert flat.mean().abs() < 5 / flat.numel() ** 0.5


def test_what_is_bounded_is_the_whole_upload_around_the_start_or_the_download():
    config = PrivacyConfig(clip=0.01)
    recommender = toy_recommender()._replace(protected=True)
    start = recommender.start
    for round, _, sent in uploads_of("fedecider", config, recommender, rounds=2):
        moved = [float((sent.tensors[key][0] - start[key]).double().square().sum()) for key in start]
        assert math.sqrt(sum(moved)) == pytest.approx(0.01, rel=1e-3), round


@pytest.mark.parametrize(
    "name", [name for name, entry in METHODS.items() if not entry.pooled and name not in ("local", "counts")]
)
def test_what_is_bounded_is_a_change_and_not_a_whole_factor(name):
    """In every round, for clients that were there in the one before: factors are large, what is learnt is not."""
    recommender, clip = toy_recommender()._replace(protected=True), 0.3
    start = recommender.start
    assert torch.cat([start[key].flatten() for key in start]).norm() > 2 * clip
    for round, _, sent in uploads_of(name, PrivacyConfig(clip=clip), recommender, rounds=3):
        for key in start.keys() & sent.tensors.keys():
            if key.endswith(".lora_a"):
                assert sent.tensors[key][0].norm() > 0.5 * start[key].norm(), (round, key)
