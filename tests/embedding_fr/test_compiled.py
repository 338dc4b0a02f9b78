"""Compiled local training against the stacked code: the same draws exactly, the same steps up to rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_federation import NUM_ITEMS, run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr import local_training
from embedding_fr.averaged import averaged
from embedding_fr.blocks import make_block
from embedding_fr.compiled.training import COLUMN, order_keys, to_slopes, train_linear
from embedding_fr.local_training import (
    Kernel,
    Optimiser,
    dot_gradients,
    draw_examples,
    pull_to,
    round_examples,
    shuffled,
)
from embedding_fr.methods.fedmf import mf_model
from embedding_fr.methods.fedrecgel import sharpness_aware

pytestmark = pytest.mark.whole

FAST = {"learning_rate": 0.1, "item_learning_rate": 0.05}
CODE_RATES = {"learning_rate": 0.2, "item_learning_rate": 2.0}
STEPS = [
    ("fedmf", {}, {}),
    ("fedmf", {}, {"embedding_size": 19, "batch_size": 3, "weight_decay": 0.05}),
    ("fedmf", {}, {"embedding_size": 1, "batch_size": 10**9, "item_learning_rate": 0.02}),
    ("pfedrec", {}, {"local_epochs": 3, "weight_decay": 0.05}),
    ("pfedrec", {"variant": "code"}, {"embedding_size": 7, "weight_decay": 0.05, "learning_rate": 0.01}),
    ("pfedclr", {}, {"embedding_size": 9, "weight_decay": 0.05}),
    ("pfedclr", {"rank": 5, "buffer_learning_rate": 0.003}, {"item_learning_rate": 0.02, "batch_size": 4}),
    ("fedncf", {}, {"embedding_size": 9, "learning_rate": 0.02, "weight_decay": 0.05}),
    ("fedncf", {"hidden_sizes": "7,11,3"}, {"batch_size": 10**9, "learning_rate": 0.02, "item_learning_rate": 0.1}),
    ("fedncf", {"hidden_sizes": ""}, {"batch_size": 1, "learning_rate": 0.02}),
    ("gpfedrec", {"graph_weight": 3.0}, {"learning_rate": 0.05, "item_learning_rate": 2.0, "local_epochs": 2}),
    ("gpfedrec", {"variant": "code"}, {"embedding_size": 9, "batch_size": 3, "learning_rate": 0.01}),
    ("gpfedrec", {"hidden_sizes": "", "graph_weight": 0.0}, {"learning_rate": 0.01, "weight_decay": 0.05}),
    ("fedem", {"adapter_layers": "7,3"}, {"embedding_size": 9, "batch_size": 4, "weight_decay": 0.05}),
    ("fedem", {"aggregation": "mean", "adapter_layers": ""}, {"item_learning_rate": 0.02, "local_epochs": 3}),
    ("fedem", {"merging": "DM", "adapter_learning_rate": 0.03}, {"batch_size": 3}),
    ("fedem", {"adapter_learning_rate": 0.0}, {}),
    ("fedem", {"merging": "SM"}, {}),
    ("fedem", {"merging": "SR", "aggregation": "mean"}, {"weight_decay": 0.05}),
    ("fedem", {"variant": "code", "mixed_share": 0.7}, {"embedding_size": 9, "batch_size": 4, "weight_decay": 0.05}),
    ("fedem", {"variant": "code", "mixed_share": 0.4, "adapter_layers": "", "adapter_learning_rate": 0.03}, {}),
    ("fedrecgel", {}, {"embedding_size": 9, "learning_rate": 0.02, "weight_decay": 0.05}),
    ("fedrecgel", {"hidden_sizes": "7,11,3", "private_radius": 0.3}, {"batch_size": 10**9, "learning_rate": 0.02}),
    ("fedrecgel", {"hidden_sizes": "", "shared_radius": 0.0}, {"batch_size": 1, "learning_rate": 0.02}),
    ("fedrecgel", {"private_radius": 0.0, "shared_radius": 0.4}, {"batch_size": 3, "item_learning_rate": 0.02}),
    ("fedrecgel", {"variant": "code"}, {"embedding_size": 5, "batch_size": 5, "weight_decay": 0.05}),
    ("fedrecgel", {"variant": "code", "private_radius": 0.4, "shared_radius": 0.0}, {}),
    ("fedrecgel", {"variant": "code", "private_radius": 0.0, "shared_radius": 0.3}, {"embedding_size": 1}),
    ("fedrap", {}, FAST),
    ("fedrap", {"sparsity_weight": 0.5, "distance_weight": 0.4}, {**FAST, "weight_decay": 0.05, "embedding_size": 19}),
    ("fedrap", {"sparsity": "l2", "distance_weight": 0.4}, {**FAST, "weight_decay": 0.05, "batch_size": 3}),
    ("fedrap", {"sparsity": "none", "distance": "bounded", "distance_weight": 0.7}, {**FAST, "local_epochs": 4}),
    ("fedrap", {"distance": "bounded", "distance_weight": 0.7}, {**FAST, "weight_decay": 0.05}),
    ("fedrap", {"tables": "common", "sparsity_weight": 0.5}, {**FAST, "weight_decay": 0.05, "batch_size": 10**9}),
    ("fedrap", {"tables": "common", "sparsity": "l2"}, {**FAST, "weight_decay": 0.05, "embedding_size": 1}),
    ("fedrap", {"tables": "personal"}, {**FAST, "weight_decay": 0.05}),
    ("fedrap", {"keep_uploaded": True, "curriculum": "fixed"}, {**FAST, "item_learning_rate": 0.04}),
    ("fedrap", {"variant": "code", "distance_weight": 0.7}, {**CODE_RATES, "weight_decay": 0.05}),
    ("fedrap", {"variant": "code", "sparsity": "l2", "distance": "bounded"}, {**CODE_RATES, "batch_size": 3}),
    ("fedrap", {"variant": "code", "tables": "common"}, {**CODE_RATES, "weight_decay": 0.05}),
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
    for compiled in (True, False):
        training = toy_training(name, compiled=compiled, **changes)
        state, records = run(toy_method(name, training=training, **variant), rounds=2)
        states.append(state)
        losses.append([list(log.values()) for record in records for log in record["clients"]])
    for left, right in ((states[0].server, states[1].server), (states[0].local, states[1].local)):
        assert left.keys() == right.keys()
        for key in left:
            assert torch.allclose(left[key], right[key], rtol=tolerance, atol=tolerance), key
    assert np.allclose(losses[0], losses[1], rtol=tolerance, atol=tolerance)


ALONE = ("fedmf", "pfedrec", "pfedclr", "fedncf", "fedrap", "gpfedrec", "fedem", "fedrecgel")


@pytest.mark.parametrize(
    ("name", "variant"), [*((name, {}) for name in ALONE), ("fedem", {"variant": "code", "mixed_share": 0.7})]
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


@pytest.mark.parametrize("name", ["fedmf", "pfedrec", "pfedclr", "fedncf", "gpfedrec", "fedrecgel"])
def test_a_cpu_takes_the_compiled_code_unless_it_is_off(name, monkeypatch):
    taken = []

    def spy(kernel, *rest):
        taken.append(kernel.train)
        return torch.zeros(len(rest[2].count_C))

    monkeypatch.setattr(local_training, "train_compiled", spy)
    run(toy_method(name, training=toy_training(name, compiled=False)), rounds=1)
    assert not taken
    run(toy_method(name), rounds=1)
    assert taken


def test_a_kernel_is_not_taken_for_what_it_does_not_say():
    federation, training = toy_federation(), toy_training("fedmf")
    model = mf_model(federation, training)
    kernel = Kernel(train_linear, dot_gradients, ("item_table",), (("user",),), pull_to())
    optimiser = Optimiser("adam", {"user": 0.1, "item_table": 0.1})
    common = {"optimiser": optimiser, "kernel": kernel}
    sharp = averaged("sharp", model, federation, training, gradients=sharpness_aware({("user",): 0.1}), **common)
    with pytest.raises(AssertionError, match="other gradients"):
        run(sharp, rounds=1)
    penalty = lambda start: lambda params: params["user"].square().sum(1)  # noqa: E731
    with pytest.raises(AssertionError, match="another regulariser"):
        run(averaged("x", model, federation, training, gradients=dot_gradients, penalty=penalty, **common), rounds=1)
    groups = [["user"], ["item_table"]]
    with pytest.raises(AssertionError, match="all tensors at once"):
        run(averaged("x", model, federation, training, gradients=dot_gradients, groups=groups, **common), rounds=1)
    pair = kernel._replace(vectors=(("user", "item_table"),), alternates=True)
    halves = {"optimiser": optimiser, "groups": groups, "gradients": dot_gradients}
    with pytest.raises(AssertionError, match="step together"):
        run(averaged("x", model, federation, training, kernel=pair, **halves), rounds=1)
    run(averaged("x", model, federation, training, **halves), rounds=1)  # without a kernel all of this is allowed


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
    drawn = [
        round_examples(federation, toy_training("fedmf", num_negatives=negatives, compiled=compiled), block, 2)
        for compiled in (True, False)
    ]
    for left, right in zip((*drawn[0][0], *drawn[0][1:]), (*drawn[1][0], *drawn[1][1:]), strict=True):
        assert torch.equal(left, right)


def test_orders_are_those_of_the_stacked_code():
    population = toy_population()
    order = sorted(range(7), key=lambda client: -int(population.num_train_N[client]))
    block = make_block(population, order)
    examples = draw_examples(block.data, block.clients, NUM_ITEMS, 3, 0, 4)
    key_CEB = np.empty((7, 3, examples.item_CB.shape[1]), np.int64)
    order_keys(examples.key_C.numpy(), examples.count_C.numpy(), 5, key_CEB)
    key_CEB.sort(axis=2)
    for number in range(3):
        expected_CB = shuffled(examples, 5 + number)
        for row, count in enumerate(examples.count_C.tolist()):
            assert (key_CEB[row, number, :count] & COLUMN).tolist() == expected_CB[row, :count].tolist()


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


@pytest.mark.parametrize("name", ["fedmf", "pfedrec", "pfedclr", "fedncf"])
def test_a_diverging_client_is_named(name):
    training = toy_training(name, learning_rate=1e38)
    with pytest.raises(ValueError, match=r"got a non-finite .* for client \d+ in round \d.*lower learning_rate"):
        run(toy_method(name, training=training), rounds=3)
