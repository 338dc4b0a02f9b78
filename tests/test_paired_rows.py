"""Rows of runs on several data sets in one table (benchmarks/paired_rows.py)."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from fedecider.comparison.compare import Cell, Entry
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


def test_settings_keep_their_names_on_other_data(paired, tmp_path):
    runs = {
        name: make_run(tmp_path / name, [name[-1]], local=[place], counts=[5])
        for name, place in {"fed_a": 0, "own_a": 20, "fed_b": 1, "own_b": 30}.items()
    }
    rows, _, names = paired["rows_of_all"]([[[runs["fed_a"]], [runs["own_a"]]], [[runs["fed_b"]], [runs["own_b"]]]])
    assert names[1] == {"books": "books of fed_b"}
    assert set(rows) == {"local", "counts", "own_a: local"}
    assert {name: p.tolist() for name, p in rows["own_a: local"].items()} == {
        "books": [[20]],
        "books of fed_b": [[30]],
    }
    expected = r"got 1 settings with .*fed_b, expected 2 as in the first --runs"
    with pytest.raises(ValueError, match=expected):
        paired["rows_of_all"]([[[runs["fed_a"]], [runs["own_a"]]], [[runs["fed_b"]]]])


def test_rows_that_are_missing_are_named(paired, tmp_path):
    run = make_run(tmp_path / "run", ["a", "b"], model=[0, 3])
    with pytest.raises(ValueError, match=r"got rows \['hybrid'\], expected some of \['model'\]"):
        paired["table"](*paired["rows_of_all"]([[[run]]])[:2], ["hybrid"])


def test_a_run_that_is_not_there_is_named_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paired_rows.py", "--runs", str(tmp_path / "run"), "--rows", "model"])
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(REPOSITORY / "benchmarks" / "paired_rows.py"), run_name="__main__")
    assert stop.value.code == 2
    expected = "without per_user.parquet, expected the folder of a finished run of federate.py"
    assert capsys.readouterr().err == f"error: got {tmp_path / 'run'} {expected}\n"


def test_rows_are_compared_with_those_that_are_asked_for_alone(paired, tmp_path):
    """A chosen row may be compared with another one; the correction is over what is compared."""
    users = [f"u{number}" for number in range(40)]
    better, worse = [0] * 40, [0] * 34 + [50] * 6
    run = make_run(tmp_path / "run", users, pooled=better, local=worse, student=[50] * 40, hybrid=better)
    rows, persons, _ = paired["rows_of_all"]([[[run]]])

    def found(*asked):
        lines = paired["table"](rows, persons, *asked)
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "hit@10 | +" in line]
        return {(first, second): float(p) for first, second, *_, p in cells}

    few, many = found(["pooled", "local"], ["local", "student"]), found(["pooled"])
    assert set(few) == {("pooled", "local"), ("pooled", "student"), ("local", "student")}
    assert set(many) == {("pooled", "local"), ("pooled", "student"), ("pooled", "hybrid")}
    assert few[("pooled", "local")] <= many[("pooled", "local")]
    with pytest.raises(ValueError, match=r"got rows \['nobody'\]"):
        paired["table"](rows, persons, ["pooled"], ["nobody"])


def test_sasrec_is_trained_on_the_data_of_each_setting(paired, monkeypatch):
    """One folder serves all settings; rows stand under the names of the table."""
    place = paired["sasrec_rows"].__globals__
    monkeypatch.setitem(place, "load_domains", lambda data, domains: {domain: (data, domain) for domain in domains})

    def trained(shared, encoder=None) -> Entry:
        label = "sasrec + text start" if encoder else "sasrec"
        number = {"a": 0, "b": 1}
        read = {name: torch.full((2,), number[data] + 2 * bool(encoder)) for name, (data, _) in shared.domains.items()}
        cell = Cell({label: 0.5}, lambda: {"strict": {label: read}})
        return Entry(label, "sasrec", "baseline", ["strict"], lambda setting, seed: cell)

    monkeypatch.setitem(place, "sasrec", trained)
    names = [{"books": "books"}, {"books": "books of second"}]

    def places(data):
        rows = paired["sasrec_rows"](data, names, 3, 1, ".cache", "auto")
        assert all(positions.shape == (3, 2) for domains in rows.values() for positions in domains.values())
        return {row: {name: int(p[0, 0]) for name, p in domains.items()} for row, domains in rows.items()}

    assert places(["a", "b"]) == {
        "sasrec": {"books": 0, "books of second": 1},
        "sasrec + text start": {"books": 2, "books of second": 3},
    }
    assert places(["b"])["sasrec"] == {"books": 1, "books of second": 1}
    with pytest.raises(ValueError, match="got 3 folders of data for SASRec, expected 1, or 2: one for each data set"):
        places(["a", "b", "a"])
