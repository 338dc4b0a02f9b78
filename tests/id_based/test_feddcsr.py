"""FedDCSR: its terms by hand, whose representations are averaged, what is sent to whom, and what reaches training."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from fedecider.baselines.sasrec import pack
from fedecider.id_based import feddcsr as module
from fedecider.id_based.feddcsr import (
    FeddcsrConfig,
    Gaussian,
    Histories,
    References,
    backward_batch,
    contrast,
    divergence,
    feddcsr,
    pull,
    shuffled,
    successors,
)
from fedecider.testing.bench import differing, updated
from fedecider.testing.id_contract import HISTORIES, ITEMS, run, tiny_clients

pytestmark = pytest.mark.whole

CONFIG = FeddcsrConfig(embedding_size=8, batch_size=3, max_length=5, local_epochs=1)
STILL = replace(CONFIG, learning_rate=1e-30)
"""Training changes no parameter."""
"""Numbers of a stack: query-key-value, mixed, feed-forward, two norms of the block, the last norm."""
ANN, BOB, EVE = 0, 1, 4
"""Persons, by their names' order."""


def uploads_of(clients, config, round=1, server=None):
    method = feddcsr(clients, config)
    start, local = method.init()
    server = start if server is None else server
    return method, server, [updated(method, round, block, server, local)[1] for block in clients.blocks()]


def users_after(histories, config):
    method, server, uploads = uploads_of(tiny_clients(histories=histories), config)
    return method.server_aggregate(1, server, iter(uploads))


def model_of(num_items=12, config=CONFIG):
    torch.manual_seed(5)
    model = module.Dcsr(num_items, config.shape)
    for parameter in model.parameters():  # far from the small start, so that every part matters
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def test_divergence_by_hand():
    assert divergence(Gaussian(torch.ones(2, 3), torch.zeros(2, 3))).tolist() == [1.5, 1.5]
    assert divergence(Gaussian(torch.zeros(1, 2), torch.full((1, 2), math.log(4.0)))).item() == pytest.approx(
        3.0 - math.log(4.0)
    )


def test_pull_by_hand():
    yes, no = torch.tensor([True]), torch.tensor([False])
    near = torch.tensor([0.7])
    assert pull(near, near, yes).item() == pytest.approx(0.3)
    assert pull(torch.tensor([20.0]), torch.tensor([-20.0]), yes).item() == 0.0
    assert pull(torch.tensor([-20.0]), torch.tensor([20.0]), yes).item() == pytest.approx(1.3)
    assert pull(near, near, no).item() == 0.0
    both = pull(torch.tensor([0.0, 9.0]), torch.tensor([0.0, 9.0]), torch.tensor([True, False]))
    assert both.item() == pytest.approx(0.3)  # who has no global representation does not thin out the mean


def test_contrast_by_hand():
    variants = torch.tensor([[2.0, 0.0], [0.0, 5.0]])
    assert contrast(variants, variants).item() == pytest.approx(math.log(math.e + 1.0) - 1.0)
    assert contrast(variants[:1], -variants[:1]).item() == 0.0  # there is nobody to be told from


def test_successors_by_hand():
    graph = successors([[0, 1, 2], [0, 1], [0, 2], [3]], 4).to_dense()
    expected = torch.tensor([[0, 2 / 3, 1 / 3, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(graph, expected)
    assert not successors([[1]], 2).to_dense().any()


def test_the_input_is_the_graph_layer_with_the_items_themselves():
    model, graph = model_of(), successors([[3, 1, 4], [1, 4]], 12)
    one, (item_BL, length_B) = model.shared_input, pack([[3, 1], [4]], 5)
    layer = (one.item_ID + graph.to_dense() @ one.item_ID + one.bias_D) / 2
    table = (one.item_ID + layer) * math.sqrt(8)
    rows = torch.stack([table[3] + one.position_LD[1], table[1] + one.position_LD[0], table[4] + one.position_LD[0]])
    found = one(graph, item_BL, length_B, 0.0)
    torch.testing.assert_close(found[[0, 0, 1], [0, 1, 0]], one.norm(rows))


@pytest.mark.parametrize("sampled", [True, False])
def test_the_loss_and_its_gradients_are_those_of_its_terms(sampled):
    config = replace(CONFIG, dropout=0.0, sampled=sampled, pull_weight=0.7, contrast_weight=0.3)
    parts = [[3, 1, 4, 0, 5], [2, 7], [6, 0, 11]]
    data = Histories(*pack(parts, 6), torch.tensor([2, -1, 0]), successors(parts, 12))
    references = References(torch.randn(3, 8), torch.tensor([True, False, True]))
    row_B, model = torch.tensor([2, 1, 0]), model_of()
    has_B, place_B = ([True, False, True], [0, 0, 2])  # of the aligned customers 0, nobody and 2; place 1 is not known
    torch.manual_seed(7)
    found = backward_batch(model, data, row_B, references, config, 0.05)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    torch.manual_seed(7)
    inputs = [parts[row][:-1] for row in (2, 1, 0)]
    item_BL, length_B = pack(inputs, 5)
    kinds = [getattr(model, kind)(data.graph_II, item_BL, length_B) for kind in ("shared", "exclusive")]
    shared, exclusive = (kind.drawn(sampled) for kind in kinds)
    mixed = model.exclusive(data.graph_II, shuffled(item_BL, length_B), length_B)
    last = (torch.arange(3), length_B - 1)
    variants = exclusive[last], mixed.at(last).drawn(sampled)
    again = kinds[1].at(last).drawn(sampled)
    events = [(row, place) for row, items in enumerate(inputs) for place in range(len(items))]
    total = torch.zeros(())
    for row, place in events:
        target = torch.tensor(parts[(2, 1, 0)[row]][place + 1])
        for state in (shared[row, place] + exclusive[row, place], exclusive[row, place]):
            total = total + functional.cross_entropy(model.output(state), target) / len(events)
        total = total + 0.05 * sum(divergence(kind.at((row, place))) for kind in kinds) / len(events)
    for row in (0, 2):
        assert has_B[row]
        reference = references.vector_RD[place_B[row]]
        near, far = (model.discriminator(torch.cat([z, reference])) for z in (shared[last][row], again[row]))
        total = total + 0.7 * (0.3 - near.sigmoid() + far.sigmoid()).relu()[0] / 2
    for row in range(3):
        cosines = torch.stack([functional.cosine_similarity(variants[0][row], one, dim=0) for one in variants[1]])
        total = total - 0.3 * cosines.log_softmax(0)[row] / 3
    total.backward()
    torch.testing.assert_close(found, total.detach())
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()], rtol=1e-3, atol=1e-5)


def test_an_empty_history_and_items_alike_are_not_first():
    model = model_of()
    graph, (item_BL, length_B) = successors([[1, 2]], 12), pack([[], [1, 2]], 5)
    assert not model.catalogue(graph, item_BL, length_B)[0].any()
    clients = tiny_clients()
    method = feddcsr(clients, CONFIG)
    server, local = method.init()
    for name in ("own.output.weight", "own.output.bias"):
        local[name].zero_()
    block = clients.blocks()[0]
    own = {name: tensor[block.clients] for name, tensor in local.items()}
    (place_U,) = method.positions("global", method.broadcast(1, server, block.clients), own, block, "test")
    seen = [len(set(items[:-1])) for items in HISTORIES["films.1"].values()]
    assert place_U.tolist() == [(12 - number - 1) / 2 for number in seen]  # all tie: the middle of the candidates


def test_a_person_has_the_mean_of_the_domains_that_have_it():
    clients = tiny_clients()
    method, server, uploads = uploads_of(clients, CONFIG)
    after = method.server_aggregate(1, server, iter(uploads))
    assert [one.weights.tolist() for one in uploads] == [[5.0], [5.0], [5.0]]  # public users are counted
    films, songs, other = (one.tensors["user_shared"][0] for one in uploads)
    marks = [one.sent_rows["user_shared"][0].nonzero()[:, 0].tolist() for one in uploads]
    assert marks == [[0, 1, 2], [0, 1, 4, 5], [4, 6, 7]]  # dan has one train event: nothing to train on
    torch.testing.assert_close(after["user_shared"][ANN], (films[ANN] + songs[ANN]) / 2)
    torch.testing.assert_close(after["user_shared"][EVE], (songs[EVE] + other[EVE]) / 2)
    assert torch.equal(after["user_shared"][2], films[2])
    assert after["known"].tolist() == [True, True, True, False, True, True, True, True]
    assert not after["user_shared"][3].any()


def test_weights_are_the_training_sequences():
    histories = {**HISTORIES, "films.1": {**HISTORIES["films.1"], "ivy": [0, 1, 2, 3], "jim": [5, 4, 3, 2]}}
    clients = tiny_clients(histories=histories)
    method, server, uploads = uploads_of(clients, CONFIG)
    after = method.server_aggregate(1, server, iter(uploads))
    films, songs, _ = (one.tensors["user_shared"][0] for one in uploads)
    torch.testing.assert_close(after["user_shared"][BOB], (7 * films[BOB] + 5 * songs[BOB]) / 12)
    name = "shared_encoder.mean.norm.bias"
    expected = sum(weight * one.tensors[name][0] for weight, one in zip((7, 5, 5), uploads, strict=True)) / 17
    torch.testing.assert_close(after[name], expected)


def test_the_order_of_users_does_not_matter():
    """To the public code it does: it adds row b of the last batch of every domain, whoever that is."""
    reversed_order = {**HISTORIES, "songs.1": dict(reversed(HISTORIES["songs.1"].items()))}
    one, other = (users_after(histories, STILL) for histories in (HISTORIES, reversed_order))
    assert torch.equal(one["known"], other["known"])
    torch.testing.assert_close(one["user_shared"], other["user_shared"], atol=1e-5, rtol=0)


def test_a_client_is_drawn_to_the_global_vectors_of_its_own_users_alone():
    clients = tiny_clients()
    method, server, uploads = uploads_of(clients, CONFIG)
    server = method.server_aggregate(1, server, iter(uploads))
    _, local = method.init()
    block = clients.blocks()[0]

    def trained(customer):
        moved = {**server, "user_shared": server["user_shared"].clone()}
        if customer is not None:
            moved["user_shared"][customer] += 3.0
        return updated(method, 2, block, moved, local)[2]

    as_it_is = trained(None)
    assert differing(as_it_is, trained(ANN))
    assert not differing(as_it_is, trained(EVE))  # of other domains


def test_what_is_not_shared_does_not_reach_others():
    other = {**HISTORIES, "songs.1": {user: items[::-1] for user, items in HISTORIES["songs.1"].items()}}
    for share, reached in (("all", True), ("nothing", False)):
        found = []
        for histories in (HISTORIES, other):
            clients = tiny_clients(histories=histories)
            state, _ = run(feddcsr(clients, replace(CONFIG, share=share)), clients, 2)
            found.append({name: tensor[[0, 2]] for name, tensor in state.local.items()})
        assert bool(differing(*found)) is reached, share


def test_only_the_shared_encoder_of_a_model_travels():
    clients = tiny_clients()
    state, _ = run(feddcsr(clients, CONFIG), clients, 2)
    names = {name for name in state.server if name not in ("user_shared", "known")}
    assert names == {name.removeprefix("own.") for name in state.local if name.startswith("own.shared_encoder.")}
    exclusive = state.local["own.exclusive_encoder.mean.norm.bias"]
    assert not torch.equal(exclusive[0], exclusive[1])


def test_the_weight_of_the_divergence_grows_with_the_steps_of_all_rounds():
    clients = tiny_clients()
    capped, free = (replace(CONFIG, batch_size=9, kl_cap=cap) for cap in (0.0, 1.0))
    states = [[run(feddcsr(clients, config), clients, rounds)[0] for config in (capped, free)] for rounds in (1, 2)]
    assert not differing(*(state.local for state in states[0]))  # one step, with weight 0
    assert differing(*(state.local for state in states[1]))
    assert states[1][0].local["steps"].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.slow
def test_it_learns_what_follows_what(monkeypatch):
    """Users count up; half of them by two. The last event alone does not tell the next one."""
    monkeypatch.setitem(ITEMS, "films", 20)
    counting = {f"user{n}": [(7 * n + (1 + n % 2) * event) % 20 for event in range(9)] for n in range(40)}
    histories = {"films.1": counting, "songs.1": HISTORIES["songs.1"]}
    clients = tiny_clients(histories=histories)
    config = replace(CONFIG, embedding_size=16, learning_rate=0.01, batch_size=20, local_epochs=10, max_length=8)
    method = feddcsr(clients, config)
    state, _ = run(method, clients, 4)
    own = {name: tensor[:1] for name, tensor in state.local.items()}
    block = clients.blocks()[0]
    download = method.broadcast(6, state.server, block.clients)
    (place_U,) = method.positions("global", download, own, block, "test")
    assert (place_U == 0).double().mean() > 0.9
