"""The weights of a mixture."""

import numpy as np
import pytest
from scipy.optimize import minimize

from fedecider.models.hybrid import fit_mixture, fit_weights, log_likelihood

PROBS = np.random.default_rng(2).gamma(0.4, size=(60, 4))


def optimum(prob_NE, prior_E):
    """The same objective by a general optimiser, over a softmax."""

    def value(logit_E):
        weight_E = np.exp(logit_E - logit_E.max())
        weight_E /= weight_E.sum()
        return -np.log(prob_NE @ weight_E).sum() - (prior_E * np.log(weight_E + 1e-300)).sum()

    found = minimize(value, np.zeros(prob_NE.shape[1]), method="BFGS", options={"gtol": 1e-9}).x
    weight_E = np.exp(found - found.max())
    return weight_E / weight_E.sum()


@pytest.mark.parametrize("prior", [0.0, 5.0])
def test_em_finds_the_optimum(prior):
    prior_E = prior * np.array([0.5, 0.1, 0.1, 0.3])
    weight_E, value = fit_weights(PROBS, prior_E, num_steps=5000)
    assert weight_E == pytest.approx(optimum(PROBS, prior_E), abs=1e-3)
    assert value == pytest.approx(np.log(PROBS @ weight_E).mean())
    assert weight_E.sum() == pytest.approx(1.0)


def test_one_step_by_hand():
    weight_E, _ = fit_weights(np.array([[0.2, 0.6], [0.3, 0.1]]), num_steps=1)
    assert weight_E.tolist() == pytest.approx([(1 / 4 + 3 / 4) / 2, (3 / 4 + 1 / 4) / 2])


def test_an_expert_that_is_always_better_gets_everything():
    weight_E, _ = fit_weights(np.array([[0.2, 0.1], [0.3, 0.1]]))
    assert weight_E == pytest.approx([1.0, 0.0], abs=1e-6)


def test_without_events_the_weights_are_the_prior():
    assert fit_weights(np.zeros((0, 2)), np.array([3.0, 1.0]))[0].tolist() == [0.75, 0.25]
    assert fit_weights(np.zeros((0, 2)))[0].tolist() == [0.5, 0.5]
    assert log_likelihood(np.zeros((0, 2)), np.array([0.5, 0.5])) == 0.0


def test_buckets_have_weights_of_their_own_near_those_of_all():
    known_N = np.arange(60.0)
    prob_NE = np.where(known_N[:, None] < 30, [[0.3, 0.1]], [[0.1, 0.3]])
    mixture = fit_mixture(prob_NE, known_N, ("counts", "uniform"), 2, 10.0)
    assert mixture.mean_E == pytest.approx([0.5, 0.5])
    assert mixture.cut_Q.tolist() == [29.5]
    expected = fit_weights(prob_NE[:30], np.array([5.0, 5.0]))[0]
    assert mixture.weight_QE[0] == pytest.approx(expected)
    assert 0.7 < expected[0] < 0.95
    assert mixture.weight_QE[1] == pytest.approx(expected[::-1])
    assert mixture.weights(np.array([0.0, 29.0, 30.0])).tolist() == mixture.weight_QE[[0, 0, 1]].tolist()
