"""Statistics: hand numbers, coverage, degenerate cases; choices within their standard error move nothing."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedecider.evaluation.statistics import (
    ONE_SIDED,
    Comparison,
    Interval,
    clearly_above,
    clearly_best,
    compare_table,
    distinguishable_winners,
    effect_size,
    holm,
    mean_interval,
    paired_difference,
    table_intervals,
    two_levels,
    verdict,
)

RUNS = torch.tensor([[0.5, 0.1, 0.3, -0.1], [0.7, 0.1, 0.5, 0.3], [0.9, 0.4, 0.7, 0.4]], dtype=torch.float64)
"""By hand: means of runs .2, .4, .6, of users .7, .2, .5, .2; residuals 0 but four of .1, so MS_res = .04 / 6.
a = .06 / 4 = .015, b = .04 / 3 - .04 / 6 / 12 = .0127778, a + b = 1 / 36, nu = 4.92611."""


def metric_intervals(positions, **options):
    """Of a table with one row."""
    return table_intervals({"": positions}, **options)[""]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_runs_and_users_by_hand():
    interval, p_value, seed_share = paired_difference(RUNS, 0 * RUNS)
    nu = (1 / 36) ** 2 / (0.015**2 / 3 + (0.04 / 3 - 0.04 / 72) ** 2 / 2)
    assert nu == pytest.approx(4.92611, abs=1e-5)
    assert interval == pytest.approx((0.4, *stats.t.interval(0.95, nu, 0.4, 1 / 6)))
    assert interval.low < 0 < 0.8 < interval.high, "by 1.96 errors it would be .07 to .73"
    assert p_value == pytest.approx(2 * stats.t.sf(0.4 * 6, nu))
    assert seed_share == pytest.approx(0.0127778 * 36, abs=1e-6)
    back = paired_difference(0 * RUNS, RUNS)
    assert back.interval == pytest.approx((-interval.mean, -interval.high, -interval.low))
    assert back[1:] == pytest.approx((p_value, seed_share))


def test_two_domains_and_their_runs_by_hand():
    """The other domain: users +-.1, runs as far apart but turned round: the macro mean has no part of theirs."""
    level = torch.tensor([[0.7], [0.5], [0.3]], dtype=torch.float64)
    other = level + torch.tensor([[0.1, -0.1, 0.1, -0.1, 0.1, -0.1]], dtype=torch.float64)
    interval, p_value, seed_share = paired_difference({"a": RUNS, "b": other}, {"a": 0 * RUNS, "b": 0 * other})
    own = (0.015 / 4, 0.06 / 5 / 6 / 4)
    nu = sum(own) ** 2 / (own[0] ** 2 / 3 + own[1] ** 2 / 5)
    assert interval == pytest.approx((0.45, *stats.t.interval(0.95, nu, 0.45, sum(own) ** 0.5)))
    assert p_value == pytest.approx(2 * stats.t.sf(0.45 / sum(own) ** 0.5, nu))
    assert seed_share == 0.0
    along = paired_difference({"a": RUNS, "b": other.flip(0)}, {"a": 0 * RUNS, "b": 0 * other})
    seeds = 0.04 / 3 - 0.04 / 72 / 4  # the runs' macro means are .25, .45, .65
    assert along.seed_share == pytest.approx(seeds / (seeds + sum(own)))


def test_one_run_is_the_paired_t_test():
    first, second = (torch.rand(23, generator=generator(seed), dtype=torch.float64) for seed in (1, 2))
    interval, p_value, seed_share = paired_difference(first, second)
    outside = stats.ttest_rel(first, second)
    assert p_value == pytest.approx(outside.pvalue, rel=1e-9)
    assert (interval.low, interval.high) == pytest.approx(tuple(outside.confidence_interval(0.95)), rel=1e-9)
    assert seed_share == 0.0
    assert paired_difference(first[None], second[None]).interval == interval


def tables(size, sigma_seed, sigma_residual=0.5, num_seeds=3, num_users=100):
    """(M, S, U) tables of mean 0, users of standard deviation 1."""
    draw, shape = generator(3), (size, num_seeds, num_users)
    parts = ((sigma_seed, (size, num_seeds, 1)), (1.0, (size, 1, num_users)), (sigma_residual, shape))
    return sum(sigma * torch.randn(part, generator=draw, dtype=torch.float64) for sigma, part in parts)


def half_widths(value_MSU):
    parts = two_levels({"": value_MSU})
    quantile = torch.from_numpy(stats.t.ppf(0.975, parts.freedom_M))
    return parts.mean_M, quantile * (parts.users_M + parts.seeds_M).sqrt()


def test_intervals_of_three_runs_cover_the_truth():
    mean_M, half_M = half_widths(tables(400, sigma_seed=0.15))
    assert 0.92 <= float((mean_M.abs() <= half_M).double().mean()) <= 0.98
    _, users_only_M = half_widths(tables(400, sigma_seed=0.15).mean(1, keepdim=True))
    assert float((mean_M.abs() <= users_only_M).double().mean()) < 0.9


def test_runs_that_do_not_differ_cost_little():
    values = tables(400, sigma_seed=0.0)
    (_, half_M), (_, users_only_M) = half_widths(values), half_widths(values.mean(1, keepdim=True))
    assert 1.0 <= float((half_M / users_only_M).mean()) < 1.1


def test_the_interval_of_a_metric_stays_in_its_range():
    hit_U = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])
    interval = mean_interval(hit_U)
    assert interval == pytest.approx((0.125, 0.0, 0.125 + stats.t.ppf(0.975, 7) * 0.125))
    assert mean_interval(1 - hit_U).high == 1.0
    low, high = stats.t.interval(0.8, 7, 0.125, 0.125)
    assert mean_interval(hit_U, level=0.8) == pytest.approx((0.125, max(low, 0.0), high))
    with pytest.raises(ValueError, match="got values from -1"):
        mean_interval(-hit_U)
    with pytest.raises(ValueError, match="at least one user"):
        mean_interval(hit_U[:0])


def test_a_single_user_says_nothing():
    one = torch.tensor([1.0])
    assert mean_interval(one) == (1.0, 0.0, 1.0)
    assert paired_difference(one, 0 * one) == ((1.0, -1.0, 1.0), 1.0, 0.0)
    many = torch.tensor([1.0, 0.5, 0.9])
    zeros = {"a": 0 * many, "b": 0 * one}
    assert paired_difference({"a": many, "b": one}, zeros)[:2] == ((pytest.approx(0.9), -1.0, 1.0), 1.0)
    same = {"a": ["u1", "u2", "u3"], "b": ["u1"]}
    assert paired_difference({"a": many, "b": one}, zeros, same)[:2] == ((pytest.approx(0.9), -1.0, 1.0), 1.0)


def test_differences_that_are_all_equal():
    """By the chance that so many signs agree; 0.3 - 0.1 is no round number."""
    third, tenth = torch.full((2, 6), 0.3, dtype=torch.float64), torch.full((2, 6), 0.1, dtype=torch.float64)
    interval, p_value, seed_share = paired_difference(third, tenth)
    assert (interval.low, interval.high) == (interval.mean, interval.mean) == pytest.approx((0.2, 0.2))
    assert (p_value, seed_share) == (1 / 32, 0.0)
    assert paired_difference(third, third) == ((0.0, 0.0, 0.0), 1.0, 0.0)
    turned = paired_difference({"a": third, "b": tenth}, {"a": tenth, "b": third})
    assert turned.p_value == 1.0
    runs = torch.tensor([[0.1], [0.2], [0.3]]).expand(3, 6)  # only runs differ
    assert paired_difference(runs, 0 * runs).p_value == pytest.approx(stats.ttest_1samp([0.1, 0.2, 0.3], 0).pvalue)
    assert paired_difference(runs, 0 * runs).seed_share == pytest.approx(1.0)


def test_p_values_are_uniform_under_the_null():
    shared_MU = torch.rand(300, 1, 60, generator=generator(4), dtype=torch.float64)
    first, second = (shared_MU + 0.3 * torch.randn(300, 1, 60, generator=generator(seed)) for seed in (5, 6))
    p_values = [paired_difference(one[0], other[0]).p_value for one, other in zip(first, second, strict=True)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.001
    assert sum(p < 0.05 for p in p_values) / 300 == pytest.approx(0.05, abs=0.03)


def test_macro_weights_each_domain_once():
    # the small domain carries the whole effect; pooled over users it would drown in the large one's noise
    big = torch.zeros(4000)
    small = torch.ones(12)
    noise = torch.randn(4000, generator=generator(9)) * 0.1
    p_value = paired_difference({"a": big + noise, "b": small}, {"a": big, "b": small * 0}).p_value
    assert p_value < 0.005


def test_seeds_are_averaged_before_the_test():
    first = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    second = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
    assert paired_difference(first, second).p_value == 1.0
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
    found = metric_intervals(positions)
    assert list(found) == ["crime", "comics", "macro"]
    assert found["crime"]["hit@10"].mean == pytest.approx(4 / 6)
    assert found["macro"]["hit@10"].mean == pytest.approx((4 / 6 + 1) / 2)
    assert found["comics"]["ndcg@10"] == pytest.approx((1 / math.log2(9),) * 3)
    # users of crime 1, .5, .5: variance 1/12, a quarter of a third of it in the macro mean; the runs are alike
    assert found["macro"]["hit@10"].low == pytest.approx(5 / 6 - stats.t.ppf(0.975, 2) / 12)
    assert found["macro"]["hit@10"].high == 1.0
    with pytest.raises(ValueError, match="same number"):
        metric_intervals({"crime": torch.zeros(2, 3), "comics": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match="no domain"):
        metric_intervals({})


def test_rows_of_a_table_keep_their_order_whatever_their_runs():
    draw = generator(5)
    rows = {name: {"crime": torch.randint(0, 30, (runs, 40), generator=draw)} for name, runs in (("b", 2), ("a", 1))}
    rows["a"]["crime"][0, 1:] = 30
    found = table_intervals(rows)
    assert list(found) == ["b", "a"]
    assert found["a"] == metric_intervals(rows["a"])
    assert {one.low for of_scope in found["a"].values() for one in of_scope.values()} == {0.0}
    hit_SU = (rows["b"]["crime"] < 10).double()
    assert found["b"]["crime"]["hit@10"] == found["b"]["macro"]["hit@10"] == mean_interval(hit_SU)


def table_of_three(num_users=400):
    base = torch.randint(0, 40, (num_users,), generator=generator(11))
    twin = torch.where(torch.arange(num_users) % 20 == 0, base.flip(0), base)
    best = torch.where(torch.arange(num_users) % 4 == 0, 0, base)
    return {
        name: {"crime": p, "comics": p[:300]} for name, p in (("local", base), ("fedavg", twin), ("fedecider", best))
    }


def test_compare_table_finds_the_winner_and_says_so():
    rows = compare_table(table_of_three())
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
    alone = compare_table(table_of_three(), pairs=[("local", "fedecider")])
    assert [row._replace(p_holm=0.0) for row in alone] == [
        row._replace(p_holm=0.0) for row in rows if (row.first, row.second) == ("local", "fedecider")
    ]
    gain = paired_difference(*((table_of_three()[name]["crime"] < 10).double() for name in ("local", "fedecider")))
    assert (by_key["crime", "hit@10", "local", "fedecider"].difference, win.p_value > 0) == (gain.interval, True)


def test_tests_of_a_table_are_those_of_its_values_corrected_together():
    table = {name: {domain: p[:60] for domain, p in of.items()} for name, of in table_of_three().items()}
    keys = [f"u{number}" for number in range(60)]
    rows = compare_table(table, ["hit@10"], persons=dict.fromkeys(("crime", "comics"), keys))
    assert [row.p_holm for row in rows] == holm([row.p_value for row in rows])
    assert any(row.p_holm > row.p_value for row in rows)
    macro = next(row for row in rows if (row.domain, row.second) == ("macro", "fedecider"))
    hits = [{domain: (p < 10).double() for domain, p in table[name].items()} for name in ("local", "fedecider")]
    alone = paired_difference(hits[0]["crime"], hits[1]["crime"])  # of the same 60 persons in both domains
    assert macro.difference == pytest.approx(alone.interval)
    assert macro.p_value > 10 * paired_difference(*hits).p_value


def test_what_is_compared_is_named():
    table = table_of_three()
    assert {row.domain for row in compare_table(table)} == {"crime", "comics", "macro"}
    assert {row.domain for row in compare_table(table, each_domain=False)} == {"macro"}
    single = {name: {"crime": of["crime"]} for name, of in table.items()}
    assert {row.domain for row in compare_table(single)} == {"crime"}
    assert {row.domain for row in compare_table(single, each_domain=False)} == {"crime"}


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
    once, apart = paired_difference(difference_U, 0 * difference_U), paired_difference(first, second)
    together = paired_difference(first, second, {"a": keys, "b": keys})
    assert together.interval == pytest.approx(once.interval)
    assert together.p_value == pytest.approx(once.p_value)
    assert apart.p_value < 0.6 * together.p_value
    turned = {"a": first["a"], "b": first["b"].flip(0)}
    assert paired_difference(turned, second, {"a": keys, "b": keys[::-1]}).p_value == pytest.approx(once.p_value)
    strangers = paired_difference(first, second, {"a": keys, "b": [f"v{number}" for number in range(8)]})
    assert strangers.p_value == pytest.approx(apart.p_value, rel=0.25)  # of one mean, not of two
    with pytest.raises(ValueError, match="got 3 persons for 8 users of b"):
        paired_difference(first, second, {"a": keys, "b": keys[:3]})


def test_runs_of_shared_persons_are_seeds_as_without():
    draw, keys = generator(8), [f"u{number}" for number in range(40)]
    values = {name: torch.rand(3, 40, generator=draw) + torch.tensor([[0.0], [0.2], [0.6]]) for name in "ab"}
    zeros = {name: 0 * value for name, value in values.items()}
    apart = two_levels({name: value[None] for name, value in values.items()})
    together = two_levels({name: value[None].double() for name, value in values.items()}, dict.fromkeys("ab", keys))
    assert together.seeds_M.item() == pytest.approx(apart.seeds_M.item(), rel=0.01)
    assert together.seeds_M.item() == pytest.approx(0.28 / 3 / 3, rel=0.2)
    assert paired_difference(values, zeros, dict.fromkeys("ab", keys)).seed_share > 0.9


def test_intervals_of_shared_persons_are_wider():
    place_U = torch.randint(0, 20, (1, 200), generator=generator(5))
    keys = [f"u{number}" for number in range(200)]
    positions = {"a": place_U, "b": place_U}
    apart, together = metric_intervals(positions), metric_intervals(positions, persons={"a": keys, "b": keys})
    widths = [one["macro"]["hit@10"].high - one["macro"]["hit@10"].low for one in (apart, together)]
    assert widths[1] / widths[0] == pytest.approx(2**0.5, rel=0.01)
    assert together["macro"]["hit@10"].mean == apart["macro"]["hit@10"].mean
    assert together["a"] == apart["a"]


def test_one_person_in_two_domains_of_unequal_size_widens_no_interval():
    """How many users a domain happens to have is no part of its mean."""
    draw = generator(5)
    sizes = {"a": 50, "b": 500, "c": 1250}
    positions = {name: torch.randint(0, 20, (1, size), generator=draw) for name, size in sizes.items()}
    users = {name: [f"{name}{number}" for number in range(size)] for name, size in sizes.items()}
    apart = metric_intervals(positions)
    together = metric_intervals(positions, persons={**users, "b": ["a0", *users["b"][1:]]})
    for metric in ("hit@10", "ndcg@10"):
        widths = [found["macro"][metric].high - found["macro"][metric].low for found in (apart, together)]
        assert widths[1] / widths[0] == pytest.approx(1.0, abs=0.03), metric
        assert together["macro"][metric].mean == apart["macro"][metric].mean


ZERO = np.zeros(4)


def test_by_hand():
    """Differences 1, 0, 0, 1 of four users: mean .5, variance 1/3, error sqrt(1/12) = .289."""
    first_U = np.array([1.0, 0.0, 0.0, 1.0])
    assert clearly_above([first_U], [ZERO])
    assert not clearly_above([ZERO], [first_U])
    assert not clearly_above([np.array([1.0, -1.0, 0.0, 0.5])], [ZERO])  # mean .125, error .427


def test_a_choice_is_wrong_in_one_case_of_twenty():
    """Deviations .3, .1, -.1, -.3: error sqrt(.2 / 3 / 4) = .129, with 4 for 3 .112; 1.645 errors are .2124."""
    around_U = np.array([0.3, 0.1, -0.1, -0.3])
    assert clearly_above([around_U + 0.22], [ZERO], ONE_SIDED)
    assert not clearly_above([around_U + 0.205], [ZERO], ONE_SIDED)  # 1.59 errors, of the divisor 4 1.83
    assert not clearly_above([around_U + 0.17], [ZERO], ONE_SIDED)  # 1.32 errors
    assert stats.norm.cdf(ONE_SIDED) == pytest.approx(0.95, abs=1e-4)


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
