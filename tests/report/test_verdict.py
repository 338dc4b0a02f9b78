"""The first words of a page, for results that are better, level, worse, mixed, alone, missing or not to be believed."""

import math

import pytest

from fedecider.report.conclusion import Evidence, best_of, conclusion, side
from fedecider.report.joining import (
    DIFFERENCE,
    difference_row,
    joining_of_sites,
    joining_rows,
    joining_sentences,
    without_rows,
    without_sentences,
)

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
    said = conclusion(evidence(tests=both("ours", "text neighbours + counts", 0.026, 0.01)), ["It ran."])
    assert said.question == "Would one switch ours on?"
    assert said.answer == "By these numbers, yes: it is better than text neighbours + counts, the best simple rule."
    assert said.paragraphs == [
        "ours ranks the item that a user took next into the first ten for 15.9 [14.9, 16.9] of 100 users; the best "
        "simple rule (text neighbours + counts) for 13.3 [12.3, 14.3] of 100; guessing for 0.3 (hit@10, with 95 % "
        "intervals).",
        "The difference of +2.6 of 100 users [+2.1, +3.1] is more than chance (paired permutation test, Holm p = "
        "0.01).",
        "It ran.",
    ]
    assert said.reservations == []


def test_a_test_that_names_the_rows_the_other_way_round_says_the_same():
    turned = conclusion(evidence(tests=both("text neighbours + counts", "ours", -0.026, 0.01)))
    assert turned == conclusion(evidence(tests=both("ours", "text neighbours + counts", 0.026, 0.01)))


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        (
            {"tests": both("ours", RULES[1], 0.026, 0.2)},
            "There is no reason to: it is not distinguishable from text neighbours + counts, the best simple rule.",
        ),
        (
            {"model": 0.1, "tests": both("ours", RULES[1], -0.033, 0.01)},
            "No: it is worse than text neighbours + counts, which needs no training.",
        ),
        (
            {"tests": [paired("ours", RULES[1], 0.026, 0.01), paired("ours", RULES[1], -0.02, 0.01, "ndcg@10")]},
            "There is no clear answer: it is better than text neighbours + counts by hit@10 and worse than text "
            "neighbours + counts by ndcg@10.",
        ),
        (
            {"tests": [paired("ours", RULES[1], 0.026, 0.2), paired("ours", RULES[1], -0.02, 0.01, "ndcg@10")]},
            "No: it is worse than text neighbours + counts by ndcg@10, which needs no training.",
        ),
        (
            {"tests": [paired("ours", RULES[1], 0.026, 0.01), paired("ours", RULES[1], 0.01, 0.3, "ndcg@10")]},
            "By these numbers, yes: it is better than text neighbours + counts by hit@10, the best simple rule.",
        ),
        (
            {"model": 0.135},
            "There is no answer yet: its interval overlaps with that of text neighbours + counts, the best simple "
            "rule.",
        ),
        ({"model": 0.05}, "No: it is worse than text neighbours + counts, which needs no training."),
        ({"simple": ()}, "Cannot be said: no simple rule stands beside it."),
        ({"model": math.nan}, "No: the result of ours is not a number."),
        (
            {"rule": math.nan, "model": 0.2, "tests": both("ours", "popularity", 0.15, 0.01)},
            "By these numbers, yes: it is better than popularity, the best simple rule.",
        ),
        (
            {},
            "Perhaps: it is better than text neighbours + counts, the best simple rule, with reservations.",
        ),
        (
            {"num_seeds": 1},
            "Perhaps: it is better than text neighbours + counts, the best simple rule, with reservations.",
        ),
        (
            {"planted": True, "model": 0.05},
            "Cannot be said: the data are planted. On them, no: it is worse than text neighbours + counts, which needs "
            "no training.",
        ),
        (
            {"protocol": "paper"},
            "Cannot be said: the protocol paper leaks the held-out item, so no number here counts.",
        ),
    ],
)
def test_the_answer_in_every_case(changes, answer):
    assert conclusion(evidence(**changes)).answer == answer


def test_sentences_of_missing_and_untested_numbers():
    (missing,) = conclusion(evidence(model=math.nan)).paragraphs
    assert missing.startswith("ours has no hit@10: the number is missing or not finite.")
    rows = {"ours": {metric: dict.fromkeys(("mean", "low", "high")) for metric in ("hit@10", "ndcg@10")}}
    assert conclusion(evidence(rows=rows)).answer == "No: the result of ours is not a number."  # as JSON has it
    assert side(evidence(model=math.nan), "ours", "popularity", "hit@10") == "unknown"
    overlap = conclusion(evidence(model=0.135)).paragraphs
    assert "their 95 % intervals overlap, so the difference may be chance." in overlap[1]
    apart = conclusion(evidence()).paragraphs
    assert "No paired test of these two was made; their 95 % intervals do not overlap." in apart
    untested = evidence(tests=both("ours", RULES[1], 0.026, math.nan))
    assert conclusion(untested).paragraphs == apart  # a p that is not a number is no test
    alone = conclusion(evidence(simple=())).paragraphs
    assert "simple rule" not in " ".join(alone)


def test_by_place_is_said_where_it_differs():
    tests = [paired("ours", RULES[1], 0.026, 0.01), paired("ours", RULES[1], 0.01, 0.3, "ndcg@10")]
    assert conclusion(evidence(tests=tests)).paragraphs[2] == (
        "By ndcg@10, which looks at the place too, it is not distinguishable (0.159 against 0.133 of text neighbours + "
        "counts)."
    )


def test_the_hardest_rule_is_the_one_that_is_named():
    assert best_of(evidence()) == "text neighbours + counts"
    assert best_of(evidence(rule=0.01)) == "popularity"
    assert best_of(evidence(rule=math.nan)) == "popularity"
    assert best_of(evidence(simple=("not there",))) is None


def test_rows_beside_it():
    rows = {**evidence().rows, "hybrid without a model": values(0.15), "local": values(0.2), "broken": values(math.nan)}
    tests = [paired("ours", "hybrid without a model", 0.009, 0.03), paired("local", "ours", 0.041, 0.2)]
    beside = {
        "hybrid without a model": "the hybrid without a model",
        "local": "training alone",
        "broken": "a broken one",
        "absent": "nobody",
    }
    said = conclusion(evidence(rows=rows, tests=tests, beside=beside)).paragraphs[-1]
    assert said == (
        "Beside it: the hybrid without a model, 15.0 (less, p = 0.03); training alone, 20.0 (not "
        "distinguishable, p = 0.2); a broken one, not a number."
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_seeds": 1}, "One seed: interval and test are about other users"),
        ({"num_seeds": 2}, "2 seeds: too few"),
        ({"num_clients": 1}, "One client: nothing was exchanged"),
        ({"planted": True}, "The data are planted:"),
        ({"protocol": "strict/sampled99"}, "Not the strict protocol: the item had to be found among 99 sampled"),
        ({"protocol": "strict/keep_seen"}, "Not the strict protocol: items that a user already had"),
        ({"alarms": ["The canary sings."]}, "The canary sings."),
        (
            {"valid": {"ours": 0.12, RULES[1]: 0.14}},
            "Validation and test disagree: on validation items ours has 12.0 and text neighbours + counts 14.0",
        ),
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


def test_a_row_that_must_be_beaten_and_is_no_number_is_said():
    rows = {**evidence().rows, "it": values(math.nan)}
    tests = both("ours", RULES[1], 0.026, 0.01)
    said = conclusion(evidence(rows=rows, tests=tests, without_exchange={"it": "the other"}))
    assert said.reservations == [
        "The result of the other (it) is not a number: whether the exchange helps cannot be said."
    ]
    assert said.answer.startswith("Perhaps")
    alone = conclusion(evidence(tests=tests, without_exchange={"ours": "itself"}))  # the row itself trained alone
    assert (alone.answer[:7], alone.reservations) == ("By thes", [])
    assert conclusion(evidence(rows=rows, simple=(), before_rounds={"ours": "itself"})).answer.startswith("Cannot")


def test_agreement_needs_no_reservation():
    for valid in (
        {"ours": 0.16, RULES[1]: 0.14},
        {"ours": 0.12},  # the rule was not ranked on validation items
        {"ours": 0.12, RULES[1]: math.nan},
    ):
        assert conclusion(evidence(valid=valid, tests=TESTED)).reservations == []


def test_intervals_without_a_paired_test_are_a_reservation():
    """Intervals say nothing about pairs of the same users, and nothing is corrected for several looks."""
    assert conclusion(evidence()).reservations == [
        "Not tested: intervals that do not overlap are all there is for ours beside text neighbours + counts (hit@10 "
        "and ndcg@10). A paired test was not made."
    ]
    assert "(ndcg@10). A paired" in conclusion(evidence(tests=TESTED[:1])).reservations[0]
    assert "A paired test was not made." in conclusion(evidence(model=0.05)).reservations[0]
    assert conclusion(evidence(model=0.135)).reservations == []  # intervals that overlap are no answer anyway
    rows = {**evidence().rows, "it": values(0.05)}
    beaten = conclusion(evidence(rows=rows, tests=TESTED, without_exchange={"it": "the other"}))
    assert "for ours beside it (hit@10 and ndcg@10)." in beaten.reservations[0]
    assert beaten.answer.startswith("Perhaps")


def test_domains_that_go_the_other_way_are_named():
    crime = {"ours": values(0.2), "popularity": values(0.05), RULES[1]: values(0.1)}
    comics = {"ours": values(0.1), "popularity": values(0.15), RULES[1]: values(0.12)}
    said = conclusion(evidence(domains={"crime": crime, "comics": comics}, tests=TESTED))
    assert "users, mean over domains; the best" in said.paragraphs[0]
    assert said.reservations == [
        "Not alike in all domains: a simple rule has the higher mean (not tested) in comics (10.0 against 15.0 of "
        "popularity)."
    ]
    worse = both("ours", RULES[1], -0.033, 0.01)
    below = conclusion(evidence(model=0.1, tests=worse, domains={"crime": crime, "comics": comics})).reservations
    assert below == [
        "Not alike in all domains: it has a higher mean than every simple rule (not tested) in crime (20.0 against "
        "10.0 of text neighbours + counts)."
    ]
    broken = {**comics, "ours": values(math.nan)}
    assert conclusion(evidence(domains={"crime": crime, "comics": broken}, tests=TESTED)).reservations == []


# What joining brought.


def joined_by(domain, mean, p_holm, first="fedavg + hybrid", metric="hit@10"):
    difference = {"mean": mean, "low": round(mean - 0.01, 6), "high": round(mean + 0.02, 6)}
    return {
        "domain": domain,
        "metric": metric,
        "first": first,
        "second": "local + hybrid",
        "p_value": p_holm / 2,
        "p_holm": p_holm,
        "difference": difference,
    }


COST = {"num_rounds": 20, "joined_cpu_s": 34.4, "local_cpu_s": 30.0, "up": 3_120_000.0, "down": 900.0}
JOINING = {
    "joined": "fedavg + hybrid",
    "alone": "local + hybrid",
    "kept": "fedavg + hybrid",
    "chosen": True,
    "clients": {"north": {"num_users": 750, "keeps": "joined"}, "south": {"num_users": 300, "keeps": "joined"}},
    "tests": [
        joined_by("north", 0.013, 0.004),
        joined_by("north", 0.5, 0.9, metric="ndcg@10"),
        joined_by("south", -0.002, 0.7),
        joined_by("macro", 0.0054, 0.04),
    ],
}


def test_what_joining_brought_in_customers_bytes_and_seconds():
    assert joining_sentences({}, COST) == []
    assert joining_sentences(JOINING, COST) == [
        "What joining brought: of 100 customers 0.5 more [-0.5, +2.5] (more than chance) find their next "
        "purchase among the ten recommended than with what a client has alone (local + hybrid; mean over 2 clients).",
        "Client by client: north 1.3 more [+0.3, +3.3] (more than chance); south 0.2 fewer [-1.2, +1.8] (which may be "
        "chance).",
        "Every client keeps the joint model: by its validation customers nothing else is clearly better.",
        "It cost each client 3.1 MB sent, 900 bytes received and 34 s of CPU time for training in 20 rounds; training "
        "alone took 30 s beside it.",
    ]


def test_who_leaves_the_joint_model_is_named_and_what_all_have_then():
    clients = {**JOINING["clients"], "south": {"num_users": 300, "keeps": "half"}}
    kept = [joined_by("macro", 0.007, 0.01, "joined or local"), joined_by("south", 0.001, 0.5, "joined or local")]
    said = joining_sentences(
        {**JOINING, "clients": clients, "kept": "joined or local", "tests": [*JOINING["tests"], *kept]}
    )
    assert said[2] == (
        "Kept is another model where validation customers like it clearly better (one-sided paired test at 95 %): "
        "south the mean of both updates; the others keep the joint model. So of 100 customers 0.7 more [-0.3, +2.7] "
        "(more than chance) than alone."
    )
    assert len(joining_sentences({**JOINING, "chosen": False}, COST)) == 3
    rows = joining_rows({**JOINING, "clients": clients}, TESTS)
    assert rows == [
        ["north", "750", "5.3", "6.6", "+1.3 [+0.3, +3.3]", "0.004", "the joint model"],
        ["south", "300", "4.0", "3.8", "-0.2 [-1.2, +1.8]", "0.7", "the mean of both updates"],
        ["macro", "", "4.7", "5.2", "+0.5 [-0.5, +2.5]", "0.04", ""],
    ]


TESTS = {
    name: {"local + hybrid": values(alone), "fedavg + hybrid": values(joined)}
    for name, alone, joined in (("north", 0.0531, 0.0661), ("south", 0.04, 0.038), ("macro", 0.0466, 0.0521))
}


def test_many_clients_are_counted():
    tests = [joined_by(f"shop.{n}", 0.01 * (n - 2), 0.01 if n in (0, 5, 6) else 0.5) for n in range(7)]
    clients = {f"shop.{n}": {"num_users": 9, "keeps": "joined"} for n in range(7)}
    said = joining_sentences({**JOINING, "clients": clients, "tests": [*tests, joined_by("macro", 0.01, 0.2)]})
    assert said[1] == (
        "Beyond chance, 2 of 7 clients (shop.5, shop.6) have more customers than alone and 1 of 7 clients (shop.0) has "
        "fewer."
    )


def test_sites_of_a_deployment_say_the_same_of_themselves():
    rows = {name: {"fedavg": values(0.1), **difference_row(JOINING, name)} for name in ("north", "south")}
    assert rows["north"][DIFFERENCE]["hit@10"] == {"mean": 0.013, "low": 0.003, "high": 0.033, "p": 0.002}
    assert joining_of_sites({"north": {"fedavg": values(0.1)}}) == {}
    (said,) = joining_sentences(joining_of_sites(rows))
    assert said == (
        "What joining brought: of 100 customers, so many find their next purchase among the ten recommended beyond "
        "what a client has alone (local; chance is judged over all tests together): north 1.3 more [+0.3, +3.3] (more "
        "than chance); south 0.2 fewer [-1.2, +1.8] (which may be chance)."
    )


def test_what_differs_in_nothing_is_no_more_by_chance():
    level = {"mean": 0.0, "low": 0.0, "high": 0.0}
    tests = [{**joined_by("north", 0.0, 1.0), "difference": level}, joined_by("macro", 0.0, 1.0)]
    said = joining_sentences({**JOINING, "clients": {"north": JOINING["clients"]["north"]}, "tests": tests})
    assert said[0].startswith("What joining brought: of 100 customers no more and no fewer [-1.0, +2.0] find their")
    assert said[1] == "Client by client: north no more and no fewer."


def test_chance_is_judged_over_all_sites():
    """Forty sites, one of which has by itself a p of 0.02: that is what chance gives to one of fifty."""
    told = {
        f"shop.{n}": {DIFFERENCE: {"hit@10": {"mean": 0.01, "low": 0.0, "high": 0.02, "p": 0.5}}} for n in range(40)
    }
    told["shop.3"][DIFFERENCE]["hit@10"]["p"] = 0.02
    assert "none of 40 clients has more customers" in joining_sentences(joining_of_sites(told))[1]
    told["shop.3"][DIFFERENCE]["hit@10"]["p"] = 0.001
    assert "1 of 40 clients (shop.3) has more customers" in joining_sentences(joining_of_sites(told))[1]
    told["shop.3"][DIFFERENCE]["hit@10"]["p"] = 7.0
    assert "none of 40 clients has more" in joining_sentences(joining_of_sites(told))[1], "whatever a site tells"


def test_who_loses_what_without_whom():
    tests = [joined_by("north", -0.013, 0.004), joined_by("north", 0.5, 0.9, metric="ndcg@10")]
    lost = [*tests, joined_by("east", 0.002, 0.7), joined_by("macro", -0.005, 0.01)]
    harmed = [joined_by("north", 0.02, 0.01), joined_by("east", 0.01, 0.03), joined_by("macro", 0.015, 0.01)]
    found = {"south": {"tests": lost}, "west": {"tests": harmed}}
    said = without_sentences(found)
    assert said[0] == (
        "Without south, of 100 customers 0.5 fewer [-1.5, +1.5] (more than chance) find their next purchase, mean over "
        "the others: north 1.3 fewer [-2.3, +0.7] (more than chance); east 0.2 more [-0.8, +2.2] (which may be chance)."
    )
    assert said[2:] == ["So west harms the others: look at its item numbers, its events, its customers."]
    chance = {f"shop.{n}": {"tests": [joined_by("macro", 0.02, 0.04)]} for n in range(3)}
    assert not any(one.startswith("So ") for one in without_sentences(chance)), "three were left out, each with p .02"
    assert without_rows(found, ["north", "south", "east", "macro"])[0] == [
        *("south", "-1.3 [-2.3, +0.7] *", "", "+0.2 [-0.8, +2.2]", "-0.5 [-1.5, +1.5] *"),
    ]
    many = [joined_by(f"shop.{n}", -0.01, 0.01 if n == 3 else 0.5) for n in range(7)]
    (counted,) = without_sentences({"other": {"tests": [*many, joined_by("macro", -0.01, 0.2)]}})
    assert counted.endswith("beyond chance 1 of 7 clients (shop.3) has fewer and none of 7 clients has more.")
    assert without_sentences({}) == []


def test_a_deployment_uses_the_words_of_a_simulated_run():
    """Both say `joining_sentences`: what a site tells of itself stands word for word in that of a simulation."""
    names = list(JOINING["clients"])
    (said,) = joining_sentences(joining_of_sites({name: difference_row(JOINING, name) for name in names}))
    simulated = joining_sentences(JOINING)
    each = simulated[1].removeprefix("Client by client: ")
    assert said.endswith(f": {each}")
    assert all(text.startswith("What joining brought: of 100 customers") for text in (said, simulated[0]))
