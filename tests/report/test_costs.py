"""Sums of bytes and seconds over rounds, by hand."""

import pytest

from fedecider.report.costs import mean_bytes, median_seconds, message_bytes, near_round, participations, total_bytes

SMALL = {"clients": [0, 2, 3], "down": {"a": 10, "b": 5}, "up": {"a": 7}, "header_down": 2, "header_up": 1}
LARGE = {"clients": [1], "down": {"a": 100}, "up": {}, "header_down": 3, "header_up": 4}


def record(round, score, traffic, seconds):
    return {
        "round": round,
        "score": score,
        "traffic": traffic,
        "train_s": seconds,
        "wall_s": 2 * seconds,
        "evaluate_s": 1,
    }


RECORDS = [record(1, 0.5, [SMALL, LARGE], 3.0), record(2, 0.9905, [SMALL], 9.0), record(3, 1.0, [SMALL], 4.0)]


def test_bytes_of_messages_clients_and_rounds():
    assert message_bytes(SMALL, "down") == 17
    assert total_bytes(RECORDS[:1]) == {"down": 3 * 17 + 103, "up": 3 * 8 + 4}
    assert total_bytes(RECORDS)["up"] == 3 * 3 * 8 + 4
    assert mean_bytes(RECORDS[0], "down") == pytest.approx((3 * 17 + 103) / 4)
    assert participations(RECORDS) == 4 + 3 + 3


def test_seconds_and_the_first_round_near_the_best():
    assert median_seconds(RECORDS) == {"train_s": 4.0, "wall_s": 8.0, "evaluate_s": 1}
    assert near_round(RECORDS) == 2
    assert near_round(RECORDS, 0.001) == 3
