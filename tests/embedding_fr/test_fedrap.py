"""FedRAP: every formula by hand, its variants, its wire format, and what happens when it diverges."""

import pytest
import torch
from references import fedrap as reference
from toy_federation import run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.examples import ExampleBatch
from embedding_fr.methods.fedrap import (
    COMMON,
    PERSONAL,
    FedrapConfig,
    FedrapRound,
    curriculum_weight,
    fedrap,
    fedrap_round,
    gradients,
    soft_threshold_,
)
from embedding_fr.testing.loop import run_reference

NOW = FedrapRound(distance=0.25, sparsity=0.3, user_rate=0.1, common_rate=0.2, personal_rate=0.2)
BATCH = ExampleBatch(1, torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
FIT_0, FIT_1 = -0.6224593, 0.7310586  # sigmoid(z) - y for z = -0.5, y = 1 and z = 1, y = 0


def two_items(bias=None):
    params = {
        COMMON: torch.tensor([[[1.0, 2.0], [0.0, -1.0]]]),
        PERSONAL: torch.tensor([[[0.5, 0.0], [1.0, 1.0]]]),
        "user": torch.tensor([[1.0, -1.0]]),
    }
    return params if bias is None else {**params, "bias": torch.tensor([bias])}


def close(tensor, values):
    assert torch.allclose(tensor, torch.tensor(values), atol=1e-5), tensor


def test_gradients_of_the_paper_by_hand():
    """Rows C + D are (1.5, 2) and (1, 0), D - C are (-0.5, -2) and (1, 2); 2 lambda = 0.5."""
    found, logit = gradients(two_items(), BATCH, FedrapConfig(), NOW, 0.0)
    close(logit, [[-0.5, 1.0]])
    close(found["user"], [[1.5 * FIT_0 + FIT_1, 2 * FIT_0]])
    close(found[COMMON], [[[FIT_0 - 0.25, -FIT_0 - 1.0], [FIT_1 + 0.5, -FIT_1 + 1.0]]])
    close(found[PERSONAL], [[[FIT_0 + 0.25, -FIT_0 + 1.0], [FIT_1 - 0.5, -FIT_1 - 1.0]]])


def test_gradients_of_the_public_code_by_hand():
    """Means: residuals 1 / 2, regularisers 1 / (2 examples x 2 dims); item 1 is not in this batch."""
    batch = BATCH._replace(item_AB=torch.tensor([[0, 0]]), label_AB=torch.tensor([[1.0, 1.0]]))
    found, logit = gradients(two_items(bias=1.5), batch, FedrapConfig("code"), NOW, weight_decay=0.1)
    close(logit, [[1.0, 1.0]])
    fit = FIT_1 - 1.0
    close(found["bias"], [fit + 0.15])
    close(found["user"], [[1.5 * fit + 0.1, 2 * fit - 0.1]])
    close(found[COMMON], [[[fit - 0.125 + 0.15 + 0.1, -fit - 0.5 + 0.15 + 0.2], [0.0, -0.1]]])
    close(found[PERSONAL], [[[fit + 0.125 + 0.05, -fit + 0.5], [0.1, 0.1]]])


def test_gradient_of_the_bounded_distance_and_of_the_frobenius_penalty():
    """g = 4.25 and 5, so that D - C is divided by 5.25^2 and 36; the penalty adds 2 mu C."""
    config = FedrapConfig(distance="bounded", sparsity="l2")
    found, _ = gradients(two_items(), BATCH, config, NOW, 0.0)
    near, far = 0.5 / 5.25**2, 0.5 / 36
    close(found[PERSONAL], [[[FIT_0 + 0.5 * near, -FIT_0 + 2 * near], [FIT_1 - far, -FIT_1 - 2 * far]]])
    close(found[COMMON][0, 0], [FIT_0 - 0.5 * near + 0.6, -FIT_0 - 2 * near + 1.2])
    close(found[COMMON][0, 1], [FIT_1 + far, -FIT_1 + 2 * far - 0.6])


def test_soft_threshold():
    value = torch.tensor([0.5, -0.5, 0.2, -0.2, 0.0, 3.0])
    close(soft_threshold_(value, 0.2), [0.3, -0.3, 0.0, 0.0, 0.0, 2.8])
    assert int((value == 0).sum()) == 3


@pytest.mark.parametrize(
    ("curriculum", "expected"),
    [
        ("tanh", (0.0996680, 0.7615942, 0.8004990, 0.9640276)),
        ("fixed", (1.0, 1.0, 1.0, 1.0)),
        ("sin", (0.0998334, 0.8414710, 0.8912074, 0.9092974)),
        ("square", (0.0, 0.0, 1.0, 1.0)),
        ("frac", (1 / 2, 1 / 11, 1 / 12, 1 / 21)),
    ],
)
def test_curricula_in_rounds_1_10_11_20(curriculum, expected):
    assert tuple(curriculum_weight(curriculum, a) for a in (1, 10, 11, 20)) == pytest.approx(expected, abs=1e-6)


def test_weights_and_rates_of_a_round():
    training = toy_training("fedrap", learning_rate=0.5, item_learning_rate=200.0)
    paper = fedrap_round(training, FedrapConfig(distance_weight=0.2, sparsity_weight=3.0), 10)
    assert paper == pytest.approx((0.15231884, 2.2847825, 0.5, 200.0, 200.0))
    code = fedrap_round(training, FedrapConfig("code"), 3)
    assert code == pytest.approx((0.1, 0.1, 0.5 * 0.97**2, 200.0 * 0.97**2, 200.0 * 0.97**2))
    apart = fedrap_round(training, FedrapConfig("code", personal_learning_rate=4.0), 3)
    assert apart == pytest.approx((0.1, 0.1, 0.5 * 0.97**2, 200.0 * 0.97**2, 4.0 * 0.97**2))
    assert [apart.rate(name) for name in ("bias", COMMON, PERSONAL)] == list(apart)[2:]
    assert fedrap_round(training, FedrapConfig(tables="common"), 10).distance == 0.0
    assert fedrap_round(training, FedrapConfig(sparsity="none"), 10).sparsity == 0.0


STRONG = [
    ({}, {"learning_rate": 0.1, "item_learning_rate": 0.05, "weight_decay": 0.02}),
    ({"sparsity": "l2", "curriculum": "fixed"}, {"learning_rate": 0.1}),
    ({"distance": "bounded", "curriculum": "frac"}, {"learning_rate": 0.1}),
    ({"variant": "code"}, {"learning_rate": 0.2, "item_learning_rate": 4.0, "weight_decay": 1e-3}),
    ({"personal_learning_rate": 0.02}, {"learning_rate": 0.1, "weight_decay": 0.02}),
    ({"personal_learning_rate": 0.03, "distance": "bounded", "sparsity": "l2"}, {"learning_rate": 0.1}),
    (
        {"variant": "code", "personal_learning_rate": 0.3},
        {"learning_rate": 0.2, "item_learning_rate": 4.0, "weight_decay": 1e-3},
    ),
    ({"variant": "code", "distance": "bounded", "sparsity": "l2"}, {"learning_rate": 0.2, "item_learning_rate": 4.0}),
]


@pytest.mark.parametrize(("options", "rates"), STRONG)
def test_strong_regularisers_equal_the_per_user_loop(options, rates, monkeypatch):
    """Far from the start, in float64; both weights matter there. The loop bounds nobody's update."""
    monkeypatch.setattr("fedecider.federation.rounds.LARGEST_OF_USERS", None)
    torch.set_default_dtype(torch.float64)
    try:
        federation, training, population = toy_federation(), toy_training("fedrap", **rates), toy_population()
        config = FedrapConfig(**options, distance_weight=0.4, sparsity_weight=0.5)
        method = fedrap(federation, training, config)
        state, _ = run(method, population, 4)
        server, local = run_reference(
            method, reference(federation, training, config), federation, training, population, 4
        )
        assert torch.allclose(state.server[COMMON], server[COMMON], rtol=1e-9, atol=1e-11)
        assert all(torch.allclose(state.local[name], local[name], rtol=1e-9, atol=1e-11) for name in local)
        for weight in ("distance_weight", "sparsity_weight"):
            less, _ = run(fedrap(federation, training, FedrapConfig(**{**vars(config), weight: 0.0})), population, 4)
            assert float((less.server[COMMON] - server[COMMON]).abs().max()) > 1e-3, weight
    finally:
        torch.set_default_dtype(torch.float32)


def test_without_a_common_table_users_train_alone():
    """FedRAP-D: nothing is sent, and what another user likes has no influence; with both tables it has one."""
    sequences = [[3, 1, 4, 0, 5, 9, 2], [2, 7, 8, 0, 1], [6, 0, 13, 11, 3]]
    changed = [sequences[0], [9, 10, 11, 12, 13], sequences[2]]
    federation = toy_federation(num_clients=3)
    for tables, alone in (("personal", True), ("both", False)):
        method = toy_method("fedrap", federation, tables=tables)
        (one, records), (other, _) = (run(method, toy_population(sequences=s), 3) for s in (sequences, changed))
        assert torch.equal(one.local[PERSONAL][0], other.local[PERSONAL][0]) == alone
        assert not torch.equal(one.local[PERSONAL][1], other.local[PERSONAL][1])
        assert (one.server == {}) == alone
        assert (records[0]["traffic"][0]["up"] == {}) == alone


def test_without_a_personal_table_the_distance_is_void():
    training = toy_training("fedrap", learning_rate=0.1)
    near, far = (
        run(toy_method("fedrap", training=training, tables="common", distance_weight=weight))[0]
        for weight in (0.0, 9.0)
    )
    assert set(near.local) == {"user"}
    assert torch.equal(near.server[COMMON], far.server[COMMON])


def test_without_weights_both_tables_move_by_the_same_gradient():
    """One round from D = 0: the mean of the D is what the mean of the C has gained."""
    method = toy_method("fedrap", distance_weight=0.0, sparsity_weight=0.0)
    start = method.init()[0][COMMON]
    state, _ = run(method, rounds=1)
    gained = state.server[COMMON] - start
    assert float(gained.abs().max()) > 1e-3
    assert torch.allclose(state.local[PERSONAL].mean(0), gained, atol=1e-6)
