"""The example package, installed as pip installs it: its methods are methods like the built-in ones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_pipeline
import yaml
from outside import EXAMPLE, install_example, look_again, use

from embedding_fr.methods import METHODS as EMBEDDING
from fedecider.cli.main import main
from fedecider.federation.record import read_json
from fedecider.methods import METHODS as LLM

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
from fedecider.cli.main import main
from fedecider.testing import check_method
assert main(sys.argv[1:]) == 0
check_method("fedbias")
try:
    main(["federate", "--help"])
except SystemExit as stop:
    assert stop.code == 0
print("checked")
"""
"""Of one process, since each of them takes seconds to start."""
LLM_RUN = ("federate", "--config", "toy.yaml", "--method", "interpolated", "--share", "0.4")
PACKAGE_RECORD = {"name": "fedecider-interpolated", "version": "0.1.0"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return install_example(tmp_path_factory.mktemp("example"))


@pytest.fixture
def installed(site, monkeypatch):
    use(monkeypatch, site)
    yield site
    monkeypatch.undo()
    look_again(site)


@pytest.fixture
def data(tmp_path):
    lines = [f"u{u},i{(7 * u + 3 * n) % 20},5,{n}" for u in range(9) for n in range(4 + u % 3)]
    (tmp_path / "ratings.dat").write_text("\n".join([*lines, ""]))
    return ["--dataset", "toy", "--source", "amazon_ratings", "--raw", str(tmp_path), "--min_user_events", "3"]


def cut_short(run, copy):
    """A copy of an output directory as it was when the last round was not done yet."""
    shutil.copytree(run, copy)
    shutil.rmtree(max((copy / "checkpoints").iterdir()))
    (copy / "metrics.json").unlink()


def ran(site, *words, cwd):
    """What a new process prints that has the example package on its path."""
    paths = os.pathsep.join([str(site), str(REPOSITORY)])
    env = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.slow
def test_a_new_process_lists_the_methods_runs_one_and_checks_it(site, data, tmp_path):
    words = ["federate", "--method", "fedbias", *data, "--num_rounds", "1", "--local_epochs", "1", "--output", "run"]
    text = ran(site, "-c", PROGRAM, *words, cwd=tmp_path)
    assert "lora_sim, centralised, interpolated." in text
    assert text.endswith("checked")
    assert read_json(tmp_path / "run" / "metrics.json")["method"] == "fedbias"
    assert read_json(tmp_path / "run" / "run.json")["config"]["package"] == PACKAGE_RECORD


@pytest.mark.slow
def test_the_tests_of_the_package_pass(site, tmp_path):
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(EXAMPLE / "tests")]
    assert "8 passed" in ran(site, *words, cwd=tmp_path)


def test_a_run_of_the_embedding_track_is_resumed_recorded_and_on_the_leaderboard(
    installed, data, tmp_path, capsys, monkeypatch
):
    words = ["federate", "--method", "fedbias", *data, "--local_epochs", "1"]
    assert main([*words, "--num_rounds", "2", "--federation", "false", "--output", str(tmp_path / "off")]) == 0
    assert read_json(tmp_path / "off" / "metrics.json")["bytes"]["up"] == 0
    words += ["--num_rounds", "2", "--checkpoint_every", "1"]
    assert main([*words, "--output", str(tmp_path / "whole")]) == 0
    cut_short(tmp_path / "whole", tmp_path / "parts")
    again = [*words, "--output", str(tmp_path / "parts"), "--resume", "true"]
    assert main(again) == 0
    whole, parts = (read_json(tmp_path / name / "metrics.json") for name in ("whole", "parts"))
    assert whole["test"] == parts["test"]
    board = [
        "leaderboard",
        "--methods",
        "popularity,fedbias,fedbias/local",
        *data,
        "--num_rounds",
        "1",
        "--tune",
        "3",
        "--protocol",
        "strict",
        "--seeds",
        "1",
        "--output",
        str(tmp_path / "board"),
    ]
    assert main(board) == 0
    cells = {folder.name for folder in (tmp_path / "board" / "cells").iterdir()}
    rows = read_json(tmp_path / "board" / "leaderboard.json")["rows"]
    assert {row["row"] for row in rows} == {"popularity", "fedbias", "fedbias/local"}
    capsys.readouterr()
    (info,) = installed.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    try:
        (info / "METADATA").write_text(metadata.replace("Version: 0.1.0", "Version: 0.2.0"))
        look_again(installed)
        assert main(again) == 2
        assert "package.version: got '0.2.0', expected '0.1.0'" in capsys.readouterr().err
        assert main(board) == 0
        made_again = [line for line in capsys.readouterr().out.splitlines() if "validation ndcg@10" in line]
        added = {folder.name for folder in (tmp_path / "board" / "cells").iterdir()} - cells
        assert len(made_again) == len(added) == sum(name.startswith("fedbias") for name in cells)
        assert all(name.startswith("fedbias") for name in [*made_again, *added])
    finally:
        (info / "METADATA").write_text(metadata)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(installed)])
    look_again(installed)
    assert main(["audit", "--run", str(tmp_path / "whole"), "--data", str(tmp_path)]) == 2
    assert "got the method fedbias of fedecider-interpolated 0.1.0 in" in capsys.readouterr().err


@pytest.fixture(scope="module")
def playground(site, tmp_path_factory):
    """A folder with toy settings and ``run``, a finished run of the cross-silo track, made by a process of its own."""
    folder = tmp_path_factory.mktemp("llm")
    (folder / "toy.yaml").write_text(yaml.safe_dump({**test_pipeline.SETTINGS, "num_rounds": 2}))
    command = ("-m", "fedecider.cli.main", *LLM_RUN, "--output", "run")
    ran(site, *command, cwd=folder)
    return folder


@pytest.mark.slow
def test_a_run_of_the_llm_track_is_recorded_reported_evaluated_and_resumed(installed, playground, capsys, monkeypatch):
    monkeypatch.chdir(playground)
    record, metrics = read_json(Path("run/run.json")), read_json(Path("run/metrics.json"))
    assert record["config"]["package"] == PACKAGE_RECORD
    assert record["config"]["method"] == {"share": 0.4}
    assert (metrics["method"], metrics["reported"]) == ("interpolated", "interpolated (mixed)")
    cut_short(Path("run"), Path("parts"))
    assert main([*LLM_RUN, "--output", "parts", "--resume", "true"]) == 0
    assert read_json(Path("parts/metrics.json"))["domains"] == metrics["domains"]
    report = Path("run/report.html")
    assert "fedecider-interpolated" in report.read_text()
    report.unlink()
    assert main(["report", "--run", "run"]) == 0
    assert "fedecider-interpolated" in report.read_text()
    assert main(["evaluate", "--run", "run"]) == 0
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(installed)])
    look_again(installed)
    capsys.readouterr()
    for command in ("report", "evaluate"):
        assert main([command, "--run", "run"]) == 2
        assert "got the method interpolated of fedecider-interpolated 0.1.0 in run/run.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_takes_it_as_a_row(installed, playground, monkeypatch):
    monkeypatch.chdir(playground)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    table = {"runs": "toy.yaml", "rows": {"interpolated": {"share": 0.4}}, "seeds": 1, "output": "table", "jobs": 1}
    Path("table.yaml").write_text(yaml.safe_dump({**table, "baselines": ["popularity"], "num_threads": 1}))
    assert main(["compare", "--config", "table.yaml"]) == 0
    assert "interpolated" in next(Path("table").glob("*.md")).read_text()


def test_nobody_else_has_them():
    assert "interpolated" not in LLM
    assert "fedbias" not in EMBEDDING
