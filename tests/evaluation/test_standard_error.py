"""Choices on validation items: differences within their standard error over clients move nothing."""

import numpy as np
import pytest

from fedecider.evaluation.statistics import clearly_above, clearly_best

ZERO = np.zeros(4)


def test_by_hand():
    """Differences 1, 0, 0, 1 of four users: mean .5, variance 1/3, error sqrt(1/12) = .289."""
    first_U = np.array([1.0, 0.0, 0.0, 1.0])
    assert clearly_above([first_U], [ZERO])
    assert not clearly_above([ZERO], [first_U])
    assert not clearly_above([np.array([1.0, -1.0, 0.0, 0.5])], [ZERO])  # mean .125, error .427


def test_clients_count_alike_whatever_their_size():
    """A client of 4 users with mean .5 and one of 40 with mean -.5 are level; by users it would be far below."""
    few_U, many_U = np.array([1.0, 0.0, 0.0, 1.0]), np.tile([-1.0, 0.0], 20)
    assert not clearly_above([few_U, many_U], [ZERO, np.zeros(40)])
    assert not clearly_above([ZERO, np.zeros(40)], [few_U, many_U])
    assert clearly_above([few_U, many_U + 0.7], [ZERO, np.zeros(40)])


def test_the_error_falls_with_the_clients():
    """Mean .2, error of one client sqrt(.96 / 3 / 4) = .28 by hand, of four such clients half of it."""
    first_U = np.array([1.0, -0.6, 0.4, 0.0])
    assert first_U.mean() == pytest.approx(0.2)
    assert not clearly_above([first_U], [ZERO])
    assert clearly_above([first_U] * 4, [ZERO] * 4)


def test_equal_figures_and_single_users_decide_nothing():
    assert not clearly_above([np.ones(5)], [np.ones(5)])
    assert not clearly_above([np.array([1.0])], [np.array([0.0])])
    assert not clearly_above([np.ones(5), np.array([1.0])], [np.zeros(5), np.array([0.0])])


def test_users_must_be_the_same():
    with pytest.raises(ValueError):
        clearly_above([np.ones(5)], [np.ones(5), np.ones(5)])


def test_the_best_of_those_that_are_clearly_above_the_first():
    better_U, best_U, unsure_U = np.full(4, 0.2), np.full(4, 0.3), np.array([4.0, -4.0, 4.0, -2.0])
    assert clearly_best([[ZERO], [better_U], [best_U], [unsure_U]]) == 2
    assert clearly_best([[best_U], [better_U], [ZERO]]) == 0
    assert clearly_best([[ZERO]]) == 0
