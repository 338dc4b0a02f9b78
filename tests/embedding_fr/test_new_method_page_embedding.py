"""The example of the embedding track in docs/new_method.md is a method like every other."""

import inspect
import json
import runpy
import sys
from pathlib import Path

import pytest
import test_embedding_contract
import torch
from documented import documented_entry, install, run_tests

from embedding_fr.methods import METHODS
from embedding_fr.reference import REFERENCES

REPOSITORY = Path(__file__).resolve().parents[2]
GIVEN = {
    "name": "fedbias",
    "variant": {},
    "changes": {},
    "participation": 0.5,
    "protocol": "strict",
    "monkeypatch": None,
}
"""What the tests of the contract are called with."""
CONTRACT = [test for name, test in vars(test_embedding_contract).items() if name.startswith("test_")]


@pytest.fixture
def fedbias(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    install(monkeypatch, folder, "embedding_fr/methods/fedbias.py")
    monkeypatch.setitem(METHODS, "fedbias", documented_entry("embedding_fr/methods/__init__.py", "fedbias"))
    reference = install(monkeypatch, folder, "embedding_fr/reference/fedbias.py")
    monkeypatch.setitem(REFERENCES, "fedbias", reference.fedbias)


@pytest.mark.usefixtures("fedbias")
def test_its_own_tests_pass():
    assert run_tests("tests/embedding_fr/test_fedbias.py") == 2


@pytest.mark.usefixtures("fedbias")
@pytest.mark.slow
@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__)
def test_it_keeps_the_contract(test):
    given = {name: GIVEN[name] for name in inspect.signature(test).parameters}
    needs_double = any(mark.args == ("double",) for mark in getattr(test, "pytestmark", []))
    torch.set_default_dtype(torch.float64 if needs_double else torch.float32)
    try:
        test(**given)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("fedbias")
@pytest.mark.parametrize("federation", ["true", "false"])
def test_it_runs_from_the_command_line(federation, tmp_path, monkeypatch, capsys):
    lines = [f"u{u},i{(7 * u + 3 * n) % 20}" for u in range(9) for n in range(4 + u % 3)]
    (tmp_path / "toy.csv").write_text("\n".join(["user,item", *lines, ""]))
    monkeypatch.setattr(sys, "path", [*sys.path])
    main = runpy.run_path(str(REPOSITORY / "scripts" / "federate.py"))["main"]
    words = ["--method", "fedbias", "--bias_learning_rate", "0.2", "--num_rounds", "2", "--federation", federation]
    words += ["--dataset", "toy", "--source", "csv", "--raw", str(tmp_path), "--min_user_events", "3"]
    assert main([*words, "--output", str(tmp_path / "run")]) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["method"] == {"bias_learning_rate": 0.2}
    assert main([*words, "--bias_learning_rate", "-1", "--output", str(tmp_path / "other")]) == 2
    assert "got bias_learning_rate -1.0, expected 0 or more" in capsys.readouterr().err
