"""The example of the LLM track in docs/new_method.md is a method like every other."""

import inspect
from pathlib import Path

import pytest
import test_contract
from documented import blocks, documented_entry, install, run_tests

from fedecider.llm.commands import parse_settings
from fedecider.methods import METHODS

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACT = [
    test
    for name, test in vars(test_contract).items()
    if name.startswith("test_") and list(inspect.signature(test).parameters) == ["name"]
]


@pytest.fixture
def interpolated(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    install(monkeypatch, folder, "fedecider/methods/interpolated.py")
    monkeypatch.setitem(METHODS, "interpolated", documented_entry("fedecider/methods/__init__.py", "interpolated"))


@pytest.mark.usefixtures("interpolated")
def test_its_own_tests_pass():
    assert run_tests("tests/methods/test_interpolated.py") == 2


@pytest.mark.usefixtures("interpolated")
@pytest.mark.slow
@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__)
def test_it_keeps_the_contract(test):
    test("interpolated")


@pytest.mark.usefixtures("interpolated")
def test_its_configuration_and_its_option_exist(tmp_path):
    path = tmp_path / "interpolated.yaml"
    path.write_text(
        (REPOSITORY / "fedecider" / "configs" / "demo.yaml").read_text() + blocks("yaml")["configs/interpolated.yaml"]
    )
    assert parse_settings("", ["--config", str(path)]).method.share == 0.3
    assert parse_settings("", ["--method", "interpolated", "--share", "0.8"]).method.share == 0.8
    with pytest.raises(ValueError, match=r"got share 1\.5, expected 0 to 1"):
        parse_settings("", ["--method", "interpolated", "--share", "1.5"])
