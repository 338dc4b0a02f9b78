"""The first words of a page: would one switch it on? From intervals, paired tests and circumstances, in plain words.

A number that is not finite is None in a run's files, and None or NaN here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import plotly.graph_objects as go

from fedecider.evaluation.protocols import MUCH_BY_CHANCE, get_protocol
from fedecider.report.figures import client_bars, colours_of
from fedecider.report.page import Conclusion, PageTable
from fedecider.report.tables import compared

Values = Mapping[str, Mapping[str, Any]]
"""Metric -> ``mean``, ``low``, ``high``."""
Side = Literal["above", "below", "level", "overlap", "unknown"]
"""Of a first row beside a second: ``level`` is tested and not distinguishable, ``overlap`` is not tested, with
intervals that have a part in common, ``unknown`` has no number."""
LEVEL = 0.05
"""A difference whose corrected p is below it is called more than chance."""
WITHOUT_EXCHANGE, BEFORE_ROUNDS = "the same training without any exchange", "the shared model before the rounds"
"""Words for rows of ``Evidence.without_exchange`` and ``before_rounds``."""
FEW_SEEDS = 3
"""With fewer nothing is said of how much runs differ (docs/evaluation.md, rule 2)."""
UNITS = {
    "hit@10": ("users", "users, those whose next item is among the first ten recommended"),
    "recall@10": ("items", "items of the next baskets, those among the first ten recommended"),
}
"""Of what a hundred is spoken of, and what counts, by the metric."""
DRAWN = 12
"""Clients whose bars still fit a phone side by side."""


class Evidence(NamedTuple):
    """What a page knows of the row that one would switch on, and of what stands beside it."""

    subject: str
    """Label of that row."""
    rows: Mapping[str, Values]
    """Test values of every row, the mean over domains where there are several."""
    simple: Sequence[str]
    """Labels of the rows that need no training; those that ``rows`` lacks are left out."""
    protocol: str
    tests: Sequence[Mapping[str, Any]] = ()
    """Paired tests of the same means as plain data (``statistics.Comparison``), corrected together."""
    beside: Mapping[str, str] = {}
    """Other rows that the reader will ask for -> what each is, in words."""
    without_exchange: Mapping[str, str] = {}
    """Rows of clients that trained alone -> what each is, in words: where one of them is better, the federation does
    harm. Those that ``rows`` lacks are left out."""
    before_rounds: Mapping[str, str] = {}
    """Rows of what was there before any round -> what each is, in words: where one is better, the rounds do harm."""
    domains: Mapping[str, Mapping[str, Values]] = {}
    """Domain -> test values of every row, where there are several domains."""
    valid: Mapping[str, float] = {}
    """Validation hit@10 (of baskets recall@10) of rows, the same mean."""
    num_seeds: int = 1
    num_clients: int = 2
    chance: float | None = None
    """The same of random scores on test items."""
    planted: bool = False
    alarms: Sequence[str] = ()
    """Other sentences that a reader must know before believing the numbers, such as a canary above chance."""

    @property
    def metrics(self) -> tuple[str, str]:
        """What rows are compared by; the first one is what they are told by."""
        return compared(self.rows[self.subject])

    @property
    def lead(self) -> str:
        """The first of `metrics`."""
        return self.metrics[0]


def conclusion(evidence: Evidence, about: Sequence[str] = ()) -> Conclusion:
    """Question, answer, sentences with the numbers, ``about`` (what was run), what speaks against the answer, and the
    few rows that it is about as a table and a figure."""
    held, question = _reservations(evidence), f"Would one switch {evidence.subject} on?"
    paragraphs = [*_sentences(evidence), *about]
    return Conclusion(question, _answer(evidence, bool(held)), paragraphs, held, _table(evidence), _figure(evidence))


def _told(evidence: Evidence) -> dict[str, str]:
    """The rows that a reader asks for first -> what each is: our own, then the best simple rule."""
    best = best_of(evidence)
    rows = {
        evidence.subject: "what would be switched on",
        **evidence.without_exchange,
        **evidence.beside,
        **evidence.before_rounds,
        **({best: "the best simple rule"} if best else {}),
    }
    return {label: what for label, what in rows.items() if label in evidence.rows}


def _table(evidence: Evidence) -> PageTable:
    beside: Mapping[Side, str] = {"above": "fewer", "below": "more", "level": "may be chance", "overlap": "not tested"}
    rows = []
    for label, what in _told(evidence).items():
        hit, ndcg = (evidence.rows[label][metric] for metric in evidence.metrics)
        found = side(evidence, evidence.subject, label, evidence.lead)
        than = "" if label == evidence.subject else beside.get(found, "-")
        rows.append([label, _interval(hit, 100.0, 1), than, _interval(ndcg, 1.0, 3), what])
    unit, what = UNITS[evidence.lead]
    caption = (
        f"Of 100 {what} ({evidence.lead}). ndcg@10 counts later places less. Bars are 95 % intervals; the third column "
        f"compares with {evidence.subject}."
    )
    return PageTable(("row", f"of 100 {unit}", "compared", "ndcg@10", "what it is"), rows, caption)


def _interval(value: Mapping[str, Any], scale: float, digits: int) -> str:
    mean, low, high = (
        f"{scale * value[end]:.{digits}f}" if _finite(value[end]) else "-" for end in ("mean", "low", "high")
    )
    return mean if "-" in (mean, low, high) else f"{mean} [{low}, {high}]"


def _figure(evidence: Evidence) -> go.Figure:
    """The subject, the same alone and the best simple rule, client by client; the mean alone where they are many."""
    told, best = _told(evidence), best_of(evidence)
    kept = [label for label in told if label in (evidence.subject, best, *evidence.without_exchange)]
    shown = evidence.domains if len(evidence.domains) <= DRAWN else {}
    parts = {"mean" if evidence.domains else "all users": evidence.rows, **shown}
    values = {
        label: {name: _of_all(rows.get(label, {}).get(evidence.lead)) for name, rows in parts.items()} for label in kept
    }
    title = f"Of 100 {UNITS[evidence.lead][1]}"
    return client_bars(values, title, colours_of(list(evidence.rows)))


def _of_all(value: Mapping[str, Any] | None) -> dict[str, float] | None:
    """Of 100 users; None for what is not a number."""
    if value is None or not all(_finite(value[end]) for end in ("mean", "low", "high")):
        return None
    return {end: 100 * value[end] for end in ("mean", "low", "high")}


def side(evidence: Evidence, first: str, second: str, metric: str) -> Side:
    """On which side of ``second`` the row ``first`` lies: by the paired test where there is one, else by intervals."""
    one, other = (evidence.rows[label][metric] for label in (first, second))
    if not all(_finite(value[name]) for value in (one, other) for name in ("mean", "low", "high")):
        return "unknown"
    test = _test(evidence, first, second, metric)
    if test is not None:
        above = (test["difference"]["mean"] > 0) == (test["first"] == first)
        return "level" if test["p_holm"] >= LEVEL else "above" if above else "below"
    if one["low"] > other["high"]:
        return "above"
    return "below" if one["high"] < other["low"] else "overlap"


def best_of(evidence: Evidence, metric: str = "") -> str | None:
    """The simple rule with the highest test ``metric`` (empty: the one they are told by): the hardest one to beat,
    whichever that is."""
    metric = metric or evidence.lead
    found = {label: evidence.rows[label][metric]["mean"] for label in evidence.simple if label in evidence.rows}
    return max((label for label in found if _finite(found[label])), key=lambda label: found[label], default=None)


def _answer(evidence: Evidence, held: bool) -> str:
    best, harm = best_of(evidence), _harm(evidence)
    mean = evidence.rows[evidence.subject][evidence.lead]["mean"]
    if get_protocol(evidence.protocol).leaks:
        return f"Cannot be said: the protocol {evidence.protocol} leaks the held-out item, so no number here counts."
    if not _finite(mean):
        return f"No: the result of {evidence.subject} is not a number."
    if best is None and not harm:
        return "Cannot be said: no simple rule stands beside it."
    sides = _sides(evidence)
    kinds = {found for _, found in sides.values()}
    if harm and kinds != {"below"}:
        found = f"no: {harm}"
    elif kinds >= {"above", "below"}:
        better, worse = (_named(sides, wanted) for wanted in ("above", "below"))
        found = f"there is no clear answer: it is better than {better} and worse than {worse}"
    elif "below" in kinds:
        found = f"no: it is worse than {_named(sides, 'below')}, which needs no training"
    elif "above" in kinds:
        found = f"it is better than {_named(sides, 'above')}, the best simple rule"
    elif "overlap" in kinds:
        found = f"there is no answer yet: its interval overlaps with that of {best}, the best simple rule"
    else:
        found = f"there is no reason to: it is not distinguishable from {best}, the best simple rule"
    if evidence.planted:
        return f"Cannot be said: the data are planted. On them, {found}."
    if "above" in kinds and "below" not in kinds and not harm:
        return f"{'Perhaps' if held else 'By these numbers, yes'}: {found}{', with reservations' if held else ''}."
    return f"{found[0].upper()}{found[1:]}."


def _sides(evidence: Evidence) -> dict[str, tuple[str, Side]]:
    """Metric -> the rule that is best in it, and the subject's side of that one."""
    best = {metric: best_of(evidence, metric) for metric in evidence.metrics}
    return {
        metric: (label, side(evidence, evidence.subject, label, metric))
        for metric, label in best.items()
        if label is not None
    }


def _harm(evidence: Evidence) -> str:
    """Which row without exchange or before the rounds is better, in words; empty where none is."""
    for rows, what in ((evidence.without_exchange, "the federation"), (evidence.before_rounds, "the training")):
        for label, words in rows.items():
            kinds = _kinds(evidence, label)
            if "below" in kinds and "above" not in kinds:
                return f"{words} ({label}) is better, so {what} does harm"
    return ""


def _kinds(evidence: Evidence, label: str) -> set[Side]:
    """Sides of ``label`` on which the subject lies, over the metrics; empty where there is no such row."""
    if label not in evidence.rows or label == evidence.subject:
        return set()
    return {side(evidence, evidence.subject, label, metric) for metric in evidence.metrics}


def _named(sides: Mapping[str, tuple[str, Side]], wanted: Side) -> str:
    """The rule on that side, and the metric where not all of them agree."""
    metrics = [metric for metric, (_, found) in sides.items() if found == wanted]
    label = sides[metrics[0]][0]
    return label if len(metrics) == len(sides) else f"{label} by {metrics[0]}"


def _sentences(evidence: Evidence) -> list[str]:
    subject, best, lead = evidence.subject, best_of(evidence), evidence.lead
    value = evidence.rows[subject][lead]
    if not _finite(value["mean"]):
        return [f"{subject} has no {lead}: the number is missing or not finite. See the warnings and rounds.jsonl."]
    where = ", mean over domains" if evidence.domains else ""
    first, of = f"{subject} ranks the item that a user took next into the first ten for {_of_100(value)} users", "for "
    if get_protocol(evidence.protocol).baskets:
        first, of = f"{subject} finds {_of_100(value)} items of the next basket by the first ten recommended", ""
    others = [f"the best simple rule ({best}) {of}{_of_100(evidence.rows[best][lead])}"] if best else []
    others += [] if evidence.chance is None else [f"guessing {of}{100 * evidence.chance:.1f}"]
    sentences = ["; ".join([first + where, *others]) + f" ({lead}, with 95 % intervals)."]
    if best is not None:
        sentences += [_difference(evidence, subject, best, lead)]
        sides = _sides(evidence)
        other, by_place = sides.get("ndcg@10", ("", "unknown"))
        if by_place not in ("unknown", sides[lead][1]):
            one, two = (evidence.rows[label]["ndcg@10"]["mean"] for label in (subject, other))
            numbers = f"({one:.3f} against {two:.3f} of {other})"
            sentences.append(f"By ndcg@10, which looks at the place too, it is {_WORDS[by_place]} {numbers}.")
    beside = {**evidence.without_exchange, **evidence.beside, **evidence.before_rounds}
    found = [
        _beside(evidence, label, what) for label, what in beside.items() if label in evidence.rows and label != subject
    ]
    return [*sentences, *([f"Beside it: {'; '.join(found)}."] if found else [])]


_WORDS: Mapping[Side, str] = {
    "above": "better",
    "below": "worse",
    "level": "not distinguishable",
    "overlap": "not tested, and the intervals overlap",
    "unknown": "not a number",
}


def _difference(evidence: Evidence, first: str, second: str, metric: str) -> str:
    found, test = side(evidence, first, second, metric), _test(evidence, first, second, metric)
    if test is None:
        words = {"overlap": "overlap, so the difference may be chance", "unknown": "cannot be read"}
        return f"No paired test of these two was made; their 95 % intervals {words.get(found, 'do not overlap')}."
    sign = 1.0 if test["first"] == first else -1.0
    mean, *ends = (sign * 100 * test["difference"][name] for name in ("mean", "low", "high"))
    size = f"The difference of {mean:+.1f} of 100 {UNITS[metric][0]} [{min(ends):+.1f}, {max(ends):+.1f}]"
    what = "is not distinguishable from chance" if found == "level" else "is more than chance"
    return f"{size} {what} (paired t test, Holm p = {test['p_holm']:.2g})."


def _beside(evidence: Evidence, label: str, what: str) -> str:
    value = evidence.rows[label][evidence.lead]["mean"]
    found = side(evidence, evidence.subject, label, evidence.lead)
    words = {"above": "less", "below": "more", "level": "not distinguishable", "overlap": "intervals overlap"}
    if not _finite(value) or found not in words:
        return f"{what}, not a number"
    test = _test(evidence, evidence.subject, label, evidence.lead)
    p_value = f", p = {test['p_holm']:.2g}" if test is not None else ""
    return f"{what}, {100 * value:.1f} ({words[found]}{p_value})"


def _reservations(evidence: Evidence) -> list[str]:
    """What must be known before the answer is believed, in plain sentences."""
    protocol, best, subject = get_protocol(evidence.protocol), best_of(evidence), evidence.subject
    found = list(evidence.alarms)
    if evidence.planted:
        found.append("The data are planted: a program made users and items, with a pattern for the model to find.")
    if protocol.num_sampled is not None:
        found.append(
            f"Not the strict protocol: the item had to be found among {protocol.num_sampled} sampled candidates, not "
            "in the catalogue. Shares are far higher so, and the order of rows can be another one."
        )
    if evidence.chance is not None and evidence.chance >= MUCH_BY_CHANCE:
        found.append(
            f"So few items are left to rank that guessing finds {100 * evidence.chance:.1f} of 100: "
            f"{evidence.lead} says {'nothing' if evidence.chance >= 1.0 else 'little'} here."
        )
    if not protocol.drop_seen and not protocol.baskets:
        found.append("Not the strict protocol: items that a user already had are recommended as well.")
    if evidence.num_seeds == 1:
        found.append(
            "One seed: interval and test are about other users, not about what another run would give. Several seeds "
            "stand in a comparison or a leaderboard."
        )
    elif evidence.num_seeds < FEW_SEEDS:
        found.append(f"{evidence.num_seeds} seeds: too few to know how much runs differ.")
    if evidence.num_clients == 1:
        found.append("One client: nothing was exchanged, so this says nothing about federation.")
    found += [*_untested(evidence), *_not_better(evidence)]
    if best is not None:
        found += [*_disagreement(evidence, subject, best), *_elsewhere(evidence, subject, best)]
    return found


def _untested(evidence: Evidence) -> list[str]:
    """Rows that the subject is said to be above or below without a paired test."""
    pairs = [(label, metric) for metric, (label, _) in _sides(evidence).items()]
    must = (*evidence.without_exchange, *evidence.before_rounds)
    pairs += [(label, metric) for label in must if _kinds(evidence, label) for metric in evidence.metrics]
    untested: dict[str, list[str]] = {}
    for label, metric in pairs:
        found = side(evidence, evidence.subject, label, metric)
        if found in ("above", "below") and _test(evidence, evidence.subject, label, metric) is None:
            untested.setdefault(label, []).append(metric)
    if not untested:
        return []
    said = ", ".join(f"{label} ({' and '.join(metrics)})" for label, metrics in untested.items())
    return [
        f"Not tested: intervals that do not overlap are all there is for {evidence.subject} beside {said}. A paired "
        "test was not made."
    ]


def _not_better(evidence: Evidence) -> list[str]:
    """Rows without exchange and before the rounds that the subject is not known to be better than."""
    found = []
    for label, words in {**evidence.without_exchange, **evidence.before_rounds}.items():
        kinds = _kinds(evidence, label)
        if not kinds or ("above" in kinds and "below" not in kinds):
            continue
        gain = "the exchange" if label in evidence.without_exchange else "the training"
        if kinds >= {"above", "below"}:
            found.append(f"By one metric it is better than {words} ({label}), by another one worse.")
        elif "below" in kinds:
            found.append(f"It is worse than {words} ({label}).")
        elif "level" in kinds:
            found.append(f"It is not distinguishable from {words} ({label}): {gain} is not known to help.")
        elif "overlap" in kinds:
            found.append(
                f"No paired test with {words} ({label}) was made, and the intervals overlap: {gain} is not known to "
                "help."
            )
        else:
            found.append(f"The result of {words} ({label}) is not a number: whether {gain} helps cannot be said.")
    return found


def _disagreement(evidence: Evidence, subject: str, best: str) -> list[str]:
    labels = (subject, best)
    if not all(_finite(evidence.valid.get(label)) for label in labels):
        return []
    valid, valid_best = (evidence.valid[label] for label in labels)
    test, test_best = (evidence.rows[label][evidence.lead]["mean"] for label in labels)
    if not _finite(test) or (valid - valid_best) * (test - test_best) >= 0:
        return []
    return [
        f"Validation and test disagree: on validation items {subject} has {100 * valid:.1f} and {best} "
        f"{100 * valid_best:.1f}, the other way round than on test items."
    ]


def _elsewhere(evidence: Evidence, subject: str, best: str) -> list[str]:
    """Domains in which the means stand the other way round than in the mean over domains."""
    above, found = _gap(evidence, subject, best) > 0, []
    for name, rows in evidence.domains.items():
        there = evidence._replace(rows=rows)
        other = best_of(there)
        if other is not None and (gap := _gap(there, subject, other)) and (gap > 0) != above:
            own, rule = (rows[label][evidence.lead]["mean"] for label in (subject, other))
            found.append(f"{name} ({100 * own:.1f} against {100 * rule:.1f} of {other})")
    if not found:
        return []
    which = "a simple rule has the higher mean" if above else "it has a higher mean than every simple rule"
    return [f"Not alike in all domains: {which} (not tested) in {', '.join(found)}."]


def _gap(evidence: Evidence, first: str, second: str) -> float:
    """Difference of the means that rows are told by; 0 where one is not a number."""
    one, other = (evidence.rows[label][evidence.lead]["mean"] for label in (first, second))
    return one - other if _finite(one) and _finite(other) else 0.0


def _test(evidence: Evidence, first: str, second: str, metric: str) -> Mapping[str, Any] | None:
    for test in evidence.tests:
        if test["metric"] == metric and {test["first"], test["second"]} == {first, second}:
            return test if _finite(test["p_holm"]) and _finite(test["difference"]["mean"]) else None
    return None


def _of_100(value: Mapping[str, Any]) -> str:
    ends = [value["low"], value["high"]]
    interval = f" [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]" if all(map(_finite, ends)) else ""
    return f"{100 * value['mean']:.1f}{interval} of 100"


def _finite(number: float | None) -> bool:
    return number is not None and math.isfinite(number)
