"""Cohorts: how large, of whom, and another one in every round."""

from fedecider.federation.cohort import sample_cohort


def test_a_cohort_has_its_share_of_different_clients():
    assert [len(sample_cohort(10, share, 0, 1)) for share in (0.01, 0.1, 0.25, 0.91, 1.0)] == [1, 1, 3, 10, 10]
    assert [len(sample_cohort(100, share, 0, 1)) for share in (0.07, 0.14, 0.28, 0.55, 0.071)] == [7, 14, 28, 55, 8]
    assert sample_cohort(10, 0.3, 0, 1) <= set(range(10))


def test_every_round_and_every_seed_draws_anew():
    rounds = [frozenset(sample_cohort(30, 0.3, 5, round)) for round in range(1, 9)]
    assert len(set(rounds)) == 8
    assert frozenset().union(*rounds) > rounds[0]
    assert sample_cohort(30, 0.3, 6, 1) != rounds[0]
    assert sample_cohort(30, 0.3, 5, 1) == rounds[0]
