"""GPFedRec: the user graph and what it does to the tables by hand; the regulariser; what travels."""

import pytest
import torch
from toy_federation import NUM_ITEMS, run, toy_federation, toy_method, toy_population

from embedding_fr.blocks import make_block, rank_users
from embedding_fr.methods.fedncf import ncf_logits
from embedding_fr.methods.gpfedrec import (
    GpfedrecConfig,
    cosine_similarities,
    tables_by_regulariser,
    user_graph,
)
from embedding_fr.mixing import collect
from fedecider.federation.method import Download, Upload

TABLES = torch.tensor([[[3.0], [4.0]], [[8.0], [6.0]], [[-4.0], [3.0]]])  # three clients, 2 items, 1 dim
SIMILARITIES = torch.tensor([[1.0, 0.96, 0.0], [0.96, 1.0, -0.28], [0.0, -0.28, 1.0]], dtype=torch.float64)


def cohort_of(table_VID):
    """As it is when these clients have uploaded."""
    upload = Upload(torch.arange(len(table_VID)), torch.ones(len(table_VID)), {"item_table": table_VID})
    return collect({"graph_table": torch.zeros_like(table_VID)}, [upload], "graph_table")


def exact_cosines(table_VID):
    """By the definition, one pair of tables after the other, in float64."""
    flat_VF = table_VID.flatten(1).double()
    return torch.stack([torch.nn.functional.cosine_similarity(one, flat_VF) for one in flat_VF])


def test_similarities_by_hand():
    assert torch.allclose(cosine_similarities(cohort_of(TABLES)), SIMILARITIES, atol=1e-6)
    two = cosine_similarities(cohort_of(TABLES[[0, 2]]))
    assert torch.allclose(two, SIMILARITIES[[0, 2]][:, [0, 2]], atol=1e-6)


@pytest.mark.parametrize("moved", [1.0, 1e-2, 1e-4])
def test_similarities_of_tables_that_have_moved_little_keep_their_digits(moved):
    """1 - cos is about moved^2, 1e-8 in the last case, where float32 has no number between 1 and 1 - 6e-8."""
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(200, 8, generator=generator)
    tables = start + moved * torch.rand(40, 1, 1, generator=generator) * torch.randn(40, 200, 8, generator=generator)
    exact, found = exact_cosines(tables), cosine_similarities(cohort_of(tables))
    apart = ~torch.eye(40, dtype=torch.bool)
    assert torch.allclose(1.0 - found[apart], 1.0 - exact[apart], rtol=2e-4, atol=1e-12)
    assert torch.equal(found.diagonal(), torch.ones(40, dtype=torch.float64))
    assert float(found.max()) == 1.0
    for config in (GpfedrecConfig(), GpfedrecConfig(num_neighbours=6)):
        assert torch.equal(user_graph(found, config), user_graph(exact.fill_diagonal_(1.0), config))
    assert bool((user_graph(found, GpfedrecConfig(num_neighbours=1)).diagonal() == 1.0).all())  # oneself


@pytest.mark.parametrize(
    ("config", "links"),
    [
        ({}, [[0, 1], [0, 1], [2]]),  # mean 4.36 / 9 = 0.484
        ({"threshold": 0.0}, [[0, 1], [0, 1], [2]]),  # 0 is not above 0
        ({"threshold": 2.0}, [[0], [1], [2]]),  # 0.969: only oneself is that similar
        ({"threshold": 2.1}, [[0], [1], [2]]),  # 1.017: nobody is, so everyone is alone
        ({"num_neighbours": 2}, [[0, 1], [0, 1], [0, 2]]),
        ({"num_neighbours": 9}, [[0, 1, 2], [0, 1, 2], [0, 1, 2]]),
        ({"variant": "code"}, [[2], [2], [0, 1]]),  # distances 0.04, 1, 1.28 and their mean 0.516
        ({"variant": "code", "threshold": 2.0}, [[0], [2], [1]]),  # 1.03: client 0 has no one so far away
        ({"variant": "code", "num_neighbours": 1}, [[2], [2], [1]]),
    ],
)
def test_neighbours_by_hand(config, links):
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for client, linked in enumerate(links):
        expected[client, linked] = 1.0 / len(linked)
    assert torch.allclose(user_graph(SIMILARITIES, GpfedrecConfig(**config)), expected)


def test_tables_spread_along_the_graph():
    method = toy_method("gpfedrec", num_neighbours=2)
    server, _ = method.init()
    clients = torch.tensor([5, 0, 3, 6])
    tables = torch.randn(4, NUM_ITEMS, 4, generator=torch.Generator().manual_seed(4)) + 100.0
    graph = user_graph(exact_cosines(tables), GpfedrecConfig(num_neighbours=2))
    assert len(graph.unique(dim=0)) > 1
    expected = torch.einsum("uv,vid->uid", graph, tables.double())
    after = method.server_aggregate(1, server, iter([Upload(clients, torch.ones(4), {"item_table": tables.clone()})]))
    assert torch.allclose(after["graph_table"][clients].double(), expected, rtol=2e-7, atol=0.0)
    assert torch.allclose(after["item_table"].double(), expected.mean(0), rtol=2e-7, atol=0.0)
    assert torch.equal(after["graph_table"][[1, 2, 4]], server["graph_table"][[1, 2, 4]])


def test_rows_without_examples_go_to_the_neighbourhood_in_closed_form():
    """q = 1, r = 3: after steps of share 1/4, 1 + 2 (1 - (3/4)^steps)."""
    download = Download({"item_table": torch.ones(5, 1)}, {"graph_offset": torch.full((3, 5, 1), 2.0)})
    pulled = tables_by_regulariser(download, torch.tensor([0, 1, 2]), 0.25)
    assert pulled[:, 0, 0].tolist() == pytest.approx([1.0, 1.5, 1.875])
    assert (pulled == pulled[:, :1]).all()


def test_the_pull_leads_to_the_own_neighbourhood():
    """Rows that a client does not touch end on r_u where one step lands, and stay on q with graph_weight 0."""
    population, offset = toy_population(), 0.1 * torch.arange(7.0)[:, None, None] - 0.3
    block = make_block(population, [1, 3][::-1])
    for graph_weight, share in ((5.0, 1.0), (0.0, 0.0)):
        method = toy_method("gpfedrec", graph_weight=graph_weight)
        server, local = method.init()
        server["graph_table"] = server["item_table"] + offset.expand(-1, NUM_ITEMS, 4)
        own = {name: tensor[block.clients] for name, tensor in local.items()}
        download = method.broadcast(1, server, block.clients)
        upload, new, _ = method.client_update(1, download, own, block)
        table_CID = upload.tensors["item_table"]
        assert torch.equal(new["personal_table"], table_CID)
        goal_CID = server["item_table"] + share * offset[block.clients]
        there_CI = torch.isclose(table_CID, goal_CID, atol=1e-5).all(2)
        for row, client in enumerate(block.clients.tolist()):
            assert 1 <= int((~there_CI[row]).sum()) <= len(block.data.train_CT[row]) * 3, client
            assert not there_CI[row][int(block.data.train_CT[row, 0])]
            assert int(there_CI[row].sum()) >= 5


def test_with_everyone_as_neighbour_it_is_the_plain_mean():
    method = toy_method("gpfedrec", num_neighbours=7)
    state, _ = run(method, rounds=2)
    uploaded = state.local["personal_table"]
    assert torch.allclose(state.server["item_table"], uploaded.mean(0), atol=1e-5)
    assert torch.allclose(state.server["graph_table"], uploaded.mean(0).expand(7, -1, -1), atol=1e-5)


def test_variants_use_the_own_the_mean_and_the_neighbourhood_table():
    federation, population = toy_federation(), toy_population()
    method = toy_method("gpfedrec", threshold=1.3)
    assert method.variants == ("personal", "global", "graph")
    state, _ = run(method, population)
    block = make_block(population, [6, 2, 0, 5, 4, 3, 1])
    own = {name: tensor[block.clients] for name, tensor in state.local.items()}
    server = {**state.server, "graph_table": state.server["graph_table"].flip(0)}  # far from the mean and the own
    download = method.broadcast(4, server, block.clients)
    tables = {
        "personal": own["personal_table"],
        "global": server["item_table"].expand(7, -1, -1),
        "graph": server["graph_table"][block.clients],
    }
    found = {}
    for variant, table in tables.items():
        score_CI = ncf_logits({**own, "item_table": table}, None)
        found[variant] = torch.cat(method.positions(variant, download, own, block, "valid"))
        expected = torch.cat(rank_users(score_CI, block.data, "valid", federation.protocol))
        assert torch.equal(found[variant], expected), variant
    assert len({tuple(position.tolist()) for position in found.values()}) == 3
