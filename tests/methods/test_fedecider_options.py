"""FeDecider beyond the paper: weights per layer, directions that are no longer downloaded, norms in the log."""

import pytest
import torch
from safetensors.torch import save
from slow import slow
from toy_recommender import blocks, run, toy_data, toy_recommender

from fedecider.experiment.results import fusion_over_rounds
from fedecider.federation.method import Download, Upload
from fedecider.federation.wire import measure, message, take_row
from fedecider.methods import BUILT_IN as METHODS
from fedecider.methods.fedecider import FUSION_WEIGHTS, GRID, FedeciderConfig, fedecider, load_view
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import (
    client_order,
    fused_factors,
    load_fusion,
    module_names,
    num_scalars,
    read_adapters,
    stack_trees,
    without_prefix,
)
from fedecider.models.directions import normalise, update_norms

pytestmark = pytest.mark.whole

RATE = {"alpha_learning_rate": 0.02}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def build(**settings):
    return fedecider(toy_recommender(), FedeciderConfig(**settings))


@pytest.fixture(scope="module")
def threshold():
    """A ``skip_below`` between the weights that peers have after round 2, so that some are skipped and some are not."""
    state, _ = run(build(**RATE), 3, 2)
    peers = state.local["alpha"].abs()[~torch.eye(3, dtype=torch.bool)].sort().values
    assert float(peers[2] - peers[1]) > 1e-4
    return float(peers[1:3].mean())


def test_round_two_with_weights_per_module_by_hand():
    first, _ = run(build(alpha_per="module", **RATE), 3, 1)
    second, records = run(build(alpha_per="module", **RATE), 3, 2)
    other = toy_recommender()
    num_modules = len(module_names(first.server))
    assert first.local["alpha"].tolist() == torch.full((3, num_modules, 3), 2.0).tolist()
    for client in (0, 2):
        alpha = load_fusion(other.model, first.server, client, torch.full((num_modules, 3), 2.0))
        trained = train_locally(other, client, 2, alpha=alpha, alpha_learning_rate=0.02)
        assert same(trained.adapters, take_row(without_prefix(second.local, "own"), client))
        assert torch.equal(second.local["alpha"][client], client_order(alpha.detach(), client))
        assert same(take_row(normalise(stack_trees([trained.adapters])).tree, 0), take_row(second.server, client))
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
        alpha = load_fusion(recommender.model, first.server, 1, alpha_K)
        recommender.model(**toy_data("comics")).loss.backward()
        gradients.append(alpha.grad)
    torch.testing.assert_close(gradients[1].sum(0), gradients[0], rtol=1e-4, atol=1e-6)
    assert gradients[1][:, 1].max() * gradients[1][:, 1].min() < 0  # layers disagree about a peer


def test_frozen_weights_are_the_same_per_client_and_per_module():
    client, _ = run(build(train_alpha=False), 3, 2)
    module, _ = run(build(train_alpha=False, alpha_per="module"), 3, 2)
    assert same(client.server, module.server)
    assert torch.equal(module.local["alpha"][:, 0], client.local["alpha"])


def test_absorbing_per_module_changes_nothing_of_the_own_part():
    config = FedeciderConfig(own_slot="absorb", alpha_per="module", **RATE)
    recommender = toy_recommender()
    state, records = run(fedecider(recommender, config), 3, 2)
    for client in range(3):
        products = []
        for view in ("pre_upload", "post_broadcast"):
            load_view(recommender, config, view, Download(state.server), take_row(state.local, client), client)
            factors = fused_factors(recommender.model)
            names = module_names(factors)
            products.append([factors[f"{name}.lora_b"][:, :2] @ factors[f"{name}.lora_a"][:2] for name in names])
        for before, after in zip(*products, strict=True):
            torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)
        log = records[1]["clients"][client]
        own_M = torch.tensor(log["trained_alpha_modules"])[:, client] * torch.tensor(log["norms"])
        torch.testing.assert_close(torch.tensor(log["alpha_modules"])[:, client], own_M.float())
        assert (own_M / torch.tensor(log["trained_alpha_modules"])[:, client] - 1.0).abs().max() > 0.1


def test_norms_of_every_module_are_logged():
    state, records = run(build(), 3, 1)
    norm_CM = update_norms(without_prefix(state.local, "own"))
    for client, log in enumerate(records[0]["clients"]):
        assert log["norms"] == norm_CM[client].tolist()
        assert (log["norm_min"], log["norm_max"]) == (min(log["norms"]), max(log["norms"]))


def test_bytes_fall_by_exactly_the_skipped_directions(threshold):
    recommender = toy_recommender()
    state, records = run(fedecider(recommender, FedeciderConfig(skip_below=threshold, **RATE)), 3, 3)
    scalars = num_scalars(read_adapters(recommender.model))
    expected = [[peer for peer in log["skipped"] if peer != client] for client, log in enumerate(records[1]["clients"])]
    assert sum(map(len, expected)) == 2
    for round, received in ((0, [1] * 3), (1, [3] * 3), (2, [3 - len(skipped) for skipped in expected])):
        down, up = {}, {}
        for group in records[round]["traffic"]:
            down.update(dict.fromkeys(group["clients"], sum(group["down"].values())))
            up.update(dict.fromkeys(group["clients"], group["up"]))
        assert [down[client] for client in range(3)] == [4 * scalars * directions for directions in received]
        for sizes in up.values():
            assert sum(sizes.values()) == 4 * scalars + 3
            assert sizes["unwanted"] == 3
    last = run(build(**RATE), 3, 2)[0].local["alpha"].abs()
    for client, skipped in enumerate(expected):
        assert skipped == [peer for peer in range(3) if peer != client and last[client, peer] < threshold]
        assert records[2]["clients"][client]["skipped"][: len(skipped)] or not skipped
    assert torch.equal(state.server["unwanted"].bool(), state.local["away"])
    assert not state.local["away"].diagonal().any()


def test_a_skipped_direction_is_a_zero_direction_and_keeps_its_weight(threshold):
    recommender, config = toy_recommender(), FedeciderConfig(skip_below=threshold, **RATE)
    method = fedecider(recommender, config)
    before, _ = run(method, 3, 2)
    client = int(before.local["away"].sum(1).argmax())
    away_K, own = before.local["away"][client], {key: tensor[[client]] for key, tensor in before.local.items()}
    zeroed = {
        key: torch.where(away_K[:, None, None], 0.0, tensor)
        for key, tensor in before.server.items()
        if key != "unwanted"
    }
    download = method.broadcast(3, before.server, torch.tensor([client]))
    load_view(recommender, config, "post_broadcast", download, take_row(own, 0), client)
    found = fused_factors(recommender.model)
    other = toy_recommender()
    alpha = load_fusion(other.model, zeroed, client, before.local["alpha"][client])
    assert same(found, fused_factors(other.model))
    trained = train_locally(other, client, 3, alpha=alpha, alpha_learning_rate=0.02)
    upload, new_own, _ = method.client_update(3, download, own, blocks(3)[client])
    uploaded = take_row(upload.tensors, 0)
    assert torch.equal(uploaded.pop("unwanted").bool(), new_own["away"][0])
    assert same(uploaded, trained.adapters)
    assert torch.equal(new_own["alpha"][0][away_K], before.local["alpha"][client][away_K])
    assert new_own["away"][0][away_K].all()  # for good
    # what was not sent has no influence
    poisoned = download._replace(
        shared={key: torch.where(away_K[:, None, None], 1e6, tensor) for key, tensor in download.shared.items()}
    )
    again, again_own, _ = method.client_update(3, poisoned, own, blocks(3)[client])
    assert same(again.tensors, upload.tensors)
    assert same(again_own, new_own)


def test_a_threshold_above_all_weights_leaves_every_client_to_itself():
    state, records = run(build(skip_below=1e3), 3, 3)
    assert state.local["away"].tolist() == (~torch.eye(3, dtype=torch.bool)).tolist()
    assert records[0]["clients"][1]["skipped"] == []  # round 1 has trained no weight
    assert records[1]["clients"][1]["skipped"] == [0, 2]
    for client in range(3):
        cosine_K = records[2]["clients"][client]["cosine"]
        assert [place for place, cosine in enumerate(cosine_K) if cosine] == [client]


def test_the_largest_weight_over_modules_decides():
    state, _ = run(build(alpha_per="module", **RATE), 3, 2)
    peers = ~torch.eye(3, dtype=torch.bool)
    largest = state.local["alpha"].abs().amax(1)
    threshold = float(largest[peers].sort().values[:2].mean())
    skipping, _ = run(build(alpha_per="module", skip_below=threshold, **RATE), 3, 2)
    assert torch.equal(skipping.local["away"], (largest < threshold) & peers)
    assert int(skipping.local["away"].sum()) == 1
    assert (state.local["alpha"].abs().amin(1)[peers] < threshold).sum() > 1  # another rule would skip more


def test_peers_without_an_update_get_their_chance_later():
    method = build(skip_below=1e3)
    server, local = method.init()
    own = {key: tensor[2:3] for key, tensor in local.items()}
    _, new_own, logs = method.client_update(2, method.broadcast(2, server, torch.tensor([2])), own, blocks(3)[2])
    assert logs[0]["skipped"] == []
    assert not new_own["away"].any()


def test_a_refused_update_leaves_the_flags_alone():
    before, _ = run(build(skip_below=1e3), 3, 2)
    method = fedecider(toy_recommender(learning_rate=1e38), FedeciderConfig(skip_below=2.5))
    first, _ = run(build(skip_below=2.5), 3, 1)
    for state in (first, before):
        own = {key: tensor[1:2] for key, tensor in state.local.items()}
        download = method.broadcast(3, state.server, torch.tensor([1]))
        upload, new_own, logs = method.client_update(3, download, own, blocks(3)[1])
        assert logs[0]["finite"] is False
        assert same(new_own, own)
        assert same(method.server_aggregate(3, state.server, iter([upload])), state.server)


def test_no_threshold_no_trace():
    server, local = build().init()
    assert not {"unwanted", "away"} & (server.keys() | local.keys())
    assert build().broadcast(2, server, torch.tensor([0])).sent_rows == {}


OPTIONS = [
    slow({"alpha_per": "module", "own_slot": "absorb"}),
    {"skip_below": 2.05, "normalize_at": "client", "alpha_per": "module"},
    slow({"alpha_per": "module", "ablation": "wo_sep"}),
    slow({"skip_below": 1.99}),
]


@pytest.mark.parametrize("settings", OPTIONS)
def test_blocks_and_resuming_change_nothing(settings, tmp_path):
    single, alone = run(build(**settings, **RATE), 3, 3)
    run(build(**settings, **RATE), 3, 2, checkpoints=tmp_path)
    resumed, _ = run(build(**settings, **RATE), 3, 3, checkpoints=tmp_path, resume=True)
    together, records = run(build(**settings, **RATE), 3, 3, block_size=3)
    for other in (resumed, together):
        assert same(single.server, other.server)
        assert same(single.local, other.local)
    for left, right in zip(alone, records, strict=True):
        assert left["traffic"] == right["traffic"]
        assert left["valid"] == right["valid"]
    if "skip_below" in settings:
        assert single.local["away"].any()


def test_rows_that_are_sent_are_counted_per_client():
    shared = {"bank": torch.arange(33.0).view(11, 3), "bias": torch.ones(2)}
    own = {"table": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}
    rows_CN = torch.ones(2, 11, dtype=torch.bool)
    rows_CN[1, [0, 7]] = False
    download = Download(shared, own, sent_rows={"bank": rows_CN})
    sent = message(download, 1)
    assert sent["bank"][:, 0].tolist() == [3, 6, 9, 12, 15, 18, 24, 27, 30]
    assert sent["table"].tolist() == [4, 5, 6]
    first, second = measure(download, Upload(torch.tensor([3, 8]), torch.ones(2), {}))
    assert first.down == {"bank": 132, "bias": 8, "table": 12}
    assert second.down == {"bank": 108, "bias": 8, "table": 12}
    for row, traffic in enumerate((first, second)):
        assert traffic.bytes_down == len(save({key: part.contiguous() for key, part in message(download, row).items()}))


@pytest.mark.slow
def test_fusion_weights_over_rounds_per_module():
    state, records = run(build(alpha_per="module", **RATE), 3, 2)
    local = build(alpha_per="module").init()[1]
    found = fusion_over_rounds(FUSION_WEIGHTS, local, records)
    assert found["alpha_modules"].shape == (2, *local["alpha"].shape)
    assert torch.equal(found["alpha_modules"][1], state.local["alpha"])
    torch.testing.assert_close(found["alpha"], found["alpha_modules"].mean(2))


def test_weights_in_use_are_zero_where_a_direction_is_away():
    away = torch.tensor([[False, True], [False, False]])
    alpha = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert FUSION_WEIGHTS.read({"alpha": alpha, "away": away}).tolist() == [[1.0, 0.0], [3.0, 4.0]]
    per_layer = alpha[:, None].repeat(1, 3, 1)
    assert FUSION_WEIGHTS.read({"alpha": per_layer, "away": away})[0].tolist() == [[1.0, 0.0]] * 3
    assert FUSION_WEIGHTS.read({"alpha": per_layer[0], "away": away[0]}).tolist() == [[1.0, 0.0]] * 3
    assert FUSION_WEIGHTS.read({"alpha": alpha}) is alpha


def test_the_grid_starts_with_the_paper_and_fits_the_settings():
    assert METHODS["fedecider"].grid is GRID
    configs = [FedeciderConfig(**settings) for settings in GRID]
    assert configs[0] == FedeciderConfig()
    assert len(set(configs)) == len(GRID) >= 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"alpha_per": "layer"}, "got alpha_per 'layer'"),
        ({"alpha_per": "module", "ablation": "wo_per"}, "alpha_per module with wo_per"),
        ({"skip_below": -0.1}, "got skip_below -0.1"),
        ({"skip_below": float("nan")}, "got skip_below nan"),
        ({"skip_below": 0.1, "train_alpha": False}, "weights that do not learn"),
        ({"skip_below": 0.1, "ablation": "wo_per"}, "weights that do not learn"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        FedeciderConfig(**settings)
