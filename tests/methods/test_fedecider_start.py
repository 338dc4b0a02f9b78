"""``alpha_init auto``: every client's weights start from the norm of its first own update, which nobody is told."""

import pytest
import torch
from slow import slow
from toy_recommender import SHIFTS, blocks, positions_of, run, toy_recommender

from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.results import fusion_over_rounds
from fedecider.federation.method import Download
from fedecider.federation.wire import take_row
from fedecider.methods.fedecider import (
    FUSION_WEIGHTS,
    FedeciderConfig,
    _fitted,
    fedecider,
    fused_start,
    load_variant,
    started,
)
from fedecider.methods.local import LocalConfig, local
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import fused_factors, fused_layers, load_plain, module_names, with_prefix, without_prefix
from fedecider.models.directions import geometric_mean_norm, update_norms

pytestmark = pytest.mark.whole

NAMES = list(SHIFTS)
AUTO = {"alpha_init": "auto"}


@pytest.fixture
def frozen(monkeypatch):
    """Fusion weights that do not learn, as those of wo_per."""
    monkeypatch.setattr(FedeciderConfig, "learns_alpha", False)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def build(recommender=None, **settings):
    return fedecider(recommender or toy_recommender(), FedeciderConfig(alpha_learning_rate=0.02, **settings))


def updates(recommender, config, state, client):
    """Variant -> module -> what the loaded model adds to its base there."""
    found = {}
    for variant in ("pre_upload", "post_broadcast"):
        load_variant(recommender, config, variant, Download(state.server), take_row(state.local, client), client)
        factors = fused_factors(recommender.model)
        names = module_names(factors)
        found[variant] = {name: factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"] for name in names}
    return found


@pytest.mark.parametrize(
    ("settings", "own_weight"), [({}, "norm"), ({"self_term": "absorb"}, "norm"), ({"self_term": "raw"}, "one")]
)
def test_weights_after_round_one_are_the_own_norm_and_its_share(settings, own_weight):
    state, records = run(build(**AUTO, alpha_peers=0.25, **settings), 3, 1)
    plain, _ = run(build(), 3, 1)
    assert same(state.server, plain.server)
    norm_CM = update_norms(without_prefix(state.local, "own"))
    for client, log in enumerate(records[0]["clients"]):
        mean = geometric_mean_norm(norm_CM[client])
        expected = [0.25 * mean] * 3
        expected[client] = mean if own_weight == "norm" else 1.0
        assert state.local["alpha"][client].tolist() == pytest.approx(expected)
        assert log["alpha"] == pytest.approx(expected)
        assert log["trained_alpha"] == [float(peer == client) for peer in range(3)]  # what the trained model has
    means = torch.tensor([geometric_mean_norm(norms) for norms in norm_CM])
    assert len(means.unique()) == 3  # every client has its own


def test_weights_per_module_are_the_norms_of_the_modules():
    state, _ = run(build(**AUTO, alpha_peers=0.25, alpha_per="module"), 3, 1)
    norm_CM = update_norms(without_prefix(state.local, "own")).float()
    for client in range(3):
        alpha_MK = state.local["alpha"][client]
        torch.testing.assert_close(alpha_MK[:, client], norm_CM[client])
        torch.testing.assert_close(alpha_MK[:, (client + 1) % 3], 0.25 * norm_CM[client])


def test_an_untrained_module_starts_from_the_mean_of_the_others():
    norm_M = torch.tensor([2.0, 0.0, 8.0], dtype=torch.float64)
    config = FedeciderConfig(**AUTO, alpha_peers=0.5, alpha_per="module")
    start = started(config, torch.zeros(3, 2), norm_M, 1)
    torch.testing.assert_close(start, torch.tensor([[1.0, 2.0], [2.0, 4.0], [4.0, 8.0]]))
    torch.testing.assert_close(started(config, torch.zeros(2), norm_M, 0), torch.tensor([4.0, 2.0]))


@pytest.mark.parametrize(
    "settings", [{"alpha_per": "module"}, {"alpha_per": "module", "self_term": "absorb"}, {"self_term": "raw"}]
)
def test_the_first_broadcast_leaves_the_model_as_it_is(settings):
    recommender, config = toy_recommender(), FedeciderConfig(**AUTO, **settings)
    method = fedecider(recommender, config)
    state, _ = run(method, 3, 1)
    for client in range(3):
        found = updates(recommender, config, state, client)
        for name, before in found["pre_upload"].items():
            torch.testing.assert_close(found["post_broadcast"][name], before, rtol=1e-4, atol=1e-6)
            assert before.abs().max() > 1e-3
    for before, after in zip(*(positions_of(method, state, variant, 3) for variant in method.variants), strict=True):
        assert torch.equal(before, after)


def fresh_data(name):
    """Examples of the domain ``name`` that nobody trained on."""
    input_ids = torch.randint(3, 24, (40, 5), generator=torch.Generator().manual_seed(99))
    target = (input_ids[:, -1:] - 3 + SHIFTS[name]) % 21 + 3
    labels = torch.cat([target, torch.ones_like(target)], 1)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}


def test_with_one_weight_the_first_broadcast_hurts_less_than_with_two():
    change = {}
    for alpha_init in ("auto", 2.0):
        recommender, config = toy_recommender(local_epochs=8), FedeciderConfig(alpha_init=alpha_init)
        state, _ = run(fedecider(recommender, config), 3, 1)
        losses = {}
        for variant in ("pre_upload", "post_broadcast"):
            for client, name in enumerate(NAMES):
                load_variant(
                    recommender, config, variant, Download(state.server), take_row(state.local, client), client
                )
                with torch.no_grad():
                    losses[variant, name] = float(recommender.model(**fresh_data(name)).loss)
        change[alpha_init] = [losses["post_broadcast", name] - losses["pre_upload", name] for name in NAMES]
    for auto, two in zip(change["auto"], change[2.0], strict=True):
        assert abs(auto) < 0.3 * abs(two)


def test_nothing_is_sent_for_it():
    _, records = run(build(**AUTO, alpha_peers=0.25), 3, 2)
    _, plain = run(build(), 3, 2)
    assert [record["traffic"] for record in records] == [record["traffic"] for record in plain]


def test_who_comes_later_starts_from_its_own_norm():
    recommender, other = toy_recommender(), toy_recommender()
    method = build(recommender, **AUTO, alpha_peers=0.25)
    before, _ = run(method, 2, 1)  # clients 0 and 1; client 2 has not been there
    assert before.local["alpha"][2].tolist() == [0.0, 0.0, 1.0]
    download, own = method.broadcast(2, before.server, torch.tensor([2])), {k: v[2:] for k, v in before.local.items()}
    load_variant(recommender, FedeciderConfig(**AUTO), "post_broadcast", download, take_row(own, 0), 2)
    factors = fused_factors(recommender.model)
    assert not any((factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"]).any() for name in module_names(factors))
    upload, new_own, logs = method.client_update(2, download, own, blocks(3)[2])
    load_plain(other.model, take_row(without_prefix(method.init()[1], "own"), 2))
    trained = train_locally(other, 2, 2)
    assert same(take_row(upload.tensors, 0), trained.adapters)
    mean = logs[0]["norm_geometric_mean"]
    assert new_own["alpha"][0].tolist() == pytest.approx([0.25 * mean, 0.25 * mean, mean])
    assert len(logs[0]["cosine"]) == 3
    after = method.server_aggregate(2, before.server, iter([upload]))
    load_variant(recommender, FedeciderConfig(**AUTO), "pre_upload", Download(after), take_row(new_own, 0), 2)
    for key, factor in fused_factors(recommender.model).items():  # nothing but the own pair
        own_part = factor[:2] if key.endswith("lora_a") else factor[:, :2]
        assert torch.equal(own_part, trained.adapters[key])
        assert key.endswith("lora_a") or not factor[:, 2:].any()
    # from then on its weights learn
    download = method.broadcast(3, after, torch.tensor([2]))
    _, later, _ = method.client_update(3, download, new_own, blocks(3)[2])
    assert (later["alpha"] - new_own["alpha"]).abs().min() > 1e-4


def test_a_refused_first_update_is_followed_by_another_first_one():
    broken = build(toy_recommender(learning_rate=1e38), **AUTO)
    server, rows = broken.init()
    own = {key: tensor[1:2] for key, tensor in rows.items()}
    _, new_own, logs = broken.client_update(1, broken.broadcast(1, server, torch.tensor([1])), own, blocks(3)[1])
    assert logs[0]["finite"] is False
    assert same(new_own, own)
    method = build(**AUTO)
    _, new_own, logs = method.client_update(2, method.broadcast(2, server, torch.tensor([1])), new_own, blocks(3)[1])
    assert float(new_own["alpha"][0, 1]) == pytest.approx(logs[0]["norm_geometric_mean"])


def liking(recommender, own_weight):
    """``recommender`` whose validation users, ten a client, have their items in front where the own weight is
    ``own_weight`` of the own norm, and nowhere else."""

    def positions(client: int, split: str) -> torch.Tensor:
        bank = next(iter(fused_layers(recommender.model).values())).bank
        own = -1.0 if bank is None else float(bank.alpha.detach()[0])  # plain before the first broadcast
        liked = own == pytest.approx(own_weight * norms[client], rel=1e-4)
        assert split == "valid"
        return torch.full((10,), 0 if liked else 50) + torch.arange(10) % 2

    start, _ = run(build(**AUTO), 3, 1)
    norms = start.local["alpha"].diagonal().tolist()
    return recommender._replace(positions=positions)


FROZEN = {**AUTO, "alpha_peers": 0.25}
FUSIONS = "sum,1,0.5,0"


@pytest.mark.parametrize(
    ("share", "own_weight", "peer_weight"), [(1.0, 1 / 3, 1 / 3), (0.5, 2 / 3, 1 / 6), (0.0, 1.0, 0.0)]
)
def test_a_client_goes_as_far_to_the_mean_as_its_validation_items_clearly_like(frozen, share, own_weight, peer_weight):
    """Weights of three clients by hand, in units of the own norm."""
    recommender = liking(toy_recommender(), own_weight)
    if share == 0.0:  # the sum has the own weight 1 as well and would be liked first
        recommender = recommender._replace(positions=_likes_no_peers(recommender))
    state, _ = run(build(recommender, **FROZEN, initial_fusion=FUSIONS), 3, 3)
    start, _ = run(build(**FROZEN), 3, 1)
    norm_K1 = start.local["alpha"].diagonal()[:, None]
    expected = torch.full((3, 3), peer_weight).fill_diagonal_(own_weight)
    torch.testing.assert_close(state.local["alpha"], expected * norm_K1)
    assert (state.local["fitted"] > 0).all()


def _likes_no_peers(recommender):
    def positions(client: int, split: str) -> torch.Tensor:
        bank = next(iter(fused_layers(recommender.model).values())).bank
        liked = bank is not None and not bank.alpha[1:].any()
        return torch.full((10,), 0 if liked else 50) + torch.arange(10) % 2

    return positions


def test_where_nothing_is_clearly_better_the_first_entry_stays():
    tried, _ = run(build(liking(toy_recommender(), 9.0), **AUTO, alpha_peers=0.25, initial_fusion=FUSIONS), 3, 3)
    plain, _ = run(build(**AUTO, alpha_peers=0.25), 3, 3)
    assert same(tried.server, plain.server)
    assert torch.equal(tried.local["alpha"], plain.local["alpha"])


def test_one_entry_is_taken_unseen(frozen):
    """The mean by hand: a third of the raw own update, a third of the own norm for the others, layer by layer."""
    config = FedeciderConfig(**FROZEN, alpha_per="module", self_term="raw", initial_fusion="1")
    recommender = toy_recommender()
    before, _ = run(fedecider(recommender, config), 3, 1)
    own = take_row(before.local, 1)
    fitted = _fitted(recommender, config, Download(before.server), own, 1)
    load_variant(recommender, config, "post_broadcast", Download(before.server), fitted, 1)
    found, norm_M = fused_factors(recommender.model), update_norms(without_prefix(before.local, "own"))[1]
    for norm, name in zip(norm_M, module_names(found), strict=True):
        products = before.server[f"{name}.lora_b"] @ before.server[f"{name}.lora_a"]  # of norm 1
        mean = float(norm) * products.sum(0) / 3
        torch.testing.assert_close(found[f"{name}.lora_b"] @ found[f"{name}.lora_a"], mean, rtol=1e-4, atol=1e-6)
    assert torch.equal(fitted["alpha"][:, 1], torch.ones(len(norm_M)))  # the pair itself is smaller


def test_one_weight_a_client_is_a_mean_over_the_layers_that_it_came_in(frozen):
    """A table that nobody shares stays whole, and its layers are a third of three, whatever the table has."""
    generator = torch.Generator().manual_seed(0)

    def pair(*size):
        return {
            f"{name}.lora_{part}": torch.randn(*size, *shape, generator=generator)
            for name in ("layer", "table")
            for part, shape in (("a", (2, 5)), ("b", (4, 2)))
        }

    own, received = pair(), pair(3)
    for part in ("a", "b"):
        received[f"table.lora_{part}"] = torch.zeros_like(received[f"table.lora_{part}"])
    config = FedeciderConfig(**FROZEN, self_term="raw", initial_fusion="1")
    row = {"alpha": torch.ones(3), **with_prefix(own, "own")}
    fused = fused_start(config, row, received, 0, 1.0)
    torch.testing.assert_close(
        fused["alpha"], torch.tensor([1.0, 1 / 3, 1 / 3]) / torch.tensor([1.0, *[config.alpha_peers] * 2])
    )
    pair_after = without_prefix(fused, "own")
    torch.testing.assert_close(pair_after["layer.lora_b"], own["layer.lora_b"] / 3)
    assert torch.equal(pair_after["table.lora_b"], own["table.lora_b"])


def test_nobody_chooses_before_another_client_has_trained(frozen):
    method = build(**FROZEN, initial_fusion=FUSIONS)
    before, _ = run(method, 1, 2)  # client 0 alone, twice
    assert before.local["fitted"].tolist() == [-1, -1, -1]


VARIANTS = [
    {"alpha_peers": 0.25},
    {"alpha_peers": 0.25, "initial_fusion": FUSIONS},
    slow({"alpha_per": "module"}),
    slow({"self_term": "absorb", "alpha_per": "module", "alpha_peers": 0.25}),
    slow({"self_term": "raw"}),
    {"self_term": "raw", "alpha_per": "module", "alpha_peers": 1.0, "merge": True, "initial_fusion": "projected,1,0"},
    slow({"self_term": "raw", "merge": True}),
]


@pytest.mark.parametrize("settings", VARIANTS)
def test_blocks_and_resuming_after_round_one_change_nothing(settings, tmp_path):
    settings = {**AUTO, **settings}
    single, alone = run(build(**settings), 3, 3)
    run(build(**settings), 3, 1, checkpoints=tmp_path)
    resumed, _ = run(build(**settings), 3, 3, checkpoints=tmp_path, resume=True)
    together, records = run(build(**settings), 3, 3, block_size=3)
    for other in (resumed, together):
        assert same(single.server, other.server)
        assert same(single.local, other.local)
    assert [record["valid"] for record in alone] == [record["valid"] for record in records]


@pytest.mark.parametrize("settings", [VARIANTS[0], *VARIANTS[2:3]])
def test_resuming_between_the_first_rounds_of_two_clients_changes_nothing(settings, tmp_path):
    settings = {**AUTO, **settings}
    single, records = run(build(**settings), 3, 6, participation=0.4)
    cohorts = [[log["client"] for log in record["clients"]] for record in records]
    assert cohorts[:5] == [[0, 1]] * 4 + [[0, 2]]  # client 2 comes in round 5
    run(build(**settings), 3, 3, participation=0.4, checkpoints=tmp_path)
    resumed, _ = run(build(**settings), 3, 6, participation=0.4, checkpoints=tmp_path, resume=True)
    assert same(single.server, resumed.server)
    assert same(single.local, resumed.local)
    first = records[4]["clients"][1]
    share = settings.get("alpha_peers", 0.0)
    assert first["alpha"] == pytest.approx([share * first["alpha"][2]] * 2 + [first["alpha"][2]])
    if "alpha_per" not in settings:
        assert first["alpha"][2] == pytest.approx(first["norm_geometric_mean"])


def test_frozen_without_peers_it_is_local_training(frozen):
    state, _ = run(build(**AUTO, self_term="raw"), 3, 3)
    alone, _ = run(local(toy_recommender(), LocalConfig()), 3, 3)
    for key, tensor in without_prefix(alone.local, "own").items():
        torch.testing.assert_close(state.local[f"own.{key}"], tensor, rtol=1e-2, atol=1e-4)


def test_the_curve_of_the_weights_begins_with_the_client_alone():
    method = build(**AUTO, alpha_peers=0.25)
    state, records = run(method, 3, 3, participation=0.4)
    found = fusion_over_rounds(FUSION_WEIGHTS, method.init()[1], records)["alpha"]
    absent = [client for client in range(3) if client not in {log["client"] for log in records[0]["clients"]}]
    assert torch.equal(found[0][absent], torch.eye(3)[absent])
    torch.testing.assert_close(found[-1], state.local["alpha"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"alpha_init": "own"}, "got alpha_init 'own', expected a number or auto"),
        ({"alpha_init": float("inf")}, "got alpha_init inf"),
        ({"alpha_peers": 0.1}, "got alpha_peers 0.1 with alpha_init 2.0"),
        ({**AUTO, "alpha_peers": -0.1}, "got alpha_peers -0.1"),
        ({**AUTO, "initial_fusion": "1,0"}, "got initial_fusion 1,0 with alpha_peers 0"),
        ({**AUTO, "alpha_peers": 1.0, "initial_fusion": "1,2"}, "got initial_fusion '1,2', expected different numbers"),
        ({**AUTO, "alpha_peers": 1.0, "initial_fusion": "half"}, "got initial_fusion 'half'"),
        ({**AUTO, "alpha_peers": 1.0, "initial_fusion": "sum,0,sum"}, "got initial_fusion 'sum,0,sum'"),
        ({**AUTO, "alpha_peers": 1.0, "initial_fusion": ""}, "got initial_fusion '', expected different numbers"),
        ({**AUTO, "alpha_peers": 1.0, "initial_fusion": "sum,"}, "got initial_fusion '', expected different numbers"),
        ({**AUTO, "alpha_peers": 1.0, "initial_fusion": "projected,,0.5"}, "got initial_fusion ',0.5'"),
        ({**AUTO, "ablation": "wo_per"}, "got alpha_init auto with wo_per"),
        ({**AUTO, "ablation": "wo_decomp"}, "got alpha_init auto with wo_decomp"),
        ({**AUTO, "ablation": "wo_sep"}, "got alpha_init auto with wo_sep"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        FedeciderConfig(**settings)


def test_the_command_line_takes_a_number_or_auto():
    for words, expected in (
        (("--alpha_init", "auto", "--alpha_peers", "0.1"), ("auto", 0.1)),
        (("--alpha_init", "2"), (2.0, 0.0)),
        (("--alpha_init=2.0",), (2.0, 0.0)),
    ):
        found = parse_settings("", ["--data", "nowhere", *words]).method
        assert (found.alpha_init, found.alpha_peers) == expected
        assert type(found.alpha_init) is type(expected[0])
    with pytest.raises(ValueError, match="alpha_init"):
        parse_settings("", ["--data", "nowhere", "--alpha_init", "atuo"])
