"""One fault of every place and expectation of benchmarks/faults.py, and that the table can fail."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from slow import slow

from fedecider.testing.faults import MESSAGE_KINDS, UPLOAD_KINDS


@pytest.fixture(scope="module")
def table():
    before = list(sys.path)
    module = import_module("faults")  # benchmarks/ is on the path of the tests
    assert Path(module.__file__).parent.name == "benchmarks"
    yield module
    sys.path[:] = before


def test_all_kinds_of_faults_are_in_the_table(table):
    cases = list(table.cases())
    assert len(cases) >= 40
    assert {fault.kind for case in cases for fault in case.faults} == {*UPLOAD_KINDS, *MESSAGE_KINDS}
    assert {case.expected for case in cases} == set(table.EXPECTED)
    assert {case.expected for case in table.quick()} == set(table.EXPECTED)


@pytest.mark.parametrize("place", ["simulated", slow("deployed"), "resumed"])
def test_one_fault_of_every_expectation(place, table):
    chosen, lines = [case for case in table.quick() if case.place == place], []
    assert len(chosen) >= 2
    assert table.run_all(chosen, lines.append) == 0, "\n".join(lines)


def test_a_wrong_expectation_is_told(table):
    fault = (table.Fault(table.HIT, "late"),)
    wrong = table.Case("embedding", "simulated", "fedmf", "late", "no effect", fault)
    lines = []
    assert table.run_all([wrong], lines.append) == 1
    assert "NOT AS EXPECTED" in lines[1]
