"""The words of a run's page: what was run and what came out, in plain sentences, and what the terms mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedecider.evaluation.metrics import MACRO
from fedecider.llm.baselines import UNTRAINED
from fedecider.report.page import PageTable, Section

GLOSSARY = (
    ("domain, client", "one party with users, items and events of its own, which it shows to nobody"),
    ("round", "every client gets what the server holds, trains on its own data and sends its update back"),
    (
        "backbone, student",
        "the language model that all clients share and nobody changes; the student has half its layers",
    ),
    ("adapter", "the small matrices that a client trains beside the backbone (LoRA)"),
    ("direction", "a client's update with its size taken away; this is what the server passes on"),
    ("fusion weights, alpha", "how much a client takes from the direction of every client"),
    ("held-out item", "the item that a user took last; it is in no training data and has to be found"),
    ("validation, test", "the last item but one, by which the round is chosen; the last item, which is read once"),
    ("hit@10", "share of users whose held-out item is among the first ten recommendations"),
    ("ndcg@10", "the same, but a place further down counts less: 1 for the first, 0.29 for the tenth"),
    ("95 % interval", "where the mean would lie for other users like these; overlapping intervals settle nothing"),
    (
        "baseline",
        "a row that is not federated, such as counts of what is often bought together, or items with near texts",
    ),
    ("canary, memoriser", "a row that learns nothing; if it is above chance, the evaluation gives the answer away"),
    ("zero-shot", "the shared model as it is before any client has trained"),
)


def opening(metrics: Mapping[str, Any], num_rounds: int) -> list[str]:
    """What was run, what came out, and whether it is better than the best row that needs no training."""
    test, where = _test(metrics)
    model = test[metrics["reported"]]
    domains, rounds = list(metrics["domains"]), f"{num_rounds} round{'s' if num_rounds > 1 else ''}"
    chance = sum(domain["chance_hit@10"] for domain in metrics["domains"].values()) / len(domains)
    found = {label: test[label]["ndcg@10"] for label in UNTRAINED if label in test}
    return [
        f"The method {metrics['method']} trained a recommender for {_parties(domains)} in {rounds}. Shown is the model "
        f"after round {metrics['best_round']}, the best one on validation items.",
        f"For {model['hit@10']['mean']:.1%} of the users{where}, the item that they took next is among its first ten "
        f"recommendations out of the whole catalogue (hit@10); guessing would find it for {chance:.1%}.",
        *([_against_untrained(model["ndcg@10"], found, where)] if found else []),
    ]


def glossary() -> Section:
    return Section("Glossary", tables=[PageTable(("term", "meaning"), GLOSSARY)])


def _test(metrics: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Rows of the mean over domains, or of the only domain; and how to say so."""
    if MACRO in metrics:
        return metrics[MACRO]["test"], ", mean over domains"
    (domain,) = metrics["domains"].values()
    return domain["test"], ""


def _parties(domains: list[str]) -> str:
    if len(domains) == 1:
        return f"the domain {domains[0]}"
    return f"each of {len(domains)} domains ({', '.join(domains)}), every one a client with data of its own,"


def _against_untrained(model: Mapping[str, float], found: Mapping[str, Mapping[str, float]], where: str) -> str:
    name = max(found, key=lambda label: found[label]["mean"])
    best = found[name]
    apart = model["low"] > best["high"] or best["low"] > model["high"]
    sure = "the 95 % intervals do not overlap" if apart else "but the 95 % intervals overlap, so it may be chance"
    numbers = f"ndcg@10{where}: {model['mean']:.4f} against {best['mean']:.4f} of {name}, the best of these rows"
    if model["mean"] > best["mean"]:
        return f"It is better than what needs no training ({numbers}); {sure}."
    if model["mean"] < best["mean"]:
        return f"It is not better than what needs no training ({numbers}); {sure}."
    return f"It is as good as what needs no training ({numbers})."
