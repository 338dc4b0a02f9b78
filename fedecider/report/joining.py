"""What joining brought, in customers, bytes and CPU time: the same words on page and console, in Python, in FLARE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedecider.evaluation.statistics import holm
from fedecider.report.conclusion import LEVEL, Values
from fedecider.report.tables import BASKETS_COMPARED, LEADS

KEPT_WORDS = {
    "joined": "the joint model",
    "half": "the mean of both updates",
    "local": "the model that it trained alone",
}
"""What a client goes on with -> in words."""
MACRO = "macro"
DIFFERENCE = "joined less alone"
"""Name of the row in which a site of a deployment tells what joining brought to it."""
NAMED = 6
"""So many clients are told of one by one."""


def joining_sentences(joining: Mapping[str, Any], cost: Mapping[str, Any] | None = None) -> list[str]:
    """From ``joining`` of ``metrics.json`` and `fedecider.report.costs.cost_of_joining`; nothing where it is empty.

    Raises:
        KeyError: it lacks something.
    """
    if not joining:
        return []
    tests = {one["domain"]: one for one in joining["tests"] if _is_of(one, joining["joined"], joining)}
    names = [name for name in joining["clients"] if name in tests]
    listed = "; ".join(f"{name} {_more(tests[name])}" for name in names)
    unit, what = words_of(joining["tests"])
    alone = f"what a client has alone ({joining['alone']}"
    each = []
    if MACRO not in tests:
        where = "; chance is judged over all tests together)" if len(names) > 1 else ")"
        first = f"What joining brought: of 100 {unit}, so many {what} beyond {alone}{where}: {listed}."
    else:
        whole, where = _more(tests[MACRO]), f"mean over {len(names)} clients)"
        first = f"What joining brought: of 100 {unit} {whole} {what} than with {alone}; {where}."
        each = [f"Client by client: {listed}."]
    if len(names) > NAMED:
        better, worse = ([name for name in names if _sign(tests[name]) == sign] for sign in (1, -1))
        said = f"{_count(better, len(names))} more {unit} than alone and {_count(worse, len(names))} fewer"
        each = [f"Beyond chance, {said}."]
    costs = [] if cost is None else _cost_sentences(cost)
    return [first, *each, *_kept_sentences(joining), *costs, *odd_sentences(joining.get("events", {}))]


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
        f"Warning: items that customers of {name} take one after the other have texts that are alike by "
        f"{events[name]['likeness']:+.2f} beyond chance, where {events[name]['usual']:+.2f} is usual. Its item numbers "
        "may be mixed up, or its events not those of people; fedecider without tells whether it does harm."
        for name in unlike_ones(events)
        if name not in of_one_item(events)
    ]
    one_item = [
        f"Warning: {100 * events[name]['most_sold']:.0f} % of the events of {name} are of one item. Its number may "
        "stand for many."
        for name in of_one_item(events)
    ]
    return unlike + one_item


def without_sentences(without: Mapping[str, Any]) -> list[str]:
    """From ``without`` of ``metrics.json``: a sentence for each company that was left out, on what the others lost.

    Raises:
        KeyError: it lacks something.
    """
    found = []
    for left_out, tests in _losses(without).items():
        macro = tests.pop(MACRO)
        unit, what = words_of([macro])
        each = "; ".join(f"{name} {_more(test)}" for name, test in tests.items())
        if len(tests) > NAMED:
            worse, better = ([name for name in tests if _sign(tests[name]) == sign] for sign in (-1, 1))
            each = f"beyond chance {_count(worse, len(tests))} fewer and {_count(better, len(tests))} more"
        found.append(
            f"Without {left_out}, of 100 {unit} {_more(macro)} {what.partition(' among')[0]}, mean over the others: "
            f"{each}."
        )
        if _sign(macro) > 0:
            found.append(f"So {left_out} harms the others: look at its item numbers, its events, its customers.")
    return found


def without_rows(without: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    """A line for each company that was left out, a column for each of ``names``: customers of 100 that it has more."""
    return [
        [left_out, *(_change(tests[name]) if name in tests else "" for name in names)]
        for left_out, tests in _losses(without).items()
    ]


def _losses(without: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Company that was left out -> domain -> test of what is told, with Holm's correction over all of them together."""
    tests = [(left_out, test) for left_out, one in without.items() for test in one["tests"]]
    found: dict[str, dict[str, Any]] = {left_out: {} for left_out in without}
    for left_out, test in zip((one for one, _ in tests), corrected([test for _, test in tests]), strict=True):
        if test["metric"] in LEADS:
            found[left_out][test["domain"]] = test
    return found


def corrected(tests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same tests, as plain data, with Holm's correction over all of them."""
    every = holm([one["p_value"] if 0.0 <= one["p_value"] <= 1.0 else 1.0 for one in tests])
    return [{**one, "p_holm": p_holm} for one, p_holm in zip(tests, every, strict=True)]


def _change(test: Mapping[str, Any]) -> str:
    mean, low, high = (100 * test["difference"][end] for end in ("mean", "low", "high"))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]{' *' if _sign(test) else ''}"


def joining_of_sites(tests: Mapping[str, Mapping[str, Values]]) -> dict[str, Any]:
    """The same from what sites tell in their row `DIFFERENCE`, site -> row -> metric -> figures; empty without any.

    What each of them keeps is told to nobody, and the mean over sites has no interval where nobody sees all customers.
    Holm's correction is over all sites.
    """
    told = {name: rows[DIFFERENCE] for name, rows in tests.items() if DIFFERENCE in rows}
    found = [
        {"domain": name, "metric": metric, "first": "joined", "second": "local", "difference": one, "p_value": one["p"]}
        for name, metrics in told.items()
        for metric, one in metrics.items()
        if {"mean", "low", "high", "p"} <= one.keys()
    ]
    if not found:
        return {}
    clients: dict[str, dict[str, Any]] = {name: {} for name in told}
    return {"joined": "joined", "alone": "local", "chosen": False, "tests": corrected(found), "clients": clients}


def difference_row(joining: Mapping[str, Any], name: str) -> dict[str, dict[str, dict[str, float]]]:
    """The row `DIFFERENCE` of the client ``name``, with p before correction; nothing where it did not train alone."""
    asked = (name, joining.get("joined"), joining.get("alone"))
    found = {
        one["metric"]: {**one["difference"], "p": one["p_value"]}
        for one in joining.get("tests", ())
        if (one["domain"], one["first"], one["second"]) == asked
    }
    return {DIFFERENCE: found} if found else {}


def joining_rows(joining: Mapping[str, Any], tests: Mapping[str, Mapping[str, Values]]) -> list[list[str]]:
    """A line for each client, and for their mean where there are several: customers, alone and joined of 100,
    the difference with its interval and p, what it keeps. ``tests``: client -> test values of every row."""
    found = {one["domain"]: one for one in joining["tests"] if _is_of(one, joining["joined"], joining)}
    rows = []
    for name, values in tests.items():
        if name not in found:
            continue
        client, test = joining["clients"].get(name), found[name]
        rows_of = (values[joining[row]] for row in ("alone", "joined"))
        alone, joined = (f"{100 * one[test['metric']]['mean']:.1f}" for one in rows_of)
        mean, low, high = (100 * test["difference"][end] for end in ("mean", "low", "high"))
        keeps = KEPT_WORDS[client["keeps"]] if client else ""
        users = f"{client['num_users']:,}" if client else ""
        p_value = f"{test['p_holm']:.2g}"
        rows.append([name, users, alone, joined, f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]", p_value, keeps])
    return rows


def _kept_sentences(joining: Mapping[str, Any]) -> list[str]:
    if not joining["chosen"]:
        return []
    others = {name: one["keeps"] for name, one in joining["clients"].items() if one["keeps"] != "joined"}
    if not others:
        who = "Every client keeps" if len(joining["clients"]) > 1 else "It keeps"
        return [f"{who} the joint model: by its validation customers nothing else is clearly better."]
    told = "; ".join(f"{name} {KEPT_WORDS[one]}" for name, one in others.items())
    tests = [one for one in joining["tests"] if _is_of(one, joining["kept"], joining)]
    whole = next((one for one in tests if one["domain"] == MACRO), tests[0])
    rest = "; the others keep the joint model" if len(others) < len(joining["clients"]) else ""
    return [
        "Kept is another model where validation customers like it clearly better (one-sided paired test at 95 %): "
        f"{told}{rest}. So of 100 {words_of(tests)[0]} {_more(whole)} than alone."
    ]


def _cost_sentences(cost: Mapping[str, Any]) -> list[str]:
    parts = [f"{size_text(cost[way])} {word}" for way, word in (("up", "sent"), ("down", "received")) if cost[way]]
    if cost["joined_cpu_s"] is not None:
        parts.append(f"{cost['joined_cpu_s']:.0f} s of CPU time for training")
    if not parts:
        return []
    rounds = f"{cost['num_rounds']} round{'s' if cost['num_rounds'] > 1 else ''}"
    alone = "" if cost["local_cpu_s"] is None else f"; training alone took {cost['local_cpu_s']:.0f} s beside it"
    said = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return [f"It cost each client {said} in {rounds}{alone}."]


def size_text(num_bytes: float) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def _is_of(test: Mapping[str, Any], label: str, joining: Mapping[str, Any]) -> bool:
    return test["metric"] in LEADS and (test["first"], test["second"]) == (label, joining["alone"])


def words_of(tests: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Of what a hundred is spoken of, and what counts."""
    if any(one["metric"] == BASKETS_COMPARED[0] for one in tests):
        return "items of the next baskets", "are found among the ten recommended"
    return "customers", "find their next purchase among the ten recommended"


def _sign(test: Mapping[str, Any]) -> int:
    """1 and -1 where the first row is above or below the second by more than chance, else 0."""
    return 0 if test["p_holm"] >= LEVEL else 1 if test["difference"]["mean"] > 0 else -1


ROUNDING = 1e-9
"""Of 100 customers: what is smaller is no difference."""


def _more(test: Mapping[str, Any]) -> str:
    """``1.3 more [+0.4, +2.2] (more than chance)``, or ``no more and no fewer`` where nothing differs; p stands in the
    table of the page and in ``metrics.json``."""
    mean, low, high = (100 * test["difference"][end] for end in ("mean", "low", "high"))
    interval = f" [{low:+.1f}, {high:+.1f}]" if max(abs(low), abs(high)) > ROUNDING else ""
    if abs(mean) <= ROUNDING:
        return f"no more and no fewer{interval}"
    chance = "more than chance" if _sign(test) else "which may be chance"
    return f"{abs(mean):.1f} {'fewer' if mean < 0 else 'more'}{interval} ({chance})"


def _count(names: Sequence[str], total: int) -> str:
    if not names:
        return f"none of {total} clients has"
    return f"{len(names)} of {total} clients ({', '.join(names)}) {'have' if len(names) > 1 else 'has'}"
