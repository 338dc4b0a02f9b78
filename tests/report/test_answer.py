"""The answer: what is recommended in every case, by which interval, and what each of its lines says."""

import math

import pytest

from fedecider.report.answer import Evidence, answer_of, best_rule, difference, sings
from fedecider.report.conclusion import conclusion

RULES = ("popularity", "item-kNN")
COMPANIES = {"north": 600, "south": 400}


def values(mean, width=0.01):
    return {metric: {"mean": mean, "low": mean - width, "high": mean + width} for metric in ("hit@10", "ndcg@10")}


def paired(first, second, mean, low, high, domain="macro", metric="hit@10"):
    gain = {"mean": mean, "low": low, "high": high}
    return {"domain": domain, "metric": metric, "first": first, "second": second, "difference": gain}


GAIN = paired("ours", "alone", 0.017, 0.006, 0.027)
KNN = paired("ours", "item-kNN", 0.03, 0.01, 0.05)
BEFORE = paired("ours", "before", -0.1, -0.2, -0.01)


def evidence(*tests, **changes):
    rows = {"ours": values(0.155), "alone": values(0.138), "popularity": values(0.05), "item-kNN": values(0.125)}
    known = {"alone": "alone", "customers": COMPANIES, "chance": 0.003, "seed_gains": (0.016, 0.018, 0.017), **changes}
    return Evidence("ours", rows, RULES, "strict", "macro", tests or (GAIN, KNN), **known)


@pytest.mark.parametrize(
    ("tests", "changes", "recommendation", "first"),
    [
        ((GAIN, KNN), {}, "join", "Join: "),
        ((paired("alone", "ours", -0.017, -0.027, -0.006), KNN), {}, "join", "Join: "),
        ((paired("ours", "alone", 0.017, 0.0, 0.027), KNN), {}, "not clear", "Not clear: "),
        ((paired("ours", "alone", 0.017, 1e-6, 0.027), KNN), {}, "join", "Join: "),
        ((paired("ours", "alone", -0.01, -0.02, -0.001), KNN), {}, "do not join", "Do not join: each company alone"),
        ((paired("ours", "alone", 0.0, -0.001, 0.0019), KNN), {}, "do not join", "Do not join: the gain is at most"),
        ((paired("ours", "alone", 0.0, -0.001, 0.0021), KNN), {}, "not clear", "Not clear: "),
        ((GAIN, paired("ours", "item-kNN", -0.02, -0.03, -0.01)), {}, "do not join", "Do not join: item-kNN, which"),
        ((GAIN, paired("ours", "item-kNN", -0.02, -0.03, 0.01)), {}, "join", "Join: "),
        ((GAIN, KNN), {"planted": True}, "no answer", "No advice: the data are synthetic"),
        ((GAIN, KNN), {"nothing_common": ["No two share one."]}, "do not join", "Do not join: No two share one"),
        ((KNN,), {}, "no answer", "No answer: ours was not tested against alone"),
        ((paired("ours", "alone", math.nan, None, None),), {}, "no answer", "No answer: ours was not tested"),
        ((KNN,), {"alone": ""}, "use", "Use ours: it is better than item-kNN"),
        ((paired("ours", "item-kNN", -0.1, -0.2, -0.01),), {"alone": ""}, "do not use", "Do not use ours: item-kNN"),
        ((GAIN, BEFORE), {"before_rounds": {"before": "of before"}}, "do not join", "Do not join: before"),
    ],
)  # fmt: skip
def test_the_recommendation_in_every_case(tests, changes, recommendation, first):
    said = answer_of(evidence(*tests, **changes))
    assert said.recommendation == recommendation
    assert said.lines[0].startswith(first)
    assert conclusion(evidence(*tests, **changes)).answer == said


def test_a_leak_and_a_result_that_is_no_number_allow_no_answer():
    assert answer_of(evidence()._replace(protocol="paper")).recommendation == "no answer"
    broken = evidence()
    assert answer_of(broken._replace(rows={**broken.rows, "ours": values(math.nan)})).recommendation == "no answer"
    assert answer_of(evidence(KNN, alone="")._replace(simple=())).recommendation == "no answer"


def test_the_gain_in_points_in_customers_and_company_by_company():
    north, south = (
        paired("ours", "alone", 0.03, 0.01, 0.05, "north"),
        paired("ours", "alone", 0.004, -0.02, 0.03, "south"),
    )
    said = answer_of(evidence(GAIN, KNN, north, south)).lines[1]
    for part in ("hit@10 +1.7 [+0.6, +2.7] over 13.8 alone", "about 17 more of 1,000 customers", "3 training runs"):
        assert part in said
    assert "3 training runs" in said
    assert "opposite" not in said
    assert "north +3.0 [+1.0, +5.0]" in said
    assert "not significant: south +0.4 [-2.0, +3.0]" in said
    none = paired("ours", "alone", 0.0, -0.01, 0.01, "south")
    assert "south +0.0 [-1.0, +1.0], below the mean" in answer_of(evidence(GAIN, KNN, north, none)).lines[1]
    many = {f"s{n}": 100 for n in range(8)}
    each = [paired("ours", "alone", 0.03, 0.01 if n < 2 else -0.01, 0.05, f"s{n}") for n in range(8)]
    each[7] = paired("ours", "alone", -0.03, -0.05, -0.01, "s7")
    assert "Of 8 companies 2 gain significantly and 1 lose" in answer_of(evidence(GAIN, *each, customers=many)).lines[1]


def test_training_runs_that_differ_in_sign_are_said():
    assert "one training run" in answer_of(evidence(seed_gains=(0.017,))).lines[1]
    assert (
        "3 training runs, 1 of them with the opposite sign"
        in answer_of(evidence(seed_gains=(0.03, -0.01, 0.03))).lines[1]
    )


UNCLEAR = paired("ours", "alone", 0.01, -0.01, 0.03)


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({"seed_gains": (0.01,)}, "--seeds 3"),
        ({"seed_gains": (0.01,), "drawn": "drawn: 100 of 900 customers"}, "without --minutes"),
        ({"seed_share": 0.8}, "--seeds 10"),
        ({"seed_share": 0.1}, "4.0 times as many customers"),
        ({"party": "site"}, "fedecider deploy collect"),
        ({"party": "server", "seed_gains": (0.01,)}, "4.0 times as many customers"),
    ],
)
def test_what_is_not_clear_names_what_would_make_it_clear(changes, command):
    said = answer_of(evidence(UNCLEAR, KNN, **changes))
    assert said.recommendation == "not clear"
    assert command in said.lines[0]


@pytest.mark.parametrize("ends", [(-0.001, -0.01, 0.008), (0.002, -0.008, 0.012)])
def test_nothing_speaks_for_it_where_the_mean_is_not_far_enough_above_zero(ends):
    said = answer_of(evidence(paired("ours", "alone", *ends), KNN)).lines[0]
    assert "times as many" not in said
    assert "keep what each company has" in said


def test_doubts_are_reasons_to_doubt_or_there_are_none():
    assert list(answer_of(evidence()).doubts) == []
    assert list(answer_of(evidence(alarms=["The canary sings."])).doubts) == ["The canary sings."]
    assert "sampled candidates" in answer_of(evidence()._replace(protocol="strict/sampled99")).doubts[0]
    assert "guessing scores 60.0 of 100" in answer_of(evidence(chance=0.6)).doubts[0]


def test_a_canary_sings_only_far_above_chance():
    assert not sings({"mean": 0.067, "low": 0.035}, 0.034), "2 standard errors: one in forty by chance"
    assert sings({"mean": 0.1, "low": 0.08}, 0.034)
    assert not sings({"mean": 0.0, "low": 0.0}, 0.034)


def test_differences_are_read_in_either_order_and_of_one_company():
    known = evidence(paired("alone", "ours", -0.017, -0.027, -0.006), paired("ours", "alone", 0.1, 0.0, 0.2, "north"))
    assert difference(known, "ours", "alone") == {"mean": 0.017, "low": 0.006, "high": 0.027}
    assert difference(known, "ours", "alone", "north")["mean"] == 0.1
    assert difference(known, "ours", "alone", "south") is None


def test_the_hardest_rule_is_the_one_that_is_named():
    assert best_rule(evidence()) == "item-kNN"
    assert best_rule(evidence()._replace(simple=("popularity", "not there"))) == "popularity"
    assert best_rule(evidence()._replace(simple=())) is None


def test_the_row_that_one_would_switch_on_is_marked():
    table = conclusion(evidence()).table
    assert [row[0].startswith("▶") for row in table.rows] == [True, False, False]
    assert [row[3] for row in table.rows] == ["", "+1.7 [+0.6, +2.7]", "+3.0 [+1.0, +5.0]"]
