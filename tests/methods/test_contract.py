"""What every method of the cross-silo track owes to the shared runner: the contract of `fedecider.testing` and more."""

import functools
import json
import os
import shutil

import pytest
import torch
import toy_recommender as toys
from slow import fast_where, slow
from toy_recommender import blocks, catalogue_recommender, run, toy_recommender

from fedecider.federation import state as state_module
from fedecider.federation.method import Download
from fedecider.federation.record import Recorder, read_records
from fedecider.federation.wire import take_row
from fedecider.methods import METHODS
from fedecider.models.adapters import FACTORS, read_pair
from fedecider.testing.llm_contract import LLM_CONTRACT, LlmBench

pytestmark = pytest.mark.whole

FEDERATED = [name for name, method in METHODS.items() if not method.pooled]
TOY_SETTINGS: dict[str, dict] = {
    "fdlora": {"sync_every": 2, "num_evaluations": 3},
}
"""What a method needs to fit into a few toy rounds."""
SENT_FACTORS = {"ffa_lora": ("lora_b",), "rolora": ("lora_b",)}
"""What the first round uploads of a pair, where it is not the whole pair."""
SENT_BESIDE = {"fellrec": {"loss"}}
"""What is uploaded beside the factors."""

OF_THEIR_OWN = ("fedecider", "fedavg")
"""Methods whose whole contract is fast; the others have fast tests of what they do differently."""

methods = pytest.mark.parametrize("name", fast_where(OF_THEIR_OWN, FEDERATED))
methods_one_fast = pytest.mark.parametrize("name", fast_where(("fedecider",), FEDERATED))


@pytest.fixture(autouse=True, params=["t5", slow("llama"), slow("qwen2")])
def _backbone(request, monkeypatch):
    monkeypatch.setattr(toys, "BACKBONE", request.param)


def build(name, recommender=None, **config):
    return METHODS[name].build(
        recommender or toy_recommender(), METHODS[name].config(**{**TOY_SETTINGS.get(name, {}), **config})
    )


@functools.cache
def bench(name, backbone):
    """Runs that several parts of the contract compare with are made once."""
    config = METHODS[name].config(**TOY_SETTINGS.get(name, {}))
    return LlmBench(METHODS[name], config, toy_recommender, catalogue_recommender)


@pytest.mark.parametrize("made", [toy_recommender, catalogue_recommender])
def test_a_model_whose_numbers_are_no_numbers_ranks_nothing_first(made):
    """Else a ruined method would look perfect to its contract."""
    models = made()
    ruined = {name: torch.full_like(tensor, torch.nan) for name, tensor in models.start.items()}
    for client in range(models.num_clients):
        assert (models.model(client, models.start).positions("test") < 9).any()
        assert (models.model(client, ruined).positions("test") >= 9).all()  # the smallest catalogue has 9 items


@methods
@pytest.mark.parametrize("part", LLM_CONTRACT, ids=lambda part: part.__name__)
def test_contract(name, part):
    part(bench(name, toys.BACKBONE))


def reference(name, rounds):
    """(Final state, records) of a toy run that many tests compare with; nobody may change them."""
    return _reference(name, rounds, toys.BACKBONE)


@functools.cache
def _reference(name, rounds, backbone):
    return run(build(name), 3, rounds)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("name", METHODS)
def test_it_is_known_beforehand_whose_server_takes_a_mean(name):
    assert METHODS[name].takes_mean == build(name).takes_mean


class Killed(BaseException):
    """Nothing between the failing call and the test may catch it, as with a killed process."""


def kill_while_saving(monkeypatch, moment):
    """Saving stops in round 2 with half of the trees written, or with all of them but not renamed; or in round 3 with
    the oldest checkpoint about to be removed."""
    owner, name, is_moment = {
        "half of the trees": (state_module, "save_file", lambda a, b: "round_00002" in str(b) and "/local" in str(b)),
        "before the rename": (os, "replace", lambda a, b: b.name == "round_00002"),
        "old one not removed": (
            shutil,
            "rmtree",
            lambda a, b: a.name.startswith(".round_00001") and (a.parent / "round_00003").exists(),
        ),
    }[moment]
    real = getattr(owner, name)

    def call(first, second=None, **options):
        if is_moment(first, second):
            raise Killed
        return real(first, **options) if second is None else real(first, second, **options)

    monkeypatch.setattr(owner, name, call)


@methods_one_fast
@pytest.mark.parametrize("moment", ["half of the trees", slow("before the rename"), slow("old one not removed")])
def test_a_run_killed_while_it_saves_gives_the_same_records(name, moment, tmp_path, monkeypatch):
    whole, records = reference(name, 3)
    part = {"recorder": Recorder(tmp_path / "part.jsonl"), "checkpoints": tmp_path / "checkpoints"}
    with monkeypatch.context() as patch:
        kill_while_saving(patch, moment)
        with pytest.raises(Killed):
            run(build(name), 3, 3, **part)
    resumed, again = run(build(name), 3, 3, resume=True, **part)
    assert [record["round"] for record in again] == ([] if moment == "old one not removed" else [2, 3])
    for tree in ("server", "local", "best_server", "best_local"):
        assert same(getattr(whole, tree), getattr(resumed, tree))
    assert (whole.best_round, whole.best_score) == (resumed.best_round, resumed.best_score)
    assert [record["round"] for record in records] == [1, 2, 3]
    assert without_times(read_records(tmp_path / "part.jsonl")) == without_times(json.loads(json.dumps(records)))
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["round_00002", "round_00003"]  # no debris


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(entry) for key, entry in value.items() if not key.endswith(("_s", "seconds"))}
    return [without_times(entry) for entry in value] if isinstance(value, list) else value


@methods_one_fast
def test_exchanging_neighbours_leaves_the_bits_of_both(name):
    """Of three clients, the two that change places still add up their peers in the same order after two rounds."""
    names, order = ["crime", "comics", "children"], [1, 0, 2]
    first, _ = reference(name, 2)
    moved, _ = run(build(name, toy_recommender([names[client] for client in order])), 3, 2)
    for key, tensor in first.local.items():
        if key.startswith("own."):
            assert torch.equal(moved.local[key][order][:2], tensor[:2])
            torch.testing.assert_close(moved.local[key][2], tensor[2], rtol=1e-3, atol=1e-4)
    if name == "fedavg":
        assert same(moved.server, first.server)
    if name == "fedecider":
        alpha_KK = moved.local["alpha"][order][:, order]
        assert torch.equal(alpha_KK[:2], first.local["alpha"][:2])
        torch.testing.assert_close(alpha_KK[2], first.local["alpha"][2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", fast_where(OF_THEIR_OWN, [name for name in FEDERATED if name != "local"]))
def test_reading_after_local_training_gives_the_upload(name):
    recommender = toy_recommender()
    method = build(name, recommender)
    server, local = method.init()
    own = {key: tensor[:1] for key, tensor in local.items()}
    download: Download = method.broadcast(1, server, torch.tensor([0]))
    upload, _, _ = method.client_update(1, download, own, blocks(3)[0])
    sent, factors = take_row(upload.tensors, 0), SENT_FACTORS.get(name, FACTORS)
    for key in SENT_BESIDE.get(name, ()):
        del sent[key]
    read = read_pair(recommender.base.model)
    assert same(sent, {key: tensor for key, tensor in read.items() if key.endswith(factors)})
