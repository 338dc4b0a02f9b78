"""Tables travel by rows of catalogues: what is sent, what it changes, and what a mean over silos is."""

import functools

import pytest
import torch
import toy_recommender as toys
from slow import fast_where, slow
from toy_recommender import SILO_SIZES, SILOS, WORDING, blocks, catalogue_recommender, run

from fedecider.federation.wire import received, take_row
from fedecider.methods import METHODS
from fedecider.methods.local_training import train_locally
from fedecider.methods.rows import (
    TABLE,
    Rows,
    common_rows,
    rows_of_clients,
    sends_own_rows,
    travelling_rows,
    travelling_shapes,
)
from fedecider.models.adapters import without_prefix

pytestmark = pytest.mark.whole

FEDERATED = [name for name, method in METHODS.items() if not method.pooled]
SETTINGS = {"fdlora": {"sync_every": 2, "num_evaluations": 5}}
CRIME, COMICS = torch.arange(3, 12), torch.arange(12, 22)
NOBODYS = torch.tensor([1, 22, 23])

OF_THEIR_OWN = ("fedecider", "fedavg")
"""Methods that send all directions, and the mean; the others are slow."""

methods = pytest.mark.parametrize("name", fast_where(OF_THEIR_OWN, FEDERATED))


@pytest.fixture(autouse=True, params=["llama", slow("t5")])
def _backbone(request, monkeypatch):
    monkeypatch.setattr(toys, "BACKBONE", request.param)


def build(name, recommender=None, **config):
    config = METHODS[name].config(**{**SETTINGS.get(name, {}), **config})
    return METHODS[name].build(recommender or catalogue_recommender(), config)


@functools.cache
def _whole_run(name, backbone):
    return run(build(name), 4, 3)


def whole_run(name):
    """(Final state, records) of three rounds that several tests read; nobody may change them."""
    return _whole_run(name, toys.BACKBONE)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("family", ["t5", "llama", "qwen2"])
def test_training_changes_the_own_rows_and_no_others(family, monkeypatch):
    monkeypatch.setattr(toys, "BACKBONE", family)
    recommender = catalogue_recommender()
    for client in range(4):
        changed_V = train_locally(recommender, client, 1, recommender.start).pair[TABLE].any(1)
        own_V = recommender.rows.own[TABLE][client]
        assert not changed_V[~own_V].any()
        assert changed_V[own_V][len(WORDING) :].all()
        assert changed_V[2]  # a word of the prompt
    outputs = catalogue_recommender(targets=("output",))
    assert train_locally(outputs, 0, 1, outputs.start).pair[TABLE].any(1).nonzero().flatten().tolist() == CRIME.tolist()


@methods
def test_clients_know_their_rows_only(name):
    """That the formula counts them is held by `fedecider.testing.llm_contract.scalars_of_silos`."""
    state, records = whole_run(name)
    common = common_rows(catalogue_recommender().rows.own)
    assert common[0] == [11, 2, 11, 2]
    for record in records:
        assert sorted(client for group in record["traffic"] for client in group["clients"]) == [0, 1, 2, 3]
        for group in record["traffic"]:
            for client in group["clients"]:
                assert group["up"].get(TABLE, 0) in (0, 4 * 2 * common[client][client])
    for key, tensor in {**state.server, **state.local}.items():
        if key.endswith(TABLE) and key.startswith(("own.", "whole.")):
            assert tensor[0].any()
            assert not tensor[0].movedim(-2, 0)[torch.cat([COMICS, NOBODYS])].any()


@pytest.mark.parametrize("config", [{}, slow({"alpha_init": 2.0})])
def test_fedecider_is_the_same_bit_for_bit_as_with_whole_tables(config):
    recommender = catalogue_recommender()
    rows, found = run(build("fedecider", recommender, **config), 4, 3)
    whole, expected = run(build("fedecider", recommender._replace(rows=Rows()), **config), 4, 3)
    assert same(rows.server, whole.server)
    for key, tensor in whole.local.items():
        if key == f"whole.{TABLE}":
            for client, row_V in enumerate(recommender.rows.own[TABLE]):
                assert torch.equal(rows.local[key][client][row_V], tensor[client][row_V])
                assert not rows.local[key][client][~row_V].any()
        else:
            assert torch.equal(rows.local[key], tensor)
    for record, other in zip(found, expected, strict=True):
        assert record["valid"] == other["valid"]
        assert [log["loss"] for log in record["clients"]] == [log["loss"] for log in other["clients"]]


@pytest.mark.slow
def test_a_silo_has_the_mean_of_its_own_catalogue():
    """Each catalogue's rows are FedAvg's of its own clients alone; what all have is the mean of all."""
    for weighting in ("uniform", "examples"):
        state, _ = run(build("fedavg", weighting=weighting), 4, 1)
        for names, rows in ((SILOS[::2], CRIME), (SILOS[1::2], COMICS)):
            alone, _ = run(build("fedavg", catalogue_recommender(names), weighting=weighting), 2, 1)
            assert torch.equal(state.server[TABLE][rows], alone.server[TABLE][rows])
        own = without_prefix(state.local, "own")
        weight_K = torch.tensor([1.0] * 4 if weighting == "uniform" else [float(SILO_SIZES[name]) for name in SILOS])
        weight_K /= weight_K.sum()
        assert own[TABLE][:, 2].abs().sum() > 0.0
        for key, tensor in own.items():
            mean = torch.tensordot(weight_K, tensor, 1)
            if key == TABLE:
                mean = mean[WORDING]
            found = state.server[key][WORDING] if key == TABLE else state.server[key]
            torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-7)
        assert not state.server[TABLE][NOBODYS].any()


@pytest.mark.parametrize("name", ["fedavg", "fdlora"])
def test_rows_of_absent_clients_stay(name):
    """Also where the server has a momentum: that of round 2 is kept for the round in which somebody sends them."""
    method = build(name)
    before, _ = run(method, 4, 2)
    uploads = []
    for client in (0, 2):
        own = {key: tensor[client : client + 1] for key, tensor in before.local.items()}
        download = method.broadcast(3, before.server, torch.tensor([client]))
        uploads.append(method.client_update(3, download, own, blocks(4)[client])[0])
    after = method.server_aggregate(3, before.server, iter(uploads))
    tables = [key for key in after if key.endswith(TABLE)]
    assert tables == [TABLE, f"momentum.{TABLE}"][: len(tables)]
    for key in tables:
        assert before.server[key][COMICS].any()
        assert torch.equal(after[key][COMICS], before.server[key][COMICS]), key
        assert not torch.equal(after[key][CRIME], before.server[key][CRIME]), key


@pytest.mark.parametrize("name", ["fellrec", "lora_sim"])
def test_personal_averages_are_over_those_who_have_the_row(name):
    method = build(name)
    state, _ = run(method, 4, 2)
    weight_K = state.server["weights"][0]
    mixed = take_row(received(method.broadcast(3, state.server, torch.tensor([0])), 0).per_client, 0)
    both = weight_K[[0, 2]] / weight_K[[0, 2]].sum()
    expected = torch.tensordot(both, state.server[TABLE][[0, 2]].double(), 1)[CRIME].float()
    torch.testing.assert_close(mixed[TABLE][CRIME], expected)
    assert float(both.min()) > 0.05
    everybody = torch.tensordot(weight_K, state.server[TABLE].double(), 1)[WORDING].float()
    torch.testing.assert_close(mixed[TABLE][WORDING], everybody)
    assert not mixed[TABLE][COMICS].any()


def test_whole_tables_travel_where_any_row_may_change():
    recommender = catalogue_recommender(targets=("attention",))
    assert rows_of_clients(recommender.shapes, []) == {}
    assert common_rows({}) == []
    method = METHODS["fedavg"].algorithm(recommender, METHODS["fedavg"].config())
    assert sends_own_rows(method, travelling_rows(Rows(), True)) is method
    shapes = recommender.shapes
    assert travelling_shapes(shapes, [], 1, 3) == (shapes, [shapes] * 3)
