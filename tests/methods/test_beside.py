"""Every client trained alone beside a method: the method as it is, and the row ``local`` as the method of that name."""

from dataclasses import replace

import pytest
import torch
from toy_recommender import NAMES, run, toy_recommender, with_clients

from fedecider.federation.wire import take_row
from fedecider.methods import METHODS
from fedecider.methods.beside import beside, has_local
from fedecider.methods.config import UserPrivacy
from fedecider.methods.local import best_model

ROUNDS = 3


def built(name, recommender):
    return METHODS[name].build(recommender, METHODS[name].config())


def parts(tree):
    """What belongs to the method, and what to the training alone."""
    own = {key: tensor for key, tensor in tree.items() if key.startswith("local.")}
    return {key: tensor for key, tensor in tree.items() if key not in own}, own


@pytest.mark.parametrize("name", ["fedecider", "fedavg", "centralised"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_method_stays_as_it_is_and_the_rest_is_local(name, participation):
    recommender, size = toy_recommender(dropout=0.2), len(NAMES)
    if METHODS[name].pooled and participation < 1.0:
        pytest.skip("all clients are one block")
    options = {"participation": participation, "block_size": size if METHODS[name].pooled else 1}
    plain, plain_records = run(built(name, recommender), size, ROUNDS, **options)
    found, records = run(beside(built(name, recommender), recommender), size, ROUNDS, **options)
    theirs, own = parts(found.local)
    assert has_local(found.local)
    assert not has_local(plain.local)
    assert theirs.keys() == plain.local.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in plain.local.items())
    assert all(torch.equal(tensor, found.server[key]) for key, tensor in plain.server.items())
    assert [one["traffic"] for one in records] == [one["traffic"] for one in plain_records]
    assert [one["valid"] for one in records] == [one["valid"] for one in plain_records]
    alone, local_records = run(built("local", recommender), size, ROUNDS, participation=participation)
    assert own.keys() == alone.local.keys()
    assert all(torch.equal(own[key], tensor) for key, tensor in alone.local.items())
    trained = [[log["client"] for log in one["clients"]] for one in records]
    assert trained == [[log["client"] for log in one["clients"]] for one in local_records]
    for client in range(size):
        scores = [log["local"]["score"] for one in records for log in one["clients"] if log["client"] == client]
        rounds = [one["round"] for one in records for log in one["clients"] if log["client"] == client]
        assert float(own["local.score"][client]) == max(scores, default=-1.0)
        best = rounds[scores.index(max(scores))] if scores else 0
        assert int(own["local.round"][client]) == best
    assert all(log["cpu_s"] > 0.0 and log["local"]["cpu_s"] > 0.0 for one in records for log in one["clients"])


def test_the_best_round_of_a_client_is_loaded_even_if_the_method_had_another():
    recommender = toy_recommender()
    places = iter([4, 4, 4, 1, 9, 9, 9, 2, 9])  # of three clients in three rounds

    def positions_of(client):
        return lambda model, split, share: torch.tensor([next(places)])

    method = beside(built("fedavg", recommender), with_clients(recommender, positions=positions_of))
    found, _ = run(method, len(NAMES), ROUNDS)
    assert found.local["local.round"].tolist() == [2, 3, 1]
    second = best_model(recommender, take_row(found.local, 0), 0).adapters.pair
    after_two, _ = run(built("local", recommender), len(NAMES), 2)
    assert all(torch.equal(tensor, after_two.local[f"local.now.{key}"][0]) for key, tensor in second.items())


def test_nothing_leaves_so_no_noise_is_drawn_and_what_is_not_finite_is_forgotten():
    noisy = UserPrivacy(clip=0.1, noise_scale=2.0)
    recommender = toy_recommender()
    private = recommender._replace(training=replace(recommender.training, user_privacy=noisy))
    found, _ = run(beside(built("fedavg", recommender), private), len(NAMES), 1)
    _, own = parts(found.local)
    alone, _ = run(built("local", recommender), len(NAMES), 1)
    assert all(torch.equal(own[key], tensor) for key, tensor in alone.local.items())
    wild = recommender._replace(training=replace(recommender.training, learning_rate=1e30))
    broken, records = run(beside(built("fedavg", recommender), wild), len(NAMES), 1)
    _, own = parts(broken.local)
    assert {log["local"]["score"] for log in records[0]["clients"]} == {None}
    assert own["local.score"].tolist() == [-1.0] * len(NAMES)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in own.values())
