"""FeDecider beyond the paper: weights per layer, norms in the log."""

import pytest
import torch
from safetensors.torch import save
from slow import slow
from toy_recommender import run, toy_data, toy_recommender

from fedecider.cross_silo.exchange import fusion_over_rounds
from fedecider.federation.method import Download, Upload
from fedecider.federation.wire import measure, message, take_row
from fedecider.methods import METHODS
from fedecider.methods.fedecider import FUSION_WEIGHTS, GRID, FedeciderConfig, fedecider
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import (
    fusion,
    module_names,
    put,
    stack_trees,
    without_prefix,
)
from fedecider.models.directions import normalise, update_norms
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


def test_norms_of_every_module_are_logged():
    state, records = run(build(), 3, 1)
    norm_CM = update_norms(without_prefix(state.local, "own"))
    for client, log in enumerate(records[0]["clients"]):
        assert log["norms"] == norm_CM[client].tolist()
        assert (log["norm_min"], log["norm_max"]) == (min(log["norms"]), max(log["norms"]))


OPTIONS = [
    {"alpha_per": "module"},
    slow({"alpha_per": "module", "ablation": "wo_sep"}),
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


@pytest.mark.parametrize(("ablation", "capped"), [("none", []), ("wo_per", []), ("wo_decomp", [1]), ("wo_sep", [1])])
def test_raw_pairs_are_bounded_by_their_peers_and_directions_need_it_not(ablation, capped):
    plan = faulty_channel([Fault(1, "scale", factor=1e4)])
    state, records = run(build(ablation=ablation), 3, 1, channel=plan)
    assert [one["client"] for one in records[0]["capped_uploads"]] == capped
    size_K = update_norms(state.server).norm(dim=1)
    assert size_K[1] < 10 * size_K[0]


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


def test_the_grid_starts_with_the_defaults_and_fits_the_settings():
    assert METHODS["fedecider"].grid is GRID
    configs = [FedeciderConfig(**settings) for settings in GRID]
    assert configs[0] == FedeciderConfig()
    assert len(set(configs)) == len(GRID) >= 3
