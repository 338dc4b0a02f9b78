"""FedHCDR: graph and filters by hand, what is sent and averaged, whom sharing reaches, the code's scorer."""

import math
from dataclasses import replace

import pytest
import torch
from slow import slow

from fedecider.federation.method import Download
from fedecider.id_based.fedhcdr import (
    CHUNK,
    FedhcdrConfig,
    contrast_loss,
    fedhcdr,
    filtered,
    hypergraph,
    rating_loss,
    return_probabilities,
    score_parts,
    silo,
    transfer_loss,
)
from fedecider.testing.bench import differing
from fedecider.testing.id_contract import HISTORIES, ITEMS, run, tiny_clients

pytestmark = pytest.mark.whole

CONFIG = FedhcdrConfig(embedding_size=4, batch_size=8, walk_steps=3, local_epochs=1)
CPU = torch.device("cpu")
USER_E, ITEM_E = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1])  # H = [[1, 0], [1, 1]]
OTHER = {**HISTORIES, "songs.1": {**HISTORIES["songs.1"], "ann": [0, 1, 2, 3, 4]}}


def trained(rounds, histories=HISTORIES, seed=0, **changes):
    clients = tiny_clients(seed, histories)
    return run(fedhcdr(clients, replace(CONFIG, **changes)), clients, rounds)


def some_pairs(num_users, num_items, count):
    drawn = torch.randperm(num_users * num_items, generator=torch.Generator().manual_seed(0))[:count].sort().values
    return drawn // num_items, drawn % num_items


def test_the_graph_by_hand():
    graph = hypergraph(USER_E, ITEM_E, (2, 2), CPU)
    # P = (1/3, 2/3), K_01 = 1/6, K_11 = 1/6 + 2/3, degrees 1 and 2
    found = graph.spread(torch.eye(2))
    torch.testing.assert_close(found, torch.tensor([[0.0, 1 / 6], [1 / 6, 0.0]]) / math.sqrt(2.0), atol=1e-7, rtol=0)


def test_the_sparse_graph_is_the_dense_one_and_so_is_its_gradient():
    user_E, item_E = some_pairs(CHUNK + 9, 40, 3000)  # users without an item, too
    user_E, item_E = user_E[user_E != 7], item_E[user_E != 7]
    shape = CHUNK + 9, 41  # and an item without a user
    matrix = torch.zeros(shape, dtype=torch.float64)
    matrix[user_E, item_E] = 1.0
    degree_U, degree_I = matrix.sum(1), matrix.sum(0)
    share_I = torch.where(degree_I > 0, (1 - degree_I / degree_I.sum()) / degree_I.clamp(min=1), 0.0)
    dense = (matrix * share_I) @ matrix.T
    dense -= dense.diagonal().diag()
    walk = dense / degree_U.clamp(min=1)[:, None]
    scale = degree_U.clamp(min=1) ** -0.5
    dense = scale[:, None] * dense * scale
    graph = hypergraph(user_E, item_E, shape, CPU)
    value, slope = torch.randn(2, shape[0], 3, generator=torch.Generator().manual_seed(1))
    value.requires_grad_()
    (graph.spread(value) * slope).sum().backward()
    torch.testing.assert_close(graph.spread(value).double(), dense @ value.double(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(value.grad.double(), dense @ slope.double(), atol=1e-5, rtol=1e-4)
    powers = torch.stack([torch.linalg.matrix_power(walk, step).diagonal() for step in (1, 2, 3, 4, 5)], 1)
    for steps in (4, 5):
        found = return_probabilities(graph, steps)
        torch.testing.assert_close(found.double(), powers[:, :steps], atol=1e-6, rtol=1e-4)
    assert found[:, 1].max() > 0.005


def test_filters_without_neighbours():
    graph = hypergraph(torch.tensor([0, 1]), torch.tensor([0, 1]), (2, 2), CPU)  # nobody shares an item
    part = {"weight": torch.tensor([[0.0, 1.0], [2.0, 0.0]]), "bias": torch.tensor([1.0, 3.0]), "beta": torch.ones(())}
    start = torch.tensor([[1.0, 2.0], [0.0, 5.0]])
    torch.testing.assert_close(
        filtered(part, graph, start, 1.0), (start + 2.0 * start @ part["weight"] + part["bias"]) / 2
    )
    torch.testing.assert_close(filtered(part, graph, start, -1.0), (start + part["bias"]) / 2)


def test_what_both_filters_leave_out_is_the_other_one():
    graph = hypergraph(USER_E, ITEM_E, (2, 2), CPU)
    part = {"weight": torch.eye(1), "bias": torch.zeros(1), "beta": torch.zeros(())}
    start = torch.tensor([[math.sqrt(2.0)], [0.0]])
    # A start = (0, 1/6): X + Y +- A Y, halved
    assert filtered(part, graph, start, 1.0).flatten().tolist() == pytest.approx([math.sqrt(2.0), 1 / 12])
    assert filtered(part, graph, start, -1.0).flatten().tolist() == pytest.approx([math.sqrt(2.0), -1 / 12])
    dropped = filtered(part, graph, start, 1.0, torch.tensor([[0.0], [2.0]]))
    assert dropped.flatten().tolist() == pytest.approx([math.sqrt(0.5), 0.0])


def test_losses_by_hand():
    logits = torch.tensor([[1.0, 0.0, 2.0]])
    expected = math.log1p(math.exp(-1)) + (math.log(2) + math.log1p(math.exp(2))) / 2
    assert rating_loss(logits).item() == pytest.approx(expected)
    same = torch.tensor([0.7, -2.0])
    assert transfer_loss(same, same, 0.3).item() == pytest.approx(0.3)
    assert transfer_loss(torch.tensor([9.0]), torch.tensor([-9.0]), 0.3).item() == 0.0
    assert transfer_loss(same[:0], same[:0], 0.3).item() == 0.0
    # z = 2, z~ = 1; f(z, u) = 2 and 6, f(z, u~) = 2 and 2, f(z~, u) = 1 and 3
    found = contrast_loss(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [1.0]]))
    plus = lambda *logits: sum(math.log1p(math.exp(one)) for one in logits) / len(logits)  # noqa: E731
    assert found.item() == pytest.approx(2 * plus(-2, -6) + plus(2, 2) + plus(1, 3))


def test_dropped_edges_are_drawn_once_and_held_out_items_are_no_edges():
    client = tiny_clients().clients[0]
    one, again, other = (silo(client, replace(CONFIG, drop_share=0.5), seed, CPU) for seed in (3, 3, 4))
    assert torch.equal(one.thinned.diagonal_R, again.thinned.diagonal_R)
    assert not torch.equal(one.thinned.diagonal_R, other.thinned.diagonal_R)
    assert one.thinned.gain_RS.values().numel() < one.users.gain_RS.values().numel() == len(one.user_E)
    own = {name: set(one.item_E[one.user_E == place].tolist()) for place, name in enumerate(HISTORIES["films.1"])}
    assert own == {name: set(items[:-2]) for name, items in HISTORIES["films.1"].items()}
    assert one.num_users == 6  # pam and pia are public


def test_what_is_sent_and_how_it_is_averaged():
    clients = tiny_clients()
    method = fedhcdr(clients, CONFIG)
    server, local = method.init()
    uploads, sizes = [], []
    for block in clients.blocks():
        number = int(block.clients[0])
        download = method.broadcast(1, server, block.clients)
        own = {name: tensor[block.clients] for name, tensor in local.items()}
        upload, _, _ = method.client_update(1, download, own, block)
        assert {*upload.tensors} == {"customer", *(f"low.user_filter.{one}" for one in ("weight", "bias", "beta"))}
        customer_U = clients.clients[number].customer_U
        assert upload.sent_rows["customer"][0].nonzero().flatten().tolist() == sorted(customer_U.tolist())
        assert upload.tensors["customer"][0, customer_U].any(1).all()
        uploads.append(upload)
        sizes.append(4 * (4 * 4 + 4 + 1 + 4 * len(customer_U)))
    state, records = run(method, clients, 1)
    for way in ("up", "down"):
        traffic = {n: sum(group[way].values()) for group in records[0]["traffic"] for n in group["clients"]}
        assert traffic == dict(enumerate(sizes))
    customer = {name: number for number, name in enumerate(sorted({u for users in HISTORIES.values() for u in users}))}
    films, songs, _ = (upload.tensors["customer"][0] for upload in uploads)
    weights = [float(upload.weights) for upload in uploads]
    assert weights[0] == 13 + 8  # distinct train pairs of the four users, then of pam and pia
    both = (weights[0] * films[customer["ann"]] + weights[1] * songs[customer["ann"]]) / (weights[0] + weights[1])
    torch.testing.assert_close(state.server["customer"][customer["ann"]], both)
    assert torch.equal(state.server["customer"][customer["cat"]], films[customer["cat"]])  # cat watches films alone


def test_what_other_domains_do_reaches_a_client_only_where_it_is_shared():
    for share, reached in (("all", True), ("filter", True), ("nothing", False)):
        one, two = (trained(2, histories, share=share)[0].local for histories in (HISTORIES, OTHER))
        moved = differing({n: t[0] for n, t in one.items()}, {n: t[0] for n, t in two.items()})
        assert bool(moved) is reached
        assert ("model.high.user" in moved) is (share == "all")  # through the vectors of customers alone
    _, records = trained(1, share="nothing")
    assert not any(group["up"] or group["down"] for group in records[0]["traffic"])


@pytest.mark.parametrize(("weight", "reached"), [(5.0, True), (0.0, False)])
def test_exclusive_vectors_are_drawn_to_what_others_know_of_a_person(weight, reached):
    clients = tiny_clients()
    method = fedhcdr(clients, replace(CONFIG, transfer_weight=weight))
    server, local = method.init()
    block, customer_U = clients.blocks()[0], clients.clients[0].customer_U
    own = {name: tensor[:1] for name, tensor in local.items()}
    known = torch.zeros_like(server["customer"])
    known[customer_U[0]] = 3.0  # of ann alone, bob and others are unknown
    found = []
    for customer in (server["customer"], known):
        download = method.broadcast(1, {**server, "customer": customer}, block.clients)
        found.append(method.client_update(1, download, own, block)[1]["model.high.user"])
    assert torch.equal(*found) is not reached


def test_the_score_of_both_parts():
    draw = torch.Generator().manual_seed(0)
    parts = [(torch.randn(3, 4, generator=draw), torch.randn(5, 4, generator=draw)) for _ in range(2)]
    chosen = torch.tensor([2, 0])
    found = score_parts(parts, chosen)
    torch.testing.assert_close(found, sum(users[chosen] @ items.T for users, items in parts))


@pytest.mark.parametrize(("share", "variant"), [("all", "both"), slow("nothing", "exclusive")])
def test_it_learns_the_taste_of_users(monkeypatch, share, variant):
    """Half of the users take even films, half odd ones; of 31 candidates 11 are of a user's taste."""
    monkeypatch.setitem(ITEMS, "films", 40)
    draws = torch.Generator().manual_seed(0)
    taste = {f"user{n}": (2 * torch.randperm(20, generator=draws)[:10] + n % 2).tolist() for n in range(60)}
    histories = {"films.1": taste, "songs.1": {"user0": [4, 1, 2, 6], "user1": [1, 2, 3, 4, 5]}}
    clients = tiny_clients(0, histories)
    method = fedhcdr(clients, replace(CONFIG, share=share, learning_rate=0.03, batch_size=64, local_epochs=5))
    state, _ = run(method, clients, 4)
    own = {name: tensor[:1] for name, tensor in state.local.items()}
    (place_U,) = method.positions(variant, Download({}), own, clients.blocks()[0], "test")
    assert (place_U < 11).double().mean() > 0.9
