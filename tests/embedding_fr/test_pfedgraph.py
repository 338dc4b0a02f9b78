"""pFedGraph: its weights against a general solver, its settings at their ends, and what the public code's sign does."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize
from toy_federation import run, toy_federation, toy_method

from embedding_fr.local_only import local_only
from embedding_fr.methods.pfedgraph import TABLE, graph_weights
from embedding_fr.mixing import PERSONAL, Cohort, gram_matrix, measured_from
from embedding_fr.similarity import cosines

pytestmark = pytest.mark.usefixtures("double")

pytestmark = pytest.mark.usefixtures("double")


def test_two_clients_by_hand():
    """(0.5, 0.5) + (1, 0) / 1.6 = (1.125, 0.5), whose surplus of 0.625 is shared out."""
    weights = graph_weights(torch.tensor([0.5, 0.5]), torch.eye(2), 0.8, 0.9)
    assert weights.tolist() == [pytest.approx([0.8125, 0.1875]), pytest.approx([0.1875, 0.8125])]


@given(
    sizes=arrays(np.float64, 5, elements=st.floats(1, 100)),
    rows=arrays(np.int64, (5, 6), elements=st.integers(-9, 9)),
    alpha=st.floats(0.05, 20.0),
)
@settings(max_examples=60, deadline=None)
def test_weights_are_those_that_a_solver_finds(sizes, rows, alpha):
    """``alpha ||w||^2 - (c + 2 alpha p) . w`` over the simplex, by sequential least squares."""
    share = sizes / sizes.sum()
    cosine = cosines(torch.from_numpy(rows @ rows.T).double())
    weights = graph_weights(torch.from_numpy(share), cosine, alpha, 1.0).numpy()
    for row, goal in zip(weights, cosine.numpy() + 2.0 * alpha * share, strict=True):

        def loss(w, goal=goal):
            return (alpha * w @ w - goal @ w) / alpha

        found = minimize(
            loss,
            share,
            jac=lambda w, goal=goal: 2.0 * w - goal / alpha,
            bounds=[(0.0, 1.0)] * 5,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": np.ones_like},
            options={"ftol": 1e-15, "maxiter": 500},
        )
        assert row == pytest.approx(found.x, abs=1e-6)
        assert loss(row) <= loss(found.x) + 1e-9
        assert row.sum() == pytest.approx(1.0)
        assert row.min() >= 0.0


def test_cosines_are_those_of_the_updates_since_the_start():
    table = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    origin = torch.randn(6, generator=torch.Generator().manual_seed(2))
    table[3] = origin  # a client that has not moved is like nobody
    mean = table.mean(0)
    moved = measured_from(Cohort(torch.arange(4), torch.full((4,), 0.25), table - mean, mean), origin)
    found = cosines(gram_matrix(moved.table_VF))
    expected = torch.nn.functional.cosine_similarity((table - origin)[:, None], (table - origin)[None], dim=2)
    assert torch.allclose(found[:3, :3], expected[:3, :3])
    assert torch.equal(moved.mean_F, origin)
    assert torch.allclose(moved.table_VF + origin, table)
    exact = Cohort(torch.arange(2), torch.tensor([0.5, 0.5]), torch.zeros(2, 3), torch.zeros(3))
    still = cosines(gram_matrix(measured_from(exact, torch.zeros(3)).table_VF))
    assert torch.equal(still, torch.zeros(2, 2))
    assert graph_weights(exact.share_V, still, 0.8, 0.9)[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_large_weight_of_the_sizes_is_fedmf(participation):
    mean, _ = run(toy_method("fedmf"), participation=participation)
    state, records = run(toy_method("pfedgraph", size_weight=1e12), participation=participation)
    for client in records[-1]["clients"]:
        assert torch.allclose(state.server[TABLE][client["client"]], mean.server[TABLE], atol=1e-9)
    if participation == 1.0:
        assert torch.allclose(state.local["user"], mean.local["user"], atol=1e-9)


def test_a_small_weight_of_the_sizes_is_training_alone():
    alone, _ = run(local_only(toy_method("fedmf"), toy_federation()))
    state, _ = run(toy_method("pfedgraph", size_weight=1e-6))
    assert torch.allclose(state.server[TABLE], alone.local["kept.item_table"], atol=1e-9)
    assert torch.allclose(state.local["user"], alone.local["user"], atol=1e-9)


def test_a_mix_is_the_client_s_own_and_an_absent_client_keeps_its_older_one():
    method = toy_method("pfedgraph")
    state, _ = run(method, rounds=1)
    assert bool(state.server[PERSONAL].all())
    table = state.server[TABLE]
    assert all(not torch.allclose(table[0], table[client]) for client in range(1, 7))
    first, records = run(method, rounds=1, participation=0.5)
    present = [client["client"] for client in records[0]["clients"]]
    absent = [client for client in range(7) if client not in present]
    assert first.server[PERSONAL].tolist() == [client in present for client in range(7)]
    mean, _ = run(toy_method("fedmf"), rounds=1, participation=0.5)
    assert torch.allclose(first.server[TABLE][absent], mean.server[TABLE].expand(len(absent), -1, -1), atol=1e-9)
    second, records = run(method, rounds=2, participation=0.5)
    stayed = [client for client in present if client not in {one["client"] for one in records[1]["clients"]}]
    assert stayed
    assert torch.equal(second.server[TABLE][stayed], first.server[TABLE][stayed])
