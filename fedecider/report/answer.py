"""The answer in three lines: what to do, what it brings, what it costs. Page, console, site and Python have this one.

It is decided by the 95 % interval of one paired difference (`fedecider.evaluation.statistics`: customers and training
runs) of hit@10, of baskets recall@10: what one would use, less what companies have alone; where nobody trained
alone, less the best baseline. A number that is not finite is None in a run's files, and None or NaN here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedecider.evaluation.protocols import MUCH_BY_CHANCE, get_protocol
from fedecider.report.tables import compared

Values = Mapping[str, Mapping[str, Any]]
"""Metric -> ``mean``, ``low``, ``high``."""
Recommendation = Literal["join", "do not join", "use", "do not use", "not clear", "no answer"]
NEGLIGIBLE = 0.002
"""A gain that is smaller at the upper end of its interval is none: two of a thousand customers."""
ROUNDING = 1e-9
"""What is smaller is no difference."""
FEW_SEEDS = 3
"""Training runs from which on their spread is known well enough to ask for customers instead."""
MANY_SEEDS = 10
MUCH_MORE = 10
"""So many times the customers nobody gets."""
NAMED = 6
"""So many companies are spoken of one by one."""


class Evidence(NamedTuple):
    """What is known of the row that one would use, and of what stands beside it."""

    subject: str
    """Label of that row."""
    rows: Mapping[str, Values]
    """Test values of every row, the mean over companies where there are several."""
    simple: Sequence[str]
    """Labels of the rows that need no training; those that ``rows`` lacks are left out."""
    protocol: str
    scope: str
    """The domain of ``tests`` by which it is decided."""
    tests: Sequence[Mapping[str, Any]] = ()
    """Paired tests as plain data (``statistics.Comparison``), of the scope and of single companies."""
    alone: str = ""
    """The row of what companies have alone; empty where there is none."""
    beside: Mapping[str, str] = {}
    """Other rows that the reader will ask for -> what each is, in words."""
    before_rounds: Mapping[str, str] = {}
    """Rows of what was there before any round -> what each is, in words."""
    domains: Mapping[str, Mapping[str, Values]] = {}
    """Company -> test values of every row, where there are several."""
    customers: Mapping[str, int] = {}
    """Company -> its customers, where they were companies."""
    seed_gains: Sequence[float] = (0.0,)
    """Difference of the subject and what is alone in each training run."""
    seed_share: float = 0.0
    """Share of its variance that training runs have."""
    chance: float | None = None
    """The same of random scores on test items."""
    planted: bool = False
    nothing_common: Sequence[str] = ()
    """Why nobody can learn from another one; empty where they can."""
    common_items: bool = True
    """Whether companies sell the same items; else only layers of the model are shared, which has never helped."""
    party: Literal["", "site", "server"] = ""
    """Whose it is in a deployment, which trains once; a site knows no other one's customers."""
    drawn: str = ""
    """Which part of the customers took part, in words; empty where all did."""
    cost: str = ""
    """What joining costs, in a sentence."""
    alarms: Sequence[str] = ()
    """Reasons to doubt the numbers, such as a canary above chance."""

    @property
    def lead(self) -> str:
        """The metric by which it is decided."""
        return compared(self.rows[self.subject])[0]

    @property
    def reference(self) -> str:
        """What the subject must be better than: what is alone, else the best baseline; empty without either."""
        return self.alone or best_rule(self) or ""


class Answer(NamedTuple):
    """What to do."""

    subject: str
    """The row that one would use."""
    recommendation: Recommendation
    lines: Sequence[str]
    """What to do; what it brings; what it costs, where that is known."""
    doubts: Sequence[str] = ()
    """What speaks against believing it."""

    @property
    def text(self) -> str:
        """The lines, and the doubts behind them."""
        return "\n".join([*self.lines, *(f"But: {doubt}" for doubt in self.doubts)])


def answer_of(evidence: Evidence) -> Answer:
    """The recommendation, its reason, what it brings and what it costs."""
    recommendation, reason = _decided(evidence)
    said = f"{recommendation[0].upper()}{recommendation[1:]}"
    if recommendation in ("use", "do not use"):
        said = f"{said} {evidence.subject}"
    first = f"{said}: {reason}."
    if evidence.planted and recommendation != "no answer":
        said = f"{said[0].lower()}{said[1:]}"
        first = f"No advice: the data are synthetic. With real data it would be: {said}, since {reason}."
        recommendation = "no answer"
    lines = [first, *_gain_line(evidence), *([evidence.cost] if evidence.cost else [])]
    return Answer(evidence.subject, recommendation, lines, _doubts(evidence))


def _decided(evidence: Evidence) -> tuple[Recommendation, str]:
    yes, no = _choices(evidence)
    if get_protocol(evidence.protocol).leaks:
        return "no answer", f"the protocol {evidence.protocol} leaks the held-out item, so no number here counts"
    if evidence.nothing_common:
        return "do not join", " ".join(evidence.nothing_common).removesuffix(".")
    if not finite(evidence.rows[evidence.subject][evidence.lead]["mean"]):
        return "no answer", f"the result of {evidence.subject} is not a number"
    if not evidence.reference:
        return "no answer", "there is no baseline to compare with"
    gain = difference(evidence, evidence.subject, evidence.reference)
    if gain is None:
        return "no answer", f"{evidence.subject} was not tested against {evidence.reference}"
    rule = best_rule(evidence)
    better = {**({rule: "which needs no training"} if rule else {}), **evidence.before_rounds}
    for label, words in better.items():
        other = difference(evidence, evidence.subject, label)
        if other is not None and label != evidence.reference and other["high"] < 0:
            return no, f"{label}, {words}, is better"
    who = "each company alone" if evidence.alone else f"{evidence.reference}, which needs no training,"
    if gain["high"] < 0:
        return no, f"{who} recommends better"
    if gain["low"] > 0:
        if evidence.alone:
            return yes, "the companies recommend better together than alone, on average"
        return yes, f"it is better than {evidence.reference}, the best baseline"
    if gain["high"] < NEGLIGIBLE:
        return no, f"the gain is at most {100 * gain['high']:.1f} of 100 {units(evidence)[0]}"
    if not evidence.common_items:
        return no, "the companies have no common items, and no gain shows"
    return "not clear", f"the difference may be chance. {_what_to_run(evidence, gain)}"


def _choices(evidence: Evidence) -> tuple[Recommendation, Recommendation]:
    return ("join", "do not join") if evidence.alone else ("use", "do not use")


def _what_to_run(evidence: Evidence, gain: Mapping[str, float]) -> str:
    """What would make it clear."""
    if evidence.drawn:
        return "Run the same command without --minutes, so that all customers take part"
    num_seeds = len(evidence.seed_gains)
    if evidence.party == "site":
        return "The server has the answer over all companies: fedecider deploy collect"
    if evidence.customers and not evidence.party and num_seeds < FEW_SEEDS:
        return f"Run the same command with --seeds {FEW_SEEDS}"
    if evidence.customers and evidence.seed_share > 0.5 and num_seeds < MANY_SEEDS:
        return f"Run the same command with --seeds {MANY_SEEDS}: what varies most is the training run"
    times = ((gain["high"] - gain["low"]) / 2 / abs(gain["mean"])) ** 2 if abs(gain["mean"]) > ROUNDING else math.inf
    if gain["mean"] <= 0 or times > MUCH_MORE:
        return "Nothing favours it so far: keep what each company has, and ask again with more customers"
    return f"Import a longer period: about {max(times, 1.5):.1f} times as many customers are needed"


def _gain_line(evidence: Evidence) -> list[str]:
    subject, lead = evidence.subject, evidence.lead
    value = evidence.rows[subject][lead]
    if not finite(value["mean"]):
        return [f"{subject} has no {lead}: the number is missing or not finite. See the warnings and rounds.jsonl."]
    unit, what = units(evidence)
    gain = difference(evidence, subject, evidence.reference) if evidence.reference else None
    runs = [_runs(evidence), evidence.drawn]
    how = f" ({'; '.join(part for part in runs if part)})" if any(runs) else ""
    if gain is None or not evidence.alone:
        rule = best_rule(evidence)
        others = [f"{rule} of {100 * evidence.rows[rule][lead]['mean']:.1f}"] if rule else []
        others += [f"guessing of {100 * evidence.chance:.1f}"] if evidence.chance is not None else []
        beside = "".join(f", {one}" for one in others)
        of_gain = "" if gain is None else f": {points(gain)} points of {lead} above {evidence.reference}"
        return [f"Of 100 {unit} {100 * value['mean']:.1f} {what}{beside}{of_gain}{how}."]
    mean, number = gain["mean"], sum(evidence.customers.values())
    more = "more" if mean >= 0 else "fewer"
    alone = f"{100 * evidence.rows[evidence.alone][lead]['mean']:.1f} alone"
    line = (
        f"Gain: about {abs(mean) * number:,.0f} {more} of {number:,} {unit} {what}: {lead} {points(gain)} over {alone}"
    )
    if not number or unit != "customers":
        line = f"Gain: {lead} {points(gain)} over {alone}, of 100 {unit}"
    return [" ".join([f"{line}{how}.", *_companies(evidence)])]


def _runs(evidence: Evidence) -> str:
    num = len(evidence.seed_gains)
    if not evidence.customers and num == 1:
        return ""
    if num == 1:
        return "one training run" + ("" if evidence.party else "; --seeds 3 makes three")
    mean = sum(evidence.seed_gains) / num
    against = sum(1 for gain in evidence.seed_gains if gain * mean < 0)
    return f"{num} training runs" + (f", {against} of them with the opposite sign" if against else "")


def _companies(evidence: Evidence) -> list[str]:
    """What can be said of each company: no more than its size allows."""
    gain = difference(evidence, evidence.subject, evidence.alone)
    of_each = {
        name: found
        for name in evidence.customers
        if (found := difference(evidence, evidence.subject, evidence.alone, name)) is not None
    }
    if gain is None or len(of_each) < 2:
        return []
    unknown = [name for name in evidence.customers if name not in of_each]
    without = [f"{', '.join(unknown)}: no figure of both, alone and together"] if unknown else []
    sure = {name: one for name, one in of_each.items() if one["low"] > 0 or one["high"] < 0}
    level = [name for name, one in of_each.items() if name not in sure and one["high"] < gain["mean"]]
    unsure = [name for name in of_each if name not in sure and name not in level]
    if len(of_each) > NAMED:
        better = sum(1 for one in sure.values() if one["low"] > 0)
        counts = (
            f"Of {len(of_each)} companies {better} gain significantly and {len(sure) - better} lose; {len(unsure)} "
            "are unclear"
        )
        return [f"{'; '.join([counts, *without])}."]
    said = [f"{name} {points(one)}" for name, one in sure.items()]
    said += [f"{name} {points(of_each[name])}, below the mean" for name in level]
    if unsure:
        said.append(f"not significant: {', '.join(f'{name} {points(of_each[name])}' for name in unsure)}")
    return [f"By company: {'; '.join([*said, *without])}."]


def _doubts(evidence: Evidence) -> list[str]:
    protocol, doubts = get_protocol(evidence.protocol), list(evidence.alarms)
    if protocol.num_sampled is not None:
        doubts.append(
            f"not the strict protocol: the item is ranked among {protocol.num_sampled} sampled candidates, not "
            "the catalogue. Figures are far higher, and the order of rows can change."
        )
    if evidence.chance is not None and evidence.chance >= MUCH_BY_CHANCE:
        doubts.append(
            f"so few items are left to rank that guessing scores {100 * evidence.chance:.1f} of 100: "
            f"{evidence.lead} says {'nothing' if evidence.chance >= 1.0 else 'little'} here."
        )
    return doubts


SURE = 3.3
"""Standard errors of a leak: by chance one canary of two thousand is as far above chance."""


def sings(hit: Mapping[str, float], chance: float) -> bool:
    """Whether hit@10 of the canary, which knows nothing of items, is above chance for sure; a leak is far above."""
    return finite(hit["mean"]) and hit["mean"] - chance > SURE / 1.96 * (hit["mean"] - hit["low"]) > 0


def canary_alarm(name: str, hit: Mapping[str, float], chance: float) -> str:
    """What is said of a canary that `sings`."""
    return (
        f"{name}: the leakage probe, which learns nothing, is above chance (hit@10 {100 * hit['mean']:.1f}, chance "
        f"{100 * chance:.1f}): the evaluation may leak."
    )


def best_rule(evidence: Evidence, metric: str = "") -> str | None:
    """The baseline with the highest test ``metric`` (empty: the one that decides): the hardest one to beat."""
    metric = metric or evidence.lead
    means = {label: evidence.rows[label][metric]["mean"] for label in evidence.simple if label in evidence.rows}
    return max((label for label in means if finite(means[label])), key=lambda label: means[label], default=None)


def difference(
    evidence: Evidence, first: str, second: str, scope: str = "", metric: str = ""
) -> dict[str, float] | None:
    """``mean``, ``low``, ``high`` of the paired difference of two rows, of a company or of the scope; None where it
    was not tested or is not a number."""
    wanted = (scope or evidence.scope, metric or evidence.lead)
    for test in evidence.tests:
        if (test["domain"], test["metric"]) == wanted and {test["first"], test["second"]} == {first, second}:
            ends = [test["difference"][end] for end in ("mean", "low", "high")]
            if not all(map(finite, ends)):
                return None
            mean, low, high = ends if test["first"] == first else (-ends[0], -ends[2], -ends[1])
            return {"mean": mean, "low": low, "high": high}
    return None


def units(evidence: Evidence) -> tuple[str, str]:
    """Of what a hundred is spoken of, and what counts."""
    protocol = get_protocol(evidence.protocol)
    if protocol.baskets:
        what = "next baskets" if protocol.first_day is None else "month held out"
        return f"items of the {what}", "are in the top ten"
    return "customers" if evidence.customers else "users", "find their next purchase in the top ten"


def points(gain: Mapping[str, float]) -> str:
    """``+1.7 [+0.6, +2.7]``, of a hundred."""
    mean, low, high = (100 * gain[end] for end in ("mean", "low", "high"))
    if max(abs(low), abs(high)) <= 100 * ROUNDING:
        return "0.0"
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def finite(number: float | None) -> bool:
    """Whether it is a number."""
    return number is not None and math.isfinite(number)
