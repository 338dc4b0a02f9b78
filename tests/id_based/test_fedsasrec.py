"""Federated SASRec: one client is the centralised model, rows are averaged over their holders, bytes by hand."""

from dataclasses import replace

import pytest
import torch

from fedecider.baselines.fitting import Pooled
from fedecider.baselines.sasrec import train
from fedecider.id_based.fedsasrec import FedsasrecConfig, fedsasrec
from fedecider.testing.bench import differing, updated
from fedecider.testing.id_contract import HISTORIES, ITEMS, PUBLIC, run, tiny_clients

SMALL = FedsasrecConfig(embedding_size=8, num_layers=1, batch_size=3, max_length=5)
ALONE = {"films.1": HISTORIES["films.1"]}
APART = {name: HISTORIES[name] for name in ("films.1", "songs.1")}
LAYERS = 5 * 8 + 4 * 8 + (3 * 8 * 8 + 3 * 8) + (8 * 8 + 8) + 2 * (8 * 8 + 8) + 2 * 8
"""Numbers of the layers of ``SMALL``: positions, two norms, query-key-value, mixed, feed-forward, last norm."""


def centralised(name, config, num_epochs, seed=0, valid=None):
    catalogue = name.partition(".")[0]
    sequences = [list(items) for items in HISTORIES[name].values()]
    settings = replace(config.model, num_epochs=num_epochs, validate_every=config.local_epochs, patience=99)
    public = [list(items) for items in PUBLIC[catalogue].values()]
    model = train(Pooled(sequences, ITEMS[catalogue], seed=seed, valid=valid), settings, public)
    return {parameter: tensor.detach() for parameter, tensor in model.named_parameters()}


def whole(server):
    """The model of one client, which alone is its catalogue."""
    return {name: tensor if name == "item_ID" else tensor[0] for name, tensor in server.items()}


@pytest.mark.parametrize("share", ["catalogue", "all"])
def test_one_client_is_centralised_sasrec_bit_for_bit(share):
    clients, config = tiny_clients(histories=ALONE), replace(SMALL, share=share)
    state, _ = run(fedsasrec(clients, config), clients, rounds=3)
    assert not differing(whole(state.server), centralised("films.1", config, num_epochs=6))
    assert differing(whole(state.server), centralised("films.1", config, num_epochs=5))


def test_one_silo_a_catalogue_trains_apart_from_the_others():
    clients = tiny_clients(histories=APART)
    state, _ = run(fedsasrec(clients, SMALL), clients, rounds=2)
    expected = centralised("films.1", SMALL, num_epochs=4)
    found = {name: tensor[:12] if name == "item_ID" else tensor[0] for name, tensor in state.server.items()}
    assert not differing(found, expected)


def test_a_row_is_the_mean_of_the_silos_that_hold_it():
    clients, config = tiny_clients(), replace(SMALL, share="all")
    method = fedsasrec(clients, config)
    server, local = method.init()
    uploads = [updated(method, 1, block, server, local)[1] for block in clients.blocks()]
    after = method.server_aggregate(1, server, iter(uploads))
    first, songs, second = ({name: tensor[0].double() for name, tensor in one.tensors.items()} for one in uploads)
    # three train parts of two events and more and two public users; three and one; three and two
    assert [one.weights.tolist() for one in uploads] == [[5.0], [5.0], [5.0]]
    films = (5 * first["item_ID"][:12] + 5 * second["item_ID"][:12]) / 10
    torch.testing.assert_close(after["item_ID"][:12], films.float())
    assert torch.equal(after["item_ID"][12:], songs["item_ID"][12:].float())
    layer = "blocks.0.mixed.weight"
    torch.testing.assert_close(after[layer], ((first[layer] + songs[layer] + second[layer]) / 3).float())


def test_clients_weigh_by_their_sequences_or_alike():
    histories = {"films.1": {**HISTORIES["films.1"], "ivy": [0, 1, 2, 3], "jim": [5, 4, 3, 2]}, **HISTORIES}
    histories["films.1"] = {**HISTORIES["films.1"], "ivy": [0, 1, 2, 3], "jim": [5, 4, 3, 2]}
    clients = tiny_clients(histories=histories)
    for weighting, expected in (("examples", [7.0, 5.0, 5.0]), ("uniform", [1.0, 1.0, 1.0])):
        method = fedsasrec(clients, replace(SMALL, weighting=weighting))
        (block,) = clients.blocks(3)
        assert updated(method, 1, block, *method.init())[1].weights.tolist() == expected


def test_a_client_without_a_pair_of_events_is_named(monkeypatch):
    monkeypatch.setitem(PUBLIC, "songs", {})
    clients = tiny_clients(histories={**APART, "songs.1": {"dan": [4, 1, 2], "eve": [3, 2, 0]}})
    with pytest.raises(ValueError, match=r"^songs.1: got no train part of two events"):
        fedsasrec(clients, SMALL)


def test_a_table_that_nobody_else_holds_may_stay_or_travel():
    clients = tiny_clients(histories=APART)
    sent, _ = run(fedsasrec(clients, replace(SMALL, share="all")), clients)
    stays, _ = run(fedsasrec(clients, replace(SMALL, share="layers")), clients)
    assert not differing({name: sent.server[name] for name in stays.server}, stays.server)
    assert torch.equal(sent.server["item_ID"][:12], stays.local["own.item_ID"][0, :12])
    assert torch.equal(sent.server["item_ID"][12:], stays.local["own.item_ID"][1, :9])


@pytest.mark.parametrize(
    ("share", "films", "songs"),
    [
        ("catalogue", LAYERS + 12 * 8, LAYERS + 9 * 8),
        ("all", LAYERS + 12 * 8, LAYERS + 9 * 8),
        ("layers", LAYERS, LAYERS),
        ("nothing", 0, 0),
    ],
)
def test_bytes(share, films, songs):
    clients = tiny_clients()
    _, records = run(fedsasrec(clients, replace(SMALL, share=share)), clients, rounds=1)
    for group in records[0]["traffic"]:
        for client in group["clients"]:
            expected = 4 * (songs if client == 1 else films)
            assert (sum(group["down"].values()), sum(group["up"].values())) == (expected, expected)


@pytest.mark.slow
def test_what_is_not_shared_does_not_reach_others():
    other = {**HISTORIES, "songs.1": {user: items[::-1] for user, items in HISTORIES["songs.1"].items()}}
    for share, reached in (("catalogue", False), ("nothing", False), ("layers", True), ("all", True)):
        found = []
        for histories in (HISTORIES, other):
            clients = tiny_clients(histories=histories)
            state, _ = run(fedsasrec(clients, replace(SMALL, share=share)), clients)
            found.append({name: tensor[[0, 2]] for name, tensor in state.local.items()})
        assert bool(differing(*found)) is reached, share
