"""FedGCDR: attention by hand, the size of the noise, what is handed over and to whom, phases and control."""

import math
from dataclasses import replace

import pytest
import torch

from fedecider.federation.method import Download
from fedecider.federation.privacy import PrivacyConfig, epsilon
from fedecider.id_based.fedgcdr import (
    FedgcdrConfig,
    fedgcdr,
    mapping_loss,
    noise_for,
    similarity_loss,
    user_layers,
)
from fedecider.testing.bench import differing
from fedecider.testing.id_contract import HISTORIES, ITEMS, run, tiny_clients

CONFIG = FedgcdrConfig(source_rounds=1, target_rounds=1, embedding_size=4, batch_size=3, noise="none", friends="known")
APART = {"films.1": {"ann": [3, 1, 4, 0], "bob": [2, 7, 8, 3]}, "songs.1": {"eve": [4, 1, 2, 6], "fay": [1, 2, 3, 4]}}
YES = torch.tensor([[True]])


def trained(rounds, histories=HISTORIES, seed=0, **changes):
    clients = tiny_clients(seed, histories)
    return run(fedgcdr(clients, replace(CONFIG, **changes)), clients, rounds)


def test_attention_by_hand():
    user_BD, item_BVD = torch.tensor([[1.0, 0.0]]), torch.tensor([[[0.0, 2.0], [9.0, 9.0]]])
    is_item_BV = torch.tensor([[True, False]])
    zero = user_layers(user_BD, item_BVD, is_item_BV, torch.zeros(1, 2))
    assert zero.tolist() == [[[0.5, 1.0]]]  # the plain mean of the user and its one item
    friend_BLSD = torch.tensor([[[[4.0, 3.0], [7.0, 7.0]]]])
    is_friend_BS = torch.tensor([[True, False]])
    found = user_layers(user_BD, item_BVD, is_item_BV, torch.tensor([[math.log(2.0), 0.0]]), friend_BLSD, is_friend_BS)
    # weights 2, 1 and 16 of the user, the item and the friend
    torch.testing.assert_close(found[0, 0], torch.tensor([66.0, 50.0]) / 19)


def test_what_looks_at_the_user_alone_changes_nothing():
    generator = torch.Generator().manual_seed(1)
    user_BD, item_BVD = torch.randn(3, 4, generator=generator), torch.randn(3, 5, 4, generator=generator)
    query_D, other_D = torch.randn(2, 4, generator=generator)
    neighbour_BVD = torch.cat([user_BD[:, None], item_BVD], 1)
    logit_BV = neighbour_BVD @ query_D + (user_BD @ other_D)[:, None]  # a_2 . e_v + a_1 . e_u, as printed
    expected = (logit_BV.softmax(1)[..., None] * neighbour_BVD).sum(1)
    found = user_layers(user_BD, item_BVD, torch.ones(3, 5, dtype=torch.bool), query_D[None])
    torch.testing.assert_close(found[:, 0], expected)


def test_losses_by_hand():
    target, friends = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[[0.0, 1.0], [3.0, 0.0], [-1.0, 0.0]]]])
    there = torch.tensor([[True, True, True]])
    assert mapping_loss(target, friends, there).item() == 2.0 + 4.0 + 4.0
    assert mapping_loss(target, friends, torch.tensor([[True, False, False]])).item() == 2.0
    assert similarity_loss(target, friends, there).item() == 4.0  # cosines 0, 1 and -1, which counts as 0
    assert similarity_loss(target, friends, torch.tensor([[True, False, True]])).item() == 0.0
    assert mapping_loss(target, target[:, :, None], YES).item() == 0.0  # a copy, an identity: no distance


def test_the_size_of_the_noise():
    assert FedgcdrConfig(noise="paper").noise_std == pytest.approx(0.6056, abs=1e-4)
    assert FedgcdrConfig(noise="none").noise_std == 0.0
    scale = noise_for(8.0, 1e-5)
    assert epsilon(PrivacyConfig(clip=1.0, noise_scale=scale), 1) <= 8.0
    assert epsilon(PrivacyConfig(clip=1.0, noise_scale=scale * 0.999), 1) > 8.0
    # one customer's vectors of two layers may move by 2 each
    assert FedgcdrConfig(num_layers=2).noise_std == pytest.approx(scale * math.sqrt(8.0))
    assert FedgcdrConfig().noise_std > FedgcdrConfig(noise="paper").noise_std


def test_what_is_handed_over():
    clients = tiny_clients()
    state, records = trained(1, source_rounds=1)
    known = state.server["known"]
    assert known.sum(1).tolist() == [4, 4, 3]
    assert known[0, clients.clients[0].customer_U].all()
    length = state.server["knowledge"].view(3, clients.num_customers, 2, 4).norm(dim=-1)
    assert length.max() <= 1.0 + 1e-6
    assert not state.server["knowledge"][~known].any()
    sent = {client: sum(group["up"].values()) for group in records[0]["traffic"] for client in group["clients"]}
    assert sent == {0: 4 * 4 * 8, 1: 4 * 4 * 8, 2: 3 * 4 * 8}
    everybody, _ = trained(1, friends="all", noise="paper")
    assert everybody.server["known"].all()
    assert everybody.server["knowledge"].view(3, -1, 8).norm(dim=-1).min() > 0.0  # noise where nothing is known


def test_friends_are_fetched_once_by_those_whose_users_they_are():
    clients = tiny_clients()
    state, records = trained(3)
    customer = clients.clients[0].customer_U
    assert state.local["is_friend"][0, :, :4].tolist() == [
        [False] * 4,
        [bool(one) for one in torch.isin(customer, clients.clients[1].customer_U)],
        [bool(one) for one in torch.isin(customer, clients.clients[2].customer_U)],
    ]
    assert state.local["is_friend"][0].sum() == 2  # ann and bob sing
    down = [
        {client: sum(group["down"].values()) for group in record["traffic"] for client in group["clients"]}
        for record in records
    ]
    # ann and bob, once; beside them 2 x 4 truth values, one of each of the other two clients and each user
    assert down[0][0] == 0
    assert down[1][0] == 2 * 8 * 4 + 2 * 4
    assert down[2][0] == 0


def test_phases():
    _, records = trained(3)
    assert [record["clients"][0]["phase"] for record in records] == [0, 1, 2]
    state, _ = trained(2)
    tuned, _ = trained(3)
    assert not differing(
        {name: tensor for name, tensor in state.local.items() if "attention" in name or "weight" in name},
        {name: tensor for name, tensor in tuned.local.items() if "attention" in name or "weight" in name},
    )
    assert differing({"item": state.local["target.item"]}, {"item": tuned.local["target.item"]})


def test_it_learns_the_taste_of_users(monkeypatch):
    """Half of the users take even films, half odd ones; of 31 candidates 11 are of a user's taste."""
    monkeypatch.setitem(ITEMS, "films", 40)
    draws = torch.Generator().manual_seed(0)
    taste = {f"user{n}": (2 * torch.randperm(20, generator=draws)[:10] + n % 2).tolist() for n in range(60)}
    histories = {"films.1": taste, "songs.1": APART["songs.1"]}
    clients = tiny_clients(0, histories)
    method = fedgcdr(clients, replace(CONFIG, source_rounds=3, learning_rate=0.03, batch_size=10))
    state, _ = run(method, clients, 3)
    own = {name: tensor[:1] for name, tensor in state.local.items()}
    (place_U,) = method.positions("model", Download({}), own, clients.blocks()[0], "test")
    assert (place_U < 11).double().mean() > 0.9


def test_a_user_of_two_domains_moves_the_other_one():
    other = {**HISTORIES, "songs.1": {**HISTORIES["songs.1"], "ann": [0, 1, 2, 3, 4]}}
    for friends, reached in (("known", True), ("none", False)):
        one, two = (
            trained(2, histories, friends=friends)[0].local["target.user"][0] for histories in (HISTORIES, other)
        )
        assert bool(torch.ne(one, two).any()) is reached
