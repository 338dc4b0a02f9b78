"""Who gains from whom, what sites tell, what joining costs: the numbers in the sentences are those of the tests."""

import pytest

from fedecider.report.joining import (
    DIFFERENCE,
    cost_sentence,
    difference_row,
    gains_of_sites,
    kept_sentence,
    without_rows,
    without_sentences,
)


def paired(domain, mean, metric="hit@10", first="fedavg + ensemble"):
    gain = {"mean": mean, "low": round(mean - 0.01, 6), "high": round(mean + 0.02, 6)}
    return {"domain": domain, "metric": metric, "first": first, "second": "local + ensemble", "difference": gain}


def test_what_it_costs_in_bytes_rounds_and_seconds():
    cost = {"num_rounds": 20, "joined_cpu_s": 34.4, "local_cpu_s": 30.0, "up": 3_120_000.0, "down": 900.0}
    for part in (
        "sends 3.1 MB",
        "receives 900 bytes",
        "20 rounds",
        "34 CPU seconds, alone for 30",
        "a server",
    ):
        assert part in cost_sentence(cost)
    assert cost_sentence({**cost, "up": 0, "down": 0}) == ""


def test_what_companies_keep():
    clients = {"north": {"num_users": 750, "keeps": "joined"}, "south": {"num_users": 300, "keeps": "joined"}}
    assert kept_sentence({}) == []
    assert "there was no choice" in kept_sentence({"chosen": False, "clients": clients})[0]
    assert "every company uses the joint model" in kept_sentence({"chosen": True, "clients": clients})[0]
    own = {**clients, "south": {"num_users": 300, "keeps": "local"}}
    assert "south the model trained alone" in kept_sentence({"chosen": True, "clients": own})[0]


def test_the_mean_over_sites_has_the_variance_of_theirs():
    tests = [paired("north", 0.03), paired("macro", 0.02), paired("north", 0.5, first="other")]
    told = difference_row(tests, "fedavg + ensemble", "local + ensemble")
    assert told == {DIFFERENCE: {"hit@10": {"mean": 0.03, "low": 0.02, "high": 0.05}}}
    sites = {
        "north": {DIFFERENCE: {"hit@10": {"mean": 0.03, "low": 0.0, "high": 0.06}}},
        "south": {DIFFERENCE: {"hit@10": {"mean": 0.01, "low": -0.03, "high": 0.05}}},
        "silent": {},
    }
    found = {test["domain"]: test["difference"] for test in gains_of_sites(sites)}
    assert found["north"]["high"] == 0.06
    half = (0.03**2 + 0.04**2) ** 0.5 / 2
    assert found["macro"] == pytest.approx({"mean": 0.02, "low": 0.02 - half, "high": 0.02 + half})
    assert gains_of_sites({"silent": {}}) == []


def test_who_gives_whom_in_one_direction():
    lost = [paired("north", -0.013), paired("east", 0.002), paired("macro", -0.021), paired("north", 0.5, "ndcg@10")]
    harmed = [paired("north", 0.02), paired("east", 0.015), paired("macro", 0.02)]
    found = {"south": {"tests": lost}, "west": {"tests": harmed}}
    said = without_sentences(found)
    assert said[0].startswith("south gives the others +2.1 [+0.1, +3.1] points of hit@10, mean over them: north +1.3 [")
    assert said[1].startswith("west gives the others -2.0 [-4.0, -1.0]")
    assert said[2].startswith("So west harms the others")
    assert len(said) == 3
    assert without_rows(found, ["north", "south", "east", "macro"])[0] == [
        *("south", "+1.3 [-0.7, +2.3]", "", "-0.2 [-2.2, +0.8]", "+2.1 [+0.1, +3.1] *"),
    ]
    many = [paired(f"shop.{n}", -0.03 if n == 3 else 0.0) for n in range(7)]
    (counted,) = without_sentences({"other": {"tests": [*many, paired("macro", 0.0)]}})
    assert "not significant" in counted
    assert "of 7 companies 1 gain significantly and 0 lose" in counted
    assert without_sentences({}) == []
