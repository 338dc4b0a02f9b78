"""Rows of runs on several data sets in one table (benchmarks/paired_rows.py)."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from fedecider.evaluation.per_user import UserPositions, write_per_user

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def paired():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        return runpy.run_path(str(REPOSITORY / "benchmarks" / "paired_rows.py"))


def make_run(folder, users, **rows):
    folder.mkdir()
    records = [
        UserPositions("books", users, "test", row.replace("_", " "), 1, torch.tensor(places))
        for row, places in rows.items()
    ]
    write_per_user(folder / "per_user.parquet", records)
    return folder


def test_other_data_are_further_domains_of_the_rows_that_all_have(paired, tmp_path):
    first = make_run(tmp_path / "first", ["a", "b"], model=[0, 3], counts=[1, 50], only_here=[0, 0])
    second = make_run(tmp_path / "second", ["b", "c", "d"], model=[2, 2, 9], counts=[60, 60, 60])
    rows, persons, names = paired["rows_of_all"]([[[first]], [[second]]])
    assert names == [{"books": "books"}, {"books": "books of second"}]
    assert set(rows) == {"model", "counts"}
    assert persons == {"books": ["a", "b"], "books of second": ["b", "c", "d"]}
    assert rows["model"]["books"].tolist() == [[0, 3]]
    assert rows["model"]["books of second"].tolist() == [[2, 2, 9]]
    lines = paired["table"](rows, persons, ["model"])
    assert any(line.startswith("| model | 1.0000") for line in lines)  # macro hit@10: all users of both
    assert any(line.startswith("| counts | 0.2500") for line in lines)  # half of the first, none of the second


def test_a_run_that_is_not_there_is_named_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paired_rows.py", "--runs", str(tmp_path / "run"), "--rows", "model"])
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(REPOSITORY / "benchmarks" / "paired_rows.py"), run_name="__main__")
    assert stop.value.code == 2
    expected = "without per_user.parquet, expected the folder of a finished run of federate.py"
    assert capsys.readouterr().err == f"error: got {tmp_path / 'run'} {expected}\n"
