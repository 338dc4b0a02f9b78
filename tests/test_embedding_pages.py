"""Verdicts of the embedding track's pages, from hand-written numbers."""

import pytest

from embedding_fr.leaderboard import LeaderboardConfig, board_evidence, write_leaderboard_page
from embedding_fr.results import run_evidence
from fedecider.report.verdict import opening


def interval(mean):
    return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}


def row(method, kind, hit, valid, protocol="strict"):
    numbers = {"hit@10": interval(hit), "ndcg@10": interval(hit / 2), "against_best": "below", "setting": "default"}
    return {"method": method, "kind": kind, "protocol": protocol, "seeds": 3, "valid_ndcg@10": valid, **numbers}


ROWS = [
    row("fednear", "federated", 0.20, 0.12),
    row("fedmf", "federated", 0.22, 0.08),
    row("fedmf/local", "local", 0.05, 0.02),
    row("ease", "central", 0.21, 0.11),
    row("mf", "central", 0.19, 0.13),
    row("decayed_cooccurrence", "central", 0.15, 0.3),
    row("popularity", "central", 0.08, 0.04),
    row("memoriser", "central", 0.02, 0.01),
]
SAMPLED = [row("fednear", "federated", 0.6, 0.5, "strict/sampled99")]
CONTENT = {
    "dataset": "toy",
    "num_users": 40,
    "chance_hit@10": {"strict": 0.05, "strict/sampled99": 0.1},
    "rows": [*SAMPLED, *ROWS],
    "comparisons": {"strict/sampled99": [], "strict": []},
    "missing": {"strict/sampled99": [], "strict": ["fedem", "fedrap"]},
}


def test_the_leaderboard_asks_about_the_row_that_validation_chose():
    evidence = board_evidence(CONTENT, ROWS, ROWS[0])
    assert evidence.subject == "fednear"
    assert evidence.beside == {"mf": "mf with all data in one place"}
    assert evidence.without_exchange == {"fedmf/local": "fedmf without any exchange"}
    assert board_evidence(CONTENT, ROWS, ROWS[1]).without_exchange == {
        "fedmf/local": "the same training without any exchange"
    }
    assert evidence.alarms == [
        "fednear was chosen on validation items; on test items fedmf has more: 22.0 against 20.0 of 100 users."
    ]
    said = opening(evidence)
    assert said.answer == "Perhaps: it is better than decayed_cooccurrence, the best simple rule, with reservations."
    alone = [*ROWS, row("pfedrec/local", "local", 0.3, 0.2)]
    assert opening(board_evidence(CONTENT, alone, ROWS[0])).answer == (
        "No: pfedrec without any exchange (pfedrec/local) is better, so the federation does harm."
    )
    loud = [*ROWS[:-1], row("memoriser", "central", 0.4, 0.3)]
    assert "The memoriser" in board_evidence(CONTENT, loud, ROWS[0]).alarms[0]
    assert board_evidence(CONTENT, ROWS, ROWS[1]).alarms == []


def test_the_strictest_protocol_speaks_first_and_a_board_without_federated_rows_does_not(tmp_path):
    config = LeaderboardConfig(protocol="strict/sampled99,strict")
    path = write_leaderboard_page(config, CONTENT, ["note"], {}, "a,b\n", tmp_path / "board.html")
    text = path.read_text(encoding="utf-8")
    assert "8 rows under the" in text
    assert text.count("Left out, since a run failed: fedem, fedrap.") == 1
    assert "Plotly" not in text
    assert 'href="data:text/csv;charset=utf-8,a,b%0A"' in text
    central = {**CONTENT, "rows": [one for one in ROWS if one["kind"] == "central"]}
    path = write_leaderboard_page(config, central, ["note"], {}, "a,b\n", tmp_path / "central.html")
    assert "Would one" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("federation", [True, False])
def test_the_page_of_a_run_says_what_stands_beside_it(federation):
    test = {
        name: {"hit@10": interval(hit), "ndcg@10": interval(hit)} for name, hit in (("fedmf", 0.2), ("popularity", 0.1))
    }
    metrics = {
        "test": {**test, "memoriser": {"hit@10": interval(0.3)}},
        "valid": {name: {"hit@10": interval(0.1)} for name in test},
        "protocol": "strict",
        "chance_hit@10": 0.05,
        "reported": "fedmf",
        "num_users": 40,
    }
    evidence = run_evidence({"config": {"run": {"federation": federation}}}, metrics)
    assert evidence.valid == {"fedmf": 0.1, "popularity": 0.1}
    assert ("Federation was off: every client trained alone." in evidence.alarms) is not federation
    assert "above chance" in evidence.alarms[0]
    assert opening(evidence).answer == "Perhaps: it is better than popularity, the best simple rule, with reservations."
    leaking = run_evidence({"config": {"run": {"federation": federation}}}, {**metrics, "protocol": "paper"})
    assert "above chance" not in " ".join(leaking.alarms)
    assert opening(leaking).answer.startswith("Cannot be said: the protocol paper leaks")
