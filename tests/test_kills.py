"""SIGKILL at any moment: a folder is as before or as after, and the next command works. Slow: twelve a command."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pandas as pd
import pyarrow.parquet
import pytest
from slow import slow
from small_runs import later_purchases

from fedecider.cli.main import main
from fedecider.data.sample import sample_domains
from fedecider.data.store import load_domains
from fedecider.federation.checksums import file_sha256
from fedecider.models.lists import HISTORIES_FILE
from fedecider.models.versions import in_force
from fedecider.scratch import PREFIX

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a command is killed in a process of its own"),
]
CRIME = sample_domains(["crime"], 0)["crime"]


def started(words):
    """The number of a process that runs a command."""
    child = os.fork()
    if not child:
        signal.alarm(300)  # a child that waits for a thread of its parent fails, rather than never ends
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        code = 70
        try:
            code = main([str(word) for word in words])
        finally:
            os._exit(code)
    return child


def ended(child):
    """Its exit code, minus the signal where one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_kills(words, num, seed, before, state, reset, folder):
    """Kill a command ``num`` times, at moments that are drawn over the time it takes, and once more let it end: in
    ``folder`` nothing is left of what the killed one wrote aside.

    ``state``: what a folder says, ``before`` at the start. ``reset`` makes the folder that of the start.
    """
    begun = time.monotonic()
    assert ended(started(words)) == 0
    length, after, draw, seen = time.monotonic() - begun, state(), random.Random(seed), []
    assert after != before
    for _ in range(num):
        reset()
        child = started(words)
        time.sleep(draw.uniform(0.0, length))
        os.kill(child, signal.SIGKILL)
        assert ended(child) in (-signal.SIGKILL, 0)
        seen.append(state())
        assert seen[-1] in (before, after), words[0]
        if seen[-1] == before:
            assert ended(started(words)) == 0, words[0]
            assert state() == after
            assert not list(folder.rglob(f"{PREFIX}*"))
    assert before in seen or num < 6, "a kill came before the end"


@pytest.fixture
def run(two_clients_run, tmp_path):
    return shutil.copytree(two_clients_run / "runs" / "whole", tmp_path / "run")


def changes(run, name, num, *words):
    """Kills of a command that makes another version of a run."""
    kept = shutil.copytree(run, run.parent / "kept")

    def state():
        root = in_force(run)
        files = [root / "private" / "crime" / file for file in ("ensemble.safetensors", HISTORIES_FILE)]
        files.append(root / "adapters" / "crime" / "adapter_model.safetensors")
        return root.name, [file_sha256(path) if path.is_file() else "" for path in files]

    def reset():
        shutil.rmtree(run)
        shutil.copytree(kept, run)

    command = [name, "--run", run, "--company", "crime", *words]
    check_kills(command, num, name, state(), state, reset, run)
    assert main(["recommend", "--run", str(run), "--company", "crime", "--customers", CRIME.clients.users[3]]) == 0


MANY = pytest.mark.parametrize("num", [2, slow(12)])


@MANY
def test_update(run, num, tmp_path):
    changes(
        run, "update", num, "--events", later_purchases(tmp_path), "--force", "true", "--epochs", 1 if num > 2 else 0
    )


@MANY
def test_forget(run, num):
    changes(run, "forget", num, "--customer", ",".join(CRIME.clients.users[:3]))


@MANY
def test_lists(run, num, tmp_path):
    output = tmp_path / "lists.parquet"

    def state():
        return pyarrow.parquet.read_table(output).to_pylist() if output.exists() else "before"

    words = ["recommend", "--run", run, "--company", "crime", "--all", "--output", output]
    check_kills(words, num, "recommend", "before", state, lambda: output.unlink(missing_ok=True), tmp_path)


@MANY
def test_import(num, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(
        f"{user},{CRIME.item_keys[item]},{at}\n"
        for user, items, times in zip(
            CRIME.clients.users, CRIME.clients.sequences, CRIME.clients.timestamps, strict=True
        )
        for item, at in zip(items, times, strict=True)
    )
    Path("orders.csv").write_text("user,item,timestamp\n" + rows)
    pd.DataFrame({"item": CRIME.item_keys, "title": CRIME.titles}).to_csv("products.csv", index=False)
    words = ["import", "orders.csv", "--items", "products.csv", "--company", "shop", "--output", tmp_path / "data"]

    def state():
        folder = tmp_path / "data"
        return load_domains(folder, ["shop"])["shop"].content_hash() if (folder / "shop").exists() else ""

    def reset():
        shutil.rmtree(tmp_path / "data", ignore_errors=True)

    check_kills(words, num, "import", "", state, reset, tmp_path)


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_end(two_clients_run, tmp_path, monkeypatch):
    monkeypatch.chdir(two_clients_run)
    words = ["federate", "--config", "toy.yaml", "--output", str(tmp_path / "run")]
    found = []
    begun = time.monotonic()
    assert ended(started(words)) == 0
    length, draw = time.monotonic() - begun, random.Random("federate")
    names = ("metrics.json", "adapters/crime/adapter_model.safetensors", "private/crime/ensemble.safetensors")

    def state():
        metrics = pd.read_json(tmp_path / "run" / "metrics.json", typ="series").drop("seconds", errors="ignore")
        return metrics.to_json(), [file_sha256(tmp_path / "run" / name) for name in names[1:]]

    whole = state()
    for _ in range(12):
        shutil.rmtree(tmp_path / "run")
        child = started(words)
        time.sleep(draw.uniform(0.0, length))
        os.kill(child, signal.SIGKILL)
        found.append(ended(child))
        goes_on = (tmp_path / "run" / "run.json").is_file()
        assert ended(started([*words, "--resume", str(goes_on).lower()])) == 0
        assert state() == whole
    assert -signal.SIGKILL in found
