"""Compiled local training against the stacked code: the same draws exactly, the same steps up to rounding."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_federation import run, stacked, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.blocks import make_block
from embedding_fr.compiled.training import to_slopes
from embedding_fr.examples import round_examples

pytestmark = pytest.mark.whole

STEPS = [
    ("fedmf", {}, {}),
    ("fedmf", {}, {"embedding_size": 19, "batch_size": 3, "weight_decay": 0.05}),
    ("fedmf", {}, {"embedding_size": 1, "batch_size": 10**9, "item_learning_rate": 0.02}),
    ("pfedrec", {}, {"local_epochs": 3, "weight_decay": 0.05}),
    ("pfedrec", {"variant": "code"}, {"embedding_size": 7, "weight_decay": 0.05, "learning_rate": 0.01}),
    ("pfedclr", {}, {"embedding_size": 9, "weight_decay": 0.05}),
    ("pfedclr", {"rank": 5, "buffer_learning_rate": 0.003}, {"item_learning_rate": 0.02, "batch_size": 4}),
    ("fedem", {"merging": "SR", "aggregation": "mean"}, {"weight_decay": 0.05}),
    ("fedem", {"variant": "code", "mixed_share": 0.7}, {"embedding_size": 9, "batch_size": 4, "weight_decay": 0.05}),
    ("fedem", {"variant": "code", "mixed_share": 0.4, "adapter_layers": "", "adapter_learning_rate": 0.03}, {}),
]


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def tolerance(request):
    """1e-9 in double precision; in single precision Adam makes steps of what is rounding error near zero."""
    torch.set_default_dtype(request.param)
    yield 1e-9 if request.param == torch.float64 else 1e-3
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "variant", "changes"), STEPS)
def test_every_kernel_takes_the_steps_of_the_stacked_code(name, variant, changes, tolerance):
    states, losses = [], []
    for runtime in (nullcontext, stacked):
        with runtime():
            state, records = run(toy_method(name, training=toy_training(name, **changes), **variant), rounds=2)
        states.append(state)
        losses.append([list(log.values()) for record in records for log in record["clients"]])
    for left, right in ((states[0].server, states[1].server), (states[0].local, states[1].local)):
        assert left.keys() == right.keys()
        for key in left:
            assert torch.allclose(left[key], right[key], rtol=tolerance, atol=tolerance), key
    assert np.allclose(losses[0], losses[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "variant"),
    [("fedmf", {}), ("pfedrec", {}), ("pfedclr", {}), ("fedem", {"variant": "code", "mixed_share": 0.7})],
)
def test_a_client_s_bits_depend_neither_on_its_block_nor_on_threads(name, variant):
    before = torch.get_num_threads()
    one, _ = run(toy_method(name, **variant), block_clients=1)
    torch.set_num_threads(3)
    try:
        other, _ = run(toy_method(name, **variant), block_clients=7)
    finally:
        torch.set_num_threads(before)
    for key in one.local:
        assert torch.equal(one.local[key], other.local[key]), key


@given(
    histories=st.lists(st.lists(st.integers(0, 19), min_size=3, max_size=16, unique=True), min_size=1, max_size=6),
    negatives=st.integers(1, 4),
    seed=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_draws_rows_and_places_are_those_of_the_stacked_code(histories, negatives, seed):
    federation = toy_federation(num_clients=len(histories), num_items=20, seed=seed)
    order = sorted(range(len(histories)), key=lambda client: -len(histories[client]))
    block = make_block(toy_population(sequences=histories, num_items=20), order)
    drawn = []
    for runtime in (nullcontext, stacked):
        with runtime():
            drawn.append(round_examples(federation, toy_training("fedmf", num_negatives=negatives), block, 2))
    for left, right in zip((*drawn[0][0], *drawn[0][1:]), (*drawn[1][0], *drawn[1][1:]), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_slopes_and_loss_of_any_logit(dtype):
    logit, label = np.array([-800.0, 800.0, 0.0, 2.0, -2.0], dtype), np.array([0.0, 1.0, 1.0, 0.0, 1.0], dtype)
    loss = to_slopes(logit, label, 5)
    assert loss == pytest.approx((np.log(2.0) + 2.0 * np.log1p(np.exp(2.0))) / 5, rel=1e-6)
    assert logit * 5 == pytest.approx([0.0, 0.0, -0.5, 0.880797, -0.880797], abs=1e-6)
    assert to_slopes(np.full(1, -800.0, dtype), np.ones(1, dtype), 1) == pytest.approx(800.0)
    many = np.zeros(5000, dtype)  # the product of 5,000 factors of 2 is beyond every number
    assert to_slopes(many, np.ones_like(many), 5000) == pytest.approx(np.log(2.0), rel=1e-6)
    assert np.isnan(to_slopes(np.full(2, np.nan, dtype), np.ones(2, dtype), 2))
