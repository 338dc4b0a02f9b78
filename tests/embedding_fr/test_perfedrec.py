"""PerFedRec: the layers, the clusters' tables and the three models by hand; its degenerate forms; what travels."""

from collections import Counter

import pytest
import torch
from toy_federation import NUM_ITEMS, SEQUENCES, run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.blocks import make_block, rank_users
from embedding_fr.clusters import k_means, nearest
from embedding_fr.examples import round_examples
from embedding_fr.methods.perfedrec import (
    PerfedrecConfig,
    drawn_by_size,
    graph_scores,
    mean_tables,
    mixing,
    paired,
    pairs_without_edge,
)
from embedding_fr.stacked import inner_products
from fedecider.federation.method import Upload
from fedecider.federation.streams import stream


def layered(user, items, num_layers, of_the_first=False):
    """The mean of the layers, by the matrix of the star graph."""
    first = torch.cat([user[None], items])
    adjacency = torch.eye(len(first))
    adjacency[0, :] = adjacency[:, 0] = 1.0
    adjacency /= adjacency.sum(1, keepdim=True)
    layers = [first]
    for _ in range(num_layers):
        layers.append(adjacency @ (first if of_the_first else layers[-1]))
    return torch.stack(layers).mean(0)


@pytest.mark.parametrize(
    ("variant", "user", "item", "itself"),
    [
        (
            "paper",
            [(1 + 1 / 3 + 4 / 9) / 3, (2 / 3 + 5 / 9) / 3],
            [(1 / 2 + 5 / 12) / 3, (1 + 1 / 2 + 7 / 12) / 3],
            7 / 12,
        ),
        ("code", [(1 + 2 / 3) / 3, (4 / 3) / 3], [1 / 3, 2 / 3], 2 / 3),
    ],
)
def test_two_layers_of_a_user_with_two_items_by_hand(variant, user, item, itself):
    """Of p and m: the user (1, 0), (1/3, 2/3), (4/9, 5/9), the items (0, 1), (1/2, 1/2), (5/12, 7/12)."""
    by = mixing(torch.tensor([2.0]), 2, variant)
    assert [float(by.user_A), float(by.user_mean_A)] == pytest.approx(user)
    assert [float(by.item_A), float(by.item_mean_A)] == pytest.approx(item)
    assert float(by.itself_A) == pytest.approx(itself)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["paper", "code"])
@pytest.mark.parametrize("num_layers", [0, 1, 2, 3])
def test_the_closed_form_is_the_product_with_the_matrix_of_the_graph(num_layers, variant):
    draw = stream(0, "graph")
    user, table = torch.randn(2, 3, generator=draw), torch.randn(2, 6, 3, generator=draw)
    neighbour = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]])
    config = PerfedrecConfig(num_layers=num_layers, variant=variant)
    found = graph_scores(user, table, neighbour, config)
    for client in range(2):
        mine = neighbour[client] > 0
        nodes = layered(user[client], table[client, mine], num_layers, variant == "code")
        items = table[client].clone()
        items[mine] = nodes[1:]
        torch.testing.assert_close(found[client], items @ nodes[0])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["paper", "code"])
def test_a_pair_is_scored_on_the_graph_without_its_own_item(variant):
    draw = stream(0, "pairs")
    user, table = torch.randn(2, 3, generator=draw), torch.randn(2, 6, 3, generator=draw)
    neighbour = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]])
    positive, negative = torch.tensor([[0, 3], [4, 4]]), torch.tensor([[2, 5], [0, 1]])
    found = pairs_without_edge(user, table, neighbour, positive, negative, PerfedrecConfig(variant=variant))
    for client in range(2):
        for place in range(2):
            one, other = positive[client, place], negative[client, place]
            rest = (neighbour[client] > 0) & (torch.arange(6) != one)
            nodes = layered(user[client], table[client, rest], 3, variant == "code")
            expected = nodes[0] @ (table[client, one] - table[client, other])
            torch.testing.assert_close(found[client, place], expected)


def test_three_layers_of_the_public_code_are_the_weights_of_one():
    """Its loop multiplies the learnt embeddings each time: 1/4 of them and 3/4 of one step, whatever is 1 and 3."""
    degree = torch.tensor([1.0, 4.0])
    one, three, real = (mixing(degree, layers, variant) for layers, variant in ((1, "code"), (3, "code"), (3, "paper")))
    for of_one, of_three in zip(one[1:3], three[1:3], strict=True):  # what comes from the other side
        torch.testing.assert_close(of_three, 1.5 * of_one)
    assert [float(by.itself_A[1]) for by in (one, three, real)] == [
        0.75,
        0.25 + 0.75 * 0.5,
        (1.0 + 0.5 + 0.25 + 0.125) / 4,
    ]
    assert not torch.allclose(three.user_A, real.user_A)
    torch.testing.assert_close(mixing(degree, 1, "paper").user_A, one.user_A)


def test_every_train_item_is_paired_with_its_negatives():
    federation, training = toy_federation(), toy_training("perfedrec", num_negatives=2)
    block = make_block(toy_population(), [6, 2, 0, 5, 4, 3, 1])
    drawn = round_examples(federation, training, block, 1)
    (pairs, row, _), sides = paired(drawn, 2)
    for client, number in enumerate(block.clients.tolist()):
        mine = SEQUENCES[number][:-2]
        count = int(pairs.count_C[client])
        assert count == 2 * len(mine) == int(pairs.num_positive_C[client])
        positive, negative = (row[client, sides[side][client, :count]].tolist() for side in ("positive", "negative"))
        assert positive == mine * 2
        assert negative == drawn.examples.item_CB[client, len(mine) : 3 * len(mine)].tolist()
        assert sorted(row[client, sides["neighbour"][client] > 0].tolist()) == sorted(mine)


def sent(clients, values, rows=None):
    clients = torch.tensor(clients)
    rows = {} if rows is None else {"item_table": torch.tensor(rows)}
    return Upload(clients, torch.ones(len(clients)), {"item_table": torch.tensor(values)}, rows=rows)


@pytest.mark.parametrize("whole", [False, True])
def test_two_clusters_by_hand(whole):
    """Users 0 and 1 | 2; user 3 is absent. They started from tables of zeros and of tens."""
    start = torch.tensor([[[0.0], [0.0]], [[10.0], [10.0]]])
    if whole:
        held = [sent([0, 2], [[[2.0], [0.0]], [[10.0], [16.0]]]), sent([1], [[[10.0], [14.0]]])]
    else:
        held = [sent([0, 2], [[[2.0]], [[16.0]]], [[0], [1]]), sent([1], [[[14.0], [99.0]]], [[1, -1]])]
    found = mean_tables(start, torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 1]), held)
    assert found["cluster_table"].tolist() == [[[6.0], [7.0]], [[10.0], [16.0]]]
    torch.testing.assert_close(found["global_table"], torch.tensor([[22.0 / 3.0], [10.0]]))
    nobody = mean_tables(start, torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 0, 1]), held)
    assert torch.equal(nobody["cluster_table"][1], nobody["global_table"])
    torch.testing.assert_close(nobody["cluster_table"][0], nobody["global_table"])


def two_kinds(variant, cluster):
    """The server after a round in which users 0, 1 and 2 came to lie at one place, all others at another one."""
    method = toy_method("perfedrec", num_clusters=2, variant=variant)
    server, _ = method.init()
    server["cluster"] = torch.tensor(cluster)
    users = torch.tensor([-5.0, -5.0, -5.0, 5.0, 5.0, 5.0, 5.0])[:, None].expand(7, 4).contiguous()
    tables = torch.arange(7.0)[:, None, None].expand(7, NUM_ITEMS, 4).contiguous()
    upload = Upload(torch.arange(7), torch.ones(7), {"item_table": tables, "user": users})
    after = method.server_aggregate(1, server, iter([upload]))
    return method.broadcast(2, after, torch.arange(7)).per_client["item_table"][:, 0, 0].tolist(), after


def test_everybody_goes_on_with_the_table_of_its_own_cluster():
    for cluster in ([0] * 7, [1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]):
        table, after = two_kinds("paper", cluster)
        assert table == [1.0] * 3 + [4.5] * 4
        centroids = k_means(after["user"], 2, stream(0, "clusters", 1)).centroid_KD
        assert torch.equal(after["cluster"], nearest(after["user"], centroids)[0])


def test_in_the_public_code_numbers_are_given_anew_after_the_tables_are_made():
    """The same members as before: only whether their cluster has the same number is chance."""
    number = int(two_kinds("code", [0] * 7)[1]["cluster"][0])
    same, other = ([number] * 3 + [1 - number] * 4, [1 - number] * 3 + [number] * 4)
    assert two_kinds("code", same)[0] == [1.0] * 3 + [4.5] * 4
    assert two_kinds("code", other)[0] == [4.5] * 3 + [1.0] * 4  # the other kind's table
    assert two_kinds("code", [0] * 7)[0] == [3.0] * 7  # round 1: no clusters yet, so everybody has the global one


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("scores", ["ego", "graph"])
def test_the_personal_score_is_the_mean_of_three_models_or_of_two(scores):
    federation, population = toy_federation(), toy_population()
    method = toy_method("perfedrec", num_clusters=3, scores=scores)
    assert method.variants == ("personal", "cluster", "global")
    state, records = run(method, population, rounds=2, participation=0.5)
    present = sorted(log["client"] for log in records[-1]["clients"])
    assert state.server["heard"].nonzero()[:, 0].tolist() == present
    assert 0 < len(present) < 7
    block = make_block(population, [6, 2, 0, 5, 4, 3, 1])
    own = {name: tensor[block.clients] for name, tensor in state.local.items()}
    download = method.broadcast(3, state.server, block.clients)
    models = {
        "global": state.server["global_table"].expand(7, -1, -1),
        "cluster": state.server["cluster_table"][state.server["cluster"][block.clients]],
        "own": own["personal_table"],
    }
    score = {}
    for name, table in models.items():
        user = state.server["user"][block.clients]
        if scores == "graph":
            mine = [SEQUENCES[client][:-2] for client in block.clients.tolist()]
            user = torch.stack([layered(p, q[items], 3)[0] for p, q, items in zip(user, table, mine, strict=True)])
        score[name] = inner_products(table, user)
    heard = state.server["heard"][block.clients][:, None]
    both = score["global"] + score["cluster"]
    score["personal"] = torch.where(heard, (both + score["own"]) / 3.0, both / 2.0)
    for variant in method.variants:
        found = torch.cat(method.positions(variant, download, own, block, "valid"))
        assert torch.equal(found, torch.cat(rank_users(score[variant], block.data, "valid", federation.protocol)))
    assert not torch.equal(score["personal"], both / 2.0)


@pytest.mark.parametrize("target_edge", ["out", "in"])
def test_without_layers_it_is_matrix_factorisation_with_bpr(target_edge):
    """One user, one step of Adam on a batch that holds all pairs: the rate, against the sign of the gradient."""
    federation, population = toy_federation(num_clients=1), toy_population(sequences=[SEQUENCES[2]])
    training = toy_training("perfedrec", batch_size=1000, local_epochs=1, num_negatives=1, learning_rate=0.01)
    method = toy_method("perfedrec", federation, training, num_layers=0, target_edge=target_edge)
    start, _ = method.init()
    state, _ = run(method, population, rounds=1)
    examples, _, _ = round_examples(federation, training, make_block(population, [0]), 1)
    positive, negative = examples.item_CB[0].view(2, -1)
    user, table = (start[name][..., :].clone().requires_grad_() for name in ("user", "global_table"))
    loss = torch.nn.functional.softplus(-(table[positive] - table[negative]) @ user[0]).mean()
    expected = torch.autograd.grad(loss, [user, table])
    found = (state.server["user"] - start["user"], state.server["global_table"] - start["global_table"])
    for step, gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(step, -0.01 * gradient.sign(), rtol=1e-2, atol=1e-5)


def test_half_of_a_cohort_is_drawn_by_the_sizes_of_clusters():
    """Nine users of one cluster, one alone, two to draw: the lone one comes first in 1/10, else second in 1/82."""
    cluster = torch.tensor([0] * 9 + [1])
    times = Counter()
    for seed in range(3000):
        drawn = drawn_by_size(cluster, 2, stream(seed, "cohort", 1))
        assert len(drawn) == 2
        times.update(drawn)
    lone = 3000 * (0.1 + 0.9 * 1.0 / (8 * 9 + 1))
    assert abs(times[9] - lone) < 5 * lone**0.5, times
    for client in range(9):
        assert abs(times[client] - (6000 - lone) / 9) < 5 * (6000 / 9) ** 0.5, times
