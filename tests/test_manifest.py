"""The manifest of a run: what is missing or changed stops with one line, and nothing is taken for version 1."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from small_runs import later_purchases

from fedecider.cli.main import main
from fedecider.data.sample import sample_domains
from fedecider.running.manifest import read_manifest, verify, write_manifest
from fedecider.scratch import MACHINE, aside, remove_left, scratch_name

CRIME = sample_domains(["crime"], 0)["crime"]


@pytest.fixture
def folder(tmp_path):
    files = {"run.json": "{}", "metrics.json": "1", "private/shop/counts": "2", "private/shop/more": "3"}
    files |= {"seeds/1/per_user.parquet": "4", "seeds/1/metrics.json": "5", "adapters/private/weights": "6"}
    files |= {"checkpoints/round_1/x": "", "trackers/x": "", ".lock": "", "report.html": "7"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write_manifest(tmp_path)
    return tmp_path


def test_it_names_files_and_those_that_hold_customers_data(folder):
    found = read_manifest(folder)
    assert set(found.files) == {
        "run.json",
        "metrics.json",
        "private/shop/counts",
        "private/shop/more",
        "seeds/1/per_user.parquet",
        "seeds/1/metrics.json",
        "adapters/private/weights",
        "report.html",
    }
    assert set(found.customers) == {
        "private/shop/counts",
        "private/shop/more",
        "seeds/1/per_user.parquet",
        "report.html",
    }
    assert (found.in_force, found.versions) == (1, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("3"), r"counts was changed"),
        (lambda path: path.unlink(), r"counts is missing"),
        (lambda path: (path.parent / "new").write_text("x"), r"new, which is no file of this run"),
        (lambda path: shutil.rmtree(path.parents[1]), r"counts is missing"),
    ],
)
def test_what_is_not_as_written_is_named(folder, change, message):
    verify(folder, [folder / "private" / "shop"])
    change(folder / "private" / "shop" / "counts")
    with pytest.raises(ValueError, match=message) as caught:
        verify(folder, [folder / "private" / "shop"])
    assert "Restore it from a copy" in str(caught.value)
    verify(folder, [folder / "metrics.json", folder / "adapters"])


def dead_process():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_what_a_dead_process_wrote_aside_goes_and_what_a_living_one_writes_stays(tmp_path):
    path = tmp_path / "lists.csv"
    for pid, name in ((dead_process(), "dead"), (os.getppid(), "alive")):
        (tmp_path / f".scratch-{MACHINE}-{pid}-1-{name}").write_text("anna")
    (tmp_path / ".scratch-00000000-1-1-fresh").write_text("of another machine")
    old = tmp_path / ".scratch-00000000-1-1-old"
    old.mkdir()
    os.utime(old, (time.time() - 100_000,) * 2)
    with aside(path) as scratch:
        scratch.write_text("new")
    left = sorted(one.name.rpartition("-")[2] for one in tmp_path.iterdir())
    assert left == ["alive", "fresh", "lists.csv"]
    with pytest.raises(ZeroDivisionError), aside(path) as scratch:
        scratch.write_text(str(1 / 0))
    assert path.read_text() == "new"
    mine = [scratch_name(tmp_path / name) for name in ("x", "private/x")]
    for one in mine:
        one.mkdir(parents=True)
    remove_left(tmp_path)
    assert all(one.exists() for one in mine), "another thread may write it"
    remove_left(tmp_path, alone=True)
    assert not any(one.exists() for one in mine)


@pytest.fixture
def run(two_clients_run, tmp_path):
    return shutil.copytree(two_clients_run / "runs" / "whole", tmp_path / "run")


@pytest.fixture
def updated(run, tmp_path):
    words = ["update", "--run", run, "--company", "crime", "--events", later_purchases(tmp_path), "--force", "true"]
    assert main([str(word) for word in words]) == 0
    return run


def commands(run, tmp_path):
    found = {
        "recommend": ["--all", "--output", tmp_path / "lists.csv"],
        "forget": ["--customer", CRIME.clients.users[3]],
        "update": ["--events", later_purchases(tmp_path), "--force", "true"],
    }
    return {name: [name, "--run", run, "--company", "crime", *words] for name, words in found.items()}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


LOST = {
    "manifest.json": lambda run: (run / "manifest.json").unlink(),
    "run.json": lambda run: (run / "run.json").unlink(),
    "run.json is missing": lambda run: [(run / name).unlink() for name in ("run.json", "manifest.json")],
    "versions/2": lambda run: shutil.rmtree(run / "versions"),
    "histories.parquet": lambda run: (run / "versions" / "2" / "private" / "crime" / "histories.parquet").unlink(),
    "histories.parquet was changed": lambda run: flip(run / "versions/2/private/crime/histories.parquet"),
    "private/crime": lambda run: shutil.rmtree(run / "versions" / "2" / "private"),
    "version.json": lambda run: (run / "versions" / "2" / "version.json").unlink(),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", LOST)
def test_a_lost_file_of_an_updated_run_stops_every_command(updated, tmp_path, capsys, name):
    """Before there was a manifest, some of these answered by version 1, or deleted all later versions."""
    LOST[name](updated)
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in updated.rglob("*") if path.is_file() and path.name != ".lock"}
    for words in commands(updated, tmp_path).values():
        assert main([str(word) for word in words]) == 2, words[0]
        error = capsys.readouterr().err
        assert name in error
        assert error.count("\n") == 1
        assert not (tmp_path / "lists.csv").exists()
    after = {path: path.stat().st_mtime_ns for path in updated.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


@pytest.mark.whole
def test_a_changed_file_of_figures_stops_the_report(run, capsys):
    assert main(["report", "--run", str(run)]) == 0
    (run / "report.html").unlink()  # holds histories: whoever hands the run on may take it away
    (run / "examples.json").unlink()
    assert main(["report", "--run", str(run)]) == 0
    metrics = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps({**metrics, "best_valid_ndcg@10": 0.9}))
    assert main(["report", "--run", str(run)]) == 2
    assert "metrics.json was changed, expected it as it was written" in capsys.readouterr().err


@pytest.mark.whole
def test_what_a_killed_update_left_goes_with_the_next_command(updated, tmp_path):
    left = [place / f".scratch-{MACHINE}-{dead_process()}-1-x" for place in (updated, updated / "versions")]
    for path in left:
        shutil.copytree(updated / "private", path)
    assert main(["update", "--run", str(updated), "--version", "1"]) == 0
    assert not [path for path in left if path.exists()]
