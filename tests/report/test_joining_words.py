"""What joining brought, in customers, bytes and seconds: the numbers in the sentences are those of the tests."""

from fedecider.report.joining import (
    DIFFERENCE,
    joining_of_sites,
    joining_sentences,
    without_rows,
    without_sentences,
)


def joined_by(domain, mean, p_holm, first="fedavg + ensemble", metric="hit@10"):
    difference = {"mean": mean, "low": round(mean - 0.01, 6), "high": round(mean + 0.02, 6)}
    return {
        "domain": domain,
        "metric": metric,
        "first": first,
        "second": "local + ensemble",
        "p_value": p_holm / 2,
        "p_holm": p_holm,
        "difference": difference,
    }


COST = {"num_rounds": 20, "joined_cpu_s": 34.4, "local_cpu_s": 30.0, "up": 3_120_000.0, "down": 900.0}
JOINING = {
    "joined": "fedavg + ensemble",
    "alone": "local + ensemble",
    "kept": "fedavg + ensemble",
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
    first, each, kept, cost = joining_sentences(JOINING, COST)
    assert "0.5 more [-0.5, +2.5] (more than chance)" in first
    assert "north 1.3 more [+0.3, +3.3] (more than chance)" in each
    assert "south 0.2 fewer [-1.2, +1.8] (which may be chance)" in each
    assert kept.startswith("Every client keeps the joint model")
    for part in ("3.1 MB sent", "900 bytes received", "34 s of CPU time", "20 rounds", "30 s"):
        assert part in cost


def test_chance_is_judged_over_all_sites():
    """Forty sites, one of which has by itself a p of 0.02: that is what chance gives to one of fifty."""
    sites = {
        f"shop.{n}": {DIFFERENCE: {"hit@10": {"mean": 0.01, "low": 0.0, "high": 0.02, "p": 0.5}}} for n in range(40)
    }
    for p_value, beyond in ((0.02, "none of 40"), (0.001, "1 of 40 clients (shop.3)"), (7.0, "none of 40")):
        sites["shop.3"][DIFFERENCE]["hit@10"]["p"] = p_value  # whatever a site tells
        assert beyond in joining_sentences(joining_of_sites(sites))[1]


def test_who_loses_what_without_whom():
    tests = [joined_by("north", -0.013, 0.004), joined_by("north", 0.5, 0.9, metric="ndcg@10")]
    lost = [*tests, joined_by("east", 0.002, 0.7), joined_by("macro", -0.005, 0.01)]
    harmed = [joined_by("north", 0.02, 0.01), joined_by("east", 0.01, 0.03), joined_by("macro", 0.015, 0.01)]
    found = {"south": {"tests": lost}, "west": {"tests": harmed}}
    said = without_sentences(found)
    for part in ("0.5 fewer [-1.5, +1.5] (more than chance)", "north 1.3 fewer [-2.3, +0.7]", "east 0.2 more [-0.8,"):
        assert part in said[0]
    assert [line.startswith("So west harms the others") for line in said[2:]] == [True]
    chance = {f"shop.{n}": {"tests": [joined_by("macro", 0.02, 0.04)]} for n in range(3)}
    assert not any(line.startswith("So ") for line in without_sentences(chance)), "three were left out, each with p .02"
    assert without_rows(found, ["north", "south", "east", "macro"])[0] == [
        *("south", "-1.3 [-2.3, +0.7] *", "", "+0.2 [-0.8, +2.2]", "-0.5 [-1.5, +1.5] *"),
    ]
    many = [joined_by(f"shop.{n}", -0.01, 0.01 if n == 3 else 0.5) for n in range(7)]
    (counted,) = without_sentences({"other": {"tests": [*many, joined_by("macro", -0.01, 0.2)]}})
    assert "1 of 7 clients (shop.3) has fewer and none of 7" in counted
    assert without_sentences({}) == []
