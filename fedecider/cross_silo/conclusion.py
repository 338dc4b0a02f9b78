"""The answer of a run of the cross-silo track: should these companies join?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedecider.baselines.counts import UNTRAINED
from fedecider.cross_silo.ensembles import ENSEMBLE_ROW, KEPT, OWN_ENSEMBLE_ROW, with_ensemble
from fedecider.cross_silo.entries import STUDENT
from fedecider.data.sample import SOURCE as SAMPLE
from fedecider.engine.result import RunResult
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import get_protocol
from fedecider.methods.config import LOCAL
from fedecider.report.answer import Answer, Evidence, Values, answer_of, canary_alarm, sings
from fedecider.report.conclusion import conclusion
from fedecider.report.costs import WAYS, cost_of_joining
from fedecider.report.joining import (
    cost_sentence,
    gains_of_sites,
    kept_sentence,
    odd_sentences,
    without_sentences,
)
from fedecider.report.page import Conclusion
from fedecider.report.tables import CANARY
from fedecider.running.run_folder import SITE


def run_conclusion(result: RunResult) -> Conclusion:
    """What stands first on the page of a run."""
    joining = result.metrics.get("joining", {})
    gives = without_sentences(result.metrics.get("without", {}))
    return conclusion(run_evidence(result), [*kept_sentence(joining), *gives, _about(result)])


def sites_answer(
    sites: Mapping[str, Mapping[str, Values]], metrics: Mapping[str, Any], record: Mapping[str, Any]
) -> Answer | None:
    """The answer of the server of a deployment, from what sites tell, site -> row -> metric -> figures; None where no
    site trained alone. What a site keeps is told to nobody, so it is about the joint model for everyone."""
    tests = gains_of_sites(sites)
    if not tests:
        return None
    rows = metrics[MACRO]["test"] if MACRO in metrics else next(iter(sites.values()))
    whole = with_ensemble(str(metrics["method"]))
    subject = whole if whole in rows else next(iter(rows))
    alone = next(label for label in (with_ensemble(LOCAL), LOCAL) if label in rows)
    return answer_of(
        Evidence(
            subject=subject,
            rows=rows,
            simple=(),
            protocol=str(metrics["protocol"]),
            scope=MACRO if len(sites) > 1 else next(iter(sites)),
            tests=[{**test, "first": subject, "second": alone} for test in tests],
            alone=alone,
            customers=dict.fromkeys(sites, 0),
            party="server",
            planted=not record.get("config", {}).get("run", {}).get("data", "-"),
        )
    )


def run_evidence(result: RunResult) -> Evidence:
    """What a run says about the entry that ``fedecider recommend`` recommends with."""
    run, joining = result.settings["run"], result.metrics.get("joining", {})
    tests = {client: result.figures[client]["test"] for client in result.clients}
    subject = subject_of(result.method, result.reported, result.test)
    alarms = [*canary_alarms(result), *odd_sentences(joining.get("events", {}))]
    nothing = result.method == LOCAL != run.get("method", LOCAL)
    beside = sources_of(result.method, result.reported)
    drawn, overlap = run.get("drawn"), result.record.get("overlap", {})
    return Evidence(
        subject=subject,
        rows=result.test,
        simple=(*UNTRAINED, *result.metrics.get("baselines", ())),
        protocol=result.protocol,
        scope=MACRO if MACRO in result.figures else result.clients[0],
        tests=result.metrics.get("comparisons", ()),
        alone=joining.get("alone", ""),
        beside={
            label: what for label, what in beside.items() if label in result.test and label not in (STUDENT, subject)
        },
        before_rounds={STUDENT: BEFORE_ROUNDS},
        domains=tests if len(tests) > 1 else {},
        customers={name: domain["num_users"] for name, domain in result.metrics["domains"].items()},
        seed_gains=result.metrics.get("seed_gains", (0.0,)),
        seed_share=result.metrics.get("seed_share", 0.0),
        chance=fmean(domain["chance_hit@10"] for domain in result.metrics["domains"].values()),
        planted=not run["data"]
        or any(card.get("settings", {}).get("source") == SAMPLE for card in result.cards.values()),
        nothing_common=overlap.get("sentences", ()) if nothing else (),
        common_items=not overlap.get("nothing", False),
        party="site" if SITE in result.record else "",
        drawn=drawn or "",
        cost=cost_sentence(_cost(result)) if joining else "",
        alarms=alarms,
    )


BEFORE_ROUNDS = "the starting model, before any round"


def _cost(result: RunResult) -> dict[str, Any]:
    """Of a company: the rounds and the sums of counts."""
    everyone = result.record.get(SITE, {}).get("clients", result.clients)
    cost = cost_of_joining(result.logs, everyone, result.clients)
    sums = [one for name, one in result.communication.get("ensemble", {}).items() if name in result.clients]
    return cost | {way: (cost[way] or 0) + sum(one[way] for one in sums) / len(result.clients) for way in WAYS}


def subject_of(method: str, reported: str, labels: Collection[str]) -> str:
    """The entry of the recommender that is exported: what clients keep where that is not the joint model for all, else
    the reported model; with the ensemble where there is one."""
    candidates = (with_ensemble(KEPT), KEPT, with_ensemble(method), reported)
    return next(label for label in candidates if label in {*labels, reported})


def sources_of(method: str, reported: str) -> dict[str, str]:
    """Entries that say where the result comes from -> what each is."""
    return {
        reported: "the model without counts and texts",
        with_ensemble(method): "the joint model for every company",
        with_ensemble(method, OWN_ENSEMBLE_ROW): "together, without the others' counts",
        ENSEMBLE_ROW: "everybody's counts and texts, no model",
        STUDENT: BEFORE_ROUNDS,
    }


def words_of_entries(method: str, reported: str) -> dict[str, str]:
    """Entries of a run -> what each is, for a reader of its whole table."""
    return {
        **sources_of(method, reported),
        f"{method} (local)": "a company's model as it left a round's training",
        LOCAL: "a company's own model, without counts and texts",
        with_ensemble(LOCAL): "each company alone",
        OWN_ENSEMBLE_ROW: "own counts and texts, no model",
    }


def canary_alarms(result: RunResult) -> list[str]:
    """Companies in which the canary is above chance, where it should not be."""
    protocol = get_protocol(result.protocol)
    if protocol.leaks or not protocol.drop_seen:
        return []  # it leaks anyway; or the memoriser knows what the user had before, which is then a candidate
    every = result.metrics["domains"].items()
    hits = {name: (one["test"][CANARY]["hit@10"], one["chance_hit@10"]) for name, one in every if CANARY in one["test"]}
    return [canary_alarm(name, hit, chance) for name, (hit, chance) in hits.items() if sings(hit, chance)]


def _about(result: RunResult) -> str:
    num_rounds = len(result.logs)
    rounds = f"{num_rounds} round{'s' if num_rounds > 1 else ''}"
    over = "Results, tests and gains are over all training runs; all else is from the first one, which is exported."
    return (
        f"{_clients(result.clients)} trained with {result.method} in {rounds}. This page shows the model after round "
        f"{result.best_round}, the best on validation. "
        f"{over if len(result.metrics.get('seeds', ())) > 1 else ''}"
    )


def _clients(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{len(names)} companies ({', '.join(names)}), each on its own data,"
