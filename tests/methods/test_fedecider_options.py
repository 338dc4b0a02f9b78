"""FeDecider beyond the paper: weights per layer, norms in the log, and the start of ``alpha_init auto``."""

import pytest
import torch
from slow import slow
from toy_recommender import blocks, run, toy_data, toy_recommender

from fedecider.federation.method import Download
from fedecider.federation.wire import take_row
from fedecider.methods.fedecider import FedeciderConfig, _scaled, _started, client_model, fedecider, start_weights
from fedecider.methods.local import LocalConfig, local
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import (
    fusion,
    module_names,
    put,
    stack_trees,
    without_prefix,
)
from fedecider.models.directions import module_cosines, normalise, update_norms
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


@pytest.mark.parametrize("alpha_per", ["client", "module"])
def test_the_first_broadcast_by_hand(alpha_per):
    recommender, config = toy_recommender(), FedeciderConfig(alpha_per=alpha_per)
    state, _ = run(fedecider(recommender, config), 3, 1)
    own_K = without_prefix(state.local, "own")
    cosine_MKK = module_cosines(state.server, state.server)[0].clamp(min=0.0)
    if alpha_per == "client":
        cosine_MKK = module_cosines(state.server, state.server)[0].mean(0, keepdim=True).clamp(min=0.0)
    norm_KM = update_norms(own_K)
    for client in range(3):
        found = updates_of(recommender, config, state, "post_broadcast", client)
        for module, name in enumerate(module_names(own_K)):
            alpha_K = start_weights(cosine_MKK[module if alpha_per == "module" else 0], client)
            directions = products(state.server)[name].double()
            expected = norm_KM[client, module] * (alpha_K[:, None, None] * directions).sum(0)
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-3, atol=1e-5)
            if alpha_per == "module" and (module_cosines(state.server, state.server)[0][module, client] >= 0).all():
                along = (found[name].double() * directions[client]).sum() / norm_KM[client, module]
                assert float(along) == pytest.approx(1.0, rel=1e-3)  # as large as the own update, along it


def test_round_two_trains_from_there_and_the_own_part_goes_on_as_it_was():
    recommender = toy_recommender()
    config = FedeciderConfig(alpha_learning_rate=0.02)
    state, _ = run(fedecider(recommender, config), 3, 2)
    assert state.local["met"].all()
    for client in range(3):
        alpha, own = state.local["alpha"][client], products(take_row(without_prefix(state.local, "own"), client))
        before = updates_of(recommender, config, state, "pre_upload", client)
        after = updates_of(recommender, config, state, "post_broadcast", client)
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
    found = client_model(recommender, FedeciderConfig(), "post_broadcast", download, take_row(own, 0), 2)
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
