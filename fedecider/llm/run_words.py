"""The words with which the page of a run begins: would one switch it on, what was run, what speaks against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedecider.evaluation.metrics import MACRO
from fedecider.llm.baselines import STUDENT, UNTRAINED
from fedecider.llm.memories import MEMORY_ROW, OWN_MEMORY_ROW, with_memory
from fedecider.report.page import Opening
from fedecider.report.verdict import BEFORE_ROUNDS, Evidence, opening


def run_opening(
    record: Mapping[str, Any], metrics: Mapping[str, Any], num_rounds: int, alarms: Sequence[str] = ()
) -> Opening:
    """From ``run.json`` and ``metrics.json``; ``alarms`` are warnings that make the numbers doubtful."""
    return opening(run_evidence(record, metrics, alarms), [_about(metrics, num_rounds)])


def run_evidence(record: Mapping[str, Any], metrics: Mapping[str, Any], alarms: Sequence[str] = ()) -> Evidence:
    """What the files of a run say about the row that ``scripts/recommend.py`` recommends with."""
    domains = metrics["domains"]
    tests = {name: domain["test"] for name, domain in domains.items()}
    rows = metrics[MACRO]["test"] if MACRO in metrics else next(iter(tests.values()))
    subject = switched_on(metrics["method"], metrics["reported"], rows)
    sampled = record["config"]["ranking"].get("num_eval_users", 0)
    note = [f"Rounds were chosen on {sampled} users a domain."] if sampled else []
    return Evidence(
        subject=subject,
        rows=rows,
        simple=UNTRAINED,
        protocol=metrics["protocol"],
        tests=metrics.get("comparisons", ()),  # runs of before have none
        beside={one: what for one, what in beside(metrics["reported"]).items() if one in rows and one != STUDENT},
        before_rounds={STUDENT: BEFORE_ROUNDS},
        domains=tests if len(tests) > 1 else {},
        valid=valid_means(metrics),
        num_clients=len(tests),
        chance=fmean(domain["chance_hit@10"] for domain in domains.values()),
        planted=not record["config"]["run"]["data"],
        alarms=[*alarms, *note],
    )


def switched_on(method: str, reported: str, labels: Mapping[str, Any] | Sequence[str]) -> str:
    """The row of the recommender that is handed over: the reported model, with the memory where there is one."""
    return with_memory(method) if with_memory(method) in labels else reported


def beside(reported: str) -> dict[str, str]:
    """Rows that say where the result comes from -> what each is."""
    return {
        reported: "the model without its memory",
        with_memory(reported.partition(" (")[0], OWN_MEMORY_ROW): "the same with counts of its own alone",
        MEMORY_ROW: "the memory without a model",
        STUDENT: BEFORE_ROUNDS,
    }


def valid_means(metrics: Mapping[str, Any], metric: str = "hit@10") -> dict[str, float]:
    """Row -> ``metric`` on validation items, mean over domains, where every domain has a number; old runs have none."""
    every = [domain.get("valid", {}) for domain in metrics["domains"].values()]
    means = {label: [rows.get(label, {}).get(metric, {}).get("mean") for rows in every] for label in every[0]}
    return {label: fmean(values) for label, values in means.items() if None not in values}


def _about(metrics: Mapping[str, Any], num_rounds: int) -> str:
    domains, rounds = list(metrics["domains"]), f"{num_rounds} round{'s' if num_rounds > 1 else ''}"
    return (
        f"What was run: the method {metrics['method']} trained a recommender for {_parties(domains)} in {rounds}. "
        f"Shown is the model after round {metrics['best_round']}, the best one on validation items."
    )


def _parties(domains: Sequence[str]) -> str:
    if len(domains) == 1:
        return f"the domain {domains[0]}"
    return f"each of {len(domains)} domains ({', '.join(domains)}), every one a client with data of its own,"


def told_choice(taken: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> str:
    """What `fedecider.llm.alternatives` came to, in one sentence."""
    words = " ".join(f"{name} {value}" for name, value in taken.items()) or "as given"
    scores = ", ".join(f"{one['valid']:.4f}" for one in tried)
    return f"settings of local training, by validation ndcg@10 of two rounds alone ({scores}): {words}"
