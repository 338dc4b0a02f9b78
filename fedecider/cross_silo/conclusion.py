"""The first words about a run of the cross-silo track: would one switch it on, and what did joining bring?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean

from fedecider.baselines.counts import UNTRAINED
from fedecider.cross_silo.ensembles import ENSEMBLE_ROW, KEPT, OWN_ENSEMBLE_ROW, with_ensemble
from fedecider.cross_silo.entries import STUDENT
from fedecider.data.sample import SOURCE as SAMPLE
from fedecider.engine.result import RunResult
from fedecider.evaluation.protocols import get_protocol
from fedecider.methods.config import LOCAL
from fedecider.report.conclusion import BEFORE_ROUNDS, WITHOUT_EXCHANGE, Evidence, conclusion
from fedecider.report.costs import cost_of_joining
from fedecider.report.joining import joining_sentences, without_sentences
from fedecider.report.page import Conclusion
from fedecider.report.tables import CANARY, compared
from fedecider.running.run_folder import SITE


def run_conclusion(result: RunResult) -> Conclusion:
    """The first words of the page of a run."""
    said = conclusion(run_evidence(result), [_about(result)])
    method, overlap = result.settings["run"].get("method", LOCAL), result.record.get("overlap", {})
    first = [*joining_lines(result), *without_sentences(result.metrics.get("without", {}))]
    if result.method == LOCAL != method:
        first = [*overlap["sentences"], f"So {method} would have changed nothing, and every client was trained alone."]
    drawn = result.settings["run"].get("drawn")
    answer = f"{drawn[0].upper()}{drawn[1:]}. {said.answer}" if drawn else said.answer
    return said._replace(answer=answer, paragraphs=[*first, *said.paragraphs])


def joining_lines(result: RunResult) -> list[str]:
    """What joining brought and what it cost, in sentences; nothing where nobody trained alone."""
    if "joining" not in result.metrics:
        return []
    everyone = result.record.get(SITE, {}).get("clients", result.clients)
    return joining_sentences(result.metrics["joining"], cost_of_joining(result.logs, everyone, result.clients))


def run_evidence(result: RunResult) -> Evidence:
    """What a run says about the entry that ``fedecider recommend`` recommends with."""
    tests = {client: result.figures[client]["test"] for client in result.clients}
    subject = subject_of(result.method, result.reported, result.test)
    num_sampled = result.settings["ranking"].get("num_eval_users", 0)
    notes = [f"Rounds were chosen on {num_sampled} users a domain."] if num_sampled else []
    beside = sources_of(result.method, result.reported)
    return Evidence(
        subject=subject,
        rows=result.test,
        simple=(*UNTRAINED, *result.metrics.get("baselines", ())),
        protocol=result.protocol,
        tests=result.metrics.get("comparisons", ()),  # runs of before have none
        beside={
            label: what for label, what in beside.items() if label in result.test and label not in (STUDENT, subject)
        },
        without_exchange=without_exchange(result.test) if result.method != LOCAL else {},
        before_rounds={STUDENT: BEFORE_ROUNDS},
        domains=tests if len(tests) > 1 else {},
        valid=result.valid_means(compared(result.test[subject])[0]),
        num_clients=len(tests),
        chance=fmean(domain["chance_hit@10"] for domain in result.metrics["domains"].values()),
        planted=not result.settings["run"]["data"]
        or any(card.get("settings", {}).get("source") == SAMPLE for card in result.cards.values()),
        alarms=[*canary_alarms(result), *notes],
    )


def subject_of(method: str, reported: str, labels: Collection[str]) -> str:
    """The entry of the recommender that is exported: what clients keep where that is not the joint model for all, else
    the reported model; with the ensemble where there is one."""
    candidates = (with_ensemble(KEPT), KEPT, with_ensemble(method), reported)
    return next(label for label in candidates if label in {*labels, reported})


def sources_of(method: str, reported: str) -> dict[str, str]:
    """Entries that say where the result comes from -> what each is."""
    return {
        reported: "the model without its private part",
        with_ensemble(method): "the joint model for every client",
        with_ensemble(method, OWN_ENSEMBLE_ROW): "the same with counts of its own alone",
        ENSEMBLE_ROW: "the ensemble without a model",
        STUDENT: BEFORE_ROUNDS,
    }


def without_exchange(labels: Collection[str]) -> dict[str, str]:
    """The entry of what clients have that trained alone, in words; nothing where there is none."""
    found = [label for label in (with_ensemble(LOCAL), LOCAL) if label in labels]
    return dict.fromkeys(found[:1], WITHOUT_EXCHANGE)


def canary_alarms(result: RunResult) -> list[str]:
    """Domains in which the canary is above chance, where it should not be."""
    protocol = get_protocol(result.protocol)
    if protocol.leaks or not protocol.drop_seen:
        return []  # it leaks anyway; or the memoriser knows what the user had before, which is then a candidate
    return [
        f"{name}: the memoriser, which knows nothing about items, is above chance (hit@10 "
        f"{domain['test'][CANARY]['hit@10']['mean']:.4f}, chance {domain['chance_hit@10']:.4f}): "
        "by luck, or the evaluation leaks"
        for name, domain in result.metrics["domains"].items()
        if CANARY in domain["test"] and domain["test"][CANARY]["hit@10"]["low"] > domain["chance_hit@10"]
    ]


def _about(result: RunResult) -> str:
    num_rounds = len(result.logs)
    rounds = f"{num_rounds} round{'s' if num_rounds > 1 else ''}"
    return (
        f"What was run: the method {result.method} trained a recommender for {_clients(result.clients)} in {rounds}. "
        f"Shown is the model after round {result.best_round}, the best one on validation items."
    )


def _clients(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"the domain {names[0]}"
    return f"each of {len(names)} domains ({', '.join(names)}), every one a client with data of its own,"
