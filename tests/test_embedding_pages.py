"""Verdicts of the cross-device track's pages, from hand-written numbers."""

import pytest

from embedding_fr.page import run_evidence
from fedecider.engine.result import RunResult
from fedecider.report.conclusion import conclusion


def interval(mean):
    return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}


@pytest.mark.parametrize("federation", [True, False])
def test_the_page_of_a_run_says_what_stands_beside_it(federation):
    test = {
        name: {"hit@10": interval(hit), "ndcg@10": interval(hit)} for name, hit in (("fedmf", 0.2), ("popularity", 0.1))
    }
    metrics = {
        "test": {**test, "memoriser": {"hit@10": interval(0.3)}},
        "valid": {name: {"hit@10": interval(0.1)} for name in test},
        "dataset": "toy",
        "protocol": "strict",
        "chance_hit@10": 0.05,
        "reported": "fedmf",
        "num_users": 40,
    }
    record = {"config": {"run": {"federation": federation}}}
    evidence = run_evidence(RunResult(record, metrics, [], []))
    assert ("federation was off: every client trained alone." in evidence.alarms) is not federation
    assert "above chance" in evidence.alarms[0]
    assert conclusion(evidence).answer.lines[0] == "No answer: fedmf was not tested against popularity."
    leaking = run_evidence(RunResult(record, {**metrics, "protocol": "paper"}, [], []))
    assert "above chance" not in " ".join(leaking.alarms)
    assert conclusion(leaking).answer.lines[0].startswith("No answer: the protocol paper leaks")
