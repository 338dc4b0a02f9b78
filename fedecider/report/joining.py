"""What joining brought company by company, what is odd about one, who gains from whom, what it costs; of sites too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedecider.evaluation.metrics import MACRO
from fedecider.report.answer import NAMED, Evidence, Values, difference, finite, points
from fedecider.report.tables import LEADS

KEPT_WORDS = {
    "joined": "the joint model",
    "half": "the mean of both updates",
    "local": "the model trained alone",
}
"""What a client goes on with -> in words."""
DIFFERENCE = "joined less alone"
"""Name of the row in which a site of a deployment tells what joining brought to it."""


def kept_sentence(joining: Mapping[str, Any]) -> list[str]:
    """What each company goes on with, in a sentence; nothing where nobody trained alone.

    Raises:
        KeyError: it lacks something.
    """
    if not joining:
        return []
    if not joining["chosen"]:
        why = "because of local_row, or because the own model lacks the noise that hides customers"
        return [f"Every company uses the joint model: there was no choice, {why}."]
    others = {name: one["keeps"] for name, one in joining["clients"].items() if one["keeps"] != "joined"}
    if not others:
        return ["If they join, every company uses the joint model: no other one is significantly better on validation."]
    named = "; ".join(f"{name} {KEPT_WORDS[one]}" for name, one in others.items())
    rest = "; the others use the joint model" if len(others) < len(joining["clients"]) else ""
    return [
        "A company uses another model if that is significantly better on validation (one-sided paired test at 95 %): "
        f"{named}{rest}."
    ]


MOSTLY = 0.5
"""A share of events above which one item is said to have most of them."""


def unlike_ones(events: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Clients whose items in a row have texts clearly (three standard errors) less than half as much alike beyond
    chance as usual. ``events``: `fedecider.cross_silo.joining.checked_events`."""
    known = {name: one for name, one in events.items() if "likeness" in one}
    return [name for name, one in known.items() if one["likeness"] + 3 * one["error"] < 0.5 * one["usual"]]


def of_one_item(events: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Clients that sell one item above all others."""
    return [name for name, one in events.items() if one.get("most_sold", 0.0) > MOSTLY]


def odd_sentences(events: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A warning for each client whose events may be wrong, from `fedecider.cross_silo.joining.checked_events`."""
    unlike = [
        f"Warning: texts of items that customers of {name} buy in a row are similar by "
        f"{events[name]['likeness']:+.2f} beyond chance; {events[name]['usual']:+.2f} is usual. Its item numbers may "
        "be mixed up, or its events may not be those of people; fedecider without measures the harm."
        for name in unlike_ones(events)
        if name not in of_one_item(events)
    ]
    one_item = [
        f"Warning: {100 * events[name]['most_sold']:.0f} % of the events of {name} are of one item. Its number may "
        "stand for many items."
        for name in of_one_item(events)
    ]
    return unlike + one_item


def without_sentences(without: Mapping[str, Any]) -> list[str]:
    """From ``without`` of ``metrics.json``: a sentence for each company that was left out, on what it gives the others.

    Raises:
        KeyError: it lacks something.
    """
    said = []
    for giver, gains in _given(without).items():
        macro = gains.pop(MACRO)
        each = "; ".join(f"{name} {points(gain)}" for name, gain in gains.items())
        if len(gains) > NAMED:
            more, fewer = (sum(1 for gain in gains.values() if _sign(gain) == sign) for sign in (1, -1))
            each = f"of {len(gains)} companies {more} gain significantly and {fewer} lose"
        said.append(
            f"{giver} gives the others {points(macro)} points of {macro['metric']}{_chance(macro)}, mean over them: "
            f"{each}."
        )
        if _sign(macro) < 0:
            said.append(f"So {giver} harms the others: look at its item numbers, its events, its customers.")
    return said


def _chance(gain: Mapping[str, Any]) -> str:
    return "" if _sign(gain) else ", not significant"


def without_rows(without: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    """A line for each company that was left out, a column for each of ``names``: points that the line gives it."""
    return [
        [
            giver,
            *(f"{points(gains[name])}{' *' if _sign(gains[name]) else ''}" if name in gains else "" for name in names),
        ]
        for giver, gains in _given(without).items()
    ]


def _given(without: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Giver -> receiver -> ``mean``, ``low``, ``high`` of what the receiver has more with the giver, and ``metric``."""
    given: dict[str, dict[str, dict[str, Any]]] = {}
    for giver, of_giver in without.items():
        for test in of_giver["tests"]:
            if test["metric"] in LEADS:
                mean, high, low = (-test["difference"][end] for end in ("mean", "low", "high"))
                gain = {"mean": mean, "low": low, "high": high, "metric": test["metric"]}
                given.setdefault(giver, {})[test["domain"]] = gain
    return given


def _sign(gain: Mapping[str, Any]) -> int:
    """1 and -1 where it is above or below zero for sure, else 0."""
    return (gain["low"] > 0) - (gain["high"] < 0)


def difference_row(tests: Sequence[Mapping[str, Any]], subject: str, alone: str) -> dict[str, Values]:
    """The row `DIFFERENCE` of a site, which tells the server what joining brought it; nothing where it did not train
    alone."""
    gains = {
        test["metric"]: test["difference"]
        for test in tests
        if (test["first"], test["second"], test["domain"] != MACRO) == (subject, alone, True)
    }
    return {DIFFERENCE: gains} if gains else {}


def gains_of_sites(rows: Mapping[str, Mapping[str, Values]]) -> list[dict[str, Any]]:
    """Tests of `DIFFERENCE` as those of a run, from what sites tell, site -> row -> metric -> figures: of each site,
    and of their mean, whose variance is the sum of theirs over their number squared: nobody sees all customers."""
    of_metric: dict[str, dict[str, Mapping[str, float]]] = {}
    for site, of_site in rows.items():
        for metric, gain in of_site.get(DIFFERENCE, {}).items():
            if all(finite(gain.get(end)) for end in ("mean", "low", "high")):
                of_metric.setdefault(metric, {})[site] = gain
    tests = []
    for metric, gains in of_metric.items():
        mean = fmean(gain["mean"] for gain in gains.values())
        half = math.sqrt(sum((gain["high"] - gain["low"]) ** 2 for gain in gains.values())) / 2 / len(gains)
        whole = {MACRO: {"mean": mean, "low": mean - half, "high": mean + half}} if len(gains) > 1 else {}
        tests += [
            {"domain": name, "metric": metric, "first": "joined", "second": "alone", "difference": gain}
            for name, gain in {**gains, **whole}.items()
        ]
    return tests


def joining_rows(evidence: Evidence, joining: Mapping[str, Any]) -> list[list[str]]:
    """A line for each company, and for their mean where there are several: customers, alone and joined of 100, the
    gain with its interval, what it keeps."""
    rows = []
    for name, values in {**evidence.domains, evidence.scope: evidence.rows}.items():
        gain = difference(evidence, evidence.subject, evidence.alone, name)
        client = joining["clients"].get(name)
        means = [values[row][evidence.lead]["mean"] for row in (evidence.alone, evidence.subject)]
        cells = [f"{100 * mean:.1f}" if finite(mean) else "not a number" for mean in means]
        keeps = KEPT_WORDS[client["keeps"]] if client else ""
        users, more = f"{client['num_users']:,}" if client else "", "-" if gain is None else points(gain)
        rows.append(["mean" if name == MACRO else name, users, *cells, more, keeps])
    return rows


def cost_sentence(cost: Mapping[str, Any]) -> str:
    """Bytes, with those of counts, and seconds of a company, and what is to be set up; empty where nothing is known."""
    parts = [f"{word} {size_text(cost[way])}" for way, word in (("up", "sends"), ("down", "receives")) if cost[way]]
    if not parts:
        return ""
    rounds = f"{cost['num_rounds']} round{'s' if cost['num_rounds'] > 1 else ''}"
    said = f"Cost: each company {' and '.join(parts)} in {rounds}, counts included"
    if cost["joined_cpu_s"] is not None:
        said += f", and trains for {cost['joined_cpu_s']:.0f} CPU seconds"
        said += "" if cost["local_cpu_s"] is None else f", alone for {cost['local_cpu_s']:.0f}"
    return f"{said}. Not counted: a server, and FeDecider installed at each company (docs/deploy.md)."


def size_text(num_bytes: float) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
