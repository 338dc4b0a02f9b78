"""FedEM's parts: elastic merging by hand, gradients, and the server's weights, distances and mixes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import nearest_on_simplex
from toy_federation import run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr import mixing
from embedding_fr.examples import ExampleBatch
from embedding_fr.local_training import Objective, dot_logits, plain_gradients
from embedding_fr.merging import (
    ADAPTER,
    LAST,
    Merging,
    Scorer,
    close_merge,
    merge_epochs,
    merged_logits,
    merged_table,
    open_merge,
    start_merging,
)
from embedding_fr.similarity import code_weights, first_components, project_on_simplex, similarity_weights
from fedecider.federation.method import Upload

# Two clients, two items, one dim, one hidden layer of two: parameters W1 (2 x 2) row by row, b1, W2 (2 x 1), b2.
ADAPTERS = torch.tensor(
    [[1.0, -1.0, 0.5, 2.0, 0.1, -0.2, 0.7, -1.1, 0.3], [0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 1.0, 1.0, -1.0]]
)


LAST_TABLES = torch.tensor([[[-1.0], [3.0]], [[0.5], [0.0]]])


RECEIVED = torch.tensor([[[1.0], [2.0]], [[1.5], [-2.0]]])


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


def test_adapter_and_merge_by_hand():
    own = {LAST: LAST_TABLES, ADAPTER: ADAPTERS}
    table, rho = merged_table(Merging(adapter_layers="2"), own, RECEIVED)
    # client 0, item 0: features (2, -1), hidden (2 - .5 + .1, -2 - 2 - .2 < 0) = (1.6, 0), out 1.12 + .3
    # client 0, item 1: features (-1, 3), hidden (-1 + 1.5 + .1, 1 + 6 - .2) = (.6, 6.8), out .42 - 7.48 + .3
    # client 1, item 0: features (1, .5), hidden (1, 1), out 1; item 1: features (-2, 0), hidden (0, 0), out -1
    weights = [[sigmoid(1.42), sigmoid(-6.76)], [sigmoid(1.0), sigmoid(-1.0)]]
    assert rho.tolist() == pytest.approx([sum(pair) / 2 for pair in weights])
    expected = [-1 + weights[0][0] * 2, 3 - weights[0][1], 0.5 + weights[1][0], -2 * weights[1][1]]
    assert table.flatten().tolist() == pytest.approx(expected)


def block(scheme="EM", layers="3"):
    """Three clients of which two are active, four rows, unequal batches, and a merge whose table has been trained."""
    torch.manual_seed(3)
    merging = Merging(scheme, 0.4, layers)
    own = {LAST: torch.randn(3, 9, 2), "user": torch.randn(3, 2)}
    if merging.learns:
        own[ADAPTER] = start_merging(merging, torch.zeros(9, 2), toy_federation())[ADAPTER][:3]
    received, row = torch.randn(3, 9, 2), torch.tensor([[1, 4, 5, 8], [0, 2, 3, -1], [2, 6, -1, -1]])
    rows = torch.stack([table[one.clamp(min=0)] for table, one in zip(received, row, strict=True)])
    merge, start = open_merge(merging, toy_training("fedem"), own, received, rows, row)
    params = {"user": own["user"].clone(), "item_table": start + 0.1 * torch.randn(3, 4, 2)}
    weight = torch.tensor([[0.25] * 4, [0.5, 0.5, 0.0, 0.0]])
    item = torch.tensor([[0, 3, 0, 2], [1, 2, 0, 0]])
    batch = ExampleBatch(2, item, torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]]), weight)
    return merging, own, received, row, merge, params, batch


@pytest.mark.parametrize("scheme", ["EM", "DM"])
@pytest.mark.parametrize("layers", ["", "5,3"])
def test_adapters_have_the_same_gradients_through_products_and_through_rows(scheme, layers):
    merging, _, _, _, merge, params, batch = block(scheme, layers)
    kept = params["item_table"] - merge.step_CRD
    seen = {**params, **merge.adapter, "feature": merge.feature, "kept": kept, "difference": merge.difference_CRD}
    through_rows = Scorer(lambda params, item: dot_logits(params, item))  # any other logits than `dot_logits` itself
    plain, logits = plain_gradients(Objective(merged_logits(merging, through_rows)), seen, [ADAPTER], batch)
    seen["kept_score"] = torch.einsum("crd,cd->cr", kept, params["user"])
    seen["effect"] = torch.einsum("crd,cd->cr", merge.difference_CRD, params["user"])
    objective = Objective(merged_logits(merging, Scorer(dot_logits)))
    closed, same = plain_gradients(objective, seen, [ADAPTER], batch)
    assert torch.allclose(same, logits, atol=1e-6)
    assert plain[ADAPTER].shape == closed[ADAPTER].shape
    assert float(plain[ADAPTER].abs().max()) > 1e-3
    assert torch.allclose(plain[ADAPTER], closed[ADAPTER], atol=1e-7)


@pytest.mark.parametrize("scheme", ["EM", "DM"])
def test_a_pass_moves_adapters_only_and_the_table_keeps_what_local_steps_added(scheme):
    merging, own, received, row, merge, params, batch = block(scheme)
    before = {name: tensor.clone() for name, tensor in {**params, **merge.adapter}.items()}
    trained = params["item_table"] - own[LAST][torch.arange(3)[:, None], row.clamp(min=0)] - merge.step_CRD
    after = merge_epochs(merge, Scorer(dot_logits), params, [batch])
    assert torch.equal(params["user"], before["user"])
    assert not torch.equal(after.adapter[ADAPTER][:2], before[ADAPTER][:2])
    assert torch.equal(after.adapter[ADAPTER][2], before[ADAPTER][2])  # not active
    whole, _ = merged_table(merging, {LAST: own[LAST], **after.adapter}, received)
    merged = whole[torch.arange(3)[:, None], row.clamp(min=0)]
    assert torch.allclose(params["item_table"], merged + trained, atol=1e-6)


def test_rows_that_no_example_touches_are_merged_too():
    merging, own, received, row, merge, params, batch = block()
    merge = merge_epochs(merge, Scorer(dot_logits), params, [batch])
    table, kept, rho = close_merge(merge, row, params["item_table"])
    merged, expected_rho = merged_table(merging, {LAST: own[LAST], **merge.adapter}, received)
    assert torch.equal(rho, expected_rho)
    assert torch.equal(table[2, [2, 6]], params["item_table"][2, :2])
    untouched = [0, 1, 3, 4, 5, 7, 8]
    assert torch.equal(table[2, untouched], merged[2, untouched])
    assert kept[LAST] is table
    assert set(kept) == {LAST, ADAPTER}


def test_a_fixed_weight_is_in_the_table_from_the_start_and_passes_change_nothing():
    _, own, received, row, merge, params, batch = block("SM")
    start = params["item_table"].clone()
    assert merge_epochs(merge, Scorer(dot_logits), params, [batch]) is merge
    assert torch.equal(params["item_table"], start)
    place = torch.arange(3)[:, None], row.clamp(min=0)
    assert torch.allclose(merge.step_CRD, 0.4 * (received - own[LAST])[place])


BASES = ["fedmf", "fedncf", "pfedrec", "gpfedrec", "fedrap"]


@pytest.mark.parametrize("name", BASES)
def test_taking_the_received_table_is_the_method_without_the_plug_in(name):
    plain, _ = run(toy_method(name, training=toy_training(name)))
    wrapped, _ = run(toy_method(f"{name}_em", training=toy_training(name), scheme="SM", rho=1.0))
    for key, tensor in plain.server.items():
        assert torch.allclose(wrapped.server[key], tensor, atol=2e-6), key
    unread = toy_method(name).unread
    assert set(wrapped.local) == set(plain.local) - set(unread) | {LAST}, "one table of its own for each client"
    for key in plain.local:
        held = wrapped.local[LAST if key in unread else key]
        assert torch.allclose(held, plain.local[key], atol=2e-6), key


NOT_ALONE = {"fedncf", "gpfedrec"}
"""The received network, the regulariser to the neighbourhood: what comes from others is not the merged table alone."""


@pytest.mark.parametrize("name", [name for name in BASES if name not in NOT_ALONE])
def test_keeping_the_own_table_ignores_what_is_received(name):
    """rho = 0: a client's table does not change when another client's data does."""
    sequences = [[3, 1, 4, 0, 5, 9, 2], [2, 7, 8], [6, 0, 13, 11, 3]]
    others = [sequences[0], [2, 7, 8], [1, 5, 10, 12, 3]]
    tables = {}
    for rho in (0.0, 0.5):
        method = toy_method(f"{name}_em", toy_federation(num_clients=3), scheme="SM", rho=rho)
        tables[rho] = [run(method, toy_population(sequences=s))[0].local[LAST][0] for s in (sequences, others)]
    assert not torch.equal(*tables[0.5])
    assert torch.equal(*tables[0.0])


SHARE = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


SQUARED = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 9.0], [4.0, 9.0, 0.0]], dtype=torch.float64)


def test_weights_of_three_clients_by_hand():
    # alpha 2: rows p_v + 2 / (1 + d^2), over 3, over their sums
    weights = similarity_weights(SHARE, SQUARED, 2.0)
    rows = [[2.5, 1.3, 0.6], [1.5, 2.3, 0.4], [0.9, 0.5, 2.2]]
    expected = [[value / sum(row) for value in row] for row in rows]
    assert weights.tolist() == [pytest.approx(row) for row in expected]
    assert torch.allclose(similarity_weights(SHARE, SQUARED, 0.0), SHARE.expand(3, 3))


def test_before_the_division_the_weights_minimise_equation_13():
    alpha, sigma = 0.9, 1.0 / (1.0 + SQUARED)
    weight = ((SHARE + alpha * sigma) / (1.0 + alpha)).requires_grad_()
    loss = ((weight - SHARE) ** 2 + alpha * (weight - sigma) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert float(gradient.abs().max()) < 1e-12
    divided = weight / weight.sum(1, keepdim=True)
    assert torch.allclose(similarity_weights(SHARE, SQUARED, alpha), divided)


def test_code_weights_by_hand():
    # distances 0, 1, 2 -> s 1, 1/2, 1/3; 0.1 squared is 0.01 -> s 1 / 1.1 = 0.909 -> 1
    squared = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 0.01], [4.0, 0.01, 0.0]], dtype=torch.float64)
    # alpha 0.6, row 0: .5 + .6, .3 + .3, .2 + .2 = 1.1, .6, .4: t = .35 (1.1 - t + .6 - t + .4 - t = 1 -> t = .3667)
    # row 1: .5 + .3, .3 + .6, .2 + .6 = .8, .9, .8: t = .5
    weights = code_weights(SHARE, squared, 0.6)
    t = (1.1 + 0.6 + 0.4 - 1.0) / 3
    assert weights[0].tolist() == pytest.approx([1.1 - t, 0.6 - t, 0.4 - t])
    assert weights[1].tolist() == pytest.approx([0.3, 0.4, 0.3])
    # alpha 3, row 0: 3.5, 1.8, 1.2: all weight goes to the first
    assert code_weights(SHARE, squared, 3.0)[0].tolist() == pytest.approx([1.0, 0.0, 0.0])


def test_projection_by_hand():
    values = torch.tensor([[0.5, 0.3, 0.9], [-1.0, 2.0, 1.5], [0.2, 0.3, 0.5]], dtype=torch.float64)
    expected = [[0.5 - 0.7 / 3, 0.3 - 0.7 / 3, 0.9 - 0.7 / 3], [0.0, 0.75, 0.25], [0.2, 0.3, 0.5]]
    assert project_on_simplex(values).tolist() == [pytest.approx(row) for row in expected]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_projection_is_the_one_found_by_bisection(values):
    projected = project_on_simplex(torch.tensor([values], dtype=torch.float64))[0]
    assert projected.tolist() == pytest.approx(nearest_on_simplex(values), abs=1e-9)
    assert float(projected.sum()) == pytest.approx(1.0)


def test_projection_of_large_values_by_hand():
    values = torch.tensor([[1e16, 1.0, 0.0], [3e300, 3e300, -3e300], [-1e17, -1e17, -2e17]], dtype=torch.float64)
    assert project_on_simplex(values).tolist() == [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]
    generator = torch.Generator().manual_seed(9)
    far = torch.randn(20, 30, generator=generator, dtype=torch.float64) + 2.0**40
    assert torch.allclose(project_on_simplex(far), project_on_simplex(far - 2.0**40), rtol=0.0, atol=1e-15)


def test_first_components_by_hand():
    # items (0, 0), (2, 2), (4, 4) along the diagonal: axis (1, 1) / sqrt(2), coordinates -2 sqrt(2), 0, 2 sqrt(2)
    diagonal = torch.tensor([[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]])
    # mostly against the first dim: the axis is (0.98.., -0.16..) or its opposite, whose largest entry is negative
    across = torch.tensor([[3.0, 0.0], [-3.0, 1.0], [0.0, 0.0]])
    lines = first_components(torch.stack([diagonal, across, -across]))
    assert lines[0].tolist() == pytest.approx([-(8**0.5), 0.0, 8**0.5], abs=1e-6)
    assert lines[1, 0] > 2.9
    assert torch.allclose(lines[1], -lines[2])


@pytest.mark.parametrize("rows", [1, 2, 128])
def test_distances_from_a_gram_matrix(monkeypatch, rows):
    monkeypatch.setattr(mixing, "ROWS", rows)
    table = torch.randn(5, 33, generator=torch.Generator().manual_seed(1))
    table[3] = table[0]
    expected = torch.cdist(table.double(), table.double()) ** 2
    distance = mixing.squared_distances(table)
    assert torch.allclose(distance, expected, atol=1e-4)
    assert torch.equal(distance.diagonal(), torch.zeros(5, dtype=torch.float64))
    assert bool((distance >= 0).all())


def uploads(tables: dict[int, torch.Tensor], weights: dict[int, float]) -> list[Upload]:
    """One client an upload, the last one by rows."""
    made = [
        Upload(torch.tensor([client]), torch.tensor([weights[client]]), {"item_table": table[None]})
        for client, table in tables.items()
    ]
    last = made[-1]
    rows = torch.tensor([[1, 0, -1]])
    values = last.tensors["item_table"][:, [1, 0, 0]]
    return [*made[:-1], last._replace(tensors={"item_table": values}, rows={"item_table": rows})]


@pytest.mark.parametrize("columns", [1, 3, 4096])
def test_one_mix_for_each_client_absent_ones_keep_theirs_new_ones_get_the_mean(monkeypatch, columns):
    monkeypatch.setattr(mixing, "COLUMNS", columns)
    generator = torch.Generator().manual_seed(2)
    tables = {client: torch.randn(2, 2, generator=generator) for client in (3, 0, 1)}
    server = mixing.start_server(torch.full((2, 2), 7.0), 5)
    server = {
        "item_table": server["item_table"].clone(),
        mixing.PERSONAL: torch.tensor([False, False, True, False, False]),
    }
    server["item_table"][2] = 9.0
    cohort = mixing.collect(server, uploads(tables, {3: 1.0, 0: 3.0, 1: 4.0}))
    assert cohort.client_V.tolist() == [3, 0, 1]
    assert cohort.share_V.tolist() == [0.125, 0.375, 0.5]
    weight = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.1, 0.9, 0.0]])
    after = mixing.mixed_server(server, cohort, mixing.Mix(weight))
    assert torch.allclose(after["item_table"][3], 0.2 * tables[3] + 0.3 * tables[0] + 0.5 * tables[1], atol=1e-6)
    assert torch.allclose(after["item_table"][0], tables[3], atol=1e-6)
    assert torch.allclose(after["item_table"][1], 0.1 * tables[3] + 0.9 * tables[0], atol=1e-6)
    assert torch.equal(after["item_table"][2], torch.full((2, 2), 9.0))
    assert torch.allclose(after["item_table"][4], 0.125 * tables[3] + 0.375 * tables[0] + 0.5 * tables[1], atol=1e-6)
    assert after[mixing.PERSONAL].tolist() == [True, True, True, True, False]
    assert torch.equal(server["item_table"][0], torch.full((2, 2), 7.0))  # the old state is as it was
    sent = mixing.send_personal(after, torch.tensor([4, 2]))
    assert torch.equal(sent.per_client["item_table"], after["item_table"][[4, 2]])


@pytest.mark.parametrize(("rows", "num_mixes"), [([0, 1, 0, 1], 2), ([0, 1, 2, 1], 4), ([0, 0, 0, 0], 1)])
def test_clients_with_equal_weights_share_a_mix_where_that_halves_them(monkeypatch, rows, num_mixes):
    sizes = []
    addmm = torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda mean, weight, table: sizes.append(len(weight)) or addmm(mean, weight, table)
    )
    generator = torch.Generator().manual_seed(6)
    tables, weight = torch.randn(4, 3, 2, generator=generator), torch.rand(3, 4, generator=generator)
    weight = (weight / weight.sum(1, keepdim=True)).double()[rows]
    old = torch.zeros(5, 3, 2)
    cohort = mixing.collect(
        {"item_table": old}, [Upload(torch.tensor([4, 1, 0, 2]), torch.ones(4), {"item_table": tables})]
    )
    new = mixing.next_tables(old, cohort, mixing.shared_mix(weight))
    assert sizes == [num_mixes]
    expected = torch.einsum("uv,vid->uid", weight, tables.double())
    assert torch.allclose(new[[4, 1, 0, 2]].double(), expected, atol=1e-6)
    assert not new[3].any()
