"""The first words of a page, for results that are better, level, worse, mixed, alone, missing or not to be believed."""

import math

import pytest

from fedecider.report.conclusion import Evidence, best_of, conclusion

RULES = ("popularity", "text neighbours + counts")


def values(mean, width=0.01):
    return {metric: {"mean": mean, "low": mean - width, "high": mean + width} for metric in ("hit@10", "ndcg@10")}


def paired(first, second, mean, p_holm, metric="hit@10"):
    difference = {"mean": mean, "low": mean - 0.005, "high": mean + 0.005}
    return {"metric": metric, "first": first, "second": second, "difference": difference, "p_holm": p_holm}


def both(first, second, mean, p_holm):
    return [paired(first, second, mean, p_holm, metric) for metric in ("hit@10", "ndcg@10")]


TESTED = both("ours", RULES[1], 0.026, 0.01)


def evidence(model=0.159, rule=0.133, tests=(), **changes):
    rows = {"ours": values(model), "popularity": values(0.05), "text neighbours + counts": values(rule)}
    known = {"num_seeds": 3, "num_clients": 3, "chance": 0.003, **changes}
    return Evidence(**{"subject": "ours", "rows": rows, "simple": RULES, "protocol": "strict", "tests": tests, **known})


def test_better_tested_and_without_reservations():
    said = conclusion(evidence(tests=TESTED), ["It ran."])
    assert said.answer.startswith("By these numbers, yes")
    for number in ("15.9 [14.9, 16.9]", "(text neighbours + counts) for 13.3 [12.3, 14.3]", "guessing for 0.3"):
        assert number in said.paragraphs[0]
    assert "+2.6 of 100 users [+2.1, +3.1] is more than chance" in said.paragraphs[1]
    assert said.paragraphs[2] == "It ran."
    assert said.reservations == []
    assert conclusion(evidence(tests=both(RULES[1], "ours", -0.026, 0.01))) == conclusion(evidence(tests=TESTED))


SPLIT = [paired("ours", RULES[1], 0.026, 0.01), paired("ours", RULES[1], -0.02, 0.01, "ndcg@10")]


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"tests": both("ours", RULES[1], 0.026, 0.2)}, "There is no reason to"),
        ({"model": 0.1, "tests": both("ours", RULES[1], -0.033, 0.01)}, "No: it is worse than text neighbours"),
        ({"tests": SPLIT}, "There is no clear answer"),
        ({"tests": [paired("ours", RULES[1], 0.026, 0.2), SPLIT[1]]}, "No: it is worse than text neighbours"),
        ({"tests": [SPLIT[0], paired("ours", RULES[1], 0.01, 0.3, "ndcg@10")]}, "By these numbers, yes"),
        ({"model": 0.135}, "There is no answer yet"),
        ({"model": 0.05}, "No: it is worse than text neighbours"),
        ({"simple": ()}, "Cannot be said"),
        ({"model": math.nan}, "No: the result of ours is not a number."),
        ({"rule": math.nan, "model": 0.2, "tests": both("ours", "popularity", 0.15, 0.01)}, "By these numbers, yes"),
        ({}, "Perhaps: it is better than text neighbours"),
        ({"num_seeds": 1}, "Perhaps: it is better than text neighbours"),
        ({"planted": True, "model": 0.05}, "Cannot be said: the data are planted. On them, no: it is worse"),
        ({"protocol": "paper"}, "Cannot be said: the protocol paper leaks"),
    ],
)
def test_the_answer_in_every_case(changes, answer):
    assert conclusion(evidence(**changes)).answer.startswith(answer)


def test_the_hardest_rule_is_the_one_that_is_named():
    assert best_of(evidence()) == "text neighbours + counts"
    assert best_of(evidence(rule=0.01)) == "popularity"
    assert best_of(evidence(rule=math.nan)) == "popularity"
    assert best_of(evidence(simple=("not there",))) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_seeds": 1}, "One seed"),
        ({"num_seeds": 2}, "2 seeds"),
        ({"num_clients": 1}, "One client"),
        ({"planted": True}, "The data are planted:"),
        ({"protocol": "strict/sampled99"}, "Not the strict protocol"),
        ({"protocol": "strict/keep_seen"}, "Not the strict protocol"),
        ({"alarms": ["The canary sings."]}, "The canary sings."),
        ({"valid": {"ours": 0.12, RULES[1]: 0.14}}, "Validation and test disagree"),
        ({"chance": 0.6}, "So few items are left to rank that guessing finds 60.0"),
    ],
)
def test_every_reservation_is_said_and_turns_yes_into_perhaps(changes, said):
    found = conclusion(evidence(tests=TESTED, **changes))
    assert [line.startswith(said) for line in found.reservations] == [True]
    assert not found.answer.startswith("By these numbers")


@pytest.mark.parametrize("field", ["without_exchange", "before_rounds"])
@pytest.mark.parametrize(
    ("hit", "ndcg", "answer", "held"),
    [
        ((0.02, 0.01), (0.02, 0.01), "By these numbers, yes: it is better than text neighbours", None),
        ((0.02, 0.01), (0.02, 0.3), "By these numbers, yes: it is better than text neighbours", None),
        ((0.02, 0.3), (0.02, 0.3), "Perhaps: it is better than text", "It is not distinguishable from the other (it):"),
        ((0.02, 0.01), (-0.02, 0.01), "Perhaps: it is better than text", "By one metric it is better than the other"),
        ((-0.02, 0.3), (-0.02, 0.01), "No: the other (it) is better, so the ", "It is worse than the other (it)."),
        ((-0.02, 0.01), (-0.02, 0.01), "No: the other (it) is better, so the ", "It is worse than the other (it)."),
        (None, None, "Perhaps: it is better than text", "No paired test with the other (it) was made, and the int"),
    ],
)
def test_who_trained_alone_and_what_was_there_before_the_rounds_must_be_beaten(field, hit, ndcg, answer, held):
    tests = both("ours", RULES[1], 0.026, 0.01)
    for metric, found in (("hit@10", hit), ("ndcg@10", ndcg)):
        tests += [paired("ours", "it", *found, metric)] if found else []
    known = evidence(rows={**evidence().rows, "it": values(0.16)}, tests=tests, **{field: {"it": "the other"}})
    said = conclusion(known)
    assert said.answer.startswith(answer)
    assert [line.startswith(held) for line in said.reservations] == ([True] if held else [])
    assert "Beside it: the other, 16.0 (" in said.paragraphs[-1]
    if answer.startswith("No"):
        harm = "the federation" if field == "without_exchange" else "the training"
        assert said.answer == f"No: the other (it) is better, so {harm} does harm."
    planted = conclusion(known._replace(planted=True)).answer
    assert planted.startswith(
        f"Cannot be said: the data are planted. On them, {'no: the other' if 'No' in answer else 'it is'}"
    )
    assert conclusion(known._replace(rows=evidence().rows)).reservations == [], "no such row, nothing to say"


def test_domains_that_go_the_other_way_are_named():
    crime = {"ours": values(0.2), "popularity": values(0.05), RULES[1]: values(0.1)}
    comics = {"ours": values(0.1), "popularity": values(0.15), RULES[1]: values(0.12)}
    (above,) = conclusion(evidence(domains={"crime": crime, "comics": comics}, tests=TESTED)).reservations
    assert "comics (10.0 against 15.0 of popularity)" in above
    worse = both("ours", RULES[1], -0.033, 0.01)
    (below,) = conclusion(evidence(model=0.1, tests=worse, domains={"crime": crime, "comics": comics})).reservations
    assert "crime (20.0 against 10.0 of text neighbours + counts)" in below
    broken = {**comics, "ours": values(math.nan)}
    assert conclusion(evidence(domains={"crime": crime, "comics": broken}, tests=TESTED)).reservations == []
