"""Weights of an ensemble: closed forms, another optimiser, bounds, what no customer can say."""

import math

import numpy as np
import pytest
import torch
from ensemble_toys import NUM_ITEMS, sequences, toy_model, vectors
from scipy.optimize import minimize

from fedecider.data.near_texts import unit_vectors
from fedecider.evaluation.protocols import histories, targets, train_parts
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models import ensemble
from fedecider.models.counts import count_events
from fedecider.models.ensemble import BOUND, PRIOR, PRIOR_ALONE, STRENGTH, Choices, choices_of, fit_weights
from fedecider.models.features import BOUGHT, FEATURES, Knowledge


def choices(columns: dict[str, list[list[float]]], chosen: list[list[float]], offset=None) -> Choices:
    """Feature -> (N, M), shares of what was chosen (N, M)."""
    target_NM = torch.tensor(chosen)
    zero_NM = torch.zeros(target_NM.shape)
    value_FNM = torch.stack([torch.tensor(columns[name]) if name in columns else zero_NM for name in FEATURES])
    return Choices(value_FNM, zero_NM if offset is None else torch.tensor(offset), target_NM)


def of_two(name: str, num_first: int, num: int = 10, stands_for: float = 1.0) -> Choices:
    """``num`` customers choose between an item with the feature, which ``num_first`` take, and another without."""
    chosen = [[1.0, 0.0] if number < num_first else [0.0, 1.0] for number in range(num)]
    return choices({name: [[1.0, 0.0]] * num}, chosen, [[0.0, math.log(stands_for)]] * num)


def test_one_feature_has_the_closed_form():
    """Of two items p = 1 / (1 + exp(-theta)): theta = log(7 / 3), its error 1 / root(n p (1 - p))."""
    found = fit_weights(of_two("text", 7), False, strength=0.0)
    assert found.value == pytest.approx({"text": math.log(7 / 3)}, abs=1e-5)
    assert found.error == pytest.approx({"text": 1 / math.sqrt(10 * 0.7 * 0.3)}, rel=1e-4)
    assert found.constant == ("counts", "successors", "followers", "popularity", BOUGHT, "habit")
    assert found.num_customers == 10
    assert not found.with_model


def test_a_choice_that_stands_for_many_counts_as_many():
    found = fit_weights(of_two("text", 7, stands_for=4.0), False, strength=0.0)
    assert found.value["text"] == pytest.approx(math.log(4 * 7 / 3), abs=1e-5)


def test_what_was_bought_before_has_no_prior_and_a_bound():
    inside = fit_weights(of_two(BOUGHT, 7), False, {BOUGHT: 3.0})
    assert inside.value[BOUGHT] == pytest.approx(math.log(7 / 3), abs=1e-5)
    for num_first, bound in ((0, -BOUND), (10, BOUND)):
        at_bound = fit_weights(of_two(BOUGHT, num_first), False)
        assert at_bound.value[BOUGHT] == bound
        assert BOUGHT not in at_bound.error
    assert BOUND == 20.0


RNG = np.random.default_rng(3)
NAMES = ("text", "counts", "popularity", BOUGHT)
RANDOM = choices(
    {
        **{name: RNG.normal(size=(40, 6)).round(3).tolist() for name in NAMES[:3]},
        BOUGHT: (RNG.random((40, 6)) < 0.3).astype(float).tolist(),
    },
    [[0.5, 0.0, 0.5, 0.0, 0.0, 0.0], *np.eye(6)[RNG.integers(6, size=39)].tolist()],
    np.log(RNG.integers(1, 4, size=(40, 6))).tolist(),
)
GIVEN = {"text": 0.7, "counts": -0.2}


def objective(theta_F, strength: float) -> float:
    """Customer by customer, from the equation."""
    value_FNM, offset_NM, target_NM = (part.double().numpy() for part in RANDOM)
    total = 0.0
    for customer in range(len(target_NM)):
        score_M = offset_NM[customer] + sum(
            theta * value_FNM[FEATURES.index(name), customer] for name, theta in zip(NAMES, theta_F, strict=True)
        )
        log_prob_M = score_M - np.log(np.exp(score_M).sum())
        total += (target_NM[customer] * (log_prob_M - offset_NM[customer])).sum()
    pull = sum((theta - GIVEN.get(name, 0)) ** 2 for name, theta in zip(NAMES[:3], theta_F[:3], strict=True))
    return -total + strength / 2 * pull


@pytest.mark.parametrize("strength", [0.0, 4.0])
def test_the_optimum_and_its_curvature_are_those_of_another_optimiser(strength):
    found = fit_weights(RANDOM, False, GIVEN, strength)
    at = minimize(objective, np.zeros(4), (strength,), method="Powell", options={"xtol": 1e-8, "ftol": 1e-14})
    assert [found.value[name] for name in NAMES] == pytest.approx(at.x.tolist(), abs=1e-4)
    theta_F, step_FF = np.array([found.value[name] for name in NAMES]), 1e-3 * np.eye(4)

    def value(*steps) -> float:
        return objective(theta_F + sum(steps), strength)

    slope_F = [(value(step) - value(-step)) / 2e-3 for step in step_FF]
    assert slope_F == pytest.approx([0.0] * 4, abs=1e-3)
    curve_FF = [[(value(a, b) - value(a, -b) - value(-a, b) + value(-a, -b)) / 4e-6 for a in step_FF] for b in step_FF]
    expected_F = np.sqrt(np.diag(np.linalg.inv(np.array(curve_FF))))
    assert [found.error[name] for name in NAMES] == pytest.approx(expected_F.tolist(), rel=1e-3)


def test_the_prior_pulls_all_but_what_was_bought_before():
    strong = fit_weights(RANDOM, False, GIVEN, 1e9)
    assert [strong.value[name] for name in NAMES[:3]] == pytest.approx([0.7, -0.2, 0.0], abs=1e-5)
    assert abs(strong.value[BOUGHT]) > 0.05
    near, far = (fit_weights(RANDOM, False, GIVEN, strength).value["text"] for strength in (STRENGTH, 1.0))
    assert abs(near - 0.7) < abs(far - 0.7)


def test_without_a_customer_the_weights_are_the_prior():
    nobody = Choices(torch.zeros(len(FEATURES), 0, 1), torch.zeros(0, 1), torch.zeros(0, 1))
    others = {"model": 0.4, "text": 0.1, BOUGHT: -2.0}
    assert fit_weights(nobody, True, others).value == {name: others.get(name, 0.0) for name in FEATURES}
    for with_model, prior in ((True, PRIOR), (False, PRIOR_ALONE)):
        found = fit_weights(nobody, with_model)
        assert {name: weight for name, weight in found.value.items() if weight} == prior
        assert (found.error, found.constant, found.num_customers) == ({}, (), 0)
        assert found.with_model == with_model


USERS = sequences(12)
KNOWLEDGE = Knowledge(count_events(train_parts(USERS), NUM_ITEMS), unit_vectors(vectors()))


def asked(users, model=None, knowledge=KNOWLEDGE, seed: int = 0) -> Choices:
    draw = torch.Generator().manual_seed(seed)
    return choices_of(knowledge, histories(users, "valid"), targets(users, "valid"), model, draw)


def test_choices_of_a_small_catalogue_are_all_items():
    found = asked(USERS, toy_model())
    assert found.value_FNM.shape == (len(FEATURES), len(USERS), NUM_ITEMS)
    assert found.target_NM.argmax(1).tolist() == [user[-2] for user in USERS]
    assert found.target_NM.sum(1).tolist() == [1.0] * len(USERS)
    assert not found.offset_NM.any()


def large(num_items: int = 600, num_users: int = 400):
    """Users who buy what is like what they had, and popular things: there is something to learn."""
    rng = np.random.default_rng(8)
    unit_ID = unit_vectors(rng.normal(size=(num_items, 4)))
    popular_I, users = rng.normal(size=num_items), []
    for _ in range(num_users):
        events = [int(rng.integers(num_items))]
        for _ in range(5):
            score_I = popular_I + 3.0 * (unit_ID @ unit_ID[events[-1]])
            score_I[events] = -np.inf
            prob_I = np.exp(score_I - score_I.max())
            events.append(int(rng.choice(num_items, p=prob_I / prob_I.sum())))
        users.append(events)
    return users, Knowledge(count_events(train_parts(users), num_items), unit_ID)


@pytest.mark.parametrize("num_beams", [0, 5])
def test_sampled_choices_give_the_weights_of_all_items(num_beams, monkeypatch):
    """Within half of a standard error, where choices are sixty of six hundred and some of them stand for many."""
    users, knowledge = large()

    def scores(histories):
        return torch.from_numpy(knowledge.unit_ID[[items[-1] for items in histories]] @ knowledge.unit_ID.T) * 2.0

    def log_probs(histories, item_BM):
        log_prob_BI = torch.log_softmax(scores(histories), 1)
        return log_prob_BI if item_BM is None else log_prob_BI.gather(1, item_BM.clamp(min=0))

    whole = fit_weights(asked(users, ensemble.ModelScores(log_probs, None), knowledge), True)
    if num_beams:
        monkeypatch.setattr(ensemble, "NUM_BEST", 15)
        beams = ensemble.ModelScores(log_probs, lambda histories, k: scores(histories).topk(num_beams).indices)
    else:
        monkeypatch.setattr(ensemble, "MIN_CHOICES", 60)
        monkeypatch.setattr(ensemble, "MAX_CHOICES", 1)
        beams = ensemble.ModelScores(log_probs, None)
    drawn = asked(users, beams, knowledge)
    assert drawn.target_NM.shape == (len(users), 60)
    assert torch.allclose(drawn.offset_NM.exp().sum(1), torch.tensor(600.0))
    some = fit_weights(drawn, True)
    assert set(some.value) == set(whole.value)
    for name, error in whole.error.items():
        assert abs(some.value[name] - whole.value[name]) < 0.5 * error, (name, some.value[name], whole.value[name])
    assert abs(whole.value["text"]) > 2 * whole.error["text"]
    again = asked(users, beams, knowledge)
    assert all(torch.equal(one, other) for one, other in zip(drawn, again, strict=True))
    assert not torch.equal(drawn.value_FNM, asked(users, beams, knowledge, seed=1).value_FNM)


@pytest.mark.parametrize("at_once", [1, 5])
def test_blocks_give_the_choices_of_all(at_once, monkeypatch):
    expected = asked(USERS, toy_model())
    monkeypatch.setattr(ensemble, "MAX_NUMBERS", at_once * NUM_ITEMS)
    assert all(torch.equal(one, other) for one, other in zip(asked(USERS, toy_model()), expected, strict=True))


def test_baskets_weigh_as_much_as_one_item():
    users = SequenceArray(np.array([0, 5]), np.array([0, 1, 2, 3, 4]), basket_E=np.array([0, 1, 1, 1, 2]))
    found = asked(users)
    assert found.target_NM[0, :5].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
