"""per_user.parquet: round trip, and every mean computed again from the file."""

import pytest
import torch

from fedecider.evaluation.metrics import NOT_RANKED, mean_metrics
from fedecider.evaluation.per_user import UserPositions, mean_table, read_per_user, write_per_user


def records():
    return [
        UserPositions("crime", ["u2", "u1", "u3"], "test", "own", 7, torch.tensor([4, NOT_RANKED, 0])),
        UserPositions("comics", ["u9"], "test", "own", 7, torch.tensor([2.5])),
        UserPositions("crime", ["u2", "u1", "u3"], "valid", "popularity", 0, torch.tensor([11, 12, NOT_RANKED])),
    ]


def test_round_trip_keeps_users_order_and_positions(tmp_path):
    path = tmp_path / "per_user.parquet"
    write_per_user(path, iter(records()))
    found = read_per_user(path)
    assert [list(r[:5]) for r in found] == [list(r[:5]) for r in records()]
    assert [r.position_U.tolist() for r in found] == [[4.0, NOT_RANKED, 0.0], [2.5], [11.0, 12.0, NOT_RANKED]]
    assert [p.name for p in tmp_path.iterdir()] == ["per_user.parquet"]


def test_tables_can_be_computed_again(tmp_path):
    path = tmp_path / "per_user.parquet"
    write_per_user(path, records())
    rows = {(row["domain"], row["split"], row["variant"]): row for row in mean_table(read_per_user(path))}
    expected = mean_metrics(torch.tensor([4, NOT_RANKED, 0]))
    crime = rows["crime", "test", "own"]
    assert {name: crime[name] for name in expected} == expected
    assert rows["macro", "test", "own"]["hit@5"] == pytest.approx((2 / 3 + 1) / 2)
    assert rows["macro", "test", "own"]["num_users"] == 4
    assert rows["macro", "valid", "popularity"]["hit@20"] == pytest.approx(2 / 3)
