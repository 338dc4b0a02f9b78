"""Statistics: hand numbers, behaviour under the null, coverage; choices within their standard error move nothing."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedecider.evaluation.statistics import (
    Comparison,
    Interval,
    bootstrap_alike,
    bootstrap_interval,
    bootstrap_intervals,
    clearly_above,
    clearly_best,
    compare_table,
    distinguishable_winners,
    effect_size,
    holm,
    paired_permutation_test,
    table_intervals,
    verdict,
)


def metric_intervals(positions, generator, **options):
    """Of a table with one row."""
    return table_intervals({"": positions}, generator, **options)[""]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_bootstrap_of_one_run_has_the_standard_error():
    value_U = (torch.rand(3000, generator=generator(1)) < 0.1).double()
    found = bootstrap_interval(value_U, generator(2))
    error = value_U.std(correction=0).item() / math.sqrt(3000)
    assert found.mean == pytest.approx(value_U.mean().item())
    assert (found.high - found.low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.08)


def test_values_that_share_their_draws_get_the_intervals_they_get_alone(monkeypatch):
    monkeypatch.setattr("fedecider.evaluation.statistics.CHUNK", 700)  # several chunks of draws
    values = {name: torch.rand(2, 31, generator=generator(seed)) for seed, name in enumerate(("a", "b", "c"))}
    found = bootstrap_intervals(values, generator(7), num_resamples=90)
    assert list(found) == ["a", "b", "c"]
    for name, value in values.items():
        assert found[name] == bootstrap_interval(value, generator(7), num_resamples=90)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_a_table_get_the_intervals_they_get_alone(shared):
    def positions(seed, num_seeds=2):
        draw = generator(seed)
        sizes = {"crime": 40, "comics": 23}
        return {name: torch.randint(0, 30, (num_seeds, size), generator=draw) for name, size in sizes.items()}

    rows = {"first": positions(1), "one seed": positions(2, 1), "second": positions(3)}
    persons = {"crime": [f"u{n}" for n in range(40)], "comics": [f"u{n}" for n in range(20, 43)]} if shared else None
    found = table_intervals(rows, generator(5), num_resamples=80, persons=persons)
    assert list(found) == list(rows)  # in the given order, though rows of one shape are handled together
    for label, row in rows.items():
        assert found[label] == metric_intervals(row, generator(5), num_resamples=80, persons=persons)


def test_bootstrap_variance_over_users_and_seeds_by_formula():
    # value = a_s + b_u: the resampled mean is an independent sum, so its variance is var(a)/S + var(b)/U
    seed_S, user_U = torch.tensor([0.0, 1.0, 5.0, 2.0]), torch.randn(50, generator=generator(3))
    means = bootstrap_alike([(seed_S[:, None] + user_U)[None]], generator(4), 20_000)[0][:, 0]
    expected = seed_S.var(correction=0) / 4 + user_U.var(correction=0) / 50
    assert means.var().item() == pytest.approx(expected.item(), rel=0.05)
    assert means.mean().item() == pytest.approx((seed_S.mean() + user_U.mean()).item(), abs=0.05)


def test_intervals_cover_the_truth():
    covered = 0
    for trial in range(200):
        value_U = (torch.rand(400, generator=generator(100 + trial)) < 0.2).double()
        found = bootstrap_interval(value_U, generator(trial), num_resamples=400)
        covered += found.low <= 0.2 <= found.high
    assert 0.90 <= covered / 200 <= 0.99


def test_permutation_test_equals_full_enumeration():
    first = torch.tensor([1.0, 0.0, 0.7, 1.0, 0.3, 0.0, 1.0], dtype=torch.float64)
    second = torch.tensor([0.0, 0.0, 1.0, 0.2, 0.1, 0.5, 0.4], dtype=torch.float64)
    difference = (first - second).tolist()
    observed = abs(sum(difference))
    extreme = [
        abs(sum(sign * d for sign, d in zip(signs, difference, strict=True))) >= observed - 1e-12
        for signs in product((-1, 1), repeat=7)
    ]
    exact = sum(extreme) / len(extreme)
    assert paired_permutation_test(first, second, generator(5), 40_000) == pytest.approx(exact, abs=0.01)
    outside = stats.permutation_test(
        (first.numpy(), second.numpy()), lambda x, y: (x - y).mean(), permutation_type="samples", n_resamples=math.inf
    )
    assert outside.pvalue == pytest.approx(exact)


def test_p_values_are_uniform_under_the_null():
    p_values = []
    for trial in range(300):
        draw = generator(1000 + trial)
        shared = torch.rand(120, generator=draw)
        first, second = (shared + 0.3 * torch.randn(120, generator=draw) for _ in range(2))
        p_values.append(paired_permutation_test(first, second, draw, 400))
    assert stats.kstest(p_values, "uniform").pvalue > 0.001
    assert sum(p < 0.05 for p in p_values) / 300 == pytest.approx(0.05, abs=0.04)


def test_p_value_ignores_user_order_of_both_and_finds_a_difference():
    hits = (torch.rand(500, generator=generator(6)) < 0.1).double()
    better = torch.maximum(hits, (torch.rand(500, generator=generator(7)) < 0.05).double())
    assert paired_permutation_test(better, hits, generator(8)) == pytest.approx(1 / 10_001)
    assert paired_permutation_test(hits, hits, generator(8)) == 1.0
    assert paired_permutation_test(hits, better, generator(8)) == paired_permutation_test(better, hits, generator(8))


def test_macro_weights_each_domain_once():
    # the small domain carries the whole effect; pooled over users it would drown in the large one's noise
    big = torch.zeros(4000)
    small = torch.ones(12)
    noise = torch.randn(4000, generator=generator(9)) * 0.1
    p_value = paired_permutation_test({"a": big + noise, "b": small}, {"a": big, "b": small * 0}, generator(10))
    assert p_value < 0.005


def test_seeds_are_averaged_before_the_test():
    first = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    second = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
    assert paired_permutation_test(first, second, generator()) == 1.0
    assert effect_size(first, second) == 0.0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    with pytest.raises(ValueError, match="p-value"):
        holm([1.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_monotone_and_never_below_the_raw_value(p_values):
    adjusted = holm(p_values)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    assert all(adjusted[i] <= adjusted[j] for i, j in pairwise(order))
    assert min(adjusted) == pytest.approx(min(1.0, len(p_values) * min(p_values)))


def test_effect_size_by_hand():
    assert effect_size(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, 0.0])) == pytest.approx(2.0)
    assert effect_size(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0])) == math.inf
    per_domain = effect_size(
        {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.zeros(2)}, {"a": torch.zeros(3), "b": torch.zeros(2)}
    )
    assert per_domain == pytest.approx(1.0)


def test_metric_intervals_hold_the_macro_mean():
    positions = {
        "crime": torch.tensor([[0, 30, 8], [0, 3, 30]]),
        "comics": torch.tensor([[7, 7, 7, 7, 7], [7, 7, 7, 7, 7]]),
    }
    found = metric_intervals(positions, generator())
    assert list(found) == ["crime", "comics", "macro"]
    assert found["crime"]["hit@10"].mean == pytest.approx(4 / 6)
    assert found["macro"]["hit@10"].mean == pytest.approx((4 / 6 + 1) / 2)
    assert found["comics"]["ndcg@10"] == pytest.approx((1 / math.log2(9),) * 3)
    assert found["macro"]["hit@10"].low < found["macro"]["hit@10"].mean < found["macro"]["hit@10"].high
    again = metric_intervals(positions, generator())
    assert again == found
    with pytest.raises(ValueError, match="same number"):
        metric_intervals({"crime": torch.zeros(2, 3), "comics": torch.zeros(1, 3)}, generator())


def table_of_three(num_users=400):
    base = torch.randint(0, 40, (num_users,), generator=generator(11))
    twin = torch.where(torch.arange(num_users) % 20 == 0, base.flip(0), base)
    best = torch.where(torch.arange(num_users) % 4 == 0, 0, base)
    return {
        name: {"crime": p, "comics": p[:300]} for name, p in (("local", base), ("fedavg", twin), ("fedecider", best))
    }


SAME_PERSONS = {"a": [str(user) for user in range(30)], "b": [str(user) for user in reversed(range(30))]}


@pytest.mark.parametrize("persons", [None, SAME_PERSONS])
def test_comparisons_that_share_their_draws_get_what_they_get_alone(monkeypatch, persons):
    monkeypatch.setattr("fedecider.evaluation.statistics.CHUNK", 300)  # several chunks of draws
    monkeypatch.setattr("fedecider.evaluation.statistics.HELD", 240)  # two comparisons at a time
    draw = generator(3)
    table = {name: {domain: torch.randint(0, 30, (2, 30), generator=draw) for domain in "ab"} for name in "xyz"}
    settings = {"num_resamples": 60, "persons": persons}
    whole = compare_table(table, generator(12), **settings)
    for pair in (("x", "y"), ("x", "z"), ("y", "z")):
        alone = compare_table(table, generator(12), pairs=[pair], **settings)
        found = [row for row in whole if (row.first, row.second) == pair]
        assert [row._replace(p_holm=0.0) for row in found] == [row._replace(p_holm=0.0) for row in alone]
    three_seeds = {**table, "w": {domain: torch.cat([of, of[:1]]) for domain, of in table["x"].items()}}
    three_seeds["v"] = three_seeds["w"]
    with_others = compare_table(three_seeds, generator(12), pairs=[("x", "y"), ("w", "v")], **settings)
    assert [row.p_value for row in with_others if row.first == "x"] == [row.p_value for row in whole[:6]]
    assert {row.p_value for row in with_others if row.first == "w"} == {1.0}


def test_compare_table_finds_the_winner_and_says_so():
    rows = compare_table(table_of_three(), generator(12), num_resamples=300)
    assert len(rows) == 3 * 2 * 3  # pairs, metrics, domains with macro
    by_key = {(row.domain, row.metric, row.first, row.second): row for row in rows}
    twins = by_key["macro", "hit@10", "local", "fedavg"]
    assert not twins.distinguishable()
    assert "not distinguishable" in verdict(twins)
    win = by_key["crime", "ndcg@10", "local", "fedecider"]
    assert win.distinguishable()
    assert win.difference.high < 0
    assert "local is below fedecider" in verdict(win)
    assert all(row.p_holm >= row.p_value for row in rows)
    winners = distinguishable_winners(rows)
    assert {name for _, _, name in winners} == {"fedecider"}
    assert len(winners) == 6
    assert compare_table(table_of_three(), generator(12), num_resamples=300) == rows


def test_a_winner_must_beat_every_other_method():
    def row(first, second, mean, p):
        return Comparison("crime", "hit@10", first, second, Interval(mean, mean - 1, mean + 1), p, p, 0.1)

    assert (
        distinguishable_winners([row("a", "b", 0.1, 0.01), row("a", "c", 0.1, 0.2), row("b", "c", -0.1, 0.9)]) == set()
    )
    beaten = [row("a", "b", -0.1, 0.01), row("a", "c", 0.1, 0.2), row("b", "c", 0.1, 0.01)]
    assert distinguishable_winners(beaten) == {("crime", "hit@10", "b")}
    assert (
        distinguishable_winners([row("a", "b", 0.1, 0.01), row("b", "c", 0.1, 0.01)]) == set()
    )  # a was not held against c


def test_one_person_in_two_domains_is_one_unit():
    """Differences that are the same twice carry half the information that the tests without persons would see."""
    difference_U = torch.tensor([1.0, 1.0, -0.5, 1.0, 0.0, 1.0, -1.0, 0.5], dtype=torch.float64)
    first, second = {"a": difference_U, "b": difference_U}, {"a": 0 * difference_U, "b": 0 * difference_U}
    keys = [f"u{number}" for number in range(8)]
    once = paired_permutation_test(difference_U, 0 * difference_U, torch.Generator().manual_seed(0), 20_000)
    apart = paired_permutation_test(first, second, torch.Generator().manual_seed(0), 20_000)
    same = {"a": keys, "b": keys}
    together = paired_permutation_test(first, second, torch.Generator().manual_seed(0), 20_000, persons=same)
    assert together == pytest.approx(once, abs=0.01)
    assert apart < 0.6 * together
    strangers = {"a": keys, "b": [f"v{number}" for number in range(8)]}
    none = paired_permutation_test(first, second, torch.Generator().manual_seed(0), 20_000, persons=strangers)
    assert none == pytest.approx(apart, abs=0.01)
    with pytest.raises(ValueError, match="got 3 persons for 8 users of b"):
        paired_permutation_test(first, second, torch.Generator(), 10, persons={"a": keys, "b": keys[:3]})


def test_intervals_of_shared_persons_are_wider():
    generator = torch.Generator().manual_seed(5)
    place_U = torch.randint(0, 20, (1, 200), generator=generator)
    keys = [f"u{number}" for number in range(200)]
    positions = {"a": place_U, "b": place_U}
    apart = metric_intervals(positions, torch.Generator().manual_seed(0))
    together = metric_intervals(positions, torch.Generator().manual_seed(0), persons={"a": keys, "b": keys})
    widths = [one["macro"]["hit@10"].high - one["macro"]["hit@10"].low for one in (apart, together)]
    assert widths[1] / widths[0] == pytest.approx(2**0.5, rel=0.1)
    assert together["macro"]["hit@10"].mean == apart["macro"]["hit@10"].mean
    assert together["a"] == apart["a"]


def test_one_person_in_two_domains_of_unequal_size_widens_no_interval():
    """How many users a domain happens to draw is no part of its mean."""
    generator = torch.Generator().manual_seed(5)
    sizes = {"a": 50, "b": 500, "c": 1250}
    positions = {name: torch.randint(0, 20, (1, size), generator=generator) for name, size in sizes.items()}
    users = {name: [f"{name}{number}" for number in range(size)] for name, size in sizes.items()}
    apart = metric_intervals(positions, torch.Generator().manual_seed(0))
    one = {**users, "b": ["a0", *users["b"][1:]]}
    together = metric_intervals(positions, torch.Generator().manual_seed(0), persons=one)
    for metric in ("hit@10", "ndcg@10"):
        widths = [found["macro"][metric].high - found["macro"][metric].low for found in (apart, together)]
        assert widths[1] / widths[0] == pytest.approx(1.0, abs=0.08), metric
        assert together["macro"][metric].mean == apart["macro"][metric].mean


def test_many_tests_raise_the_number_of_permutations():
    """Forty tests at ten permutations could never be significant after Holm."""
    positions = {"low": {"a": torch.full((60,), 30), "b": torch.full((60,), 30)}}
    positions |= {f"m{number}": {"a": torch.arange(60) % 3, "b": torch.arange(60) % 2} for number in range(4)}
    found = compare_table(positions, torch.Generator().manual_seed(0), num_resamples=20)
    assert len(found) == 60
    assert all(one.distinguishable() for one in found if "low" in (one.first, one.second))


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
