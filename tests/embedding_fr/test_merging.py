"""Elastic merging: the adapter and the merge in numbers, gradients, and what each scheme comes to at its ends."""

import math

import pytest
import torch
from toy_federation import run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.examples import ExampleBatch
from embedding_fr.local_training import Objective, dot_logits, plain_gradients
from embedding_fr.merging import (
    ADAPTER,
    LAST,
    Merging,
    Scorer,
    close_merge,
    dot_adapter_gradients,
    merge_epochs,
    merged_logits,
    merged_table,
    open_merge,
    start_merging,
)

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
def test_closed_form_gradients_of_adapters_are_those_of_autograd(scheme, layers):
    merging, _, _, _, merge, params, batch = block(scheme, layers)
    kept = params["item_table"] - merge.step_CRD
    seen = {**params, **merge.adapter, "feature": merge.feature, "kept": kept, "difference": merge.difference_CRD}
    objective = Objective(merged_logits(merging, Scorer(dot_logits)))
    plain, logits = plain_gradients(objective, seen, [ADAPTER], batch)
    seen["kept_score"] = torch.einsum("crd,cd->cr", kept, params["user"])
    seen["effect"] = torch.einsum("crd,cd->cr", merge.difference_CRD, params["user"])
    closed, same = dot_adapter_gradients(merging.sizes(2), objective, seen, [ADAPTER], batch)
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
