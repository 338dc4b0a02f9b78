"""What is told and tracked about a round, for clients that are scored apart and for those scored together."""

from types import SimpleNamespace

from fedecider.running import rounds
from fedecider.running.rounds import round_logger, round_text
from fedecider.running.trackers import valid_metrics

DOMAINS = {
    "round": 2,
    "valid": {"global": [{"hit@10": 0.5, "ndcg@10": 0.25}, {"hit@10": 0.1, "ndcg@10": 0.05}]},
    "clients": [{"client": 0, "loss": 3.25}, {"client": 1, "loss": 0.0000123}],
    "wall_s": 1.5,
    "evaluate_s": 0.25,
}
USERS = {**DOMAINS, "valid": {"fedmf": [{"ndcg@10": 0.3}]}, "clients": [{"clients": 900}]}


def test_a_round_in_one_line():
    assert round_text(DOMAINS, 5) == (
        "round 2/5: valid ndcg@10 global 0.1500 | loss 3.25 1.23e-05 | train 1.50 s, evaluate 0.25 s"
    )
    assert round_text(USERS, 5) == "round 2/5: valid ndcg@10 fedmf 0.3000 | train 1.50 s, evaluate 0.25 s"


def printed_rounds(monkeypatch, num_rounds: int, seconds: float, last: int) -> list[int]:
    """Numbers of the rounds that are told, when each takes so many seconds and the run ends after ``last``."""
    lines, clock = [], [0.0]
    monkeypatch.setattr(rounds, "log_line", lines.append)
    monkeypatch.setattr(rounds.time, "monotonic", lambda: clock[0])
    tell = round_logger(SimpleNamespace(is_main=True), num_rounds)
    for number in range(1, last + 1):
        clock[0] += seconds
        tell({**DOMAINS, "round": number})
    return [int(line.split("/")[0].removeprefix("round ")) for line in lines]


def test_the_rounds_of_a_run_leave_room_on_the_screen(monkeypatch):
    assert printed_rounds(monkeypatch, 3, 1.0, 3) == [1, 2, 3]
    assert printed_rounds(monkeypatch, 20, 1.0, 20) == [1, 4, 8, 12, 16, 20]
    assert printed_rounds(monkeypatch, 20, 1.0, 11) == [1, 4, 8]  # patience; the results say which one was the last
    assert printed_rounds(monkeypatch, 20, 3600.0, 5) == [1, 2, 3, 4, 5]  # nobody waits hours for a word


def test_what_went_wrong_in_a_round_is_always_told(monkeypatch):
    lines = []
    monkeypatch.setattr(rounds, "log_line", lines.append)
    refused = {**DOMAINS, "round": 3, "clients": [{"client": 1, "finite": False}]}
    round_logger(SimpleNamespace(is_main=True), 50, ["crime", "comics"])(DOMAINS)
    said = len(lines)
    tell = round_logger(SimpleNamespace(is_main=True), 50, ["crime", "comics"])
    tell({**DOMAINS, "round": 1})
    tell(refused)
    assert any("comics" in line for line in lines[said + 1 :])


def test_tracked_names_tell_the_client_where_clients_are_scored_apart():
    assert list(valid_metrics(DOMAINS, ["crime", "comics"])) == [
        ("valid/global/crime/hit_at_10", 0.5),
        ("valid/global/crime/ndcg_at_10", 0.25),
        ("valid/global/comics/hit_at_10", 0.1),
        ("valid/global/comics/ndcg_at_10", 0.05),
    ]
    assert list(valid_metrics(USERS)) == [("valid/fedmf/ndcg_at_10", 0.3)]
