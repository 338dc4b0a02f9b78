"""FeDecider beyond the paper: bounded raw pairs and the start of ``alpha_init auto``."""

import pytest
import torch
from toy_recommender import blocks, run, toy_recommender

from fedecider.federation.method import Download
from fedecider.federation.wire import take_row
from fedecider.methods.fedecider import FedeciderConfig, _scaled, _started, client_model, fedecider, start_weights
from fedecider.methods.local import LocalConfig, local
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import (
    fusion,
    module_names,
    without_prefix,
)
from fedecider.models.directions import update_norms
from fedecider.testing.faults import Fault, faulty_channel

pytestmark = pytest.mark.whole


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def build(**settings):
    return fedecider(toy_recommender(), FedeciderConfig(**{"alpha_init": 2.0, **settings}))


@pytest.mark.parametrize(("ablation", "capped"), [("none", []), ("wo_per", []), ("wo_decomp", [1]), ("wo_sep", [1])])
def test_raw_pairs_are_bounded_by_their_peers_and_directions_need_it_not(ablation, capped):
    plan = faulty_channel([Fault(1, "scale", factor=1e4)])
    state, records = run(build(ablation=ablation), 3, 1, channel=plan)
    assert [one["client"] for one in records[0]["capped_uploads"]] == capped
    size_K = update_norms(state.server).norm(dim=1)
    assert size_K[1] < 10 * size_K[0]


@pytest.fixture
def unlearned(monkeypatch):
    """Fusion weights that do not learn, as those of wo_per."""
    monkeypatch.setattr("fedecider.methods.fedecider.fusion", _without_learning)


def _without_learning(*given, **options):
    return fusion(*given, **{**options, "learns": False})


def build_for(recommender=None, **settings):
    return fedecider(recommender or toy_recommender(), FedeciderConfig(alpha_learning_rate=0.02, **settings))


def products(factors):
    return {name: factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"] for name in module_names(factors)}


def updates_of(recommender, config, state, variant, client):
    asked = (Download(state.server), take_row(state.local, client), client)
    return products(client_model(recommender, config, variant, *asked).adapters.factors())


def rows(*updates):
    """One layer of rank 1 with these updates (1, I)."""
    update_KI = torch.tensor(updates)
    return {"layer.lora_a": update_KI[:, None], "layer.lora_b": torch.ones(len(updates), 1, 1)}


def weights(directions, client, **settings):
    own = {"alpha": torch.eye(len(directions["layer.lora_b"]))[client], "met": torch.tensor(False)}
    found = _started(FedeciderConfig(**settings), directions, {**own, "norm": torch.tensor([3.0])}, client)
    return found["alpha"].tolist()


def test_the_start_by_hand():
    apart = rows([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    assert weights(apart, 1) == [0.0, 1.0, 0.0]  # nothing in common: the own update
    equal = rows(*[[0.6, 0.8, 0.0]] * 4)
    assert weights(equal, 2) == pytest.approx([0.25] * 4)  # the mean
    half = rows([1.0, 0.0], [0.5, 0.75**0.5])
    assert weights(half, 0) == pytest.approx([2 / 3, 2 / 3])  # w (1 + 1 / 2) = 1
    assert weights(rows([1.0, 0.0], [-0.5, 0.75**0.5]), 0) == [1.0, 0.0]  # nobody is taken away
    assert weights(rows([1.0, 0.0], [0.0, 0.0]), 0) == [1.0, 0.0]  # nobody there yet
    assert weights(rows([0.0, 0.0], [1.0, 0.0]), 0) == [1.0, 0.0]  # the own update is not there yet
    assert weights(half, 0, alpha_init=2.0) == [1.0, 0.0]  # a number: nothing is set


@pytest.mark.parametrize(
    ("cosines", "expected"),
    [
        ([[1, 0.5, 0.25], [0.5, 1, 0.25], [0.25, 0.25, 1]], [7 / 11, 7 / 11, 2 / 11]),  # two of one kind
        ([[1, 0.6, 0.6], [0.6, 1, 0.4], [0.6, 0.4, 1]], [15 / 17, 5 / 51, 5 / 51]),  # a large one: .6 .6 / .4 holds
        ([[1, 0.1], [0.1, 1]], [95 / 99, 40 / 99]),  # little in common: a fifth of the own one holds
        ([[1, 0.4, -0.3], [0.4, 1, 0.0], [-0.3, 0.0, 1]], [5 / 7, 5 / 7, 0.0]),
    ],
)
def test_weights_say_what_of_a_direction_others_have_in_common(cosines, expected):
    assert start_weights(torch.tensor(cosines, dtype=torch.float64), 0).tolist() == pytest.approx(expected)


def test_who_s_first_upload_is_lost_starts_when_the_server_has_its_direction():
    lost = faulty_channel([Fault(1, "late", 1, 1)])
    for rounds, met in ((2, [True, False, True]), (3, [True, True, True])):
        state, records = run(build_for(), 3, rounds, channel=lost)
        assert [one["client"] for one in records[0]["refused_uploads"]] == [1]
        assert state.local["met"].tolist() == met


def test_an_untrained_module_has_the_mean_size_of_the_others():
    directions = {f"{name}.lora_{part}": torch.ones(2, 1, 1) for name in ("a", "b", "c") for part in ("a", "b")}
    found = products(_scaled(directions, torch.tensor([2.0, 0.0, 8.0])))
    assert [float(found[name][0]) for name in ("a", "b", "c")] == pytest.approx([2.0, 4.0, 8.0])


def test_the_first_broadcast_by_hand():
    recommender, config = toy_recommender(), FedeciderConfig()
    state, _ = run(fedecider(recommender, config), 3, 1)
    own_K = without_prefix(state.local, "own")
    unit_MKN = torch.stack([update_KOI.flatten(1) for update_KOI in products(state.server).values()]).double()
    cosine_KK = (unit_MKN @ unit_MKN.mT).mean(0)
    norm_KM = update_norms(own_K)
    for client in range(3):
        found = updates_of(recommender, config, state, "fused", client)
        for module, name in enumerate(module_names(own_K)):
            alpha_K = start_weights(cosine_KK, client)
            directions = products(state.server)[name].double()
            expected = norm_KM[client, module] * (alpha_K[:, None, None] * directions).sum(0)
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-3, atol=1e-5)


def test_round_two_trains_from_there_and_the_own_part_goes_on_as_it_was():
    recommender = toy_recommender()
    config = FedeciderConfig(alpha_learning_rate=0.02)
    state, _ = run(fedecider(recommender, config), 3, 2)
    assert state.local["met"].all()
    for client in range(3):
        alpha, own = state.local["alpha"][client], products(take_row(without_prefix(state.local, "own"), client))
        before = updates_of(recommender, config, state, "local", client)
        after = updates_of(recommender, config, state, "fused", client)
        found = _started(config, state.server, take_row(state.local, client), client)
        assert torch.equal(found["alpha"], alpha)  # once
        for name, update in own.items():
            own_part = float(alpha[client]) * update
            assert (after[name] - own_part).norm() < 0.9 * after[name].norm()
            assert (before[name] - own_part).norm() < 0.9 * before[name].norm()


def test_alone_it_is_local_training(unlearned):
    state, _ = run(build_for(toy_recommender(["crime"])), 1, 3)
    alone, _ = run(local(toy_recommender(["crime"]), LocalConfig()), 1, 3)
    for key, tensor in without_prefix(alone.local, "local.now").items():
        torch.testing.assert_close(state.local[f"own.{key}"], tensor, rtol=1e-2, atol=1e-4)


def test_who_comes_later_starts_with_plain_training():
    recommender, other = toy_recommender(), toy_recommender()
    method = build_for(recommender)
    before, _ = run(method, 2, 1)  # clients 0 and 1; client 2 has not been there
    assert before.local["alpha"][2].tolist() == [0.0, 0.0, 1.0]
    download, own = method.broadcast(2, before.server, torch.tensor([2])), {k: v[2:] for k, v in before.local.items()}
    found = client_model(recommender, FedeciderConfig(), "fused", download, take_row(own, 0), 2)
    assert not any(one.any() for one in products(found.adapters.factors()).values())
    upload, new_own, _ = method.client_update(2, download, own, blocks(3)[2])
    start = take_row(without_prefix(method.init()[1], "own"), 2)
    assert same(take_row(upload.tensors, 0), train_locally(other, 2, 2, start).pair)
    assert not new_own["met"].any()
    after = method.server_aggregate(2, before.server, iter([upload]))
    _, later, _ = method.client_update(3, method.broadcast(3, after, torch.tensor([2])), new_own, blocks(3)[2])
    assert later["met"].all()
    assert later["alpha"][0, :2].any()


def test_a_refused_first_update_is_followed_by_another_first_one():
    broken = build_for(toy_recommender(learning_rate=1e38))
    server, local_rows = broken.init()
    own = {key: tensor[1:2] for key, tensor in local_rows.items()}
    _, new_own, logs = broken.client_update(1, broken.broadcast(1, server, torch.tensor([1])), own, blocks(3)[1])
    assert logs[0]["finite"] is False
    assert same(new_own, own)
    method = build_for()
    _, new_own, logs = method.client_update(2, method.broadcast(2, server, torch.tensor([1])), new_own, blocks(3)[1])
    torch.testing.assert_close(new_own["norm"][0], torch.tensor(logs[0]["norms"]))
